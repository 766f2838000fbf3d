// Selection by equal slices of the scores' range, for scores without a pattern: those of beams are near a normal
// distribution, and equal slices of it hold a few elements each. (Equal slices of the floats' bits do not: where scores
// cross zero, most of that range is numbers next to zero.) Only speed depends on it.

#pragma once

#include "radix_select.cuh"

#define CROWD 40  // elements of one slice from which on comparing each with each other is slower than a bitonic sort
#define SMALL_PER_THREAD (CAPACITY / THREADS)

#define LOWEST_KEY 0x00800000u  // of the lowest finite score: what is below is -inf
#define HIGHEST_KEY 0xff7fffffu  // of the highest
#define LOWEST __uint_as_float(0xff7fffffu)
#define MINUS_INFINITY __uint_as_float(0xff800000u)

// Maps scores to slices, never a larger score to a lower slice: each operation rounds monotonically, whatever the range.
struct Slices {
  float low, scale;

  __device__ __forceinline__ Slices(float low, float high)
      : low(low), scale(high > low ? __fdividef(float(BINS), high - low) : 0.0f) {}

  // NaN goes to the last slice, as what is above the range does; what is below it goes to the first.
  __device__ __forceinline__ u32 of(float x) const {
    return __float2uint_rz(fminf((x - low) * scale, float(BINS - 1)));
  }

  // A number that everything in `slice` and above reaches; `otherwise` where rounding leaves none to be found.
  __device__ __forceinline__ float start(u32 slice, float otherwise) const {
    const float below = low + __fdividef(float(slice) - 0.25f, scale);
    return slice && (below - low) * scale < float(slice) ? below : otherwise;
  }
};

// Offers a warp's elements to the candidates: the score's bits above the index. Too many are counted, not stored.
__device__ __forceinline__ void append(Scratch& s, bool wanted, float x, u32 index) {
  const u32 votes = __ballot_sync(ALL, wanted), lane = threadIdx.x & 31;
  if (!votes) return;
  u32 base = 0;
  if (lane == 0) base = atomicAdd(&s.size, u32(__popc(votes)));
  const u32 place = __shfl_sync(ALL, base, 0) + __popc(votes & ((1u << lane) - 1));
  if (wanted && place < CAPACITY) s.candidates[place] = (u64(__float_as_uint(x)) << 32) | index;
}

// As append for all elements of the block's registers.
__device__ __forceinline__ void append_row(Scratch& s, const float (&x)[ITEMS], float bound) {
  float reached = 0.0f;  // counted as a float: a comparison can yield 1.0 in one instruction
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) reached += x[i] < bound ? 0.0f : 1.0f;
  const u32 lane = threadIdx.x & 31, mine = u32(reached);
  u32 place = warp_scan(mine), base = 0;
  if (lane == 31) base = atomicAdd(&s.size, place);
  base = __shfl_sync(ALL, base, 31);
  if (base + __shfl_sync(ALL, place, 31) > CAPACITY) return;
  u64* next = s.candidates + (place + base - mine);
  bound = __shfl_sync(ALL, bound, 0);  // the same number: comparing again is cheaper than the compiler's keeping the bits
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const u32 index = (i / 4) * THREADS * 4 + threadIdx.x * 4 + i % 4;
    if (!(x[i] < bound)) *next++ = (u64(__float_as_uint(x[i])) << 32) | index;
  }
}

// Turns each slice's count into the number of elements in higher slices.
__device__ __forceinline__ void place_slices(Scratch& s) {
  const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const u32 first = BINS - BINS_PER_THREAD * (threadIdx.x + 1);
  u32 mine[BINS_PER_THREAD], sum = 0, most = 0;
#pragma unroll
  for (int i = 0; i < BINS_PER_THREAD; ++i) {
    mine[i] = s.counts[first + i];
    sum += mine[i];
    most = max(most, mine[i]);
  }
  const u32 inclusive = warp_scan(sum);
  if (lane == 31) s.warp_values[warp] = inclusive;
  if (most > CROWD) s.crowded = 1;
  __syncthreads();
  u32 running = __reduce_add_sync(ALL, lane < warp ? s.warp_values[lane] : 0u) + inclusive - sum;
#pragma unroll
  for (int i = BINS_PER_THREAD - 1; i >= 0; --i) {
    const u32 count = mine[i];
    mine[i] = running;
    running += count;
  }
#pragma unroll
  for (int i = 0; i < BINS_PER_THREAD; ++i) s.counts[first + i] = mine[i];
  __syncthreads();
}

// Writes the k largest of the first `count` candidates, sorted. The counts must be zero, and are not afterwards.
// A slice's place in the answer is what the slices above it hold; an element's, how many of its slice are larger.
__device__ __forceinline__ void sort_candidates(Scratch& s, const Slices& slices, u32 count, u32 k, float* values,
                                                int* indices) {
  u64 keys[SMALL_PER_THREAD];
  u32 mine[SMALL_PER_THREAD], places[SMALL_PER_THREAD];
  if (threadIdx.x == 0) s.crowded = 0;
#pragma unroll
  for (int i = 0; i < SMALL_PER_THREAD; ++i) {
    const u32 at = i * THREADS + threadIdx.x;
    if (at < count) {
      const u64 raw = s.candidates[at];
      const float x = __uint_as_float(u32(raw >> 32));
      keys[i] = compose(ordered(x), u32(raw));
      mine[i] = slices.of(x);
      places[i] = atomicAdd(&s.counts[mine[i]], 1u);
    }
  }
  __syncthreads();
  place_slices(s);
#pragma unroll
  for (int i = 0; i < SMALL_PER_THREAD; ++i) {
    if (i * THREADS + threadIdx.x < count) s.candidates[s.counts[mine[i]] + places[i]] = keys[i];
  }
  __syncthreads();
  if (s.crowded) {
    write_bitonic(s, count, k, values, indices);
    return;
  }
  // Neighbouring threads take neighbouring places, so they compare in the same slices.
  for (u32 place = threadIdx.x; place < count; place += THREADS) {
    const u64 key = s.candidates[place];
    const u32 slice = slices.of(unordered(u32(key >> 32)));
    const u32 begin = s.counts[slice], end = slice == 0 ? count : s.counts[slice - 1];
    u32 rank = begin;
#pragma unroll 1
    for (u32 other = begin; other < end; ++other) rank += s.candidates[other] > key;
    if (rank < k) write_entry(key, rank, values, indices);
  }
}

// Entries from..to-1 of an answer: the first columns whose score is -inf.
__device__ __noinline__ void append_minus_infinity(Scratch& s, const float* own, u32 columns, u32 from, u32 to,
                                                   float* values, int* indices) {
  const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  for (u32 begin = 0; from < to && begin < columns; begin += THREADS) {
    const u32 i = begin + threadIdx.x;
    const bool found = i < columns && own[i] == MINUS_INFINITY;
    const u32 votes = __ballot_sync(ALL, found);
    __syncthreads();
    if (lane == 0) s.warp_values[warp] = __popc(votes);
    __syncthreads();
    const u32 of_lane = lane < WARPS ? s.warp_values[lane] : 0u;
    const u32 before = __reduce_add_sync(ALL, lane < warp ? of_lane : 0u);
    const u32 place = from + before + __popc(votes & ((1u << lane) - 1));
    if (found && place < to) {
      values[place] = MINUS_INFINITY;
      indices[place] = int(i);
    }
    from += __reduce_add_sync(ALL, of_lane);
  }
}
