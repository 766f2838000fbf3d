// What the kernels of radix_topk.cu share, and the selection that is right on any scores: a radix descent over keys.
// slices.cuh has the faster one, which falls back to this where the scores defeat it.
//
// An element's key is 64 bits: the float's bits in an order-preserving form above the complemented index. Keys are
// distinct, so "ties by lower index" needs no case of its own. The descent's digit adapts to the range that is left: a
// histogram of BINS equal slices, the slice where the k-th key lies, and again inside that slice until what remains fits
// the candidate buffer.
//
// Functions stay out of line where they are rarely or repeatedly called: a launch starts with a cold instruction cache,
// and on small inputs fetching code is what takes the time.

#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

#define ALL 0xffffffffu  // lanes of a warp
#define WARPS (THREADS / 32)
#define BINS (1 << LOG2_BINS)
#define BINS_PER_THREAD (BINS / THREADS)
#define NO_SLICE 0xffffffffu
static_assert(BINS_PER_THREAD * THREADS == BINS, "THREADS must divide BINS");
static_assert(CAPACITY % THREADS == 0 && (CAPACITY & (CAPACITY - 1)) == 0, "a power of two, for the bitonic sort");

struct __align__(16) Scratch {
  u64 candidates[CAPACITY];
  u32 counts[BINS];  // zero between uses
  u32 warp_values[2 * WARPS];
  u32 size;                          // candidates offered, zero at the start
  u32 slice, above_slice, in_slice;  // find_slice's answer
  u32 crowded;
};

// A barrier must follow before anything is counted.
__device__ __forceinline__ void clear(Scratch& s) {
#pragma unroll
  for (int i = 0; i < BINS_PER_THREAD; ++i) s.counts[BINS_PER_THREAD * threadIdx.x + i] = 0;  // one wide store
  if (threadIdx.x == 0) s.size = 0;
}

// The addition makes -0.0 equal to +0.0 and every NaN the positive one, whose key is the largest.
__device__ __forceinline__ u32 ordered(float x) {
  const u32 bits = __float_as_uint(__fadd_rn(x, 0.0f));
  return bits ^ (u32(int(bits) >> 31) | 0x80000000u);
}

__device__ __forceinline__ float unordered(u32 key) {
  return __uint_as_float(key ^ ((key >> 31) ? 0x80000000u : 0xffffffffu));
}

__device__ __forceinline__ u64 compose(u32 key, u32 index) { return (u64(key) << 32) | (0xffffffffu - index); }

__device__ __forceinline__ u32 warp_scan(u32 value) {  // inclusive
  const u32 lane = threadIdx.x & 31;
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    const u32 other = __shfl_up_sync(ALL, value, step);
    if (lane >= step) value += other;
  }
  return value;
}

// Smallest and largest of the block's values.
__device__ __forceinline__ void block_range(Scratch& s, u32 smallest, u32 largest, u32& low, u32& high) {
  const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const u32 warp_low = __reduce_min_sync(ALL, smallest), warp_high = __reduce_max_sync(ALL, largest);
  if (lane == 0) {
    s.warp_values[warp] = warp_low;
    s.warp_values[WARPS + warp] = warp_high;
  }
  __syncthreads();
  low = __reduce_min_sync(ALL, lane < WARPS ? s.warp_values[lane] : 0xffffffffu);
  high = __reduce_max_sync(ALL, lane < WARPS ? s.warp_values[WARPS + lane] : 0u);
}

// The slice of the k-th largest of what was counted, NO_SLICE where fewer were. A barrier must lie between the counting
// and this, which leaves the counts zero.
__device__ __forceinline__ u32 find_slice(Scratch& s, u32 k) {
  const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const u32 first = BINS - BINS_PER_THREAD * (threadIdx.x + 1);  // thread 0 holds the highest slices
  u32 mine[BINS_PER_THREAD], sum = 0;
#pragma unroll
  for (int i = 0; i < BINS_PER_THREAD; ++i) {
    mine[i] = s.counts[first + i];  // neighbours: the compiler makes one wide load of them
    sum += mine[i];
  }
#pragma unroll
  for (int i = 0; i < BINS_PER_THREAD; ++i) s.counts[first + i] = 0;
  const u32 of_warp = __reduce_add_sync(ALL, sum);
  if (lane == 0) s.warp_values[warp] = of_warp;
  if (threadIdx.x == 0) s.slice = NO_SLICE;
  __syncthreads();
  const u32 before = __reduce_add_sync(ALL, lane < warp ? s.warp_values[lane] : 0u);
  if (before < k && k <= before + of_warp) {  // in one warp at most
    u32 running = before + warp_scan(sum) - sum;
#pragma unroll
    for (int i = BINS_PER_THREAD - 1; i >= 0; --i) {
      if (running < k && k <= running + mine[i]) {
        s.slice = first + i;
        s.above_slice = running;
        s.in_slice = mine[i];
      }
      running += mine[i];
    }
  }
  __syncthreads();
  return s.slice;
}

