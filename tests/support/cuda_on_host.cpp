// Runs CUDA kernels on the host: the engine under `cuda_on_host.h`.
//
// Each thread of a block is a context of its own that gives way where it waits for others: at a barrier of the block or
// at an exchange between the lanes of a warp. Blocks begin last to first, because a GPU promises no order. They run one
// after another, or, with HEADRACE_RACECHECK, several at once.
//
// This file is compiled without a sanitizer, so that only what the kernels do is watched. With HEADRACE_RACECHECK every
// thread of a block is a fiber to ThreadSanitizer, which takes two accesses for ordered only when a barrier, or the end
// of the kernel, is between them. How the contexts happen to take turns orders nothing.
#include "cuda_on_host.h"

#include <signal.h>
#include <stdio.h>
#include <ucontext.h>

#include <atomic>
#include <deque>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#ifdef HEADRACE_RACECHECK
#include <sanitizer/tsan_interface.h>
#endif

OF_BLOCK Index threadIdx, blockIdx, blockDim, gridDim;

namespace {
using host::LANES;
constexpr int STACK_BYTES = 64 * 1024, MAX_ARGUMENTS = 66;
enum Failure { NONE = 0, TRAPPED = 1, STUCK = 2, MISALIGNED = 3 };

// What ThreadSanitizer is told. A place of memory stands for an order: who has come to it after others have passed it
// on sees what they did before.
#ifdef HEADRACE_RACECHECK
constexpr unsigned BLOCKS_AT_ONCE = 3;  // a fiber takes most of a megabyte
void* new_fiber(unsigned block, size_t thread) {
    void* fiber = __tsan_create_fiber(0);
    char name[64];
    snprintf(name, sizeof name, "thread %zu of block %u", thread, block);
    __tsan_set_fiber_name(fiber, name);
    return fiber;
}
void* this_fiber() { return __tsan_get_current_fiber(); }
void end_fiber(void* fiber) { __tsan_destroy_fiber(fiber); }
void become(void* fiber) { __tsan_switch_to_fiber(fiber, __tsan_switch_to_fiber_no_sync); }
void pass_on(void* order) { __tsan_release(order); }
void come_to(void* order) { __tsan_acquire(order); }
#else
constexpr unsigned BLOCKS_AT_ONCE = 1;
void* new_fiber(unsigned, size_t) { return nullptr; }
void* this_fiber() { return nullptr; }
void end_fiber(void*) {}
void become(void*) {}
void pass_on(void*) {}
void come_to(void*) {}
#endif
// So often may a block look at other blocks' words: far more often than any kernel of the tests has to.
constexpr long MAX_LOOKS = BLOCKS_AT_ONCE > 1 ? 20'000'000 : 20'000;

struct Meeting {  // where a number of threads wait for each other
    int num_arrived = 0, generation = 0;
    uint64_t orders[2];  // by turns: some come to the one while others pass on the next
};
struct Warp : Meeting {
    uint64_t told[2][LANES];  // by turns, too
};
// Where a context goes on. `swapcontext` would make a system call for the signal mask, most of a kernel's time here.
struct Place {
    void* registers[5];
};
[[gnu::noinline, noreturn]] void jump(Place& to) { __builtin_longjmp(to.registers, 1); }
[[gnu::noinline]] void switch_to(Place& from, Place& to) {
    if (!__builtin_setjmp(from.registers)) jump(to);
}

struct Thread {
    ucontext_t start;
    Place place;
    void* fiber;
    bool is_started, is_done;
};

std::atomic<int> failure;
uint64_t end_of_kernel;  // an order
void (*body)();

struct Block {
    explicit Block(unsigned num_threads)
        : threads(num_threads), warps(num_threads / LANES), stacks(new char[size_t(num_threads) * STACK_BYTES]) {}

    void run(unsigned number, unsigned num_blocks);
    bool run_threads();
    [[gnu::noinline]] void resume(Thread& thread) {
        if (thread.is_started) return switch_to(scheduler, thread.place);
        thread.is_started = true;
        if (!__builtin_setjmp(scheduler.registers)) setcontext(&thread.start);
    }
    void give_way() {
        Thread& thread = threads[threadIdx.x];
        become(fiber);
        switch_to(thread.place, scheduler);
    }
    void fail(Failure why) {
        failure = why;
        give_way();
    }
    void meet(Meeting& meeting, size_t num_expected, bool is_barrier) {
        const int generation = meeting.generation;
        if (is_barrier) pass_on(&meeting.orders[generation % 2]);
        if (++meeting.num_arrived == (int)num_expected) {
            meeting.num_arrived = 0, ++meeting.generation, ++num_steps;
        } else {
            while (meeting.generation == generation) give_way();
        }
        if (is_barrier) come_to(&meeting.orders[generation % 2]);
    }

