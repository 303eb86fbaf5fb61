// A drain of the dirty rows of many tables, whose counts never leave the device. The kernels count the rows of each tile of
// the bitmap, plan which rows fit into the buffer and where they go, take the rows, and order them by shard. Then
// `row_packing.cu` copies the columns.
#include "block_sums.cuh"
#include "dirty_words.cuh"
#include "packed_column.cuh"
#include "shards.cuh"

constexpr int PLAN_THREADS = 256;
constexpr int ROUTE_THREADS = 128;
constexpr int ROUTE_WARPS = ROUTE_THREADS / WARP_LANES;
constexpr int ROUTE_ROWS = 4096;  // `dirty_drain.py` has the same numbers
constexpr int WARP_ROWS = ROUTE_ROWS / ROUTE_WARPS;
constexpr int GROUPS_AHEAD = 8;
constexpr int64 ALIGNMENT = 64;
constexpr int64 ROW_ID_BYTES = 8;

// A header's first numbers; each table's number of rows for each shard follows.
enum { PACKED_BYTES, DIRTY_LEFT, NEXT_SLOT, SHARD_ROWS };

// Filled by `dirty_drain.py`. An extra entry says where the last table's tiles and columns end. A tile of the bitmap belongs
// to one table.
struct DrainTable {
    int64 first_word, num_words, num_rows, row_offset;
    uint64 seed;
    int64 row_bytes, first_tile, first_column;
};
struct CutColumn {
    const uint8* source;
    int64 stride, row_bytes, word_bytes;
};
// Shared by the kernels of a drain, besides the arrays.
struct CutState {
    int64 start, num_taken, is_full;
    uint64 num_route_tiles;
};

// Returns the last table that begins at or before `tile`.
__device__ inline int64 table_of_tile(const DrainTable* tables, int64 num_tables, int64 tile) {
    int64 low = 0, high = num_tables - 1;
    while (low < high) {
        const int64 middle = (low + high + 1) / 2;
        if (tables[middle].first_tile <= tile) low = middle;
        else high = middle - 1;
    }
    return low;
}

// Returns the bits of a word from a slot on.
__device__ inline uint64 slots_from(int64 start, int64 word) {
    if (start <= word * 64) return ~0ull;
    return start - word * 64 < 64 ? ~0ull << (start - word * 64) : 0;
}

// tile_rows[tile] = dirty rows from the cursor on; behind these, all dirty rows of each tile. Clears the counters of the
// next kernels, so it is launched with a block even without a tile.
HEADRACE_KERNEL count_dirty_kernel(
    const uint64* bitmap, const DrainTable* tables, int64 num_tables, const int64* cursor, CutState* state,
    int64* tile_rows, uint64* progress, int64 num_progress, int64* header, int64 num_shard_rows) {
    for (int64 i = first_of_grid(); i < num_progress; i += grid_stride()) progress[i] = 0;
    for (int64 i = first_of_grid(); i < num_shard_rows; i += grid_stride()) header[SHARD_ROWS + i] = 0;
    if (first_of_grid() == 0) state->num_route_tiles = 0;
    const int64 tile = blockIdx.x, num_tiles = tables[num_tables].first_tile, start = *cursor;
    if (tile >= num_tiles) return;
    const DrainTable& table = tables[table_of_tile(tables, num_tables, tile)];
    const int64 first_word = (tile - table.first_tile) * TILE_WORDS + threadIdx.x;
    uint64 words[WORDS_PER_THREAD];
#pragma unroll
    for (int i = 0; i < WORDS_PER_THREAD; ++i) {
        const int64 word = first_word + i * TAKE_THREADS;
        words[i] = word < table.num_words ? bitmap[table.first_word + word] : 0;
    }
    int64 both = 0;  // in one sum: all rows, and in the lower half those from the cursor on
#pragma unroll
    for (int i = 0; i < WORDS_PER_THREAD; ++i) {
        const uint64 wanted = words[i] & slots_from(start, table.first_word + first_word + i * TAKE_THREADS);
        both += (int64)__popcll(words[i]) << 32 | __popcll(wanted);
    }
    int64 of_tile;
    sum_before_thread<TAKE_THREADS>(both, of_tile);
    if (threadIdx.x) return;
    tile_rows[tile] = of_tile & 0xffffffff;
    tile_rows[num_tiles + 1 + tile] = of_tile >> 32;
}

