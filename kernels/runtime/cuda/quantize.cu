// Quantizes rows to int8 and int4, and back, with the layouts and bytes of `kernels/quantization.py`.
//
// Compiled without contraction of multiplications and additions, so each step is rounded as there. Some lanes of a warp share
// a row; short rows are read once, 16 bytes at a time, and several to a warp, since what is done once a row (the search for
// its range, two divisions) would otherwise take longer than its bytes.
#include "common.cuh"

__device__ inline bool is_finite(float value) { return (__float_as_uint(value) & 0x7f800000u) != 0x7f800000u; }

// Rows have any number of bytes, so scale and bias may be at any address.
__device__ inline void store_bytes(uint8* out, uint32 bits, int num_bytes) {
    for (int i = 0; i < num_bytes; ++i) out[i] = (uint8)(bits >> 8 * i);
}
__device__ inline uint32 load_bytes(const uint8* from, int num_bytes) {
    uint32 bits = 0;
    for (int i = 0; i < num_bytes; ++i) bits |= (uint32)from[i] << 8 * i;
    return bits;
}

// How one row becomes codes, scale and bias.
template <int BITS>
struct Scaling {
    float bias, inverse;
    uint32 scale_bits, bias_bits;
    bool fits;

    __device__ Scaling(float lowest, float highest) {
        if (BITS == 8) {
            // Adding 0 turns -0 into +0, because a minimum or maximum may return either of a row's zeros.
            const float scale = (highest - lowest) / 255.0f + 0.0f;
            bias = lowest + 0.0f;
            inverse = 255.0f / ((highest - lowest) + 1e-8f);
            fits = is_finite(scale) && is_finite(bias);
            scale_bits = __float_as_uint(fits ? scale : __uint_as_float(0x7fc00000u));
            bias_bits = __float_as_uint(fits ? bias : __uint_as_float(0x7fc00000u));
        } else {
            uint16 half_bias = half_bits(lowest);
            if (half_value(half_bias) == 0.0f) half_bias = 0;  // not -0
            bias = half_value(half_bias);
            uint16 half_scale = half_bits((highest - bias) / 15.0f);
            if (half_value(half_scale) == 0.0f) half_scale = 0x3c00;  // 1
            fits = is_finite(half_value(half_scale)) && is_finite(bias);
            inverse = 1.0f / half_value(half_scale);
            scale_bits = fits ? half_scale : 0x7e00;
            bias_bits = fits ? half_bias : 0x7e00;
        }
    }

    // Adding 2^23 rounds a number from 0 to 255 to the nearest integer, ties to even, and leaves it in the low bits.
    __device__ uint32 code(float value) const {
        constexpr float MOST = BITS == 8 ? 255.0f : 15.0f;
        const float clamped = fminf(fmaxf((value - bias) * inverse, 0.0f), MOST);
        return __float_as_uint(clamped + 8388608.0f) & ((1u << BITS) - 1);
    }
};

// Lanes that share a row, and 16-byte parts of it that each of them keeps: rows of up to 4 * LANES * PARTS columns.
constexpr int SHORT_LANES = 8, LONG_LANES = 32;  // `quantization.py` has the same numbers
constexpr int PARTS = 4, PART_COLUMNS = 4;
constexpr int64 SHORT_COLUMNS = SHORT_LANES * PARTS * PART_COLUMNS, LONG_COLUMNS = LONG_LANES * PARTS * PART_COLUMNS;

// The codes of a part: 4 bytes, or 2. REQUIRES of all that use it: a multiple of 4 columns, so that rows are aligned to it.
template <int BITS> struct PartCodes { typedef uint32 Word; };
template <> struct PartCodes<4> { typedef uint16 Word; };

