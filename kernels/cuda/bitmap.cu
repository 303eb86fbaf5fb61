// Marks rows dirty in a bitmap, and takes them out of it in ascending order.
//
// The bitmap is little-endian words of 64 bits; row r is bit r % 64 of word r / 64.
#include "block_sums.cuh"
#include "dirty_words.cuh"

__device__ inline void mark_row(uint64* bitmap, int64 num_words, int64 row) {
    uint32* halves = (uint32*)bitmap;
    require(row / 64 < num_words);
    const uint32 bit = 1u << (row % 32);
    // Hot rows are marked again and again, and nothing clears a bit meanwhile: a read is cheaper than an atomic. Not a
    // plain one, which would race with the atomics of other threads.
    if (!(load_relaxed(&halves[row / 32]) & bit)) atomicOr(&halves[row / 32], bit);
}

template <typename Id>
__device__ void mark_dirty(uint64* bitmap, int64 num_words, const Id* row_ids, int64 num_ids) {
    for (int64 i = first_of_grid(); i < num_ids; i += grid_stride()) {
        const int64 row = row_ids[i];
        if (row >= 0) mark_row(bitmap, num_words, row);
    }
}

HEADRACE_KERNEL mark_dirty_int32_kernel(uint64* bitmap, int64 num_words, const int* row_ids, int64 num_ids) {
    mark_dirty(bitmap, num_words, row_ids, num_ids);
}

HEADRACE_KERNEL mark_dirty_int64_kernel(uint64* bitmap, int64 num_words, const int64* row_ids, int64 num_ids) {
    mark_dirty(bitmap, num_words, row_ids, num_ids);
}

// An int32 or an int64 as it comes.
__device__ inline int64 number_at(const void* numbers, int64 number_bytes, int64 at) {
    return number_bytes == 4 ? ((const int*)numbers)[at] : ((const int64*)numbers)[at];
}

// Feature f has the ids from starts[f] to starts[f + 1], which are `starts_stride` numbers apart; its table's rows begin
// at bit first_slots[f], and where that is negative its ids are passed over.
HEADRACE_KERNEL mark_dirty_features_kernel(
    uint64* bitmap, int64 num_words, const void* row_ids, int64 num_ids, int64 id_bytes, const void* starts,
    int64 start_bytes, int64 starts_stride, const int64* first_slots, const int64* num_rows, int64 num_features) {
    for (int64 i = first_of_grid(); i < num_ids; i += grid_stride()) {
        int64 low = -1, high = num_features;  // the last start that is not above i
        while (low < high) {
            const int64 middle = (low + high + 1) / 2;
            if (number_at(starts, start_bytes, middle * starts_stride) <= i) low = middle;
            else high = middle - 1;
        }
        const int64 row = number_at(row_ids, id_bytes, i);
        if (low < 0 || low == num_features || row < 0 || first_slots[low] < 0) continue;
        require(row < num_rows[low]);
        mark_row(bitmap, num_words, first_slots[low] + row);
    }
}

// Returns the rows of all tiles before `tile`; called by one whole warp. A tile a lane is looked at, backwards
// until one knows the rows of all before it. It ends because tiles are numbered in the order in which their blocks
// start: those before this one are running, or done.
//
// Source: D. Merrill and M. Garland, "Single-pass Parallel Prefix Scan with Decoupled Look-back", NVIDIA, 2016.
__device__ int64 rows_before(const uint64* progress, int64 tile) {
    int64 total = 0;
    for (int64 nearest = tile - 1;; nearest -= WARP_LANES) {
        const int64 mine = nearest - lane_of_thread();
        uint64 told;
        do {
            told = UP_TO_HERE;  // so that a look beyond the first tile ends there
            if (mine >= 0) told = load_relaxed(&progress[mine]);
        } while (lanes_where(told < OWN));
        const LaneMask knowing = lanes_where(told >= UP_TO_HERE);
        const int last = knowing ? lowest_lane(knowing) : WARP_LANES;
        total += sum_over_warp(lane_of_thread() <= last ? (int64)(told & NUMBER) : 0);
        if (knowing) return total;
    }
}

// Returns the place of a thread's first row, counted over the whole bitmap.
__device__ int64 place_of_thread(int num_rows, uint64* progress, int64 tile, int64 num_tiles, int64* total) {
    __shared__ int64 tile_start;
    int in_tile;
    const int before = sum_before_thread<TAKE_THREADS>(num_rows, in_tile);
    if (warp_of_thread() == 0) {
        if (threadIdx.x == 0 && tile) store_relaxed(&progress[tile], OWN | (uint64)in_tile);
        const int64 start = tile ? rows_before(progress, tile) : 0;
        if (threadIdx.x == 0) {
            store_relaxed(&progress[tile], UP_TO_HERE | (uint64)(start + in_tile));
            tile_start = start;
            if (tile == num_tiles - 1) *total = start + in_tile;
        }
    }
    __syncthreads();
    return tile_start + before;
}

// Takes the lowest rows of the bitmap, at most `max_rows`, in one pass: `row_ids` gets them, the bitmap loses them.
// REQUIRES: progress[0 .. num_tiles] are zero; the last one numbers the blocks.
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
    // A slice of a bitmap may begin at any word.
    if (first_word + WORDS_PER_THREAD <= num_words && (uint64)bitmap % 16 == 0) {
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
    write_taken(words, num_rows, first_word * 64, place, row_ids);
    if (tile == num_tiles - 1 && threadIdx.x == 0) counts[0] = counts[1] < max_rows ? counts[1] : max_rows;
}
