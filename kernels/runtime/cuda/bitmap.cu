// Marks rows dirty in a bitmap, and takes them from it in ascending order.
//
// The bitmap is little-endian words of 64 bits; row r is bit r % 64 of word r / 64.
#include "block_sums.cuh"
#include "dirty_words.cuh"

__device__ inline void mark_row(uint64* bitmap, int64 num_words, int64 row) {
    uint32* halves = (uint32*)bitmap;
    require(row / 64 < num_words);
    const uint32 bit = 1u << (row % 32);
    // Hot rows are marked repeatedly and nothing clears a bit meanwhile, so a read is cheaper than an atomic. A plain read
    // would race with the atomics of other threads.
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

// Reads an int32 or an int64.
__device__ inline int64 number_at(const void* numbers, int64 number_bytes, int64 at) {
    return number_bytes == 4 ? ((const int*)numbers)[at] : ((const int64*)numbers)[at];
}

// Feature f has the ids from starts[f] to starts[f + 1]; starts are `starts_stride` numbers apart. Its table's rows begin at
// bit first_slots[f]; if that is negative, its ids are skipped.
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

// The parameters for each of a launch's 16 tables. They are parameters rather than an array in memory, so nothing has to be
// copied before a launch, and a captured launch keeps them.
#define EACH_TABLE(of_table) \
    of_table(0) of_table(1) of_table(2) of_table(3) of_table(4) of_table(5) of_table(6) of_table(7) \
    of_table(8) of_table(9) of_table(10) of_table(11) of_table(12) of_table(13) of_table(14) of_table(15)
#define TABLE_PARAMETERS(t) , const int64* row_ids_##t, int64 num_ids_##t, int64 first_slot_##t, int64 num_rows_##t
#define CHOOSE_TABLE(t) \
    case t: row_ids = row_ids_##t, num_ids = num_ids_##t, first_slot = first_slot_##t, num_rows = num_rows_##t; break;
constexpr int TABLES_A_LAUNCH = 16;

// Tables take turns in the order of blocks; an unused table has no ids, and zeros otherwise.
// REQUIRES: the number of blocks is a multiple of 16.
HEADRACE_KERNEL mark_dirty_tables_kernel(uint64* bitmap, int64 num_words EACH_TABLE(TABLE_PARAMETERS)) {
    const int64* row_ids = nullptr;
    int64 num_ids = 0, first_slot = 0, num_rows = 0;
    switch (blockIdx.x % TABLES_A_LAUNCH) { EACH_TABLE(CHOOSE_TABLE) }
    const int64 stride = grid_stride() / TABLES_A_LAUNCH;
    for (int64 i = (int64)(blockIdx.x / TABLES_A_LAUNCH) * blockDim.x + threadIdx.x; i < num_ids; i += stride) {
        const int64 row = row_ids[i];
        if (row < 0) continue;
        require(row < num_rows);
        mark_row(bitmap, num_words, first_slot + row);
    }
}

// Returns the rows of all tiles before `tile`; a whole warp calls it. It looks back, one tile per lane, until a tile knows
// the rows of all before it. It ends because tiles are numbered in the order in which their blocks start, so those before
// this one are running or done.
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

// Returns the rows of all tiles before this one, and publishes this tile's; all threads of a block call it.
__device__ int64 start_of_tile(int in_tile, uint64* progress, int64 tile) {
    __shared__ int64 tile_start;
    if (warp_of_thread() == 0) {
        if (threadIdx.x == 0 && tile) store_relaxed(&progress[tile], OWN | (uint64)in_tile);
        const int64 start = tile ? rows_before(progress, tile) : 0;
        if (threadIdx.x == 0) {
            store_relaxed(&progress[tile], UP_TO_HERE | (uint64)(start + in_tile));
            tile_start = start;
        }
    }
    __syncthreads();
    return tile_start;
}

__device__ inline void store_pair(uint64* at, uint64 low, uint64 high) {
    *(uint4*)at = uint4{(uint32)low, (uint32)(low >> 32), (uint32)high, (uint32)(high >> 32)};
}

// Moves the lowest rows, at most `max_rows`, from the bitmap to `row_ids` in one pass; `*count` becomes their number.
// REQUIRES: progress[0 .. num_tiles] are zero; the last one numbers the blocks.
HEADRACE_KERNEL take_dirty_kernel(
    uint64* bitmap, int64 num_words, uint64* progress, int64 num_tiles, int64 max_rows, int64* row_ids, int64* count) {
    __shared__ int64 shared_tile;
    if (threadIdx.x == 0) shared_tile = atomicAdd(&progress[num_tiles], 1ull);
    __syncthreads();
    const int64 tile = shared_tile;
    const int64 first_word = tile * TILE_WORDS + (int64)threadIdx.x * WORDS_PER_THREAD;
    // A slice of a bitmap may begin at any word.
    const bool is_whole = first_word + WORDS_PER_THREAD <= num_words && (uint64)bitmap % 16 == 0;
    uint64 words[WORDS_PER_THREAD];
    int num_rows = 0, in_tile;
    if (is_whole) {
        const uint4 low = *(const uint4*)(bitmap + first_word), high = *(const uint4*)(bitmap + first_word + 2);
        words[0] = (uint64)low.y << 32 | low.x, words[1] = (uint64)low.w << 32 | low.z;
        words[2] = (uint64)high.y << 32 | high.x, words[3] = (uint64)high.w << 32 | high.z;
    } else {
#pragma unroll
        for (int i = 0; i < WORDS_PER_THREAD; ++i) words[i] = first_word + i < num_words ? bitmap[first_word + i] : 0;
    }
#pragma unroll
    for (int i = 0; i < WORDS_PER_THREAD; ++i) num_rows += __popcll(words[i]);
    const int place = sum_before_thread<TAKE_THREADS>(num_rows, in_tile);
    const int64 start = start_of_tile(in_tile, progress, tile), room = start < max_rows ? max_rows - start : 0;
    const int num_taken = room < in_tile ? (int)room : in_tile;
    if (tile == num_tiles - 1 && threadIdx.x == 0) *count = start < max_rows ? start + num_taken : max_rows;
    uint64 left[WORDS_PER_THREAD];
    int next = place;
#pragma unroll
    for (int i = 0; i < WORDS_PER_THREAD; ++i) {
        const uint64 taken = next < num_taken ? lowest_rows(words[i], num_taken - next) : 0;
        next += __popcll(words[i]);
        left[i] = words[i] & ~taken;
        words[i] = taken;
    }
#pragma unroll
    for (int i = 0; i < WORDS_PER_THREAD; i += 2) {
        if (is_whole) {
            if (words[i] | words[i + 1]) store_pair(bitmap + first_word + i, left[i], left[i + 1]);
        } else {
            if (words[i]) bitmap[first_word + i] = left[i];
            if (words[i + 1]) bitmap[first_word + i + 1] = left[i + 1];
        }
    }
    write_taken(words, tile * TILE_WORDS * 64, place, num_taken, row_ids + start);
}
