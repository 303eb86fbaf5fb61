// What the kernel families share. Every parameter of every kernel is 8 bytes wide (a pointer or a 64-bit integer), so
// that one launcher fits all. No header of CUDA's is included: NVRTC then needs none on the machine.
#pragma once

typedef long long int64;
typedef unsigned long long uint64;
typedef unsigned int uint32;
typedef unsigned short uint16;
typedef unsigned char uint8;

#define HEADRACE_KERNEL extern "C" __global__ void

constexpr int WARP_LANES = 32;
constexpr uint32 ALL_LANES = 0xffffffffu;

__device__ inline int lane_of_thread() { return threadIdx.x % WARP_LANES; }
__device__ inline int warp_of_thread() { return threadIdx.x / WARP_LANES; }

__device__ inline int64 first_of_grid() { return (int64)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ inline int64 grid_stride() { return (int64)gridDim.x * blockDim.x; }

// An id that lies outside is a bug of the caller's. Like torch's own indexing, the kernel stops with an error that the
// next synchronization reports: to skip the row would lose it in silence.
__device__ inline void require(bool holds) {
    if (!holds) __trap();
}

// ON THE WIRE: the finalizer of splitmix64, as `schemas/routing.py` has it.
__device__ inline uint64 mix(uint64 value) {
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ull;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBull;
    return value ^ (value >> 31);
}
constexpr uint64 GOLDEN = 0x9E3779B97F4A7C15ull;

template <typename Value>
__device__ inline Value sum_over_warp(Value value) {
    for (int apart = WARP_LANES / 2; apart; apart /= 2) value += __shfl_xor_sync(ALL_LANES, value, apart);
    return value;
}