// REQUIRES: dim is a multiple of 4, at most 4 * LANES * PARTS. All lanes of a warp stay together, because they exchange.
template <int BITS, int LANES>
__device__ void quantize_short_rows(const float* rows, int64 num_rows, int64 dim, uint8* packed) {
    typedef typename PartCodes<BITS>::Word Word;
    constexpr int WARP_ROWS = WARP_LANES / LANES;
    const int num_parts = (int)dim / PART_COLUMNS, lane = threadIdx.x % LANES;
    const int64 row_bytes = (num_parts + 2) * (int64)sizeof(Word);
    const int64 first_warp = first_of_grid() / WARP_LANES, warps = grid_stride() / WARP_LANES;
    for (int64 first = first_warp * WARP_ROWS; first < num_rows; first += warps * WARP_ROWS) {
        const int64 row = first + lane_of_thread() / LANES;
        const bool is_row = row < num_rows;
        const float4* values = (const float4*)(rows + (is_row ? row : first) * dim);
        float4 held[PARTS];
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            if (lane + i * LANES < num_parts) held[i] = values[lane + i * LANES];
        }
        float lowest = __uint_as_float(0x7f800000u), highest = -lowest;
        bool has_nan = false;  // an infinity shows in the range
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            if (lane + i * LANES >= num_parts) continue;
            const float4 part = held[i];
            lowest = fminf(fminf(fminf(lowest, part.x), fminf(part.y, part.z)), part.w);
            highest = fmaxf(fmaxf(fmaxf(highest, part.x), fmaxf(part.y, part.z)), part.w);
            has_nan = has_nan || part.x != part.x || part.y != part.y || part.z != part.z || part.w != part.w;
        }
        if (has_nan) lowest = __uint_as_float(0xff800000u);  // then the row does not fit
#pragma unroll
        for (int apart = LANES / 2; apart; apart /= 2) {
            lowest = fminf(lowest, shuffle_xor(lowest, apart));
            highest = fmaxf(highest, shuffle_xor(highest, apart));
        }
        if (!is_row) continue;  // all lanes exchange again in the next round, or none does
        const Scaling<BITS> scaling(lowest, highest);
        uint8* out = packed + row * row_bytes;
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            if (lane + i * LANES >= num_parts) continue;
            const float4 part = held[i];
            const uint32 codes = scaling.code(part.x) | scaling.code(part.y) << BITS | scaling.code(part.z) << 2 * BITS |
                                 scaling.code(part.w) << 3 * BITS;
            ((Word*)out)[lane + i * LANES] = (Word)(scaling.fits ? codes : 0);
        }
        if (lane == 0) {
            ((Word*)out)[num_parts] = (Word)scaling.scale_bits;
            ((Word*)out)[num_parts + 1] = (Word)scaling.bias_bits;
        }
    }
}

template <int BITS>
__device__ void quantize_rows(const float* rows, int64 num_rows, int64 dim, uint8* packed) {
    if (dim % PART_COLUMNS == 0 && dim <= SHORT_COLUMNS) {
        return quantize_short_rows<BITS, SHORT_LANES>(rows, num_rows, dim, packed);
    }
    if (dim % PART_COLUMNS == 0 && dim <= LONG_COLUMNS) {
        return quantize_short_rows<BITS, LONG_LANES>(rows, num_rows, dim, packed);
    }
    constexpr int WORD_CODES = 32 / BITS, BYTE_CODES = 8 / BITS, SCALE_BYTES = BITS == 8 ? 4 : 2;
    const int64 code_bytes = (dim + BYTE_CODES - 1) / BYTE_CODES, row_bytes = code_bytes + 2 * SCALE_BYTES;
    for (int64 row = first_of_grid() / WARP_LANES; row < num_rows; row += grid_stride() / WARP_LANES) {
        const float* values = rows + row * dim;
        uint8* out = packed + row * row_bytes;
        float lowest = __uint_as_float(0x7f800000u), highest = -lowest;
        bool all_finite = true;
        for (int64 i = lane_of_thread(); i < dim; i += WARP_LANES) {
            lowest = fminf(lowest, values[i]);
            highest = fmaxf(highest, values[i]);
            all_finite = all_finite && is_finite(values[i]);
        }
        for (int apart = WARP_LANES / 2; apart; apart /= 2) {
            lowest = fminf(lowest, shuffle_xor(lowest, apart));
            highest = fmaxf(highest, shuffle_xor(highest, apart));
        }
        if (lanes_where(!all_finite)) lowest = __uint_as_float(0x7f800000u);  // then it does not fit
        const Scaling<BITS> scaling(lowest, highest);
        int64 done = 0;
        if (dim % WORD_CODES == 0) {  // then rows and codes are aligned to words
            for (int64 i = lane_of_thread(); i < dim / WORD_CODES; i += WARP_LANES) {
                uint32 word = 0;
#pragma unroll
                for (int k = 0; k < WORD_CODES; ++k) word |= scaling.code(values[i * WORD_CODES + k]) << BITS * k;
                ((uint32*)out)[i] = scaling.fits ? word : 0;
            }
            done = code_bytes;
        }
        for (int64 i = done + lane_of_thread(); i < code_bytes; i += WARP_LANES) {
            uint32 byte = 0;
#pragma unroll
            for (int k = 0; k < BYTE_CODES; ++k) {
                const int64 at = i * BYTE_CODES + k;
                if (at < dim) byte |= scaling.code(values[at]) << BITS * k;
            }
            out[i] = scaling.fits ? (uint8)byte : 0;
        }
        if (lane_of_thread() == 0) {
            store_bytes(out + code_bytes, scaling.scale_bits, SCALE_BYTES);
            store_bytes(out + code_bytes + SCALE_BYTES, scaling.bias_bits, SCALE_BYTES);
        }
    }
}

