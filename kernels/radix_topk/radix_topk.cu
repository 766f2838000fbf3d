// Exact row-wise top-k, largest first, ties by lower index. cuda.py holds the contract and chooses the path.
//
// Compiled with -DTHREADS, -DITEMS (elements a thread holds), -DGROUP (neighbours a maximum is of: 4 or 8), -DCAPACITY
// (candidates, at least twice the largest k), -DLOG2_BINS, -DBLOCKS_PER_SM (how many blocks should fit a multiprocessor)
// and -DRESIDENT (0 or 1).

#include "slices.cuh"

__device__ __noinline__ void fill_rest(u32 from, u32 width, float* values, int* indices) {
  for (u32 i = from + threadIdx.x; i < width; i += THREADS) {
    values[i] = __uint_as_float(0xff800000u);  // -inf
    indices[i] = -1;
  }
}

__device__ __forceinline__ u32 wanted(const int* row_k, int ragged, u32 k, u32 columns, u32 row) {
  const u32 own = ragged ? min(u32(max(row_k[row], 0)), k) : k;
  return min(own, columns);
}

// Four neighbouring elements, -inf for those beyond the row's end.
__device__ __noinline__ float4 load_four(const float* own, u32 first, u32 columns, bool aligned) {
  if (aligned && first + 3 < columns) return *reinterpret_cast<const float4*>(own + first);
  float4 four = make_float4(MINUS_INFINITY, MINUS_INFINITY, MINUS_INFINITY, MINUS_INFINITY);
  if (first < columns) four.x = own[first];
  if (first + 1 < columns) four.y = own[first + 1];
  if (first + 2 < columns) four.z = own[first + 2];
  if (first + 3 < columns) four.w = own[first + 3];
  return four;
}

__device__ __forceinline__ void load_row(float (&x)[ITEMS], const float* own, u32 columns, bool aligned) {
  float4 fours[ITEMS / 4];
  if (aligned && columns == THREADS * ITEMS) {
    const float4* next = reinterpret_cast<const float4*>(own) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < ITEMS / 4; ++i) fours[i] = __ldcs(next + i * THREADS);
  } else {
#pragma unroll
    for (int i = 0; i < ITEMS / 4; ++i) fours[i] = load_four(own, (i * THREADS + threadIdx.x) * 4, columns, aligned);
  }
#pragma unroll
  for (int i = 0; i < ITEMS / 4; ++i) {
    x[4 * i] = fours[i].x;
    x[4 * i + 1] = fours[i].y;
    x[4 * i + 2] = fours[i].z;
    x[4 * i + 3] = fours[i].w;
  }
}

// A number that the k largest elements of the block's registers reach, and on scores without a pattern hardly more do:
// the k-th largest maximum of groups, which at least k elements reach. LOWEST where fewer than k maxima are finite.
// `lowest` and `highest` become the ends of the range that was looked at.
__device__ __forceinline__ float find_bound(Scratch& s, const float (&x)[ITEMS], u32 columns, u32 k, float& lowest,
                                            float& highest) {
  float best[ITEMS / GROUP];
#pragma unroll
  for (int i = 0; i < ITEMS / GROUP; ++i) {
    best[i] = x[i * GROUP];  // fmaxf passes over NaN: a maximum that is too low makes no bound too high
#pragma unroll
    for (int j = 1; j < GROUP; ++j) best[i] = fmaxf(best[i], x[i * GROUP + j]);
  }
  // Where the maxima over a thread, or half of one, are k or more, the least of them is a bound already: a rough one that
  // spares counting what is below. The range of slices begins there.
  constexpr int N = ITEMS / GROUP;
  float front = best[0], back = best[N - 1], least = fminf(best[0], best[N - 1]);
#pragma unroll
  for (int i = 1; i < N; ++i) {
    if (i < N / 2) front = fmaxf(front, best[i]);
    if (i >= N / 2) back = fmaxf(back, best[i]);
    least = fminf(least, best[i]);
  }
  const float largest = fmaxf(front, back);
  const float weakest = k <= THREADS ? largest : k <= 2 * THREADS ? fminf(front, back) : least;
  u32 low, high;
  block_range(s, weakest == MINUS_INFINITY ? 0xffffffffu : ordered(weakest),
              largest <= -LOWEST ? ordered(largest) : 0u, low, high);  // neither NaN nor infinity stretch the range
  lowest = unordered(low);  // NaN, which nothing reaches, where no maximum is finite
  highest = unordered(high);
  const Slices slices(lowest, highest);
  if (k <= columns / GROUP) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      u32* const count = &s.counts[slices.of(best[i])];
      if (best[i] >= lowest) atomicAdd(count, 1u);
    }
  } else {  // more are wanted than there are groups
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      if (x[i] >= lowest) atomicAdd(&s.counts[slices.of(x[i])], 1u);
    }
  }
  __syncthreads();
  const u32 slice = find_slice(s, k);
  return slice == NO_SLICE ? LOWEST : slices.start(slice, lowest);
}