__device__ __forceinline__ void write_entry(u64 key, u32 rank, float* values, int* indices) {
  values[rank] = unordered(u32(key >> 32));
  indices[rank] = int(0xffffffffu - u32(key));
}

// Sorts s.candidates[0..count), largest first, and writes the k first. A step of at most 32 stays inside the 64 keys of a
// warp.
__device__ __noinline__ void write_bitonic(Scratch& s, u32 count, u32 k, float* values, int* indices) {
  u32 size = 2;
  while (size < count) size <<= 1;
  for (u32 i = count + threadIdx.x; i < size; i += THREADS) s.candidates[i] = 0;  // below every key
  __syncthreads();
  for (u32 run = 2; run <= size; run <<= 1) {
    for (u32 step = run >> 1; step; step >>= 1) {
      for (u32 pair = threadIdx.x; pair < size / 2; pair += THREADS) {
        const u32 at = 2 * pair - (pair & (step - 1));
        const u64 one = s.candidates[at], other = s.candidates[at + step];
        if ((one < other) == ((at & run) == 0)) {
          s.candidates[at] = other;
          s.candidates[at + step] = one;
        }
      }
      if (step > 32 || (step == 1 && run > 32)) {
        __syncthreads();
      } else {
        __syncwarp();
      }
    }
  }
  __syncthreads();
#pragma unroll 1
  for (u32 rank = threadIdx.x; rank < k; rank += THREADS) write_entry(s.candidates[rank], rank, values, indices);
}

__device__ __forceinline__ int slice_shift(u64 low, u64 high) {
  const u64 range = high - low;
  return max((range ? 64 - __clzll(range) : 0) - LOG2_BINS, 0);
}

// Counts the source's keys in [low, high], a slice being 1 << shift keys wide. Others may be there and do not matter.
template <class Source>
__device__ __forceinline__ void count_slices(Scratch& s, Source& source, u64 low, u64 high, int shift) {
  const u32 low_key = u32(low >> 32), high_key = u32(high >> 32);
  source.for_each([&](u32 score, u32 index) {
    if (score < low_key || score > high_key) return;  // most elements leave here, before 64-bit arithmetic
    const u64 key = compose(score, index);
    if (key >= low && key <= high) atomicAdd(&s.counts[u32((key - low) >> shift)], 1u);
  });
  __syncthreads();
}

// Writes the k largest of the keys in [low, high], of which there are at least k and at most CAPACITY.
template <class Source>
__device__ __noinline__ void emit(Scratch& s, Source& source, u64 low, u64 high, u32 k, float* values, int* indices) {
  if (threadIdx.x == 0) s.size = 0;
  __syncthreads();
  const u32 low_key = u32(low >> 32), high_key = u32(high >> 32);
  source.for_each([&](u32 score, u32 index) {
    if (score < low_key || score > high_key) return;
    const u64 key = compose(score, index);
    if (key >= low && key <= high) s.candidates[atomicAdd(&s.size, 1u)] = key;
  });
  __syncthreads();
  write_bitonic(s, s.size, k, values, indices);
  __syncthreads();
}

// The k largest keys of the source, all of which are `low` or more. The counts must be zero.
template <class Source>
__device__ __noinline__ void select_sorted(Scratch& s, Source& source, u64 low, u32 k, float* values, int* indices) {
  u64 high = ~u64(0);
  while (k > 0) {
    const int shift = slice_shift(low, high);
    count_slices(s, source, low, high, shift);
    const u32 slice = find_slice(s, k), sure = s.above_slice, in_slice = s.in_slice;
    const u64 begin = low + (u64(slice) << shift), width = (u64(1) << shift) - 1;
    if (sure + in_slice <= CAPACITY) {
      emit(s, source, begin, high, k, values, indices);
      return;
    }
    if (sure) emit(s, source, begin + width + 1, high, sure, values, indices);
    values += sure;
    indices += sure;
    k -= sure;
    low = begin;
    if (high - begin > width) high = begin + width;
    __syncthreads();
  }
}

struct Registers {  // a sample, whose indices do not matter
  u32 keys[ITEMS];
  template <class Function>
  __device__ __forceinline__ void for_each(Function function) {
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) function(keys[i], 0u);
  }
};

struct Row {  // streams a row of device memory
  const float* scores;
  u32 columns;
  template <class Function>
  __device__ __forceinline__ void for_each(Function function) {
#pragma unroll 4
    for (u32 i = threadIdx.x; i < columns; i += THREADS) function(ordered(scores[i]), i);
  }
};

struct Keys {  // a list of keys in device memory
  const u64* keys;
  u32 count;
  template <class Function>
  __device__ __forceinline__ void for_each(Function function) {
#pragma unroll 1
    for (u32 i = threadIdx.x; i < count; i += THREADS) function(u32(keys[i] >> 32), 0xffffffffu - u32(keys[i]));
  }
};
