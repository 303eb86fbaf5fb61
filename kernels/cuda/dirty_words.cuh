// Rows that are taken out of the words of a bitmap: row r is bit r % 64 of word r / 64.
#pragma once
#include "common.cuh"

constexpr int TAKE_THREADS = 256;
constexpr int WORDS_PER_THREAD = 4;
constexpr int TILE_WORDS = TAKE_THREADS * WORDS_PER_THREAD;  // `bitmap.py` and `dirty_cut.py` have the same number
// From so many rows of a warp's on, an eighth, its lanes write each word's rows together.
constexpr int DENSE_WARP_ROWS = WARP_LANES * WORDS_PER_THREAD * 64 / 8;

// Returns which rows of a word are taken: all, or the lowest when `room` is for fewer.
__device__ inline uint64 lowest_rows(uint64 word, int64 room) {
    if (room >= __popcll(word)) return word;
    uint64 left = word;
    for (int64 n = 0; n < room; ++n) left &= left - 1;
    return word & ~left;
}

__device__ inline void write_rows(uint64 word, int64 first_row, int64* out) {
    for (; word; word &= word - 1) *out++ = first_row + __ffsll(word) - 1;
}

// Writes the rows of a warp's words, each word by all lanes: neighbours write neighbours.
__device__ void write_rows_together(const uint64* words, int64 first_row, int64 place, int64* row_ids) {
    for (int part = 0; part < WORDS_PER_THREAD; ++part) {
        for (int from = 0; from < WARP_LANES; ++from) {
            const uint64 word = shuffle(words[part], from);
            const int64 row = shuffle(first_row, from) + 64 * part;
            const int64 start = shuffle(place, from);
            for (int bit = lane_of_thread(); bit < 64; bit += WARP_LANES) {
                if (word >> bit & 1) row_ids[start + __popcll(word & ((1ull << bit) - 1))] = row + bit;
            }
        }
        place += __popcll(words[part]);
    }
}

// Writes the rows of a warp's words, `num_rows` of a thread's or some more, in the way that suits how many they are.
// `place` is that of the thread's first row.
__device__ inline void write_taken(const uint64* words, int num_rows, int64 first_row, int64 place, int64* row_ids) {
    if (sum_over_warp(num_rows) >= DENSE_WARP_ROWS) return write_rows_together(words, first_row, place, row_ids);
#pragma unroll
    for (int i = 0; i < WORDS_PER_THREAD; ++i) {
        write_rows(words[i], first_row + 64 * i, row_ids + place);
        place += __popcll(words[i]);
    }
}
