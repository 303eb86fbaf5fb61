// A row's shard, and its place among the rows of its shard.
#pragma once
#include "common.cuh"

constexpr int MAX_SHARDS = 2048;  // the same number as in `bucketize.py` and `dirty_drain.py`

// How rows are assigned to shards: in blocks of `block_rows`, or by hash if that is 0.
struct Routing {
    int64 block_rows;
    uint64 seed;
    int64 num_shards;
};

__device__ inline uint32 shard_of(int64 row, const Routing& routing) {
    if (routing.block_rows == 0) {
        const uint64 mixed = mix(((uint64)row ^ routing.seed) + GOLDEN), num_shards = (uint64)routing.num_shards;
        // A 64-bit division takes a GPU about a hundred instructions, and most stores have a power of two.
        return (uint32)(num_shards & (num_shards - 1) ? mixed % num_shards : mixed & (num_shards - 1));
    }
    const int64 shard = row / routing.block_rows;
    require(row >= 0 && shard < routing.num_shards);
    return (uint32)shard;
}

// Returns the lanes with the same shard, by one ballot per bit of the shard.
__device__ inline LaneMask lanes_of_shard(uint32 shard, bool is_row, int64 num_shards) {
    LaneMask lanes = lanes_where(is_row);
    for (int bit = 0; (num_shards - 1) >> bit; ++bit) {
        const LaneMask with_bit = lanes_where(shard >> bit & 1);
        lanes &= shard >> bit & 1 ? with_bit : ~with_bit;
    }
    return lanes;
}

// Returns how many rows of its shard precede a lane's row: those counted in `found`, and those of lower lanes. Adds all
// rows of the warp to `found`. REQUIRES: all lanes take part, and no other warp uses `found`.
__device__ inline uint32 rows_before_in_shard(uint32* found, uint32 shard, bool is_row, int64 num_shards) {
    const LaneMask lanes = lanes_of_shard(shard, is_row, num_shards);
    const LaneMask before = lanes & lanes_below();
    const uint32 so_far = is_row ? found[shard] : 0;
    sync_warp();  // every lane has read before one writes
    if (is_row && !before) found[shard] = so_far + count_lanes(lanes);
    sync_warp();
    return so_far + count_lanes(before);
}
