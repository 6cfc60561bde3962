// Vectors of 8 lanes on AArch64: pairs of NEON registers, with the dot product instruction where it is compiled in.
#pragma once
#include <arm_neon.h>

#include <cstdint>
#include <cstring>

struct f32x8 {
    float32x4_t a, b;
};
static inline f32x8 load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
static inline f32x8 load_f16(const uint16_t* p) {
    float16x8_t h = vreinterpretq_f16_u16(vld1q_u16(p));
    return {vcvt_f32_f16(vget_low_f16(h)), vcvt_f32_f16(vget_high_f16(h))};
}
static inline f32x8 load_u8(const uint8_t* p) {
    uint16x8_t wide = vmovl_u8(vld1_u8(p));
    return {vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(wide)))};
}
static inline f32x8 all(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
static inline void store(float* p, f32x8 x) { vst1q_f32(p, x.a), vst1q_f32(p + 4, x.b); }
static inline void store_f16(uint16_t* p, f32x8 x) {
    vst1q_u16(p, vreinterpretq_u16_f16(vcombine_f16(vcvt_f16_f32(x.a), vcvt_f16_f32(x.b))));
}
static inline f32x8 operator+(f32x8 x, f32x8 y) { return {vaddq_f32(x.a, y.a), vaddq_f32(x.b, y.b)}; }
static inline f32x8 operator-(f32x8 x, f32x8 y) { return {vsubq_f32(x.a, y.a), vsubq_f32(x.b, y.b)}; }
static inline f32x8 operator*(f32x8 x, f32x8 y) { return {vmulq_f32(x.a, y.a), vmulq_f32(x.b, y.b)}; }
static inline f32x8 operator/(f32x8 x, f32x8 y) { return {vdivq_f32(x.a, y.a), vdivq_f32(x.b, y.b)}; }
static inline f32x8 fma(f32x8 x, f32x8 y, f32x8 z) { return {vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b)}; }
static inline f32x8 max(f32x8 x, f32x8 y) { return {vmaxq_f32(x.a, y.a), vmaxq_f32(x.b, y.b)}; }
static inline f32x8 min(f32x8 x, f32x8 y) { return {vminq_f32(x.a, y.a), vminq_f32(x.b, y.b)}; }
static inline f32x8 abs(f32x8 x) { return {vabsq_f32(x.a), vabsq_f32(x.b)}; }
static inline f32x8 round(f32x8 x) { return {vrndnq_f32(x.a), vrndnq_f32(x.b)}; }
static inline float32x4_t scale2(float32x4_t x, float32x4_t n) {
    return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(x), vshlq_n_s32(vcvtnq_s32_f32(n), 23)));
}
static inline f32x8 scale2(f32x8 x, f32x8 n) { return {scale2(x.a, n.a), scale2(x.b, n.b)}; }
static inline f32x8 where_less(f32x8 x, f32x8 y, f32x8 yes, f32x8 no) {
    return {vbslq_f32(vcltq_f32(x.a, y.a), yes.a, no.a), vbslq_f32(vcltq_f32(x.b, y.b), yes.b, no.b)};
}
static inline float sum(f32x8 x) {  // in the same order as on x86-64
    const float32x4_t four = vaddq_f32(x.a, x.b);
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
static inline float max_of(f32x8 x) { return vmaxvq_f32(vmaxq_f32(x.a, x.b)); }
static inline bool all_at_most(f32x8 x, f32x8 y) {  // false where one is NaN
    return vminvq_u32(vandq_u32(vcleq_f32(x.a, y.a), vcleq_f32(x.b, y.b))) != 0;
}

// Eight unsigned integers of 32 bits, modulo 2^32.
struct u32x8 {
    uint32x4_t a, b;
};
static inline u32x8 all_u32(uint32_t x) { return {vdupq_n_u32(x), vdupq_n_u32(x)}; }
static inline u32x8 load_u32(const int32_t* p) {
    return {vreinterpretq_u32_s32(vld1q_s32(p)), vreinterpretq_u32_s32(vld1q_s32(p + 4))};
}
static inline void store(int32_t* p, u32x8 x) {
    vst1q_s32(p, vreinterpretq_s32_u32(x.a)), vst1q_s32(p + 4, vreinterpretq_s32_u32(x.b));
}
static inline u32x8 operator+(u32x8 x, u32x8 y) { return {vaddq_u32(x.a, y.a), vaddq_u32(x.b, y.b)}; }
static inline u32x8 operator-(u32x8 x, u32x8 y) { return {vsubq_u32(x.a, y.a), vsubq_u32(x.b, y.b)}; }
static inline u32x8 operator*(u32x8 x, u32x8 y) { return {vmulq_u32(x.a, y.a), vmulq_u32(x.b, y.b)}; }
static inline u32x8 operator^(u32x8 x, u32x8 y) { return {veorq_u32(x.a, y.a), veorq_u32(x.b, y.b)}; }
template <int N>
static inline u32x8 right(u32x8 x) {
    return {vshrq_n_u32(x.a, N), vshrq_n_u32(x.b, N)};
}
template <int N>
static inline u32x8 signed_right(u32x8 x) {
    return {vreinterpretq_u32_s32(vshrq_n_s32(vreinterpretq_s32_u32(x.a), N)),
            vreinterpretq_u32_s32(vshrq_n_s32(vreinterpretq_s32_u32(x.b), N))};
}
template <int N>
static inline u32x8 left(u32x8 x) {
    return {vshlq_n_u32(x.a, N), vshlq_n_u32(x.b, N)};
}
static inline u32x8 bits_of(f32x8 x) { return {vreinterpretq_u32_f32(x.a), vreinterpretq_u32_f32(x.b)}; }
static inline f32x8 float_of_bits(u32x8 x) { return {vreinterpretq_f32_u32(x.a), vreinterpretq_f32_u32(x.b)}; }
static inline f32x8 to_float(u32x8 x) {  // of signed numbers
    return {vcvtq_f32_s32(vreinterpretq_s32_u32(x.a)), vcvtq_f32_s32(vreinterpretq_s32_u32(x.b))};
}
static inline u32x8 to_whole(f32x8 x) {  // rounded to the nearest, ties to even
    return {vreinterpretq_u32_s32(vcvtnq_s32_f32(x.a)), vreinterpretq_u32_s32(vcvtnq_s32_f32(x.b))};
}

static inline int8x8_t narrow(f32x8 x) {
    int16x8_t wide = vcombine_s16(vqmovn_s32(vcvtnq_s32_f32(x.a)), vqmovn_s32(vcvtnq_s32_f32(x.b)));
    return vqmovn_s16(wide);
}
// Rounds 32 floats, each already in -127..127, to int8; returns their sum.
static inline int store_codes(int8_t* p, f32x8 a, f32x8 b, f32x8 c, f32x8 d) {
    int8x16_t ab = vcombine_s8(narrow(a), narrow(b)), cd = vcombine_s8(narrow(c), narrow(d));
    vst1q_s8(p, ab), vst1q_s8(p + 16, cd);
    return vaddlvq_s8(ab) + vaddlvq_s8(cd);
}

struct u8x32 {
    uint8x16_t a, b;
};
static inline u8x32 load_bytes(const uint8_t* p) { return {vld1q_u8(p), vld1q_u8(p + 16)}; }
static inline u8x32 low_nibbles(u8x32 x) { return {vandq_u8(x.a, vdupq_n_u8(15)), vandq_u8(x.b, vdupq_n_u8(15))}; }
static inline u8x32 high_nibbles(u8x32 x) { return {vshrq_n_u8(x.a, 4), vshrq_n_u8(x.b, 4)}; }
static inline int8x16_t four_everywhere(const int8_t* p) {
    int32_t word;
    std::memcpy(&word, p, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(word));
}
static inline int32x4_t dot4(int32x4_t acc, int8x16_t x, int8x16_t y) {
#ifdef __ARM_FEATURE_DOTPROD
    return vdotq_s32(acc, x, y);
#else
    int16x8_t low = vmull_s8(vget_low_s8(x), vget_low_s8(y)), high = vmull_s8(vget_high_s8(x), vget_high_s8(y));
    return vaddq_s32(acc, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
#endif
}

// Sums over a group of 32 inputs for 8 rows: signed arithmetic serves codes 0..15 and -128..127 alike.
struct SignedCodes {
    int8x16_t a, b;
    explicit SignedCodes(u8x32 x) : a(vreinterpretq_s8_u8(x.a)), b(vreinterpretq_s8_u8(x.b)) {}
};
struct SignedDot {
    int32x4_t a = vdupq_n_s32(0), b = vdupq_n_s32(0);
    void add(const SignedCodes& codes, const int8_t* activations) {
        const int8x16_t four = four_everywhere(activations);
        a = dot4(a, codes.a, four), b = dot4(b, codes.b, four);
    }
    f32x8 total(int) const { return {vcvtq_f32_s32(a), vcvtq_f32_s32(b)}; }
};
struct SmallDot {
    SignedDot dot;
    void add(u8x32 codes, const int8_t* activations) { dot.add(SignedCodes(codes), activations); }
    f32x8 total() const { return dot.total(0); }
};
