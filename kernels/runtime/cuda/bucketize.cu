// Orders row ids by shard, stably: one kernel counts each tile's rows of each shard, the next moves each row to its place.
//
// Each warp works on its own tile, so the order within it needs no barrier. Ids are read twice, because the place of a
// shard's first row is known only after all rows of the shards before it are counted; weights are read once.
#include "shards.cuh"

constexpr int BUCKET_THREADS = 128;  // `bucketize.py` has the same numbers
constexpr int BUCKET_WARPS = BUCKET_THREADS / WARP_LANES;
constexpr int TILE_ROWS = 1024;

// The tiles of a warp; a block has more warps of 32 lanes than of 64.
__device__ inline int64 first_tile() { return (int64)blockIdx.x * BUCKET_WARPS + warp_of_thread(); }
__device__ inline int64 tile_stride() { return (int64)gridDim.x * BUCKET_WARPS; }

// counts[shard * num_tiles + tile] = rows of the shard in the tile
HEADRACE_KERNEL count_shards_kernel(
    const int64* row_ids, int64 num_rows, int64 block_rows, uint64 seed, int64 num_shards, int64 num_tiles,
    int64* counts) {
    __shared__ uint32 found[BUCKET_WARPS][MAX_SHARDS];
    const Routing routing = {block_rows, seed, num_shards};
    uint32* mine = found[warp_of_thread()];
    for (int64 tile = first_tile(); tile < num_tiles; tile += tile_stride()) {
        for (int64 shard = lane_of_thread(); shard < num_shards; shard += WARP_LANES) mine[shard] = 0;
        sync_warp();
        const int64 end = (tile + 1) * TILE_ROWS < num_rows ? (tile + 1) * TILE_ROWS : num_rows;
        for (int64 i = tile * TILE_ROWS + lane_of_thread(); i < end; i += WARP_LANES) {
            atomicAdd(&mine[shard_of(row_ids[i], routing)], 1u);
        }
        sync_warp();
        // The next tile needs no barrier, because each lane clears its own counts.
        for (int64 shard = lane_of_thread(); shard < num_shards; shard += WARP_LANES) {
            counts[shard * num_tiles + tile] = mine[shard];
        }
    }
}

// `firsts`, in the order of `counts`, says where each tile's rows of each shard begin. Weights have 0 (none), 2, 4 or 8
// bytes.
HEADRACE_KERNEL move_to_shards_kernel(
    const int64* row_ids, int64 num_rows, int64 block_rows, uint64 seed, int64 num_shards, int64 num_tiles,
    const int64* firsts, int64* out_ids, int64* out_positions, const uint8* weights, uint8* out_weights,
    int64 weight_bytes) {
    __shared__ uint32 found[BUCKET_WARPS][MAX_SHARDS];
    const Routing routing = {block_rows, seed, num_shards};
    uint32* mine = found[warp_of_thread()];
    for (int64 tile = first_tile(); tile < num_tiles; tile += tile_stride()) {
        for (int64 shard = lane_of_thread(); shard < num_shards; shard += WARP_LANES) mine[shard] = 0;
        sync_warp();
        for (int64 group = tile * TILE_ROWS; group < (tile + 1) * TILE_ROWS && group < num_rows; group += WARP_LANES) {
            const int64 i = group + lane_of_thread();
            const bool is_row = i < num_rows;
            const int64 row = is_row ? row_ids[i] : 0;
            const uint32 shard = is_row ? shard_of(row, routing) : 0;
            const uint32 so_far = rows_before_in_shard(mine, shard, is_row, num_shards);
            if (!is_row) continue;
            const int64 place = firsts[(int64)shard * num_tiles + tile] + so_far;
            out_ids[place] = row;
            out_positions[place] = i;
            if (weight_bytes == 8) ((uint64*)out_weights)[place] = ((const uint64*)weights)[i];
            else if (weight_bytes == 4) ((uint32*)out_weights)[place] = ((const uint32*)weights)[i];
            else if (weight_bytes == 2) ((uint16*)out_weights)[place] = ((const uint16*)weights)[i];
        }
    }
}
