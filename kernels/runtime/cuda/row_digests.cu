// Digests of rows, as `schemas/row_digest.py` defines them: 64 bits over a row's id, weights and states.
#include "common.cuh"

// One column of the rows, filled in by `digests.py`. Its keys begin at `first_key`.
struct DigestedColumn {
    const uint8* source;
    int64 stride, num_words, word_bytes, first_key;
};

template <typename Word>
__device__ inline uint64 hash_of_lane(const uint8* row, const uint64* keys, int64 num_words) {
    uint64 hashed = 0;
    for (int64 i = lane_of_thread(); i < num_words; i += WARP_LANES) hashed += ((const Word*)row)[i] * keys[i];
    return hashed;
}

// A warp takes a row.
HEADRACE_KERNEL row_digests_kernel(
    const int64* row_ids, int64 num_rows, const DigestedColumn* columns, int64 num_columns, const uint64* keys,
    uint64* digests) {
    for (int64 row = first_of_grid() / WARP_LANES; row < num_rows; row += grid_stride() / WARP_LANES) {
        uint64 hashed = 0;
        for (int64 number = 0; number < num_columns; ++number) {
            const DigestedColumn column = columns[number];
            const uint8* source = column.source + row * column.stride;
            const uint64* its_keys = keys + column.first_key;
            if (column.word_bytes == 4) hashed += hash_of_lane<uint32>(source, its_keys, column.num_words);
            else if (column.word_bytes == 2) hashed += hash_of_lane<uint16>(source, its_keys, column.num_words);
            else hashed += hash_of_lane<uint8>(source, its_keys, column.num_words);
        }
        hashed = sum_over_warp(hashed);
        if (lane_of_thread() == 0) digests[row] = mix(hashed + mix((uint64)row_ids[row] + GOLDEN));
    }
}
