// Marks rows dirty in a bitmap, and takes them out of it in ascending order.
//
// The bitmap is little-endian words of 64 bits; row r is bit r % 64 of word r / 64.
#include "common.cuh"

constexpr int TAKE_THREADS = 256;
constexpr int WORDS_PER_THREAD = 4;
constexpr int TILE_WORDS = TAKE_THREADS * WORDS_PER_THREAD;  // `bitmap.py` has the same number
constexpr int TAKE_WARPS = TAKE_THREADS / WARP_LANES;
// From so many rows of a warp's 8192 on, its lanes write each word's rows together.
constexpr int DENSE_WARP_ROWS = 1024;

template <typename Id>
__device__ void mark_dirty(uint64* bitmap, int64 num_words, const Id* row_ids, int64 num_ids) {
    uint32* halves = (uint32*)bitmap;
    for (int64 i = first_of_grid(); i < num_ids; i += grid_stride()) {
        const int64 row = row_ids[i];
        if (row < 0) continue;
        require(row / 64 < num_words);
        const uint32 bit = 1u << (row % 32);
        // Hot rows are marked again and again, and nothing clears a bit meanwhile: a read is cheaper than an atomic.
        if (!(halves[row / 32] & bit)) atomicOr(&halves[row / 32], bit);
    }
}

HEADRACE_KERNEL mark_dirty_int32_kernel(uint64* bitmap, int64 num_words, const int* row_ids, int64 num_ids) {
    mark_dirty(bitmap, num_words, row_ids, num_ids);
}

HEADRACE_KERNEL mark_dirty_int64_kernel(uint64* bitmap, int64 num_words, const int64* row_ids, int64 num_ids) {
    mark_dirty(bitmap, num_words, row_ids, num_ids);
}

// What a tile has told the ones behind it: nothing yet, the number of its own rows, or that of all rows up to its end.
// One 64-bit word holds both the kind and the number, so that no reader sees one without the other.
constexpr uint64 OWN = 1ull << 62, UP_TO_HERE = 2ull << 62, NUMBER = OWN - 1;

// Returns the rows of all tiles before `tile`; called by one whole warp. 32 tiles are looked at together, backwards
// until one knows the rows of all before it. It ends because tiles are numbered in the order in which their blocks
// start: those before this one are running, or done.
//
// Source: D. Merrill and M. Garland, "Single-pass Parallel Prefix Scan with Decoupled Look-back", NVIDIA, 2016.
__device__ int64 rows_before(volatile uint64* progress, int64 tile) {
    int64 total = 0;
    for (int64 nearest = tile - 1;; nearest -= WARP_LANES) {
        const int64 mine = nearest - lane_of_thread();
        uint64 told;
        do {
            told = UP_TO_HERE;  // so that a look beyond the first tile ends there
            if (mine >= 0) told = progress[mine];
        } while (__ballot_sync(ALL_LANES, told < OWN));
        const uint32 knowing = __ballot_sync(ALL_LANES, told >= UP_TO_HERE);
        const int last = knowing ? __ffs(knowing) - 1 : WARP_LANES;
        total += sum_over_warp(lane_of_thread() <= last ? (int64)(told & NUMBER) : 0);
        if (knowing) return total;
    }
}

