// Exact row-wise top-k, largest first, ties by lower index. cuda.py holds the contract and chooses the path.
//
// Each element is one 64-bit key: the float's bits in an order-preserving form above the complemented index. Keys are
// distinct, so "ties by lower index" needs no case of its own. Selection is a radix descent whose digit adapts to the
// range that is left: a histogram of BINS equal slices, the slice where the k-th key lies, and again inside that slice
// until what remains fits the candidate buffer. The histogram's running sums are also each slice's place in the sorted
// answer, so sorting costs a comparison within a slice only.
//
// Functions stay out of line where they are called twice: a launch starts with a cold instruction cache, and on small
// inputs fetching code is what takes the time.
//
// Compiled with -DTHREADS, -DITEMS (keys a thread holds), -DCAPACITY (candidates, at least twice the largest k),
// -DLOG2_BINS and -DBLOCKS_PER_SM (how many blocks should fit a multiprocessor).

typedef unsigned int u32;
typedef unsigned long long u64;

#define WARPS (THREADS / 32)
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
  extern __shared__ __align__(16) unsigned char memory[];
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
