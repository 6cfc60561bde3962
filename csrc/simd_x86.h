// Vectors of 8 lanes on x86-64: AVX2 + FMA + F16C, and the integer dot product of AVX-512 VNNI where it is compiled in.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

struct f32x8 {
    __m256 v;
};
static inline f32x8 load(const float* p) { return {_mm256_loadu_ps(p)}; }
static inline f32x8 load_f16(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
static inline f32x8 load_u8(const uint8_t* p) {  // 8 unsigned bytes as floats
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
}
static inline f32x8 all(float x) { return {_mm256_set1_ps(x)}; }
static inline void store(float* p, f32x8 a) { _mm256_storeu_ps(p, a.v); }
static inline void store_f16(uint16_t* p, f32x8 a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
static inline f32x8 operator+(f32x8 a, f32x8 b) { return {_mm256_add_ps(a.v, b.v)}; }
static inline f32x8 operator-(f32x8 a, f32x8 b) { return {_mm256_sub_ps(a.v, b.v)}; }
static inline f32x8 operator*(f32x8 a, f32x8 b) { return {_mm256_mul_ps(a.v, b.v)}; }
static inline f32x8 operator/(f32x8 a, f32x8 b) { return {_mm256_div_ps(a.v, b.v)}; }
static inline f32x8 fma(f32x8 a, f32x8 b, f32x8 c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
static inline f32x8 max(f32x8 a, f32x8 b) { return {_mm256_max_ps(a.v, b.v)}; }
static inline f32x8 min(f32x8 a, f32x8 b) { return {_mm256_min_ps(a.v, b.v)}; }
static inline f32x8 abs(f32x8 a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
static inline f32x8 round(f32x8 a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
static inline f32x8 scale2(f32x8 a, f32x8 n) {  // a * 2^n for whole n in the exponent's range
    return {_mm256_castsi256_ps(
        _mm256_add_epi32(_mm256_castps_si256(a.v), _mm256_slli_epi32(_mm256_cvtps_epi32(n.v), 23)))};
}
static inline f32x8 where_less(f32x8 a, f32x8 b, f32x8 yes, f32x8 no) {  // a < b ? yes : no
    return {_mm256_blendv_ps(no.v, yes.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ))};
}
static inline float sum(f32x8 a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
static inline float max_of(f32x8 a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
static inline bool all_at_most(f32x8 a, f32x8 b) {  // false where one is NaN
    return _mm256_movemask_ps(_mm256_cmp_ps(a.v, b.v, _CMP_NLE_UQ)) == 0;
}

// Eight unsigned integers of 32 bits, modulo 2^32.
struct u32x8 {
    __m256i v;
};
static inline u32x8 all_u32(uint32_t x) { return {_mm256_set1_epi32(static_cast<int32_t>(x))}; }
static inline u32x8 load_u32(const int32_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
static inline void store(int32_t* p, u32x8 a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.v); }
static inline u32x8 operator+(u32x8 a, u32x8 b) { return {_mm256_add_epi32(a.v, b.v)}; }
static inline u32x8 operator-(u32x8 a, u32x8 b) { return {_mm256_sub_epi32(a.v, b.v)}; }
static inline u32x8 operator*(u32x8 a, u32x8 b) { return {_mm256_mullo_epi32(a.v, b.v)}; }
static inline u32x8 operator^(u32x8 a, u32x8 b) { return {_mm256_xor_si256(a.v, b.v)}; }
template <int N>
static inline u32x8 right(u32x8 a) {
    return {_mm256_srli_epi32(a.v, N)};
}
template <int N>
static inline u32x8 signed_right(u32x8 a) {
    return {_mm256_srai_epi32(a.v, N)};
}
template <int N>
static inline u32x8 left(u32x8 a) {
    return {_mm256_slli_epi32(a.v, N)};
}
static inline u32x8 bits_of(f32x8 a) { return {_mm256_castps_si256(a.v)}; }
static inline f32x8 float_of_bits(u32x8 a) { return {_mm256_castsi256_ps(a.v)}; }
static inline f32x8 to_float(u32x8 a) { return {_mm256_cvtepi32_ps(a.v)}; }          // of signed numbers
static inline u32x8 to_whole(f32x8 a) { return {_mm256_cvtps_epi32(a.v)}; }  // rounded to the nearest, ties to even

// Rounds 32 floats, each already in -127..127, to int8; returns their sum.
static inline int store_codes(int8_t* p, f32x8 a, f32x8 b, f32x8 c, f32x8 d) {
    __m256i ab = _mm256_packs_epi32(_mm256_cvtps_epi32(a.v), _mm256_cvtps_epi32(b.v));
    __m256i cd = _mm256_packs_epi32(_mm256_cvtps_epi32(c.v), _mm256_cvtps_epi32(d.v));
    __m256i codes = _mm256_packs_epi16(ab, cd);  // in the order a0 b0 c0 d0 a1 b1 c1 d1, four codes each
    codes = _mm256_permutevar8x32_epi32(codes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), codes);
    __m256i pairs = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), codes), _mm256_set1_epi16(1));
    __m128i x = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(x, _mm_shuffle_epi32(x, 0xb1)));
}

struct u8x32 {
    __m256i v;
};
static inline u8x32 load_bytes(const uint8_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
static inline u8x32 low_nibbles(u8x32 a) { return {_mm256_and_si256(a.v, _mm256_set1_epi8(15))}; }
static inline u8x32 high_nibbles(u8x32 a) {
    return {_mm256_and_si256(_mm256_srli_epi16(a.v, 4), _mm256_set1_epi8(15))};
}
static inline __m256i four_everywhere(const int8_t* p) {
    int32_t word;
    std::memcpy(&word, p, 4);
    return _mm256_set1_epi32(word);
}

#ifdef __AVX512VNNI__

static inline f32x8 to_f32(__m256i a) { return {_mm256_cvtepi32_ps(a)}; }

// Sums over a group of 32 inputs for 8 rows: dot products of codes with activations. Codes are unsigned and at most 15.
struct SmallDot {
    __m256i acc = _mm256_setzero_si256();
    void add(u8x32 codes, const int8_t* activations) {
        acc = _mm256_dpbusd_epi32(acc, codes.v, four_everywhere(activations));
    }
    f32x8 total() const { return to_f32(acc); }
};
// The same for signed codes: made unsigned by adding 128, which `activation_sum` takes back.
struct SignedCodes {
    __m256i v;
    explicit SignedCodes(u8x32 a) : v(_mm256_xor_si256(a.v, _mm256_set1_epi8(-128))) {}
};
struct SignedDot {
    __m256i acc = _mm256_setzero_si256();
    void add(const SignedCodes& codes, const int8_t* activations) {
        acc = _mm256_dpbusd_epi32(acc, codes.v, four_everywhere(activations));
    }
    f32x8 total(int activation_sum) const {
        return to_f32(_mm256_sub_epi32(acc, _mm256_set1_epi32(128 * activation_sum)));
    }
};

// Two vectors of 8 lanes as one.
#define LAMPEJO_16_LANES
static inline void prefetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1); }
struct f32x16 {
    __m512 v;
};
struct u8x64 {
    __m512i v;
};
static inline f32x16 load16(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline f32x16 all16(float x) { return {_mm512_set1_ps(x)}; }
static inline void store(float* p, f32x16 a) { _mm512_storeu_ps(p, a.v); }
static inline f32x16 operator+(f32x16 a, f32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline f32x16 operator*(f32x16 a, f32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
static inline f32x16 join(f32x8 a, f32x8 b) { return {_mm512_insertf32x8(_mm512_castps256_ps512(a.v), b.v, 1)}; }
static inline u8x64 join(u8x32 a, u8x32 b) { return {_mm512_inserti64x4(_mm512_castsi256_si512(a.v), b.v, 1)}; }
static inline u8x64 low_nibbles(u8x64 a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
static inline u8x64 high_nibbles(u8x64 a) {
    return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))};
}
static inline __m512i four_in_16(const int8_t* p) {
    int32_t word;
    std::memcpy(&word, p, 4);
    return _mm512_set1_epi32(word);
}
struct SmallDot16 {
    __m512i acc = _mm512_setzero_si512();
    void add(u8x64 codes, const int8_t* activations) {
        acc = _mm512_dpbusd_epi32(acc, codes.v, four_in_16(activations));
    }
    f32x16 total() const { return {_mm512_cvtepi32_ps(acc)}; }
};
struct SignedCodes16 {
    __m512i v;
    explicit SignedCodes16(u8x64 a) : v(_mm512_xor_si512(a.v, _mm512_set1_epi8(-128))) {}
};
struct SignedDot16 {
    __m512i acc = _mm512_setzero_si512();
    void add(const SignedCodes16& codes, const int8_t* activations) {
        acc = _mm512_dpbusd_epi32(acc, codes.v, four_in_16(activations));
    }
    f32x16 total(int activation_sum) const {
        return {_mm512_cvtepi32_ps(_mm512_sub_epi32(acc, _mm512_set1_epi32(128 * activation_sum)))};
    }
};

#else

struct SmallDot {  // 8 steps of at most 2 * 15 * 127 = 3810 stay below 32768, so a whole group is summed in 16 bits
    __m256i acc = _mm256_setzero_si256();
    void add(u8x32 codes, const int8_t* activations) {
        acc = _mm256_add_epi16(acc, _mm256_maddubs_epi16(codes.v, four_everywhere(activations)));
        asm("" : "+x"(acc));  // or the compiler reorders the sum, and runs out of registers
    }
    f32x8 total() const { return {_mm256_cvtepi32_ps(_mm256_madd_epi16(acc, _mm256_set1_epi16(1)))}; }
};
struct SignedCodes {  // |code| is the unsigned factor, its sign goes to the activation: 2 * 128 * 127 fits 16 bits
    __m256i v, magnitude;
    explicit SignedCodes(u8x32 a) : v(a.v), magnitude(_mm256_abs_epi8(a.v)) {}
};
struct SignedDot {
    __m256i acc = _mm256_setzero_si256();
    void add(const SignedCodes& codes, const int8_t* activations) {
        __m256i signed_activations = _mm256_sign_epi8(four_everywhere(activations), codes.v);
        __m256i pairs = _mm256_maddubs_epi16(codes.magnitude, signed_activations);
        acc = _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
        asm("" : "+x"(acc));
    }
    f32x8 total(int) const { return {_mm256_cvtepi32_ps(acc)}; }
};

#endif
