// Which shard a row is on, and its place among the rows of its shard.
#pragma once
#include "common.cuh"

constexpr int MAX_SHARDS = 2048;  // `bucketize.py` and `dirty_cut.py` have the same number

// How rows are dealt out: in blocks of `block_rows`, or by hash where that is 0.
struct Routing {
    int64 block_rows;
    uint64 seed;
    int64 num_shards;
};

__device__ inline uint32 shard_of(int64 row, const Routing& routing) {
    if (routing.block_rows == 0) {
        const uint64 mixed = mix(((uint64)row ^ routing.seed) + GOLDEN), num_shards = (uint64)routing.num_shards;
        // A division of 64 bits takes a GPU some hundred instructions, and most stores have a power of two.
        return (uint32)(num_shards & (num_shards - 1) ? mixed % num_shards : mixed & (num_shards - 1));
    }
    const int64 shard = row / routing.block_rows;
    require(row >= 0 && shard < routing.num_shards);
    return (uint32)shard;
}

// Returns which lanes have the same shard: a ballot for each bit of it.
__device__ inline LaneMask lanes_of_shard(uint32 shard, bool is_row, int64 num_shards) {
    LaneMask lanes = lanes_where(is_row);
    for (int bit = 0; (num_shards - 1) >> bit; ++bit) {
        const LaneMask with_bit = lanes_where(shard >> bit & 1);
        lanes &= shard >> bit & 1 ? with_bit : ~with_bit;
    }
    return lanes;
}

// Returns how many rows of its shard come before a lane's row: those counted in `found`, and those of the lanes below.
// Counts all of the warp's. REQUIRES: all lanes come here; `found` is the warp's alone.
__device__ inline uint32 rows_before_in_shard(uint32* found, uint32 shard, bool is_row, int64 num_shards) {
    const LaneMask lanes = lanes_of_shard(shard, is_row, num_shards);
    const LaneMask before = lanes & lanes_below();
    const uint32 so_far = is_row ? found[shard] : 0;
    sync_warp();  // all have read before one writes
    if (is_row && !before) found[shard] = so_far + count_lanes(lanes);
    sync_warp();
    return so_far + count_lanes(before);
}