// Returns the place of a thread's first row, counted over the whole bitmap.
__device__ int64 place_of_thread(int num_rows, volatile uint64* progress, int64 tile, int64 num_tiles, int64* total) {
    __shared__ int warp_rows[TAKE_WARPS];
    __shared__ int64 tile_start;
    int up_to = num_rows;
    for (int apart = 1; apart < WARP_LANES; apart *= 2) {
        const int below = __shfl_up_sync(ALL_LANES, up_to, apart);
        if (lane_of_thread() >= apart) up_to += below;
    }
    if (lane_of_thread() == WARP_LANES - 1) warp_rows[warp_of_thread()] = up_to;
    __syncthreads();
    int before = 0, in_tile = 0;
    for (int warp = 0; warp < TAKE_WARPS; ++warp) {
        if (warp < warp_of_thread()) before += warp_rows[warp];
        in_tile += warp_rows[warp];
    }
    if (warp_of_thread() == 0) {
        if (threadIdx.x == 0 && tile) progress[tile] = OWN | (uint64)in_tile;
        const int64 start = tile ? rows_before(progress, tile) : 0;
        if (threadIdx.x == 0) {
            progress[tile] = UP_TO_HERE | (uint64)(start + in_tile);
            tile_start = start;
            if (tile == num_tiles - 1) *total = start + in_tile;
        }
    }
    __syncthreads();
    return tile_start + before + up_to - num_rows;
}

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
            const uint64 word = __shfl_sync(ALL_LANES, words[part], from);
            const int64 row = __shfl_sync(ALL_LANES, first_row, from) + 64 * part;
            const int64 start = __shfl_sync(ALL_LANES, place, from);
            for (int bit = lane_of_thread(); bit < 64; bit += WARP_LANES) {
                if (word >> bit & 1) row_ids[start + __popcll(word & ((1ull << bit) - 1))] = row + bit;
            }
        }
        place += __popcll(words[part]);
    }
}

// Takes the lowest rows of the bitmap, at most `max_rows`, in one pass: `row_ids` gets them, the bitmap loses them.
// REQUIRES: progress[0 .. num_tiles] are zero; the last one numbers the blocks. The bitmap is aligned to 16 bytes.
// `counts[0]` is the number of rows taken. `counts[1]` is scratch.
HEADRACE_KERNEL take_dirty_kernel(
    uint64* bitmap, int64 num_words, uint64* progress, int64 num_tiles, int64 max_rows, int64* row_ids, int64* counts) {
    __shared__ int64 shared_tile;
    if (threadIdx.x == 0) shared_tile = atomicAdd(&progress[num_tiles], 1ull);
    __syncthreads();
    const int64 tile = shared_tile;
    const int64 first_word = tile * TILE_WORDS + (int64)threadIdx.x * WORDS_PER_THREAD;
    uint64 words[WORDS_PER_THREAD];
    int num_rows = 0;
    if (first_word + WORDS_PER_THREAD <= num_words) {
        const uint4 low = *(const uint4*)(bitmap + first_word), high = *(const uint4*)(bitmap + first_word + 2);
        words[0] = (uint64)low.y << 32 | low.x, words[1] = (uint64)low.w << 32 | low.z;
        words[2] = (uint64)high.y << 32 | high.x, words[3] = (uint64)high.w << 32 | high.z;
    } else {
#pragma unroll
        for (int i = 0; i < WORDS_PER_THREAD; ++i) words[i] = first_word + i < num_words ? bitmap[first_word + i] : 0;
    }
#pragma unroll
    for (int i = 0; i < WORDS_PER_THREAD; ++i) num_rows += __popcll(words[i]);
    const int64 place = place_of_thread(num_rows, progress, tile, num_tiles, &counts[1]);
    int64 next = place;
#pragma unroll
    for (int i = 0; i < WORDS_PER_THREAD; ++i) {
        const uint64 taken = next < max_rows ? lowest_rows(words[i], max_rows - next) : 0;
        next += __popcll(words[i]);
        if (taken) bitmap[first_word + i] = words[i] & ~taken;
        words[i] = taken;
    }
    if (sum_over_warp(num_rows) >= DENSE_WARP_ROWS) {
        write_rows_together(words, first_word * 64, place, row_ids);
    } else {
        next = place;
#pragma unroll
        for (int i = 0; i < WORDS_PER_THREAD; ++i) {
            if (words[i]) write_rows(words[i], (first_word + i) * 64, row_ids + next);
            next += __popcll(words[i]);
        }
    }
    if (tile == num_tiles - 1 && threadIdx.x == 0) counts[0] = counts[1] < max_rows ? counts[1] : max_rows;
}
