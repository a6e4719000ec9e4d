// The scheduler of emulation.h, and the kernels behind the C interface that csrc/cuda/launch.cu has on a GPU.
#include "emulation.h"  // first: it defines the words that the kernels are written in

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <memory>
#include <vector>

#include "cpu/lossy/denormals.h"
#include "cuda/kernels.cuh"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace emulation {
namespace {

constexpr uint32_t kThreads = zipccl::kThreads, kWarps = kThreads / kLanes;
constexpr uint64_t kStack = (256 << 10) + 576;  // not a power of two: the ends of all stacks would have the same few lines of the cache
constexpr uint32_t kResident = 3;  // most blocks that run at a time: the others wait until one of these ends

// A place on a stack that waits, for __builtin_setjmp: tests change stacks most of the time, and jmp_buf would have far more.
using Place = void*[5];

struct Block;
struct Fiber {
  Block* block;
  uint32_t thread, exchanges;  // how often it has exchanged values with its warp
  Place where;
  char* stack = nullptr;  // goes on from one block of threads to the next
};
struct Warp {
  uint32_t here;
  const char* operation;
  uint32_t values[2][kLanes];  // of this exchange and the last one, which slow lanes still read
};
struct Block {
  uint32_t index, waiting, ended = kThreads;
  Fiber fibers[kThreads];
  Warp warps[kWarps];
  std::unique_ptr<char, void (*)(void*)> shared{nullptr, free};
};

Block residents[kResident];
void (*run_kernel)(const void*);
const void* parameters;
Fiber* current;
Place scheduler;
Fiber* ready[kResident * kThreads];
uint32_t are_ready = 0;
uint64_t chance;
uint32_t shared_bytes;
Index grid;
uint64_t sighs = 0;  // how often threads gave way since a warp last got on
constexpr uint64_t kPatience = 10'000'000;

[[noreturn]] void fail(const char* what, const char* more) {
  fprintf(stderr, "emulation: block %u, thread %u: %s%s\n", current->block->index, current->thread, what, more);
  abort();
}

// A number below a limit, by SplitMix64 (Steele, Lea and Flood, 2014).
uint32_t draw(uint32_t limit) {
  uint64_t z = chance += 0x9e3779b97f4a7c15;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
  z = (z ^ z >> 27) * 0x94d049bb133111eb;
  return uint32_t(((z ^ z >> 31) >> 32) * limit >> 32);
}

void add(Fiber* fiber) { ready[are_ready++] = fiber; }

Fiber* take() {
  if (!are_ready) return nullptr;
  const uint32_t pick = draw(are_ready);
  Fiber* const fiber = ready[pick];
  ready[pick] = ready[--are_ready];
  return fiber;
}

// AddressSanitizer is told of every change of stacks. The scheduler's stack is learned by the first fiber that starts.
#ifdef __SANITIZE_ADDRESS__
const void* scheduler_stack;
size_t scheduler_bytes;
void to_fiber(Fiber* fiber) { __sanitizer_start_switch_fiber(nullptr, fiber->stack, kStack); }
void to_scheduler() { __sanitizer_start_switch_fiber(nullptr, scheduler_stack, scheduler_bytes); }
void arrived() { __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr); }
void arrived_from_scheduler() { __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_bytes); }
void forbid(void* at, uint64_t bytes) { __asan_poison_memory_region(at, bytes); }
#else
void to_fiber(Fiber*) {}
void to_scheduler() {}
void arrived() {}
void arrived_from_scheduler() {}
void forbid(void*, uint64_t) {}
#endif

// A jump is a call of its own: a compiler takes a place for unreachable if only its own function jumps. And callers must not know which
// registers these functions leave alone.
#define STACKS_CHANGE __attribute__((noipa))

[[noreturn]] STACKS_CHANGE void go_on(Fiber* fiber) {
  current = fiber;
  to_fiber(fiber);
  __builtin_longjmp(fiber->where, 1);
}

[[noreturn]] STACKS_CHANGE void go_to_scheduler() {
  to_scheduler();
  __builtin_longjmp(scheduler, 1);
}

STACKS_CHANGE void leave_for(Fiber* next) {
  if (__builtin_setjmp(current->where)) return arrived();
  if (next) go_on(next);
  go_to_scheduler();
}

void leave() { leave_for(take()); }

void body() {
  arrived_from_scheduler();
  for (;;) {
    leave_for(nullptr);
    run_kernel(parameters);
    ++current->block->ended;
  }
}

// Returns when a thread has ended, or when none can go on.
STACKS_CHANGE void resume(Fiber* fiber) {
  if (!__builtin_setjmp(scheduler)) go_on(fiber);
  arrived();
}