__device__ inline int64 aligned(int64 num_bytes) { return (num_bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

__device__ inline int64 rows_that_fit(const DrainTable* table, int64 free_bytes) {
    const int64 num_columns = 1 + table[1].first_column - table->first_column;
    const int64 usable = free_bytes - num_columns * ALIGNMENT;
    return usable > 0 ? usable / table->row_bytes : 0;
}

__device__ inline int64 packed_bytes(const DrainTable* table, const CutColumn* columns, int64 num_rows) {
    int64 num_bytes = aligned(num_rows * ROW_ID_BYTES);
    for (int64 i = table->first_column; i < table[1].first_column; ++i) {
        num_bytes += aligned(num_rows * columns[i].row_bytes);
    }
    return num_bytes;
}

// Fills in the columns of a table's rows, which begin at byte `at` of the buffer. A column's first tile is an upper bound:
// the whole tiles of the bytes before it, and one more for each column before it.
__device__ void plan_columns(
    const DrainTable& table, int64 table_number, int64 num_columns, const CutColumn* columns, int64 num_rows,
    const int64* row_ids, uint8* out, int64 at, PackedColumn* packed) {
    for (int64 i = -1; i < num_columns; ++i) {  // -1: of the ids
        const CutColumn column = i < 0 ? CutColumn{nullptr, 0, ROW_ID_BYTES, 0} : columns[table.first_column + i];
        const int64 number = table.first_column + table_number + 1 + i;
        packed[number] = PackedColumn{
            at / PACK_TILE_BYTES + number, column.source, table.num_rows, column.stride, row_ids,
            num_rows, column.row_bytes, out + at, column.word_bytes, table.row_offset};
        at += aligned(num_rows * column.row_bytes);
    }
}

// Plans what is taken and where it goes; one block. `tile_rows` becomes the place of each tile's first row among those from
// the cursor on. table_firsts[t] is the place of a table's first row taken; the number of all rows follows the last table.
// `table_firsts` has room for as many numbers again, at first where each table would begin in the buffer.
HEADRACE_KERNEL plan_drain_kernel(
    const DrainTable* tables, int64 num_tables, int64* cursor, CutState* state, int64* tile_rows, int64* table_firsts,
    PackedColumn* packed, const int64* row_ids, uint8* out, int64 out_bytes, int64* header) {
    __shared__ int first_not_whole;
    const CutColumn* columns = (const CutColumn*)(tables + num_tables + 1);
    const int64 num_tiles = tables[num_tables].first_tile;
    int64* table_bytes = table_firsts + num_tables + 1;
    if (threadIdx.x == 0) first_not_whole = (int)num_tables;
    int64 mine = 0, num_dirty;
    for (int64 i = threadIdx.x; i < num_tiles; i += PLAN_THREADS) mine += tile_rows[num_tiles + 1 + i];
    sum_before_thread<PLAN_THREADS>(mine, num_dirty);
    const int64 num_wanted = sum_up<PLAN_THREADS>(tile_rows, num_tiles);
    if (threadIdx.x == 0) tile_rows[num_tiles] = num_wanted;
    __syncthreads();
    for (int64 i = threadIdx.x; i < num_tables; i += PLAN_THREADS) {
        const int64 num_rows = tile_rows[tables[i + 1].first_tile] - tile_rows[tables[i].first_tile];
        table_bytes[i] = packed_bytes(&tables[i], columns, num_rows);
    }
    __syncthreads();
    int64 used_bytes = sum_up<PLAN_THREADS>(table_bytes, num_tables);
    __syncthreads();
    for (int64 i = threadIdx.x; i < num_tables; i += PLAN_THREADS) {
        const int64 num_rows = tile_rows[tables[i + 1].first_tile] - tile_rows[tables[i].first_tile];
        if (num_rows > rows_that_fit(&tables[i], out_bytes - table_bytes[i])) atomicMin(&first_not_whole, (int)i);
    }
    __syncthreads();
    const int64 last = first_not_whole;
    int64 num_taken = num_wanted;
    if (last < num_tables) {
        const int64 num_rows = rows_that_fit(&tables[last], out_bytes - table_bytes[last]);
        num_taken = tile_rows[tables[last].first_tile] + num_rows;
        used_bytes = table_bytes[last] + packed_bytes(&tables[last], columns, num_rows);
    }
    for (int64 i = threadIdx.x; i < num_tables; i += PLAN_THREADS) {
        const int64 first = tile_rows[tables[i].first_tile], end = tile_rows[tables[i + 1].first_tile];
        const int64 first_taken = first < num_taken ? first : num_taken, end_taken = end < num_taken ? end : num_taken;
        table_firsts[i] = first_taken;
        plan_columns(
            tables[i], i, tables[i + 1].first_column - tables[i].first_column, columns, end_taken - first_taken,
            row_ids + first_taken, out, table_bytes[i], packed);
    }
    if (threadIdx.x) return;
    table_firsts[num_tables] = num_taken;
    state->start = *cursor, state->num_taken = num_taken, state->is_full = last < num_tables;
    header[PACKED_BYTES] = used_bytes, header[DIRTY_LEFT] = num_dirty - num_taken;
    *cursor = header[NEXT_SLOT] = 0;  // or as the next kernel says, which knows the last row taken
}

// Moves rows from the bitmap: row_ids[place] = local row, by ascending slot. Counts the rows of each shard.
HEADRACE_KERNEL take_rows_kernel(
    uint64* bitmap, const DrainTable* tables, int64 num_tables, int64 num_shards, int64* cursor, const CutState* state,
    const int64* tile_rows, int64* row_ids, int64* header) {
    __shared__ uint32 found[MAX_SHARDS];
    const int64 tile = blockIdx.x, num_taken = state->num_taken;
    const int64 first_place = tile_rows[tile];
    const int64 end_place = tile_rows[tile + 1] < num_taken ? tile_rows[tile + 1] : num_taken;
    if (first_place >= end_place) return;
    const int64 table_number = table_of_tile(tables, num_tables, tile);
    const DrainTable& table = tables[table_number];
    const int64 first_word = (tile - table.first_tile) * TILE_WORDS + (int64)threadIdx.x * WORDS_PER_THREAD;
    uint64 words[WORDS_PER_THREAD];
    int num_rows = 0, in_tile;
#pragma unroll
    for (int i = 0; i < WORDS_PER_THREAD; ++i) {
        const int64 word = table.first_word + first_word + i;
        words[i] = first_word + i < table.num_words ? bitmap[word] & slots_from(state->start, word) : 0;
        num_rows += __popcll(words[i]);
    }
    const int place_in_tile = sum_before_thread<TAKE_THREADS>(num_rows, in_tile);
    int64 next = first_place + place_in_tile;
#pragma unroll
    for (int i = 0; i < WORDS_PER_THREAD; ++i) {
        const uint64 taken = next < num_taken ? lowest_rows(words[i], num_taken - next) : 0;
        if (taken) bitmap[table.first_word + first_word + i] &= ~taken;
        if (taken && state->is_full && next + __popcll(taken) == num_taken) {
            uint64 highest = taken;
            while (highest & (highest - 1)) highest &= highest - 1;
            *cursor = header[NEXT_SLOT] = (table.first_word + first_word + i) * 64 + __ffsll(highest);
        }
        next += __popcll(words[i]);
        words[i] = taken;
    }
    write_taken(
        words, (tile - table.first_tile) * TILE_WORDS * 64, place_in_tile, (int)(end_place - first_place),
        row_ids + first_place);
    for (int64 shard = threadIdx.x; shard < num_shards; shard += TAKE_THREADS) found[shard] = 0;
    __syncthreads();
    const Routing routing = {0, table.seed, num_shards};
    for (int64 i = first_place + threadIdx.x; i < end_place; i += TAKE_THREADS) {
        atomicAdd(&found[shard_of(row_ids[i] + table.row_offset, routing)], 1u);
    }
    __syncthreads();
    uint64* shard_rows = (uint64*)header + SHARD_ROWS + table_number * num_shards;
    for (int64 shard = threadIdx.x; shard < num_shards; shard += TAKE_THREADS) {
        if (found[shard]) atomicAdd(&shard_rows[shard], (uint64)found[shard]);
    }
}

// Returns the rows of the shards before this one, and of this shard in the earlier tiles of the table. It ends for the same
// reason as in `bitmap.cu`: tiles are numbered as their blocks start. A table's first tile does not wait.
__device__ inline int64 rows_before_tile(const uint64* progress, int64 num_shards) {
    int64 total = 0;
    for (const uint64* told_at = progress - num_shards;; told_at -= num_shards) {
        uint64 told;
        do {
            told = load_relaxed(told_at);
        } while (told < OWN);
        total += told & NUMBER;
        if (told >= UP_TO_HERE) return total;
    }
}

// Loads rows of several groups of a warp at once, as each access takes longer than what is done with a row; 0 behind `end`.
__device__ inline void load_groups(const int64* row_ids, int64 first, int64 end, int64* rows) {
#pragma unroll
    for (int n = 0; n < GROUPS_AHEAD; ++n) {
        const int64 i = first + n * WARP_LANES + lane_of_thread();
        rows[n] = i < end ? row_ids[i] : 0;
    }
}

// Orders each table's rows by shard, stably. A block takes a tile of one table's rows, of which each warp has a part.
// progress[tile][shard] is what a tile has published about a shard.
HEADRACE_KERNEL route_rows_kernel(
    const DrainTable* tables, int64 num_tables, int64 num_shards, CutState* state, const int64* table_firsts,
    const int64* row_ids, int64* routed_ids, uint64* progress, const int64* header) {
    __shared__ uint32 found[ROUTE_WARPS][MAX_SHARDS];
    __shared__ uint32 shard_firsts[MAX_SHARDS];
    __shared__ int64 shared_tile;
    if (threadIdx.x == 0) shared_tile = atomicAdd(&state->num_route_tiles, 1ull);
    __syncthreads();
    const int64 tile = shared_tile;
    int64 table_number = 0, high = num_tables - 1;
    while (table_number < high) {  // the last table whose tiles begin here or before; numbered as in `plan_columns`
        const int64 middle = (table_number + high + 1) / 2;
        if (table_firsts[middle] / ROUTE_ROWS + middle <= tile) table_number = middle;
        else high = middle - 1;
    }
    const DrainTable& table = tables[table_number];
    const int64 table_first = table_firsts[table_number], table_end = table_firsts[table_number + 1];
    const int64 tile_of_table = tile - (table_first / ROUTE_ROWS + table_number);
    const int64 first = table_first + tile_of_table * ROUTE_ROWS + warp_of_thread() * WARP_ROWS;
    if (first - warp_of_thread() * WARP_ROWS >= table_end) return;
    const int64 end = first + WARP_ROWS < table_end ? first + WARP_ROWS : table_end;
    for (int64 shard = threadIdx.x; shard < num_shards; shard += ROUTE_THREADS) {
        for (int warp = 0; warp < ROUTE_WARPS; ++warp) found[warp][shard] = 0;
    }
    __syncthreads();
    const Routing routing = {0, table.seed, num_shards};
    uint32* mine = found[warp_of_thread()];
    for (int64 batch = first; batch < end; batch += WARP_LANES * GROUPS_AHEAD) {
        int64 rows[GROUPS_AHEAD];
        load_groups(row_ids, batch, end, rows);
#pragma unroll
        for (int n = 0; n < GROUPS_AHEAD; ++n) {
            if (batch + n * WARP_LANES + lane_of_thread() >= end) continue;
            atomicAdd(&mine[shard_of(rows[n] + table.row_offset, routing)], 1u);
        }
    }
    if (tile_of_table == 0) {
        const int64* shard_rows = header + SHARD_ROWS + table_number * num_shards;
        for (int64 shard = threadIdx.x; shard < num_shards; shard += ROUTE_THREADS) {
            shard_firsts[shard] = (uint32)shard_rows[shard];
        }
        __syncthreads();
        sum_up<ROUTE_THREADS>(shard_firsts, num_shards);
    }
    __syncthreads();
    uint64* told = progress + tile * num_shards;
    for (int64 shard = threadIdx.x; shard < num_shards; shard += ROUTE_THREADS) {
        uint32 in_tile = 0;  // each warp's rows of the shard begin behind those of the warps before
        for (int warp = 0; warp < ROUTE_WARPS; ++warp) {
            const uint32 of_warp = found[warp][shard];
            found[warp][shard] = in_tile;
            in_tile += of_warp;
        }
        // The first tile does not wait, so it publishes its total at once.
        const uint64 word = tile_of_table ? OWN | in_tile : UP_TO_HERE | (shard_firsts[shard] + in_tile);
        store_relaxed(&told[shard], word);
    }
    for (int64 shard = threadIdx.x; shard < num_shards; shard += ROUTE_THREADS) {
        uint32 before;
        if (tile_of_table == 0) {
            before = shard_firsts[shard];
        } else {
            before = (uint32)rows_before_tile(told + shard, num_shards);
            store_relaxed(&told[shard], UP_TO_HERE | (before + (load_relaxed(&told[shard]) & NUMBER)));
        }
        for (int warp = 0; warp < ROUTE_WARPS; ++warp) found[warp][shard] += before;
    }
    __syncthreads();
    for (int64 batch = first; batch < end; batch += WARP_LANES * GROUPS_AHEAD) {
        int64 rows[GROUPS_AHEAD];
        load_groups(row_ids, batch, end, rows);
#pragma unroll
        for (int n = 0; n < GROUPS_AHEAD; ++n) {
            if (batch + n * WARP_LANES >= end) continue;  // for all lanes
            const bool is_row = batch + n * WARP_LANES + lane_of_thread() < end;
            const uint32 shard = is_row ? shard_of(rows[n] + table.row_offset, routing) : 0;
            const uint32 so_far = rows_before_in_shard(mine, shard, is_row, num_shards);
            if (is_row) routed_ids[table_first + so_far] = rows[n];
        }
    }
}
