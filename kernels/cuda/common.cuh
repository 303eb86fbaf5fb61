// What the kernel families share. Every parameter of every kernel is 8 bytes wide (a pointer or a 64-bit integer), so
// that one launcher fits all. No header of CUDA's or HIP's is included: NVRTC then needs none on the machine.
#pragma once

typedef long long int64;
typedef unsigned long long uint64;
typedef unsigned int uint32;
typedef unsigned short uint16;
typedef unsigned char uint8;

#define HEADRACE_KERNEL extern "C" __global__ void

// A warp is 32 lanes on NVIDIA's GPUs and on AMD's RDNA, and 64 on AMD's CDNA; the tests on the host choose. Kernels use
// the names below alone, and are right with both.
#ifndef HEADRACE_WARP_LANES
#if defined(__GFX9__) || defined(__GFX8__)
#define HEADRACE_WARP_LANES 64
#else
#define HEADRACE_WARP_LANES 32
#endif
#endif
constexpr int WARP_LANES = HEADRACE_WARP_LANES;

// A bit for each lane of a warp.
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

// Exchanges between the lanes of a warp. REQUIRES: all of its lanes come here.
#ifdef __HIP__
// The forms without `_sync`, which all versions of HIP have; and `sync_warp` as HIP 7 has its `__syncwarp`.
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

// An id that lies outside is a bug of the caller's. Like torch's own indexing, the kernel stops with an error that the
// next synchronization reports: to skip the row would lose it in silence.
__device__ inline void require(bool holds) {
    if (!holds) stop();
}

// A word that other blocks write meanwhile: relaxed accesses of the whole device. What is plain would be a race; these
// order nothing but the word itself, so it has to hold all that is told by it. And a float as the bits of the nearest
// half, ties to even, and back. The tests on the host bring their own of these four.
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
// Source: the PTX ISA, "ld" and "st": what is volatile is relaxed, at the scope of the system. `ld.relaxed` itself is not
// known to GPUs before sm_70.
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

// ON THE WIRE: the finalizer of splitmix64, as `schemas/routing.py` has it.
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
