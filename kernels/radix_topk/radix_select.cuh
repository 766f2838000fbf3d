// Selection of one block: how keys are ordered, counted, placed and sorted. Used by radix_topk.cu.
//
// Each element is one 64-bit key: the float's bits in an order-preserving form above the complemented index. Keys are
// distinct, so "ties by lower index" needs no case of its own. Selection is a radix descent whose digit adapts to the
// range that is left: a histogram of BINS equal slices, the slice where the k-th key lies, and again inside that slice
// until what remains fits the candidate buffer. The histogram's running sums are also each slice's place in the sorted
// answer, so sorting costs a comparison within a slice only.
//
// Functions stay out of line where they are called twice: a launch starts with a cold instruction cache, and on small
// inputs fetching code is what takes the time.

#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

#define WARPS (THREADS / 32)
#ifndef DYNAMIC_SHARED  // the test that runs this file on the host has its own
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#endif

#define BINS (1 << LOG2_BINS)
#define BINS_PER_THREAD ((BINS + THREADS - 1) / THREADS)
#define SMALL_PER_THREAD (CAPACITY / THREADS)
static_assert(BINS_PER_THREAD * THREADS == BINS, "THREADS must divide BINS");
static_assert(SMALL_PER_THREAD * THREADS == CAPACITY, "THREADS must divide CAPACITY");

struct __align__(16) Scratch {
  u64 candidates[CAPACITY];
  u32 counts[BINS];
  u32 above[BINS];  // keys in higher slices
  u32 warp_values[2 * WARPS];
  u32 slice, above_slice, in_slice, total;
};

// The addition makes -0.0 equal to +0.0 and every NaN the positive one, whose key is the largest.
__device__ __forceinline__ u32 ordered(float x) {
  const u32 bits = __float_as_uint(__fadd_rn(x, 0.0f));
  return bits ^ (u32(int(bits) >> 31) | 0x80000000u);
}

__device__ __forceinline__ float unordered(u32 key) {
  return __uint_as_float(key ^ ((key >> 31) ? 0x80000000u : 0xffffffffu));
}

__device__ __forceinline__ u64 compose(u32 key, u32 index) { return (u64(key) << 32) | (0xffffffffu - index); }

// Ranges: keys in [low, high] are looked at; a slice is 1 << shift keys wide.
__device__ __forceinline__ int slice_shift(u64 low, u64 high) {
  const u64 range = high - low;
  const int bits = range ? 64 - __clzll(range) : 0;
  return max(bits - LOG2_BINS, 0);
}

__device__ __forceinline__ int slice_shift(u32 low, u32 high) { return max(32 - __clz(high - low) - LOG2_BINS, 0); }

// For every slice the number of keys in higher slices; and the slice of the k-th largest key.
// Without PLACES only the latter is found.
template <bool PLACES>
__device__ __forceinline__ void scan_slices(Scratch& s, u32 k) {
  const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const u32 first = BINS - BINS_PER_THREAD * (threadIdx.x + 1);  // thread 0 holds the highest slices
  u32 mine[BINS_PER_THREAD], sum = 0;
#pragma unroll
  for (int i = 0; i < BINS_PER_THREAD; ++i) {
    mine[i] = s.counts[first + i];  // neighbours: the compiler makes one wide load of them
    sum += mine[i];
  }
  u32 inclusive = sum;
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    const u32 other = __shfl_up_sync(0xffffffffu, inclusive, step);
    if (lane >= step) inclusive += other;
  }
  if (lane == 31) s.warp_values[warp] = inclusive;
  __syncthreads();
  const u32 of_warp = lane < WARPS && lane < warp ? s.warp_values[lane] : 0u;
  u32 running = __reduce_add_sync(0xffffffffu, of_warp) + inclusive - sum;
#pragma unroll
  for (int i = BINS_PER_THREAD - 1; i >= 0; --i) {
    if (PLACES) s.above[first + i] = running;
    if (running < k && k <= running + mine[i]) {
      s.slice = first + i;
      s.above_slice = running;
      s.in_slice = mine[i];
    }
    running += mine[i];
  }
  if (threadIdx.x == THREADS - 1) s.total = running;
  __syncthreads();
}

