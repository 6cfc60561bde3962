// Packing of GGUF blocks and floats into the layouts of lampejo_kernels.h, and the way back for single rows.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace {

float from_f16(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 0x3ff;
    float magnitude;
    if (exponent == 31) {
        magnitude = mantissa ? NAN : INFINITY;
    } else if (exponent == 0) {
        magnitude = std::ldexp(static_cast<float>(mantissa), -24);
    } else {
        magnitude = std::ldexp(static_cast<float>(mantissa | 0x400), static_cast<int>(exponent) - 25);
    }
    return sign ? -magnitude : magnitude;
}

uint16_t to_f16(float x) {  // round to nearest even; what is too large becomes the largest f16
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
    const float a = std::fabs(x);
    if (!(a < 65520.0f)) return static_cast<uint16_t>(sign | 0x7bff);
    if (a < 6.103515625e-5f) return static_cast<uint16_t>(sign | static_cast<uint16_t>(std::nearbyint(a * 16777216.0f)));
    bits &= 0x7fffffff;
    bits += 0xfff + ((bits >> 13) & 1);
    return static_cast<uint16_t>(sign | ((bits - 0x38000000) >> 13));
}

bool is_finite(uint16_t h) { return (h & 0x7c00) != 0x7c00; }

bool all_finite(const float (&x)[32]) {
    return std::all_of(x, x + 32, [](float value) { return std::isfinite(value); });
}

uint16_t read_u16(const uint8_t* p) {
    uint16_t x;
    std::memcpy(&x, p, 2);
    return x;
}

// GGUF type numbers (ggml.h), their block lengths and sizes in bytes.
enum Type { F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14, BF16 = 30 };
struct Layout {
    int length, bytes;
};
bool layout_of(int type, Layout* out) {
    switch (type) {
        case F32: *out = {1, 4}; return true;
        case F16: case BF16: *out = {1, 2}; return true;
        case Q4_0: *out = {32, 18}; return true;
        case Q4_1: *out = {32, 20}; return true;
        case Q5_0: *out = {32, 22}; return true;
        case Q5_1: *out = {32, 24}; return true;
        case Q8_0: *out = {32, 34}; return true;
        case Q4_K: *out = {256, 144}; return true;
        case Q5_K: *out = {256, 176}; return true;
        case Q6_K: *out = {256, 210}; return true;
        default: return false;
    }
}

// Scale and minimum j (0..7) of the 12 bytes that Q4_K and Q5_K pack eight 6-bit pairs into.
void six_bits(const uint8_t* p, int j, int* scale, int* minimum) {
    if (j < 4) {
        *scale = p[j] & 63, *minimum = p[j + 4] & 63;
    } else {
        *scale = (p[j + 4] & 15) | (p[j - 4] >> 6) << 4;
        *minimum = (p[j + 4] >> 4) | (p[j] >> 6) << 4;
    }
}

// Floats of `count` values of a row, starting at a multiple of 32.
void to_floats(int type, const uint8_t* row, int start, int count, float* out) {
    Layout layout;
    layout_of(type, &layout);
    for (int i = 0; i < count;) {
        const int at = start + i, inside = at % layout.length;
        const uint8_t* b = row + static_cast<size_t>(at / layout.length) * layout.bytes;
        if (layout.length == 1) {
            if (type == F32) {
                std::memcpy(out + i, b, 4);
            } else if (type == F16) {
                out[i] = from_f16(read_u16(b));
            } else {
                uint32_t bits = static_cast<uint32_t>(read_u16(b)) << 16;
                std::memcpy(out + i, &bits, 4);
            }
            i++;
            continue;
        }
        const int n = std::min(32, count - i);
        float* to = out + i;
        switch (type) {
            case Q8_0: {
                const float d = from_f16(read_u16(b));
                for (int k = 0; k < n; k++) to[k] = d * static_cast<int8_t>(b[2 + k]);
                break;
            }
            case Q4_0: {
                const float d = from_f16(read_u16(b));
                for (int k = 0; k < n; k++) to[k] = d * ((b[2 + k % 16] >> (k < 16 ? 0 : 4) & 15) - 8);
                break;
            }
            case Q4_1: {
                const float d = from_f16(read_u16(b)), m = from_f16(read_u16(b + 2));
                for (int k = 0; k < n; k++) to[k] = d * (b[4 + k % 16] >> (k < 16 ? 0 : 4) & 15) + m;
                break;
            }
            case Q5_0:
            case Q5_1: {
                const int head = type == Q5_0 ? 2 : 4;
                const float d = from_f16(read_u16(b)), m = type == Q5_0 ? -16 * d : from_f16(read_u16(b + 2));
                uint32_t high;
                std::memcpy(&high, b + head, 4);
                for (int k = 0; k < n; k++) {
                    const int low = b[head + 4 + k % 16] >> (k < 16 ? 0 : 4) & 15;
                    to[k] = d * (low | static_cast<int>(high >> k & 1) << 4) + m;
                }
                break;
            }
            case Q4_K:
            case Q5_K: {
                const int group = inside / 32, nibble = group % 2 ? 4 : 0;
                const uint8_t* codes = b + (type == Q4_K ? 16 : 48) + group / 2 * 32;
                int scale, minimum;
                six_bits(b + 4, group, &scale, &minimum);
                const float d = from_f16(read_u16(b)) * scale, m = from_f16(read_u16(b + 2)) * minimum;
                for (int k = 0; k < n; k++) {
                    const int high = type == Q5_K ? (b[16 + k] >> group & 1) << 4 : 0;
                    to[k] = d * ((codes[k] >> nibble & 15) | high) - m;
                }
                break;
            }
            default: {  // Q6_K: halves of 128, each with four runs of 32
                const int half = inside / 128, run = inside % 128 / 32;
                const uint8_t *low = b + half * 64 + run % 2 * 32, *high = b + 128 + half * 32;
                const float d = from_f16(read_u16(b + 208));
                const float scales[2] = {d * static_cast<int8_t>(b[192 + half * 8 + run * 2]),
                                         d * static_cast<int8_t>(b[192 + half * 8 + run * 2 + 1])};
                for (int k = 0; k < n; k++) {
                    const int code = (low[k] >> (run / 2 * 4) & 15) | (high[k] >> (2 * run) & 3) << 4;
                    to[k] = scales[k / 16] * (code - 32);
                }
            }
        }
        i += n;
    }
}

