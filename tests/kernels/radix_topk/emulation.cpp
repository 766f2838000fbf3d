// Runs radix_topk.cu on the host: each CUDA thread is a fiber, a barrier or warp operation is a switch of fibers. Slow and
// exact; it shows errors of logic (not of timing or memory order) where there is no GPU.
// Compiled with -DSOURCE="\"path/to/radix_topk.cu\"" and the kernel's own macros.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

struct Index { unsigned x, y, z; };
struct float4 { float x, y, z, w; };
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

static Index threadIdx, blockIdx, gridDim;

// ---- fibers
struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(64 << 10);
  bool done = false;
  unsigned barriers = 0, exchanges = 0;  // how many it has reached
  unsigned offered[2] = {0, 0};          // by parity of the exchange, so that a fast lane cannot overwrite a slow one's
};
static std::vector<Fiber> fibers;
static ucontext_t scheduler;

static void yield() {
  const unsigned mine = threadIdx.x;
  swapcontext(&fibers[mine].context, &scheduler);
  threadIdx.x = mine;
}

static void __syncthreads() {
  const unsigned target = ++fibers[threadIdx.x].barriers;
  while (!std::all_of(fibers.begin(), fibers.end(), [&](const Fiber& f) { return f.done || f.barriers >= target; })) yield();
}

// Every lane offers a value and sees those of all 32.
template <class Function>
static auto exchange(unsigned value, Function function) {
  const unsigned first = threadIdx.x & ~31u, mine = threadIdx.x;
  const unsigned target = ++fibers[mine].exchanges;
  fibers[mine].offered[target & 1] = value;
  auto arrived = [&] {
    for (unsigned lane = 0; lane < 32; ++lane)
      if (fibers[first + lane].exchanges < target) return false;
    return true;
  };
  while (!arrived()) yield();
  unsigned values[32];
  for (unsigned lane = 0; lane < 32; ++lane) values[lane] = fibers[first + lane].offered[target & 1];
  return function(values, mine & 31);
}

static unsigned __shfl_up_sync(unsigned, unsigned value, int step) {
  return exchange(value, [&](unsigned* all, unsigned lane) { return lane >= unsigned(step) ? all[lane - step] : value; });
}
static unsigned __shfl_sync(unsigned, unsigned value, int source) {
  return exchange(value, [&](unsigned* all, unsigned) { return all[source]; });
}
static float __shfl_sync(unsigned, float value, int source) {
  unsigned bits;
  std::memcpy(&bits, &value, 4);
  bits = __shfl_sync(0, bits, source);
  std::memcpy(&value, &bits, 4);
  return value;
}
static unsigned __reduce_min_sync(unsigned, unsigned value) {
  return exchange(value, [](unsigned* all, unsigned) { return *std::min_element(all, all + 32); });
}
static unsigned __reduce_max_sync(unsigned, unsigned value) {
  return exchange(value, [](unsigned* all, unsigned) { return *std::max_element(all, all + 32); });
}
static unsigned __reduce_add_sync(unsigned, unsigned value) {
  return exchange(value, [](unsigned* all, unsigned) {
    unsigned sum = 0;
    for (int lane = 0; lane < 32; ++lane) sum += all[lane];
    return sum;
  });
}
static unsigned __ballot_sync(unsigned, bool vote) {
  return exchange(vote, [](unsigned* all, unsigned) {
    unsigned votes = 0;
    for (int lane = 0; lane < 32; ++lane) votes |= all[lane] << lane;
    return votes;
  });
}
static void __syncwarp() {
  exchange(0, [](unsigned*, unsigned) { return 0; });
}