// Rows of at most THREADS * ITEMS columns: a block holds one in registers. With RESIDENT blocks, which take row after row,
// the next one is loaded while this one is sorted.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) topk_short_rows(const float* __restrict__ scores,
    u32 columns, u32 row_stride, u32 rows, u32 k, const int* __restrict__ row_k, int ragged, float* __restrict__ values,
    int* __restrict__ indices) {
  __shared__ Scratch s;
  const bool aligned = (row_stride & 3) == 0;
  float x[ITEMS];
  u32 row = blockIdx.x;
  load_row(x, scores + u64(row) * row_stride, columns, aligned);
  while (true) {
    const float* own = scores + u64(row) * row_stride;
    const u32 own_k = wanted(row_k, ragged, k, columns, row);
    float* own_values = values + u64(row) * k;
    int* own_indices = indices + u64(row) * k;
    row += gridDim.x;
    clear(s);
    float lowest, highest;
    const float bound = find_bound(s, x, columns, own_k, lowest, highest);
    append_row(s, x, bound);
    if (RESIDENT && row < rows) load_row(x, scores + u64(row) * row_stride, columns, aligned);
    __syncthreads();
    const u32 count = s.size;
    if (count <= CAPACITY) {
      const u32 found = min(count, own_k);
      sort_candidates(s, Slices(fmaxf(bound, lowest), highest), count, found, own_values, own_indices);
      if (found < own_k) append_minus_infinity(s, own, columns, found, own_k, own_values, own_indices);
    } else {
      Row source{own, columns};
      select_sorted(s, source, bound == LOWEST ? 0 : u64(ordered(bound)) << 32, own_k, own_values, own_indices);
    }
    if (own_k < k) fill_rest(own_k, k, own_values, own_indices);
    if (!RESIDENT || row >= rows) return;
    __syncthreads();
  }
}

// Long rows, step 1: a key that about `rank` of THREADS * ITEMS sampled elements reach; the sample takes one run of 32
// elements from each equal stretch of the row, at a place that varies from stretch to stretch.
extern "C" __global__ void __launch_bounds__(THREADS) topk_sample_threshold(const float* __restrict__ scores, u32 columns,
    u32 row_stride, u32 rank, u32* __restrict__ thresholds, u32* __restrict__ counts) {
  __shared__ Scratch s;
  clear(s);
  const u32 row = blockIdx.x;
  const float* own = scores + u64(row) * row_stride;
  const u32 runs = THREADS * ITEMS / 32, stretch = columns / runs;  // the host promises stretch >= 64
  Registers source;
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const u32 run = i * WARPS + (threadIdx.x >> 5);
    u32 hash = (run + 1u) * 2654435761u ^ (row * 0x9e3779b9u);
    hash ^= hash >> 15;
    hash *= 0x85ebca6bu;
    hash ^= hash >> 13;
    const u32 start = u32((u64(hash) * (stretch - 31)) >> 32) & ~7u;
    source.keys[i] = ordered(own[u64(run) * stretch + start + (threadIdx.x & 31)]);
  }
  u32 largest = 0, smallest = 0xffffffffu;
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    largest = max(largest, source.keys[i]);
    smallest = min(smallest, source.keys[i]);
  }
  u32 low_score, high_score;
  block_range(s, smallest, largest, low_score, high_score);
  u64 low = u64(low_score) << 32, high = (u64(high_score) << 32) | 0xffffffffu;
  // Descend to the slice of the rank-th sample; its lower end is as good a threshold as the sample itself.
  u32 left = rank;
  for (int level = 0; level < 3; ++level) {
    const int shift = slice_shift(low, high);
    count_slices(s, source, low, high, shift);
    low += u64(find_slice(s, left)) << shift;
    high = low + ((u64(1) << shift) - 1);
    left -= s.above_slice;
    const u32 in_slice = s.in_slice;
    __syncthreads();
    if (in_slice <= 2 || shift <= 32) break;
  }
  if (threadIdx.x == 0) {
    // Where hardly anything is finite, everything that is: -inf itself need not be collected to be counted out.
    thresholds[row] = max(u32(low >> 32), LOWEST_KEY);
    counts[row] = 0;
  }
}