// Returns when the fiber waits for its first block of threads.
STACKS_CHANGE void make(Fiber* fiber, char* stack) {
  if (__builtin_setjmp(scheduler)) return arrived();
  fiber->stack = stack;
  current = fiber;
  to_fiber(fiber);
  ucontext_t context, back;
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = kStack;
  context.uc_link = nullptr;
  makecontext(&context, body, 0);
  swapcontext(&back, &context);
}

}  // namespace

Index thread_index() { return {current->thread, 0}; }
Index block_index() { return {current->block->index % grid.x, current->block->index / grid.x}; }
Index grid_size() { return grid; }

void* shared_memory(uint64_t bytes) {
  if (bytes > shared_bytes) fail("more shared memory is used than was asked for", "");
  char* const at = current->block->shared.get();
  forbid(at + bytes, shared_bytes - bytes);  // was asked for and is not used
  return at;
}

void give_way() {
  if (++sighs > kPatience) fail("threads spin for ever: ", "what they wait for does not come");
  add(current);
  leave();
}

void wait_for_block() {
  Block& block = *current->block;
  if (++block.waiting < kThreads) return leave();
  block.waiting = 0;
  for (Fiber& fiber : block.fibers) add(&fiber);
  leave();
}

const uint32_t* exchange(uint32_t value, const char* operation) {
  Warp& warp = current->block->warps[current->thread / kLanes];
  if (warp.here && warp.operation != operation && strcmp(warp.operation, operation)) fail("lanes of a warp wait for different operations: ", operation);
  warp.operation = operation;
  uint32_t* const values = warp.values[current->exchanges++ % 2];
  values[current->thread % kLanes] = value;
  if (++warp.here == kLanes) {
    warp.here = 0;
    if (strcmp(operation, "any")) sighs = 0;  // a loop that waits has only this one
    for (uint32_t lane = 0; lane < kLanes; ++lane) add(&current->block->fibers[current->thread / kLanes * kLanes + lane]);
  }
  leave();
  return values;
}

}  // namespace emulation

namespace {

using namespace emulation;

struct Kernel {
  const char* name;
  void (*run)(const void*);
};
template <typename Params, void (*kKernel)(Params)>
void run_one(const void* params) {
  kKernel(*static_cast<const Params*>(params));
}
#define ZIPCCL_ENTRY(blocks, kernel, Params, ...) {#kernel, run_one<zipccl::Params, kernel>},
const Kernel kKernels[] = {ZIPCCL_EACH_KERNEL(ZIPCCL_ENTRY)};

uint64_t seed = 0;
uint32_t places = kResident;

}  // namespace

// The order in which threads run is drawn from this.
extern "C" void zipccl_emulation_seed(uint64_t value) { seed = value; }
// As many blocks run at a time as a device has room for beside other work; at most kResident.
extern "C" void zipccl_emulation_residents(uint32_t count) { places = count < kResident ? count : kResident; }

extern "C" int32_t zipccl_cuda_launch(const char* name, uint32_t x, uint32_t y, uint32_t shared, const void* params, void*) {
  const Kernel* kernel = nullptr;
  for (const Kernel& each : kKernels)
    if (!strcmp(each.name, name)) kernel = &each;
  if (!kernel) return 1;
  const zipccl::Denormals on;  // a device does not know the switch of the calling thread
  static char* const stacks = static_cast<char*>(
      mmap(nullptr, kResident * kThreads * kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  run_kernel = kernel->run;
  parameters = params;
  shared_bytes = shared;
  grid = {x, y};
  const uint32_t blocks = x * y;
  chance = seed;
  // Blocks start in any order.
  std::vector<uint32_t> order(blocks);
  for (uint32_t i = 0; i < blocks; ++i) order[i] = i;
  for (uint32_t i = blocks; i > 1; --i) std::swap(order[i - 1], order[draw(i)]);
  uint32_t next = 0;
  are_ready = 0;
  const auto start = [&](Block& block) {
    if (next == blocks) return;
    block.index = order[next++];
    block.waiting = block.ended = 0;
    memset(block.warps, 0, sizeof block.warps);
    block.shared.reset(static_cast<char*>(aligned_alloc(16, shared + (shared ? 0 : 16))));
    memset(block.shared.get(), 0xa5, shared);
    for (uint32_t t = 0; t < kThreads; ++t) {
      Fiber& fiber = block.fibers[t];
      fiber.block = &block;
      fiber.thread = t;
      fiber.exchanges = 0;
      if (!fiber.stack) make(&fiber, stacks + (uint64_t(&block - residents) * kThreads + t) * kStack);
      add(&fiber);
    }
  };
  for (uint32_t place = 0; place < places; ++place) start(residents[place]);
  while (Fiber* const fiber = take()) {
    resume(fiber);
    if (current->block->ended == kThreads) start(*current->block);
  }
  for (const Block& block : residents)
    if (block.ended < kThreads) fprintf(stderr, "emulation: block %u waits for ever\n", block.index), abort();
  return 0;
}
