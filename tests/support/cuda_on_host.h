// What CUDA has beyond C++, for kernels that run on the host, so that their code is tested where there is no GPU. The
// threads are run by `cuda_on_host.cpp`.
//
// HEADRACE_WARP_LANES, which the compiler is told, is 32 or 64: a warp of NVIDIA's GPUs, or one of AMD's. With
// HEADRACE_RACECHECK several blocks run at once, each as a thread of the operating system: what is a block's own is then
// that thread's.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef HEADRACE_RACECHECK
#define OF_BLOCK __thread
#else
#define OF_BLOCK
#endif

#define __global__ __attribute__((visibility("default")))
#define __device__
#define __shared__ static OF_BLOCK
#define __launch_bounds__(...)

struct Index { unsigned x; };
extern OF_BLOCK Index threadIdx, blockIdx, blockDim, gridDim;
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };

namespace host {
constexpr int LANES = HEADRACE_WARP_LANES;

void trap();        // does not return
void meet_block();  // waits for all threads of the block, and orders what they do to memory
void meet_warp();   // the same of a warp

// Tells the warp a value, and returns what all its lanes told, until this lane's next exchange. Orders nothing else: as
// on a GPU, a shuffle or a ballot is no barrier for memory.
const uint64_t* exchange(uint64_t value);

// Comes before a look at a word that other blocks may write meanwhile.
void look();

// Returns the value that another lane has here.
template <typename Value>
inline Value from_lane(Value value, int lane) {
    static_assert(sizeof value <= 8);
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    bits = exchange(bits)[lane];
    memcpy(&value, &bits, sizeof value);
    return value;
}
}  // namespace host

inline void __trap() { host::trap(); }
inline void __syncthreads() { host::meet_block(); }
inline void __syncwarp() { host::meet_warp(); }
template <typename Value>
Value __shfl_sync(uint64_t, Value value, int lane) { return host::from_lane(value, lane); }
template <typename Value>
Value __shfl_xor_sync(uint64_t, Value value, int apart) {
    return host::from_lane(value, (threadIdx.x % host::LANES) ^ apart);
}
template <typename Value>
Value __shfl_up_sync(uint64_t, Value value, int apart) {
    const int lane = threadIdx.x % host::LANES;
    return host::from_lane(value, lane < apart ? lane : lane - apart);
}
inline uint64_t __ballot_sync(uint64_t, bool holds) {
    const uint64_t* told = host::exchange(holds);
    uint64_t lanes = 0;
    for (int lane = 0; lane < host::LANES; ++lane) lanes |= told[lane] << lane;
    return lanes;
}

// Relaxed, as CUDA's are: they order nothing but the word itself.
template <typename Value>
Value atomicAdd(Value* at, Value value) { return __atomic_fetch_add(at, value, __ATOMIC_RELAXED); }
inline unsigned atomicOr(unsigned* at, unsigned bits) { return __atomic_fetch_or(at, bits, __ATOMIC_RELAXED); }
inline int atomicMin(int* at, int value) {
    int was = __atomic_load_n(at, __ATOMIC_RELAXED);
    while (value < was && !__atomic_compare_exchange_n(at, &was, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
    return was;
}
template <typename Word>
Word load_relaxed(const Word* word) {
    host::look();
    return __atomic_load_n(word, __ATOMIC_RELAXED);
}
template <typename Word>
void store_relaxed(Word* word, Word value) { __atomic_store_n(word, value, __ATOMIC_RELAXED); }

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __popcll(unsigned long long bits) { return __builtin_popcountll(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __ffsll(long long bits) { return __builtin_ffsll(bits); }
inline unsigned __float_as_uint(float value) { unsigned bits; memcpy(&bits, &value, 4); return bits; }
inline float __uint_as_float(unsigned bits) { float value; memcpy(&value, &bits, 4); return value; }

// A float as the bits of the nearest half, ties to even; and back.
inline unsigned short half_bits(float value) {
    const unsigned bits = __float_as_uint(value), sign = bits >> 16 & 0x8000;
    const float size = fabsf(value);
    if (size != size) return sign | 0x7e00;
    if (size >= 65520.0f) return sign | 0x7c00;
    if (size < 0x1p-14f) return sign | (unsigned)nearbyintf(size * 0x1p24f);  // steps of a subnormal half
    const unsigned rounded = __float_as_uint(size) + 0xfff + (bits >> 13 & 1);
    return sign | ((rounded >> 13) - (112 << 10));
}
inline float half_value(unsigned short bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float size = exponent == 31 ? (fraction ? NAN : INFINITY)
                                      : exponent ? ldexpf(1024 + fraction, exponent - 25) : ldexpf(fraction, -24);
    return bits >> 15 ? -size : size;
}