// REQUIRES: as `quantize_short_rows`.
template <int BITS, int LANES>
__device__ void dequantize_short_rows(const uint8* packed, int64 num_rows, int64 dim, float* rows) {
    typedef typename PartCodes<BITS>::Word Word;
    const int num_parts = (int)dim / PART_COLUMNS, lane = threadIdx.x % LANES;
    const int64 row_words = num_parts + 2;
    for (int64 row = first_of_grid() / LANES; row < num_rows; row += grid_stride() / LANES) {
        const Word* codes = (const Word*)packed + row * row_words;
        Word held[PARTS];
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            if (lane + i * LANES < num_parts) held[i] = codes[lane + i * LANES];
        }
        const Word scale_bits = codes[num_parts], bias_bits = codes[num_parts + 1];
        const float scale = BITS == 8 ? __uint_as_float(scale_bits) : half_value((uint16)scale_bits);
        const float bias = BITS == 8 ? __uint_as_float(bias_bits) : half_value((uint16)bias_bits);
        float4* out = (float4*)(rows + row * dim);
        constexpr uint32 MOST = (1u << BITS) - 1;
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            if (lane + i * LANES >= num_parts) continue;
            const uint32 part = held[i];
            out[lane + i * LANES] = float4{
                fmaf((float)(part & MOST), scale, bias), fmaf((float)(part >> BITS & MOST), scale, bias),
                fmaf((float)(part >> 2 * BITS & MOST), scale, bias), fmaf((float)(part >> 3 * BITS & MOST), scale, bias)};
        }
    }
}

template <int BITS>
__device__ void dequantize_rows(const uint8* packed, int64 num_rows, int64 dim, float* rows) {
    if (dim % PART_COLUMNS == 0 && dim <= SHORT_COLUMNS) {
        return dequantize_short_rows<BITS, SHORT_LANES>(packed, num_rows, dim, rows);
    }
    if (dim % PART_COLUMNS == 0 && dim <= LONG_COLUMNS) {
        return dequantize_short_rows<BITS, LONG_LANES>(packed, num_rows, dim, rows);
    }
    constexpr int BYTE_CODES = 8 / BITS, SCALE_BYTES = BITS == 8 ? 4 : 2;
    const int64 code_bytes = (dim + BYTE_CODES - 1) / BYTE_CODES, row_bytes = code_bytes + 2 * SCALE_BYTES;
    for (int64 row = first_of_grid() / WARP_LANES; row < num_rows; row += grid_stride() / WARP_LANES) {
        const uint8* codes = packed + row * row_bytes;
        const uint32 scale_bits = load_bytes(codes + code_bytes, SCALE_BYTES);
        const uint32 bias_bits = load_bytes(codes + code_bytes + SCALE_BYTES, SCALE_BYTES);
        const float scale = BITS == 8 ? __uint_as_float(scale_bits) : half_value((uint16)scale_bits);
        const float bias = BITS == 8 ? __uint_as_float(bias_bits) : half_value((uint16)bias_bits);
        for (int64 i = lane_of_thread(); i < dim; i += WARP_LANES) {
            const uint32 code = codes[i / BYTE_CODES] >> (i % BYTE_CODES * BITS) & ((1u << BITS) - 1);
            rows[row * dim + i] = fmaf((float)code, scale, bias);
        }
    }
}

HEADRACE_KERNEL quantize_int8_kernel(const float* rows, int64 num_rows, int64 dim, uint8* packed) {
    quantize_rows<8>(rows, num_rows, dim, packed);
}
HEADRACE_KERNEL quantize_int4_kernel(const float* rows, int64 num_rows, int64 dim, uint8* packed) {
    quantize_rows<4>(rows, num_rows, dim, packed);
}
HEADRACE_KERNEL dequantize_int8_kernel(const uint8* packed, int64 num_rows, int64 dim, float* rows) {
    dequantize_rows<8>(packed, num_rows, dim, rows);
}
HEADRACE_KERNEL dequantize_int4_kernel(const uint8* packed, int64 num_rows, int64 dim, float* rows) {
    dequantize_rows<4>(packed, num_rows, dim, rows);
}