    std::vector<Thread> threads;
    std::vector<Warp> warps;
    std::unique_ptr<char[]> stacks;
    Meeting all;
    Place scheduler;
    void* fiber;         // the scheduler's
    long num_steps = 0;  // how often anything went on
    long num_looks = 0;
};
OF_BLOCK Block* running;

void* called;  // the kernel
const uint64_t* args;

template <size_t... I>
void call(std::index_sequence<I...>) {
    ((void (*)(decltype(uint64_t(I))...))called)(args[I]...);
}

void run_thread() {
    body();
    running->threads[threadIdx.x].is_done = true;
    ++running->num_steps;
    running->give_way();
}

// Lets each thread go on to where it waits; returns whether all are done.
bool Block::run_threads() {
    bool are_done = true;
    for (size_t i = 0; i < threads.size() && !failure; ++i) {
        if (threads[i].is_done) continue;
        threadIdx.x = i;
        become(threads[i].fiber);
        resume(threads[i]);
        are_done = are_done && threads[i].is_done;
    }
    return are_done;
}

void Block::run(unsigned number, unsigned num_blocks) {
    running = this, fiber = this_fiber(), num_looks = 0;
    blockIdx.x = number, gridDim.x = num_blocks, blockDim.x = threads.size();
    all = Meeting(), warps.assign(warps.size(), Warp());
    for (size_t i = 0; i < threads.size(); ++i) {
        Thread& thread = threads[i];
        thread.fiber = new_fiber(number, i);
        thread.is_started = thread.is_done = false;
        getcontext(&thread.start);
        thread.start.uc_stack.ss_sp = &stacks[i * STACK_BYTES];
        thread.start.uc_stack.ss_size = STACK_BYTES;
        makecontext(&thread.start, run_thread, 0);
    }
    for (bool are_done = false; !are_done && !failure;) {
        const long steps_before = num_steps, looks_before = num_looks;
        are_done = run_threads();
        if (are_done || failure || num_steps != steps_before) continue;
        if (num_looks == looks_before) failure = STUCK;
        std::this_thread::yield();  // to the block whose word is awaited
    }
    for (Thread& thread : threads) {
        become(thread.fiber);
        pass_on(&end_of_kernel);
        become(fiber);
        end_fiber(thread.fiber);
    }
}

#ifdef HEADRACE_RACECHECK
void run_grid(unsigned num_blocks, unsigned num_threads) {
    // All are kept until the kernel's end: memory that one block gives back and the next one gets would order the two.
    std::vector<std::unique_ptr<Block>> blocks;
    std::deque<std::thread> at_once;
    for (unsigned number = num_blocks; number-- && !failure;) {
        if (at_once.size() == BLOCKS_AT_ONCE) at_once.front().join(), at_once.pop_front();
        blocks.push_back(std::make_unique<Block>(num_threads));
        at_once.emplace_back(&Block::run, blocks.back().get(), number, num_blocks);
    }
    for (std::thread& thread : at_once) thread.join();
    come_to(&end_of_kernel);
}
#else
void run_grid(unsigned num_blocks, unsigned num_threads) {
    Block block(num_threads);
    for (unsigned number = num_blocks; number-- && !failure;) block.run(number, num_blocks);
}
#endif
}  // namespace

void host::trap() { running->fail(TRAPPED); }
void host::meet_block() { running->meet(running->all, running->threads.size(), true); }
void host::meet_warp() { running->meet(running->warps[threadIdx.x / LANES], LANES, true); }
const uint64_t* host::exchange(uint64_t value) {
    Warp& warp = running->warps[threadIdx.x / LANES];
    uint64_t* told = warp.told[warp.generation % 2];
    told[threadIdx.x % LANES] = value;
    running->meet(warp, LANES, false);
    return told;
}
void host::look() {
    if (++running->num_looks > MAX_LOOKS) running->fail(STUCK);
    if (BLOCKS_AT_ONCE > 1) running->give_way();
}

// Every parameter is 8 bytes wide, and a function may be given more of them than it takes: true of x86-64 and aarch64.
extern "C" __attribute__((visibility("default"))) int launch_on_host(
    void* kernel, unsigned num_blocks, unsigned num_threads, const uint64_t* arguments) {
    called = kernel, args = arguments;
    body = [] { call(std::make_index_sequence<MAX_ARGUMENTS>()); };
    failure = NONE;
    // Where an access is not aligned, what the compiler has put in stops with an illegal instruction; x86 would not.
    struct sigaction stop = {}, before;
    stop.sa_flags = SA_NODEFER;  // the handler does not return: it gives way
    stop.sa_handler = [](int) { running->fail(MISALIGNED); };
    sigaction(SIGILL, &stop, &before);
    run_grid(num_blocks, num_threads);
    sigaction(SIGILL, &before, nullptr);
    return failure;
}
