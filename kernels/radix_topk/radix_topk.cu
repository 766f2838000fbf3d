// Exact row-wise top-k, largest first, ties by lower index. cuda.py holds the contract and chooses the path.
//
// Compiled with -DTHREADS, -DITEMS (keys a thread holds), -DCAPACITY (candidates, at least twice the largest k),
// -DLOG2_BINS and -DBLOCKS_PER_SM (how many blocks should fit a multiprocessor).

#include "radix_select.cuh"

__device__ __forceinline__ void fill_rest(u32 from, u32 width, float* values, int* indices) {
  for (u32 i = from + threadIdx.x; i < width; i += THREADS) {
    values[i] = __uint_as_float(0xff800000u);  // -inf
    indices[i] = -1;
  }
}

__device__ __forceinline__ u32 wanted(const int* row_k, int ragged, u32 k, u32 columns, u32 row) {
  const u32 own = ragged ? min(u32(max(row_k[row], 0)), k) : k;
  return min(own, columns);
}

// Bits of four neighbouring elements, of which some may be beyond the row's end.
__device__ __noinline__ uint4 load_four(const float* own, u32 first, u32 columns, bool aligned) {
  if (aligned && first + 3 < columns) return *reinterpret_cast<const uint4*>(own + first);
  uint4 four = make_uint4(0u, 0u, 0u, 0u);
  if (first < columns) four.x = __float_as_uint(own[first]);
  if (first + 1 < columns) four.y = __float_as_uint(own[first + 1]);
  if (first + 2 < columns) four.z = __float_as_uint(own[first + 2]);
  if (first + 3 < columns) four.w = __float_as_uint(own[first + 3]);
  return four;
}

// Rows of at most THREADS * ITEMS columns: one block a row, read once into shared memory. A bound comes from the maxima
// of neighbouring fours: the k-th largest of them is reached by at least k elements, and on scores without a pattern by
// hardly more. What reaches it is gathered and selected; where too much does, the whole row is.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) topk_short_rows(const float* __restrict__ scores,
    u32 columns, u32 row_stride, u32 k, const int* __restrict__ row_k, int ragged, float* __restrict__ values,
    int* __restrict__ indices) {
  DYNAMIC_SHARED(memory);
  Scratch& s = *reinterpret_cast<Scratch*>(memory);
  u64* list = reinterpret_cast<u64*>(memory + sizeof(Scratch));
  u32* keys = reinterpret_cast<u32*>(list + CAPACITY);
  __shared__ u32 size;
  const u32 row = blockIdx.x;
  const float* own = scores + u64(row) * row_stride;
  const bool aligned = (row_stride & 3) == 0;
  if (threadIdx.x == 0) size = 0;
  u32 best[ITEMS / 4], smallest = 0xffffffffu, largest = 0;
  uint4 fours[ITEMS / 4];
  const bool full = aligned && columns == THREADS * ITEMS;
#pragma unroll
  for (int i = 0; i < ITEMS / 4; ++i) {
    const u32 first = (i * THREADS + threadIdx.x) * 4;
    fours[i] = full ? __ldcs(reinterpret_cast<const uint4*>(own + first)) : load_four(own, first, columns, aligned);
  }
#pragma unroll
  for (int i = 0; i < ITEMS / 4; ++i) {
    const u32 first = (i * THREADS + threadIdx.x) * 4;
    uint4 four = make_uint4(ordered(__uint_as_float(fours[i].x)), ordered(__uint_as_float(fours[i].y)),
                            ordered(__uint_as_float(fours[i].z)), ordered(__uint_as_float(fours[i].w)));
    if (!full) {
      four.x = first < columns ? four.x : 0u;
      four.y = first + 1 < columns ? four.y : 0u;
      four.z = first + 2 < columns ? four.z : 0u;
      four.w = first + 3 < columns ? four.w : 0u;
    }
    *reinterpret_cast<uint4*>(keys + first) = four;
    best[i] = max(max(four.x, four.y), max(four.z, four.w));
    largest = max(largest, best[i]);
    if (best[i]) smallest = min(smallest, best[i]);
  }
  const u32 own_k = wanted(row_k, ragged, k, columns, row);
  values += u64(row) * k;
  indices += u64(row) * k;
  u32 low, high;
  block_range(s, smallest, largest, low, high);
  const u32 groups = (columns + 3) / 4;
  u32 count = 0;
  if (own_k && own_k <= groups) {
    const int shift = slice_shift(low, high);
    for (u32 i = threadIdx.x; i < BINS; i += THREADS) s.counts[i] = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ITEMS / 4; ++i) {
      if (best[i]) atomicAdd(&s.counts[(best[i] - low) >> shift], 1u);
    }
    __syncthreads();
    scan_slices<false>(s, own_k);
    low += s.slice << shift;
    count = gather(keys, low, list, &size);
  }
  if (count && count <= CAPACITY) {
    sort_small(s, list, count, low, high, own_k, values, indices);
  } else {
    // The smallest of the maxima says nothing of the smallest element.
    __syncthreads();
    SharedRow source{keys};
    select_sorted(s, source, u64(1) << 32, (u64(high) << 32) | 0xffffffffu, own_k, values, indices);
  }
  fill_rest(own_k, k, values, indices);
}

// Long rows, step 1: a key that about `rank` of THREADS * ITEMS sampled elements reach; the sample takes one run of 32
// elements from each equal stretch of the row, at a place that varies from stretch to stretch.
extern "C" __global__ void __launch_bounds__(THREADS) topk_sample_threshold(const float* __restrict__ scores, u32 columns,
    u32 row_stride, u32 rank, u32* __restrict__ thresholds, u32* __restrict__ counts) {
  __shared__ Scratch s;
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
  __syncthreads();
  // Descend to the slice of the rank-th sample; its lower end is as good a threshold as the sample itself.
  u32 left = rank;
  for (int level = 0; level < 3; ++level) {
    const int shift = slice_shift(low, high);
    count_slices(s, source, low, high, shift);
    scan_slices<false>(s, left);
    const u32 in_slice = s.in_slice;
    low += u64(s.slice) << shift;
    high = low + ((u64(1) << shift) - 1);
    left -= s.above_slice;
    __syncthreads();
    if (in_slice <= 2 || shift <= 32) break;
  }
  if (threadIdx.x == 0) {
    thresholds[row] = u32(low >> 32);
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
  const u32 row = blockIdx.x;
  const u32 own_k = wanted(row_k, ragged, k, columns, row);
  const u32 count = counts[row];
  float* own_values = values + u64(row) * k;
  int* own_indices = indices + u64(row) * k;
  if (count >= own_k && count <= room) {
    Keys source{collected + u64(row) * room, count};
    u32 largest = 0;
    source.for_each([&](u32 score, u32) { largest = max(largest, score); });
    largest = __reduce_max_sync(0xffffffffu, largest);
    if ((threadIdx.x & 31) == 0) s.warp_values[threadIdx.x >> 5] = largest;
    __syncthreads();
    for (int w = 0; w < WARPS; ++w) largest = max(largest, s.warp_values[w]);
    __syncthreads();
    if (count <= CAPACITY) {
      sort_small(s, source.keys, count, thresholds[row], largest, own_k, own_values, own_indices);
    } else {
      const u64 high = (u64(largest) << 32) | 0xffffffffu;
      select_sorted(s, source, u64(thresholds[row]) << 32, high, own_k, own_values, own_indices);
    }
  } else {
    Row source{scores + u64(row) * row_stride, columns};
    select_sorted(s, source, 0, ~u64(0), own_k, own_values, own_indices);
  }
  fill_rest(own_k, k, own_values, own_indices);
}
