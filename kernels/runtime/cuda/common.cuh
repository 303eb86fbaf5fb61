// Shared by all kernel families. Every parameter of every kernel is 8 bytes wide (a pointer or a 64-bit integer), so one
// launcher fits all. No CUDA or HIP header is included, so NVRTC needs none on the machine.
#pragma once

typedef long long int64;
typedef unsigned long long uint64;
typedef unsigned int uint32;
typedef unsigned short uint16;
typedef unsigned char uint8;

#define HEADRACE_KERNEL extern "C" __global__ void

// A warp has 32 lanes on NVIDIA GPUs and AMD's RDNA, 64 on AMD's CDNA, and either in tests on the host. Kernels use only
// the names below, and work with both.
#ifndef HEADRACE_WARP_LANES
#if defined(__GFX9__) || defined(__GFX8__)
#define HEADRACE_WARP_LANES 64
#else
#define HEADRACE_WARP_LANES 32
#endif
#endif
constexpr int WARP_LANES = HEADRACE_WARP_LANES;

// One bit per lane of a warp.
#if HEADRACE_WARP_LANES == 64
typedef uint64 LaneMask;
__device__ inline int count_lanes(LaneMask lanes) { return __popcll(lanes); }
__device__ inline int lowest_lane(LaneMask lanes) { return __ffsll(lanes) - 1; }
#else
typedef uint32 LaneMask;
__device__ inline int count_lanes(LaneMask lanes) { return __popc(lanes); }
__device__ inline int lowest_lane(LaneMask lanes) { return __ffs(lanes) - 1; }
#endif
constexpr LaneMask ALL_LANES = ~LaneMask(0);

__device__ inline int lane_of_thread() { return threadIdx.x % WARP_LANES; }
__device__ inline int warp_of_thread() { return threadIdx.x / WARP_LANES; }
__device__ inline LaneMask lanes_below() { return (LaneMask(1) << lane_of_thread()) - 1; }

// Exchanges between the lanes of a warp. REQUIRES: all of its lanes take part.
#ifdef __HIP__
// The forms without `_sync`, which all versions of HIP have; `sync_warp` does what HIP 7's `__syncwarp` does.
__device__ inline LaneMask lanes_where(bool holds) { return (LaneMask)__ballot(holds); }
template <typename Value>
__device__ inline Value shuffle(Value value, int lane) { return __shfl(value, lane); }
template <typename Value>
__device__ inline Value shuffle_xor(Value value, int apart) { return __shfl_xor(value, apart); }
template <typename Value>
__device__ inline Value shuffle_up(Value value, int apart) { return __shfl_up(value, apart); }
__device__ inline void sync_warp() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
    __builtin_amdgcn_wave_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}
__device__ inline void stop() { __builtin_trap(); }
#else
__device__ inline LaneMask lanes_where(bool holds) { return __ballot_sync(ALL_LANES, holds); }
template <typename Value>
__device__ inline Value shuffle(Value value, int lane) { return __shfl_sync(ALL_LANES, value, lane); }
template <typename Value>
__device__ inline Value shuffle_xor(Value value, int apart) { return __shfl_xor_sync(ALL_LANES, value, apart); }
template <typename Value>
__device__ inline Value shuffle_up(Value value, int apart) { return __shfl_up_sync(ALL_LANES, value, apart); }
__device__ inline void sync_warp() { __syncwarp(); }
__device__ inline void stop() { __trap(); }
#endif

__device__ inline int64 first_of_grid() { return (int64)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ inline int64 grid_stride() { return (int64)gridDim.x * blockDim.x; }

// An id out of range is a bug of the caller. As in torch's indexing, the kernel stops with an error that the next
// synchronization reports. Skipping the row would lose it silently.
__device__ inline void require(bool holds) {
    if (!holds) stop();
}

// Relaxed accesses, on the whole device, to a word that other blocks write meanwhile. Plain accesses would race. These
// order nothing except the word itself, so the word has to hold the whole message. And a float as the bits of the nearest
// half, ties to even, and back. Tests on the host have their own versions of these four.
#if defined(__HIP__)
template <typename Word>
__device__ inline Word load_relaxed(const Word* word) {
    return __hip_atomic_load(word, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
template <typename Word>
__device__ inline void store_relaxed(Word* word, Word value) {
    __hip_atomic_store(word, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
__device__ inline uint16 half_bits(float value) { return __builtin_bit_cast(uint16, (_Float16)value); }
__device__ inline float half_value(uint16 bits) { return __builtin_bit_cast(_Float16, bits); }
#elif defined(__CUDA_ARCH__)
// Source: the PTX ISA, "ld" and "st": volatile accesses are relaxed at system scope. GPUs before sm_70 lack `ld.relaxed`.
template <typename Word>
__device__ inline Word load_relaxed(const Word* word) { return *(const volatile Word*)word; }
template <typename Word>
__device__ inline void store_relaxed(Word* word, Word value) { *(volatile Word*)word = value; }
__device__ inline uint16 half_bits(float value) {
    uint16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
__device__ inline float half_value(uint16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
#endif

// ON THE WIRE: the finalizer of splitmix64, as in `schemas/routing.py`.
__device__ inline uint64 mix(uint64 value) {
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ull;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBull;
    return value ^ (value >> 31);
}
constexpr uint64 GOLDEN = 0x9E3779B97F4A7C15ull;

template <typename Value>
__device__ inline Value sum_over_warp(Value value) {
    for (int apart = WARP_LANES / 2; apart; apart /= 2) value += shuffle_xor(value, apart);
    return value;
}