// Writes the sorted answer of the keys in slices first_slice and higher: those of rank below k.
template <class Source>
__device__ __noinline__ void emit(Scratch& s, Source& source, u64 low, u64 high, int shift, u32 first_slice, u32 count,
                                     u32 k, float* values, int* indices) {
  const u32 low_key = u32(low >> 32), high_key = u32(high >> 32);
  source.for_each([&](u32 score, u32 index) {
    if (score < low_key || score > high_key) return;  // most elements leave here, before 64-bit arithmetic
    const u64 key = compose(score, index);
    if (key < low || key > high) return;
    const u32 slice = u32((key - low) >> shift);
    if (slice >= first_slice) s.candidates[s.above[slice] + atomicSub(&s.counts[slice], 1u) - 1u] = key;
  });
  __syncthreads();
  for (u32 place = threadIdx.x; place < count; place += THREADS) {
    const u64 key = s.candidates[place];
    const u32 slice = u32((key - low) >> shift);
    const u32 begin = s.above[slice], end = slice == 0 ? s.total : s.above[slice - 1];
    u32 rank = begin;
#pragma unroll 1
    for (u32 other = begin; other < end; ++other) rank += s.candidates[other] > key;
    if (rank < k) {
      values[rank] = unordered(u32(key >> 32));
      indices[rank] = int(0xffffffffu - u32(key));
    }
  }
  __syncthreads();
}

template <class Source>
__device__ __forceinline__ void count_slices(Scratch& s, Source& source, u64 low, u64 high, int shift) {
  for (u32 i = threadIdx.x; i < BINS; i += THREADS) s.counts[i] = 0;
  __syncthreads();
  const u32 low_key = u32(low >> 32), high_key = u32(high >> 32);
  source.for_each([&](u32 score, u32 index) {
    if (score < low_key || score > high_key) return;
    const u64 key = compose(score, index);
    if (key >= low && key <= high) atomicAdd(&s.counts[u32((key - low) >> shift)], 1u);
  });
  __syncthreads();
}

// The k largest keys of the source, all of which lie in [low, high] (others are smaller than low and not wanted).
template <class Source>
__device__ __noinline__ void select_sorted(Scratch& s, Source& source, u64 low, u64 high, u32 k, float* values, int* indices) {
  while (k > 0) {
    const int shift = slice_shift(low, high);
    count_slices(s, source, low, high, shift);
    scan_slices<true>(s, k);
    const u32 slice = s.slice, sure = s.above_slice, in_slice = s.in_slice;
    if (sure + in_slice <= CAPACITY) {
      emit(s, source, low, high, shift, slice, sure + in_slice, k, values, indices);
      return;
    }
    if (sure) emit(s, source, low, high, shift, slice + 1, sure, sure, values, indices);
    values += sure;
    indices += sure;
    k -= sure;
    low += u64(slice) << shift;
    const u64 slice_end = low + ((u64(1) << shift) - 1);
    high = slice_end < high ? slice_end : high;
    __syncthreads();
  }
}

// As select_sorted for at most CAPACITY keys of a list: each is read once, and its place inside its slice is what the
// count was when it was added. Slices are of the score alone.
__device__ __forceinline__ void sort_small(Scratch& s, const u64* list, u32 count, u32 low, u32 high, u32 k,
                                           float* values, int* indices) {
  const int shift = slice_shift(low, high);
  u64 keys[SMALL_PER_THREAD];
  u32 slices[SMALL_PER_THREAD], places[SMALL_PER_THREAD];
  for (u32 i = threadIdx.x; i < BINS; i += THREADS) s.counts[i] = 0;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < SMALL_PER_THREAD; ++i) {
    const u32 at = i * THREADS + threadIdx.x;
    if (at < count) {
      keys[i] = list[at];
      slices[i] = (u32(keys[i] >> 32) - low) >> shift;
      places[i] = atomicAdd(&s.counts[slices[i]], 1u);
    }
  }
  __syncthreads();
  scan_slices<true>(s, k);