// Where a row's part of a group lies.
uint8_t* group_of(uint8_t* packed, int kind, int groups, int row, int g) {
    if (kind == Q4K) return packed + (static_cast<size_t>(row / 8) * (groups / 8) + g / 8) * 1184 + 160 + g % 8 * 128;
    return packed + (static_cast<size_t>(row / 8) * groups + g) * (kind == Q4 ? 160 : 272);
}

void put_nibbles(uint8_t* codes, int lane, const uint8_t* values) {  // 32 codes of a row into its lane of the 128 bytes
    for (int v = 0; v < 4; v++) {
        uint32_t low, high;  // four codes each
        std::memcpy(&low, values + 8 * v, 4), std::memcpy(&high, values + 8 * v + 4, 4);
        low |= high << 4;
        std::memcpy(codes + 32 * v + 4 * lane, &low, 4);
    }
}

void put_u16(uint8_t* p, int lane, uint16_t x) { std::memcpy(p + 2 * lane, &x, 2); }

// Returns whether all is finite.
bool pack_row(int kind, uint8_t* packed, int num_in, int type, const uint8_t* source, int row) {
    const int groups = (kind == Q4K ? (num_in + 255) / 256 * 8 : (num_in + 31) / 32), lane = row % 8;
    bool finite = true;
    for (int g = 0; g < groups; g++) {
        uint8_t* to = group_of(packed, kind, groups, row, g);
        const int count = std::max(0, std::min(32, num_in - 32 * g));
        uint8_t codes[32] = {};
        if (kind == Q4K) {  // only from Q4_K: its numbers are kept as they are
            const uint8_t* b = source + static_cast<size_t>(g / 8) * 144;
            uint8_t* super = to - 160 - g % 8 * 128;
            if (g % 8 == 0) {
                std::memcpy(super + 2 * lane, b, 2), std::memcpy(super + 16 + 2 * lane, b + 2, 2);
                finite &= is_finite(read_u16(b)) && is_finite(read_u16(b + 2));
            }
            int scale, minimum;
            six_bits(b + 4, g % 8, &scale, &minimum);
            super[32 + 16 * (g % 8) + lane] = static_cast<uint8_t>(scale);
            super[32 + 16 * (g % 8) + 8 + lane] = static_cast<uint8_t>(minimum);
            const uint8_t* nibbles = b + 16 + g % 8 / 2 * 32;
            for (int j = 0; j < 32; j++) codes[j] = nibbles[j] >> (g % 2 ? 4 : 0) & 15;
            put_nibbles(to, lane, codes);
        } else if (kind == Q4) {
            uint16_t scale, minimum;
            if (type == Q4_0 || type == Q4_1) {
                const uint8_t* b = source + static_cast<size_t>(g) * (type == Q4_0 ? 18 : 20);
                const int head = type == Q4_0 ? 2 : 4;
                for (int j = 0; j < 16; j++) codes[j] = b[head + j] & 15, codes[16 + j] = b[head + j] >> 4;
                scale = read_u16(b);
                minimum = type == Q4_1 ? read_u16(b + 2) : to_f16(-8 * from_f16(scale));  // exact: a power of two
            } else {
                float x[32] = {};
                to_floats(type, source, 32 * g, count, x);
                if (!all_finite(x)) return false;
                const float low = *std::min_element(x, x + 32), high = *std::max_element(x, x + 32);
                scale = to_f16((high - low) / 15), minimum = to_f16(low);
                const float d = from_f16(scale), m = from_f16(minimum);
                for (int j = 0; j < count; j++)
                    codes[j] = static_cast<uint8_t>(d > 0 ? std::clamp(static_cast<int>(std::nearbyint((x[j] - m) / d)), 0, 15) : 0);
            }
            finite &= is_finite(scale) && is_finite(minimum);
            put_nibbles(to, lane, codes);
            put_u16(to + 128, lane, scale);
            put_u16(to + 144, lane, minimum);
        } else {
            uint16_t scale;
            if (type == Q8_0) {
                const uint8_t* b = source + static_cast<size_t>(g) * 34;
                scale = read_u16(b);
                std::memcpy(codes, b + 2, 32);
            } else {
                float x[32] = {}, largest = 0;
                to_floats(type, source, 32 * g, count, x);
                if (!all_finite(x)) return false;
                for (float value : x) largest = std::max(largest, std::fabs(value));
                scale = to_f16(largest / 127);
                const float d = from_f16(scale);
                for (int j = 0; j < count; j++)
                    codes[j] = static_cast<uint8_t>(d > 0 ? std::clamp(static_cast<int>(std::nearbyint(x[j] / d)), -127, 127) : 0);
            }
            for (int j = 0; j < 32; j += 4) std::memcpy(to + 8 * j + 4 * lane, codes + j, 4);
            finite &= is_finite(scale);
            put_u16(to + 256, lane, scale);
        }
    }
    return finite;
}

}  // namespace