// ---- scalar intrinsics
static unsigned __float_as_uint(float x) { unsigned bits; std::memcpy(&bits, &x, 4); return bits; }
static float __uint_as_float(unsigned bits) { float x; std::memcpy(&x, &bits, 4); return x; }
static float __fadd_rn(float x, float y) { return std::isnan(x + y) ? __uint_as_float(0x7fffffffu) : x + y; }
static float __fdividef(float x, float y) { return std::fabs(y) > 0x1p126f ? x / y * 0.0f : x / y; }
static unsigned __float2uint_rz(float x) {
  return !(x > 0.0f) ? 0u : x >= 4294967296.0f ? 0xffffffffu : unsigned(x);
}
static int __clzll(unsigned long long x) { return x ? __builtin_clzll(x) : 64; }
static int __popc(unsigned x) { return __builtin_popcount(x); }
static unsigned atomicAdd(unsigned* at, unsigned value) { const unsigned old = *at; *at += value; return old; }
template <class T> static T __ldcs(const T* at) { return *at; }
using std::isnan;
// As CUDA's: arguments of mixed types are brought to their common one.
template <class A, class B> static std::common_type_t<A, B> max(A a, B b) { return a > std::common_type_t<A, B>(b) ? a : b; }
template <class A, class B> static std::common_type_t<A, B> min(A a, B b) { return a < std::common_type_t<A, B>(b) ? a : b; }

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __restrict__
#define __align__(bytes) alignas(bytes)
#define __launch_bounds__(...)
#define __shared__ static
#include SOURCE

// ---- launches
static void (*entry)(void*);
static void* entry_arguments;

static void run_fiber(int index) {
  threadIdx.x = unsigned(index);
  entry(entry_arguments);
  fibers[unsigned(index)].done = true;
  swapcontext(&fibers[unsigned(index)].context, &scheduler);
}

template <class Function>
static void launch(unsigned blocks_x, unsigned blocks_y, Function function) {
  entry = [](void* pointer) { (*static_cast<Function*>(pointer))(); };
  entry_arguments = &function;
  gridDim = {blocks_x, blocks_y, 1};
  for (blockIdx.y = 0; blockIdx.y < blocks_y; ++blockIdx.y) {
    for (blockIdx.x = 0; blockIdx.x < blocks_x; ++blockIdx.x) {
      fibers.assign(THREADS, Fiber());
      for (int i = 0; i < THREADS; ++i) {
        getcontext(&fibers[i].context);
        fibers[i].context.uc_stack.ss_sp = fibers[i].stack.data();
        fibers[i].context.uc_stack.ss_size = fibers[i].stack.size();
        makecontext(&fibers[i].context, reinterpret_cast<void (*)()>(run_fiber), 1, i);
      }
      for (bool running = true; running;) {
        running = false;
        for (int i = 0; i < THREADS; ++i) {
          if (fibers[i].done) continue;
          running = true;
          threadIdx.x = unsigned(i);
          swapcontext(&scheduler, &fibers[i].context);
        }
      }
    }
  }
}

extern "C" void short_rows(const float* scores, unsigned rows, unsigned columns, unsigned stride, unsigned k, const int* row_k,
                           int ragged, float* values, int* indices) {
  const unsigned blocks = RESIDENT && rows > 2 ? 2 : rows;
  launch(blocks, 1, [=] { topk_short_rows(scores, columns, stride, rows, k, row_k, ragged, values, indices); });
}

extern "C" void long_rows(const float* scores, unsigned rows, unsigned columns, unsigned stride, unsigned k, const int* row_k,
                          int ragged, unsigned rank, unsigned columns_per_block, unsigned* thresholds, unsigned* counts,
                          unsigned long long* collected, unsigned room, float* values, int* indices) {
  if (rank) {
    launch(rows, 1, [=] { topk_sample_threshold(scores, columns, stride, rank, thresholds, counts); });
    launch((columns + columns_per_block - 1) / columns_per_block, rows,
           [=] { topk_collect(scores, columns, stride, columns_per_block, thresholds, counts, collected, room); });
  }
  launch(rows, 1, [=] {
    topk_finish(scores, columns, stride, k, row_k, ragged, thresholds, counts, collected, room, values, indices);
  });
}