#pragma unroll
  for (int i = 0; i < SMALL_PER_THREAD; ++i) {
    if (i * THREADS + threadIdx.x < count) s.candidates[s.above[slices[i]] + places[i]] = keys[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < SMALL_PER_THREAD; ++i) {
    if (i * THREADS + threadIdx.x >= count) break;
    const u32 begin = s.above[slices[i]], end = slices[i] == 0 ? count : s.above[slices[i] - 1];
    u32 rank = begin;
#pragma unroll 1
    for (u32 other = begin; other < end; ++other) rank += s.candidates[other] > keys[i];
    if (rank < k) {
      values[rank] = unordered(u32(keys[i] >> 32));
      indices[rank] = int(0xffffffffu - u32(keys[i]));
    }
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

struct SharedRow {  // a row's ordered keys in shared memory, 0 beyond its end
  const u32* keys;
  template <class Function>
  __device__ __forceinline__ void for_each(Function function) {
#pragma unroll 1  // a fallback: small code matters more than speed
    for (int i = 0; i < ITEMS / 4; ++i) {
      const u32 first = (i * THREADS + threadIdx.x) * 4;
      const uint4 four = *reinterpret_cast<const uint4*>(keys + first);
      function(four.x, first);
      function(four.y, first + 1);
      function(four.z, first + 2);
      function(four.w, first + 3);
    }
  }
};

struct Row {  // streams a row of device memory
  const float* scores;
  u32 columns;
  template <class Function>
  __device__ __forceinline__ void for_each(Function function) {
    for (u32 i = threadIdx.x; i < columns; i += THREADS) function(ordered(scores[i]), i);
  }
};

struct Keys {  // gathered candidates, in shared or device memory
  const u64* keys;
  u32 count;
  template <class Function>
  __device__ __forceinline__ void for_each(Function function) {
#pragma unroll 1
    for (u32 i = threadIdx.x; i < count; i += THREADS) function(u32(keys[i] >> 32), 0xffffffffu - u32(keys[i]));
  }
};

// Smallest and largest key of the block, from each thread's own.
__device__ __forceinline__ void block_range(Scratch& s, u32 smallest, u32 largest, u32& low, u32& high) {
  const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const u32 warp_low = __reduce_min_sync(0xffffffffu, smallest), warp_high = __reduce_max_sync(0xffffffffu, largest);
  if (lane == 0) {
    s.warp_values[warp] = warp_low;
    s.warp_values[WARPS + warp] = warp_high;
  }
  __syncthreads();
  low = __reduce_min_sync(0xffffffffu, lane < WARPS ? s.warp_values[lane] : 0xffffffffu);
  high = __reduce_max_sync(0xffffffffu, lane < WARPS ? s.warp_values[WARPS + lane] : 0u);
}

// Appends the row's keys from `low` on to `list`; returns how many there are, of which at most CAPACITY are stored.
// Survivors are few and spread over all threads, so each thread marks its own and walks the marks.
__device__ __forceinline__ u32 gather(const u32* keys, u32 low, u64* list, u32* size) {
  u32 marks = 0;
#pragma unroll
  for (int i = 0; i < ITEMS / 4; ++i) {
    const uint4 four = *reinterpret_cast<const uint4*>(keys + (i * THREADS + threadIdx.x) * 4);
    marks |= u32(four.x >= low) << (4 * i) | u32(four.y >= low) << (4 * i + 1) | u32(four.z >= low) << (4 * i + 2) |
             u32(four.w >= low) << (4 * i + 3);
  }
  const u32 lane = threadIdx.x & 31, mine = __popc(marks);
  u32 place = mine;
#pragma unroll
  for (int step = 1; step < 32; step <<= 1) {
    const u32 other = __shfl_up_sync(0xffffffffu, place, step);
    if (lane >= step) place += other;
  }
  u32 base = 0;
  if (lane == 31) base = atomicAdd(size, place);
  place += __shfl_sync(0xffffffffu, base, 31) - mine;
  for (; marks; marks &= marks - 1, ++place) {
    const u32 i = __ffs(marks) - 1, index = ((i / 4) * THREADS + threadIdx.x) * 4 + i % 4;
    if (place < CAPACITY) list[place] = compose(keys[index], index);
  }
  __syncthreads();
  return *size;
}
