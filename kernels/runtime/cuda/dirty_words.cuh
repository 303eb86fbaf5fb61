// Taking rows from the words of a bitmap: row r is bit r % 64 of word r / 64.
#pragma once
#include "common.cuh"

constexpr int TAKE_THREADS = 256;
constexpr int WORDS_PER_THREAD = 4;
constexpr int TILE_WORDS = TAKE_THREADS * WORDS_PER_THREAD;  // the same number as in `dirty_bitmap.py` and `dirty_drain.py`
constexpr int STAGED_ROWS = 8192;  // of a tile at a time: 16 KiB of shared memory

// Returns which rows of a word are taken: all, or only the lowest `room` ones.
__device__ inline uint64 lowest_rows(uint64 word, int64 room) {
    if (room >= __popcll(word)) return word;
    uint64 left = word;
    for (int64 n = 0; n < room; ++n) left &= left - 1;
    return word & ~left;
}

// Writes the rows of a tile in ascending order; all threads of a block call it and meet at barriers. Rows go through shared
// memory: a thread's rows are consecutive, so direct writes of several threads would each touch another sector. `words` are
// the thread's words, which end up zero. `place` is the place of its first row in the tile, and `row_ids` points to the
// tile's first of `num_rows` rows.
__device__ inline void write_taken(uint64* words, int64 tile_row, int place, int num_rows, int64* row_ids) {
    __shared__ uint16 staged[STAGED_ROWS];  // relative to the tile's first row; a tile has 65,536
    for (int part = 0; part < num_rows; part += STAGED_ROWS) {
        const int end = part + STAGED_ROWS < num_rows ? part + STAGED_ROWS : num_rows;
#pragma unroll
        for (int i = 0; i < WORDS_PER_THREAD; ++i) {
            const int first_row = ((int)threadIdx.x * WORDS_PER_THREAD + i) * 64;
            for (; words[i] && place < end; words[i] &= words[i] - 1) {
                staged[place++ - part] = (uint16)(first_row + __ffsll(words[i]) - 1);
            }
        }
        __syncthreads();
        for (int at = part + threadIdx.x; at < end; at += TAKE_THREADS) row_ids[at] = tile_row + staged[at - part];
        __syncthreads();  // the next part reuses it
    }
}