size_t packed_bytes(int kind, int num_out, int num_in) {
    const size_t blocks = (num_out + 7) / 8;
    if (kind == Q4K) return blocks * ((num_in + 255) / 256) * 1184;
    return blocks * ((num_in + 31) / 32) * (kind == Q4 ? 160 : 272);
}

size_t lampejo_packed_bytes(int kind, int num_out, int num_in) { return packed_bytes(kind, num_out, num_in); }

int lampejo_pack(int kind, uint8_t* packed, int num_out, int num_in, int type, const uint8_t* source,
                 const int32_t* row_map) {
    Layout layout;
    if (!layout_of(type, &layout) || num_in % layout.length || (kind == Q4K && type != Q4_K)) return -1;
    const size_t row_bytes = static_cast<size_t>(num_in / layout.length) * layout.bytes;
    const int per_piece = 64;
    std::atomic<bool> finite{true};
    parallel([=, &finite](Team& team) {
        team.run((num_out + per_piece - 1) / per_piece, [&](int piece) {
            const int last = std::min(num_out, (piece + 1) * per_piece);
            for (int i = piece * per_piece; i < last; i++)
                if (!pack_row(kind, packed, num_in, type, source + i * row_bytes, row_map ? row_map[i] : i)) finite = false;
        });
    });
    return finite ? 0 : -2;
}

void lampejo_unpack_rows(const Matrix* m, const int64_t* rows, int num_rows, float* out) {
    const int groups = m->kind == Q4K ? (m->num_in + 255) / 256 * 8 : (m->num_in + 31) / 32;
    for (int n = 0; n < num_rows; n++) {
        const int row = static_cast<int>(rows[n]), lane = row % 8;
        for (int i = 0; i < m->num_in; i++) {
            const int g = i / 32, j = i % 32;
            const uint8_t* w = group_of(const_cast<uint8_t*>(m->data), m->kind, groups, row, g);
            float value;
            if (m->kind == Q8) {
                value = from_f16(read_u16(w + 256 + 2 * lane)) * static_cast<int8_t>(w[j / 4 * 32 + 4 * lane + j % 4]);
            } else {
                const int code = w[j / 8 * 32 + 4 * lane + j % 4] >> (j % 8 < 4 ? 0 : 4) & 15;
                if (m->kind == Q4) {
                    value = from_f16(read_u16(w + 128 + 2 * lane)) * code + from_f16(read_u16(w + 144 + 2 * lane));
                } else {
                    const uint8_t* super = w - 160 - g % 8 * 128;
                    value = from_f16(read_u16(super + 2 * lane)) * super[32 + 16 * (g % 8) + lane] * code -
                            from_f16(read_u16(super + 16 + 2 * lane)) * super[32 + 16 * (g % 8) + 8 + lane];
                }
            }
            out[static_cast<size_t>(n) * m->num_in + i] = value;
        }
    }
}