// Long rows, step 2: one pass over the scores collects every element that reaches the threshold.
extern "C" __global__ void __launch_bounds__(THREADS) topk_collect(const float* __restrict__ scores, u32 columns,
    u32 row_stride, u32 columns_per_block, const u32* __restrict__ thresholds, u32* __restrict__ counts,
    u64* __restrict__ collected, u32 room) {
  const u32 row = blockIdx.y, begin = blockIdx.x * columns_per_block;
  const u32 end = min(columns, begin + columns_per_block);
  const float* own = scores + u64(row) * row_stride;
  const u32 threshold = thresholds[row];
  // Floats compare as their keys do: -0.0 equals +0.0, and NaN reaches every threshold through !(x < bound).
  const float bound = unordered(threshold);
  const bool only_nan = threshold == 0xffffffffu;
  // Staged in the block first: one addition to the row's count a block, not one an element.
  __shared__ u64 staged[CAPACITY];
  __shared__ u32 staged_count, base;
  u64* mine = collected + u64(row) * room;
  if (threadIdx.x == 0) staged_count = 0;
  __syncthreads();
  auto offer = [&](float x, u32 index) {
    if (only_nan ? isnan(x) : !(x < bound)) {
      const u64 key = compose(ordered(x), index);
      const u32 slot = atomicAdd(&staged_count, 1u);
      if (slot < CAPACITY) {
        staged[slot] = key;
      } else {
        const u32 place = atomicAdd(&counts[row], 1u);
        if (place < room) mine[place] = key;
      }
    }
  };
  u32 i = begin + threadIdx.x * 4;
  if ((row_stride & 3) == 0) {
    for (; i + 3 * THREADS * 4 + 3 < end; i += 4 * THREADS * 4) {
      float4 four[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) four[j] = __ldcs(reinterpret_cast<const float4*>(own + i + j * THREADS * 4));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const u32 index = i + j * THREADS * 4;
        const float4 x = four[j];
        // One test for 4 elements, most of which stay below; NaN takes the slow way through !(x < bound).
        if (only_nan || !(x.x < bound && x.y < bound && x.z < bound && x.w < bound)) {
          offer(x.x, index);
          offer(x.y, index + 1);
          offer(x.z, index + 2);
          offer(x.w, index + 3);
        }
      }
    }
  }
  for (; i < end; i += THREADS * 4) {
    for (u32 j = i; j < min(end, i + 4); ++j) offer(own[j], j);
  }
  __syncthreads();
  const u32 staged_total = min(staged_count, CAPACITY);
  if (threadIdx.x == 0 && staged_total) base = atomicAdd(&counts[row], staged_total);
  __syncthreads();
  for (u32 slot = threadIdx.x; slot < staged_total; slot += THREADS) {
    if (base + slot < room) mine[base + slot] = staged[slot];
  }
}

// Long rows, step 3: select among the collected; where the threshold caught too few or too many, read the row again.
extern "C" __global__ void __launch_bounds__(THREADS) topk_finish(const float* __restrict__ scores, u32 columns,
    u32 row_stride, u32 k, const int* __restrict__ row_k, int ragged, const u32* __restrict__ thresholds,
    const u32* __restrict__ counts, const u64* __restrict__ collected, u32 room, float* __restrict__ values,
    int* __restrict__ indices) {
  __shared__ Scratch s;
  clear(s);
  __syncthreads();
  const u32 row = blockIdx.x;
  const float* own = scores + u64(row) * row_stride;
  const u32 own_k = wanted(row_k, ragged, k, columns, row), count = counts[row], threshold = thresholds[row];
  values += u64(row) * k;
  indices += u64(row) * k;
  if (count <= room && (count >= own_k || threshold == LOWEST_KEY)) {
    Keys source{collected + u64(row) * room, count};
    u32 low = 0xffffffffu, high = 0;
    source.for_each([&](u32 key, u32) {
      low = min(low, key);
      if (key <= HIGHEST_KEY) high = max(high, key);
    });
    block_range(s, low, high, low, high);
    float bound = unordered(low);
    const float highest = unordered(high);
    if (count > CAPACITY) {
      const Slices slices(bound, highest);
      source.for_each([&](u32 key, u32) { atomicAdd(&s.counts[slices.of(unordered(key))], 1u); });
      __syncthreads();
      const u32 slice = find_slice(s, own_k);
      bound = slices.start(slice, bound);
    }
    for (u32 begin = 0; begin < count; begin += THREADS) {
      const u32 i = begin + threadIdx.x;
      const u64 key = i < count ? source.keys[i] : 0;
      const float x = unordered(u32(key >> 32));
      append(s, i < count && !(x < bound), x, 0xffffffffu - u32(key));
    }
    __syncthreads();
    const u32 reached = s.size, found = min(reached, own_k);
    if (reached <= CAPACITY) {
      sort_candidates(s, Slices(bound, highest), reached, found, values, indices);
      if (found < own_k) append_minus_infinity(s, own, columns, found, own_k, values, indices);
    } else {
      select_sorted(s, source, 0, own_k, values, indices);
    }
  } else {
    Row source{own, columns};
    select_sorted(s, source, count > room ? u64(threshold) << 32 : 0, own_k, values, indices);
  }
  if (own_k < k) fill_rest(own_k, k, values, indices);
}
