// Orders row ids by shard, stably: the shard of each and how many a tile has of each shard, and then each to its place.
//
// A warp works on a tile of its own, so that the order within it needs no barrier. Ids are read twice, because the place
// of the first row of a shard is known once all rows of the shards before it are counted; weights are read once.
#include "common.cuh"

constexpr int BUCKET_WARPS = 4;
constexpr int MAX_SHARDS = 2048;  // `bucketize.py` has the same numbers
constexpr int TILE_ROWS = 1024;

// How rows are dealt out: in blocks of `block_rows`, or by hash where that is 0.
struct Routing {
    int64 block_rows;
    uint64 seed;
    int64 num_shards;
};

__device__ inline uint32 shard_of(int64 row, const Routing& routing) {
    if (routing.block_rows == 0) return (uint32)(mix(((uint64)row ^ routing.seed) + GOLDEN) % (uint64)routing.num_shards);
    const int64 shard = row / routing.block_rows;
    require(row >= 0 && shard < routing.num_shards);
    return (uint32)shard;
}

// Returns which lanes have the same shard: a ballot for each bit of it.
__device__ inline uint32 lanes_of_shard(uint32 shard, bool is_row, int64 num_shards) {
    uint32 lanes = __ballot_sync(ALL_LANES, is_row);
    for (int bit = 0; (num_shards - 1) >> bit; ++bit) {
        const uint32 with_bit = __ballot_sync(ALL_LANES, shard >> bit & 1);
        lanes &= shard >> bit & 1 ? with_bit : ~with_bit;
    }
    return lanes;
}

// counts[shard * num_tiles + tile] = rows of the shard in the tile
HEADRACE_KERNEL count_shards_kernel(
    const int64* row_ids, int64 num_rows, int64 block_rows, uint64 seed, int64 num_shards, int64 num_tiles,
    int64* counts) {
    __shared__ uint32 found[BUCKET_WARPS][MAX_SHARDS];
    const Routing routing = {block_rows, seed, num_shards};
    const int64 tile = (int64)blockIdx.x * BUCKET_WARPS + warp_of_thread();
    uint32* mine = found[warp_of_thread()];
    for (int64 shard = lane_of_thread(); shard < num_shards; shard += WARP_LANES) mine[shard] = 0;
    __syncwarp();
    const int64 end = (tile + 1) * TILE_ROWS < num_rows ? (tile + 1) * TILE_ROWS : num_rows;
    for (int64 i = tile * TILE_ROWS + lane_of_thread(); i < end; i += WARP_LANES) {
        atomicAdd(&mine[shard_of(row_ids[i], routing)], 1u);
    }
    __syncwarp();
    if (tile >= num_tiles) return;
    for (int64 shard = lane_of_thread(); shard < num_shards; shard += WARP_LANES) {
        counts[shard * num_tiles + tile] = mine[shard];
    }
}

// `firsts` has where each tile's rows of each shard begin, as `counts` lies. `weights` are of 0 (none), 2, 4 or 8 bytes.
HEADRACE_KERNEL move_to_shards_kernel(
    const int64* row_ids, int64 num_rows, int64 block_rows, uint64 seed, int64 num_shards, int64 num_tiles,
    const int64* firsts, int64* out_ids, int64* out_positions, const uint8* weights, uint8* out_weights,
    int64 weight_bytes) {
    __shared__ uint32 found[BUCKET_WARPS][MAX_SHARDS];
    const Routing routing = {block_rows, seed, num_shards};
    const int64 tile = (int64)blockIdx.x * BUCKET_WARPS + warp_of_thread();
    if (tile >= num_tiles) return;  // whole warps: nothing below waits for other warps
    uint32* mine = found[warp_of_thread()];
    for (int64 shard = lane_of_thread(); shard < num_shards; shard += WARP_LANES) mine[shard] = 0;
    __syncwarp();
    for (int64 group = tile * TILE_ROWS; group < (tile + 1) * TILE_ROWS && group < num_rows; group += WARP_LANES) {
        const int64 i = group + lane_of_thread();
        const bool is_row = i < num_rows;
        const int64 row = is_row ? row_ids[i] : 0;
        const uint32 shard = is_row ? shard_of(row, routing) : 0;
        const uint32 lanes = lanes_of_shard(shard, is_row, num_shards);
        const uint32 before = lanes & ((1u << lane_of_thread()) - 1);
        const uint32 so_far = is_row ? mine[shard] : 0;
        __syncwarp();  // all have read before one writes
        if (is_row && !before) mine[shard] = so_far + __popc(lanes);
        __syncwarp();
        if (!is_row) continue;
        const int64 place = firsts[(int64)shard * num_tiles + tile] + so_far + __popc(before);
        out_ids[place] = row;
        out_positions[place] = i;
        if (weight_bytes == 8) ((uint64*)out_weights)[place] = ((const uint64*)weights)[i];
        else if (weight_bytes == 4) ((uint32*)out_weights)[place] = ((const uint32*)weights)[i];
        else if (weight_bytes == 2) ((uint16*)out_weights)[place] = ((const uint16*)weights)[i];
    }
}
