// Runs CUDA kernels on the host, one thread after another, so that their code is tested where there is no GPU.
//
// Each thread of a block is a context of its own that gives way where it waits for others: at a barrier of the block or
// at an exchange between the lanes of a warp. Blocks run one after another. So this finds wrong results, wrong addresses,
// accesses that are not aligned and barriers that not all threads reach; it does not find races, and it says nothing of
// speed.
//
// HEADRACE_WARP_LANES, which the compiler is told, is 32 or 64: a warp of NVIDIA's GPUs, or one of AMD's.
#pragma once
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

#include <vector>

#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(...)

struct Index { unsigned x; };
static Index threadIdx, blockIdx, blockDim, gridDim;
struct alignas(16) uint4 { unsigned x, y, z, w; };

namespace host {
constexpr int LANES = HEADRACE_WARP_LANES, STACK_BYTES = 64 * 1024;
enum Failure { NONE = 0, TRAPPED = 1, STUCK = 2, MISALIGNED = 3 };

struct Meeting {  // where a number of threads wait for each other
    int num_arrived = 0, generation = 0;
};
struct Warp : Meeting {
    uint64_t told[2][LANES];  // by turns: one is still read while the next is written
};
struct Thread {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(STACK_BYTES);
    bool is_done = false;
};

static ucontext_t scheduler;
static std::vector<Thread> threads;
static std::vector<Warp> warps;
static Meeting block;
static long num_steps;  // how often anything went on
static Failure failure;
static void (*body)();

inline void give_way() { swapcontext(&threads[threadIdx.x].context, &scheduler); }
inline void fail(Failure why) {
    failure = why;
    give_way();
}
inline void meet(Meeting& meeting, int num_expected) {
    const int generation = meeting.generation;
    if (++meeting.num_arrived == num_expected) {
        meeting.num_arrived = 0, ++meeting.generation, ++num_steps;
    } else {
        while (meeting.generation == generation) give_way();
    }
}
// Tells the warp a value, and returns what all lanes told.
template <typename Value>
inline const uint64_t* exchange(Value value) {
    static_assert(sizeof(Value) <= 8);
    Warp& warp = warps[threadIdx.x / LANES];
    uint64_t* told = warp.told[warp.generation % 2];
    told[threadIdx.x % LANES] = 0;
    memcpy(&told[threadIdx.x % LANES], &value, sizeof value);
    meet(warp, LANES);
    return told;
}
template <typename Value>
inline Value of_lane(const uint64_t* told, int lane) {
    Value value;
    memcpy(&value, &told[lane], sizeof value);
    return value;
}
inline void run_thread() {
    body();
    threads[threadIdx.x].is_done = true;
    ++num_steps;
    give_way();
}
inline Failure run_block() {
    block = Meeting(), warps.assign(threads.size() / LANES, Warp());
    for (Thread& thread : threads) {
        thread.is_done = false;
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack.data();
        thread.context.uc_stack.ss_size = thread.stack.size();
        makecontext(&thread.context, run_thread, 0);
    }
    for (size_t num_done = 0; num_done < threads.size();) {
        const long before = num_steps;
        num_done = 0;
        for (unsigned i = 0; i < threads.size(); ++i) {
            threadIdx.x = i;
            if (!threads[i].is_done) swapcontext(&scheduler, &threads[i].context);
            if (failure) return failure;
            num_done += threads[i].is_done;
        }
        if (num_steps == before && num_done < threads.size()) return failure = STUCK;
    }
    return NONE;
}
}  // namespace host

inline void __trap() { host::fail(host::TRAPPED); }
inline void __syncthreads() { host::meet(host::block, host::threads.size()); }
inline void __syncwarp() { host::exchange(0); }
template <typename Value>
Value __shfl_sync(uint64_t, Value value, int lane) { return host::of_lane<Value>(host::exchange(value), lane); }
template <typename Value>
Value __shfl_xor_sync(uint64_t, Value value, int apart) {
    return host::of_lane<Value>(host::exchange(value), (threadIdx.x % host::LANES) ^ apart);
}
template <typename Value>
Value __shfl_up_sync(uint64_t, Value value, int apart) {
    const int lane = threadIdx.x % host::LANES;
    return host::of_lane<Value>(host::exchange(value), lane < apart ? lane : lane - apart);
}
inline uint64_t __ballot_sync(uint64_t, bool holds) {
    const uint64_t* told = host::exchange<int>(holds);
    uint64_t lanes = 0;
    for (int lane = 0; lane < host::LANES; ++lane) lanes |= told[lane] << lane;
    return lanes;
}
template <typename Value>
Value atomicAdd(Value* at, Value value) { const Value was = *at; *at += value; return was; }
inline int atomicMin(int* at, int value) { const int was = *at; *at = was < value ? was : value; return was; }
inline unsigned atomicOr(unsigned* at, unsigned bits) { const unsigned was = *at; *at |= bits; return was; }

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

// Every parameter is 8 bytes wide, and a function may be given more of them than it takes: true of x86-64 and aarch64.
extern "C" int launch_on_host(void* kernel, unsigned num_blocks, unsigned num_threads, const uint64_t* arguments) {
    static const uint64_t* args;
    static void (*function)(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t,
                            uint64_t, uint64_t, uint64_t);
    args = arguments;
    function = (decltype(function))kernel;
    host::body = [] {
        function(args[0], args[1], args[2], args[3], args[4], args[5], args[6], args[7], args[8], args[9], args[10],
                 args[11]);
    };
    host::failure = host::NONE;
    // Where an access is not aligned, what the compiler has put in stops with an illegal instruction; x86 would not.
    struct sigaction stop = {}, before;
    stop.sa_handler = [](int) { host::fail(host::MISALIGNED); };
    sigaction(SIGILL, &stop, &before);
    host::threads.resize(num_threads);
    gridDim.x = num_blocks, blockDim.x = num_threads;
    for (unsigned i = 0; i < num_blocks && !host::failure; ++i) {
        blockIdx.x = i;
        host::run_block();
    }
    sigaction(SIGILL, &before, nullptr);
    return host::failure;
}
