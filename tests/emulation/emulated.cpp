// The scheduler of emulation.h, and the kernels behind the C interface that csrc/cuda/launch.cu has on a GPU.
#include "emulation.h"  // first: it defines the words that the kernels are written in

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <memory>
#include <random>
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

struct Block;
struct Fiber {
  Block* block;
  uint32_t thread, exchanges = 0;  // how often it has exchanged values with its warp
  jmp_buf where;
  bool started = false;
  char* stack;
};
struct Warp {
  uint32_t here = 0;
  const char* operation = nullptr;
  uint32_t values[2][kLanes];  // of this exchange and the last one, which slow lanes still read
};
struct Block {
  uint32_t index, waiting = 0, ended = 0;
  Fiber fibers[kThreads];
  Warp warps[kWarps];
  std::unique_ptr<char, void (*)(void*)> shared{nullptr, free};
};

void (*run_kernel)(const void*);
const void* parameters;
Fiber* current;
jmp_buf scheduler;
std::vector<Fiber*> ready;
std::mt19937_64 chance;
uint32_t shared_bytes;
Index grid;
uint64_t sighs = 0;  // how often threads gave way since a warp last got on
constexpr uint64_t kPatience = 10'000'000;

[[noreturn]] void fail(const char* what, const char* more) {
  fprintf(stderr, "emulation: block %u, thread %u: %s%s\n", current->block->index, current->thread, what, more);
  abort();
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
void permit(void* at, uint64_t bytes) { __asan_unpoison_memory_region(at, bytes); }
#else
void to_fiber(Fiber*) {}
void to_scheduler() {}
void arrived() {}
void arrived_from_scheduler() {}
void forbid(void*, uint64_t) {}
void permit(void*, uint64_t) {}
#endif

void leave() {
  if (!_setjmp(current->where)) {
    to_scheduler();
    _longjmp(scheduler, 1);
  }
  arrived_from_scheduler();
}

void body() {
  arrived_from_scheduler();
  run_kernel(parameters);
  ++current->block->ended;
  to_scheduler();
  _longjmp(scheduler, 2);
}

void resume(Fiber* fiber) {
  current = fiber;
  if (_setjmp(scheduler)) return arrived();
  to_fiber(fiber);
  if (fiber->started) _longjmp(fiber->where, 1);
  fiber->started = true;
  ucontext_t context, back;
  getcontext(&context);
  context.uc_stack.ss_sp = fiber->stack;
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
  ready.push_back(current);
  leave();
}

void wait_for_block() {
  Block& block = *current->block;
  if (++block.waiting < kThreads) return leave();
  block.waiting = 0;
  for (Fiber& fiber : block.fibers) ready.push_back(&fiber);
  leave();
}

const uint32_t* exchange(uint32_t value, const char* operation) {
  Warp& warp = current->block->warps[current->thread / kLanes];
  if (warp.here && strcmp(warp.operation, operation)) fail("lanes of a warp wait for different operations: ", operation);
  warp.operation = operation;
  uint32_t* const values = warp.values[current->exchanges++ % 2];
  values[current->thread % kLanes] = value;
  if (++warp.here == kLanes) {
    warp.here = 0;
    if (strcmp(operation, "any")) sighs = 0;  // a loop that waits has only this one
    for (uint32_t lane = 0; lane < kLanes; ++lane) ready.push_back(&current->block->fibers[current->thread / kLanes * kLanes + lane]);
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
  chance.seed(seed);
  // Blocks start in any order.
  std::vector<uint32_t> order(blocks);
  for (uint32_t i = 0; i < blocks; ++i) order[i] = i;
  for (uint32_t i = blocks; i > 1; --i) std::swap(order[i - 1], order[chance() % i]);
  std::vector<std::unique_ptr<Block>> residents(kResident);
  uint32_t next = 0;
  ready.clear();
  const auto start = [&](uint32_t place) {
    residents[place] = nullptr;
    if (next == blocks) return;
    auto block = std::make_unique<Block>();
    block->index = order[next++];
    block->shared.reset(static_cast<char*>(aligned_alloc(16, shared + (shared ? 0 : 16))));
    memset(block->shared.get(), 0xa5, shared);
    for (uint32_t t = 0; t < kThreads; ++t) {
      block->fibers[t].block = block.get();
      block->fibers[t].thread = t;
      block->fibers[t].stack = stacks + (uint64_t(place) * kThreads + t) * kStack;
      permit(block->fibers[t].stack, kStack);  // the stack of an ended fiber, whose frames never returned
      ready.push_back(&block->fibers[t]);
    }
    residents[place] = std::move(block);
  };
  for (uint32_t place = 0; place < places; ++place) start(place);
  while (!ready.empty()) {
    const uint64_t pick = chance() % ready.size();
    Fiber* const fiber = ready[pick];
    ready[pick] = ready.back();
    ready.pop_back();
    resume(fiber);
    if (fiber->block->ended < kThreads) continue;
    uint32_t place = 0;
    while (residents[place].get() != fiber->block) ++place;
    start(place);
  }
  for (const auto& block : residents)
    if (block) fprintf(stderr, "emulation: block %u waits for ever\n", block->index), abort();
  return 0;
}
