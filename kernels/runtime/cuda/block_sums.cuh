// Sums over a block; all of its threads call these functions. And the words by which blocks publish their sums.
#pragma once
#include "common.cuh"

// What a tile has published for those behind it: nothing yet, the number of its own rows, or that of all rows up to its
// end. One 64-bit word holds both the kind and the number, so no reader sees one without the other.
constexpr uint64 OWN = 1ull << 62, UP_TO_HERE = 2ull << 62, NUMBER = OWN - 1;

constexpr int SUMMED_PER_THREAD = 8;

// Returns the sum of the values of the threads before this one; `total` becomes the sum of all.
template <int THREADS, typename Value>
__device__ Value sum_before_thread(Value value, Value& total) {
    constexpr int WARPS = THREADS / WARP_LANES;
    __shared__ Value warp_sums[WARPS];
    Value up_to = value;
    for (int apart = 1; apart < WARP_LANES; apart *= 2) {
        const Value below = shuffle_up(up_to, apart);
        if (lane_of_thread() >= apart) up_to += below;
    }
    if (lane_of_thread() == WARP_LANES - 1) warp_sums[warp_of_thread()] = up_to;
    __syncthreads();
    Value before = 0, of_all = 0;
    for (int warp = 0; warp < WARPS; ++warp) {
        if (warp < warp_of_thread()) before += warp_sums[warp];
        of_all += warp_sums[warp];
    }
    __syncthreads();  // the next call writes them again
    total = of_all;
    return before + up_to - value;
}

// Replaces each value by the sum of those before it, and returns the sum of all. REQUIRES: a barrier between the writes of
// the values and this call, and one before a thread reads a sum of another one.
template <int THREADS, typename Value>
__device__ Value sum_up(Value* values, int64 num_values) {
    Value so_far = 0;
    for (int64 part = 0; part < num_values; part += THREADS * SUMMED_PER_THREAD) {
        const int64 first = part + threadIdx.x * SUMMED_PER_THREAD;
        Value mine[SUMMED_PER_THREAD], sum = 0, in_part;
#pragma unroll
        for (int i = 0; i < SUMMED_PER_THREAD; ++i) sum += mine[i] = first + i < num_values ? values[first + i] : 0;
        Value before = so_far + sum_before_thread<THREADS>(sum, in_part);
#pragma unroll
        for (int i = 0; i < SUMMED_PER_THREAD; ++i) {
            if (first + i < num_values) values[first + i] = before;
            before += mine[i];
        }
        so_far += in_part;
    }
    return so_far;
}
