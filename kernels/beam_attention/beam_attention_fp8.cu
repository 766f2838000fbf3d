// Beam attention on an E4M3 context: 128 rows (beams x heads of a group) against the slots of their request.
//
// One warp copies blocks of 128 slots, two warp groups of 64 rows attend. Each multiplies its probabilities with a block's
// values and its queries with the next block's keys in one go, and takes exponentials while the other group multiplies.
// The rounding is that of `reference.beam_attention_fp8`; running maxima are whole exponents of 2, and what the tensor
// cores add up is one block, summed over blocks in float32, as in triton_tile.py. The schedule is that of
// triton_schedule.py, whose merge_kernel joins the parts of tiles that programs share.
//
// Compile-time: GROUPS, HEADS_PER_GROUP, SPLIT, MIN_BLOCKS.

#include "../hopper.cuh"

typedef unsigned short bf16;

#define WIDTH 128  // of a head
#define TILE_ROWS 128
#define GROUP_ROWS 64
#define BLOCK 128  // slots
#define STAGES 5
#define COPIERS 128
#define ATTENDERS 256
#define OPERAND_BYTES (BLOCK * WIDTH)
#define PROBABILITY_SHIFT 8.0f
#define LEAST_AMAX 1e-12f

struct Shared {
  u8 keys[STAGES][OPERAND_BYTES];
  u8 values[STAGES][OPERAND_BYTES];
  u8 query[2][GROUP_ROWS * WIDTH];  // codes; in the end, the results of each warp in its order
  float query_amax[2][GROUP_ROWS];
  u64 keys_full[STAGES], values_full[STAGES], empty[STAGES];
};

struct Work {
  const int *lengths, *counts;
  int batch;
};

struct Tile {
  int request, group, first_row, rows, first, last, blocks, length;
};

// Calls visit(tile) for each tile of this block of threads, in order.
template <typename Visit>
__device__ __forceinline__ void for_each_tile(const Work& work, Visit visit) {
  auto units_of = [&](int length) {
    const int blocks = (length + BLOCK - 1) / BLOCK;
    return SPLIT ? blocks : min(blocks, 1);
  };
  auto tiles_of = [&](int count) { return (count * HEADS_PER_GROUP + TILE_ROWS - 1) / TILE_ROWS; };
  int total = 0;
  for (int request = 0; request < work.batch; ++request)
    total += units_of(work.lengths[request]) * tiles_of(work.counts[request]) * GROUPS;
  const int share = SPLIT ? max(int((total + gridDim.x - 1) / gridDim.x), MIN_BLOCKS) : 1;
  const int start = blockIdx.x * share, end = min(start + share, total);
  int passed = 0;
  for (int request = 0; request < work.batch && passed < end; ++request) {
    const int length = work.lengths[request], count = work.counts[request];
    const int units = units_of(length), tiles = tiles_of(count), blocks = (length + BLOCK - 1) / BLOCK;
    const int begin = max(start - passed, 0), stop = min(end - passed, units * tiles * GROUPS);
    passed += units * tiles * GROUPS;
    if (begin >= stop) continue;
    for (int tile = begin / units; tile * units < stop; ++tile) {
      const int first = SPLIT ? max(begin - tile * units, 0) : 0;
      const int last = SPLIT ? min(stop - tile * units, units) : blocks;
      visit(Tile{request, tile / tiles, tile % tiles * TILE_ROWS, count * HEADS_PER_GROUP, first, last, blocks, length});
    }
  }
}

__device__ __forceinline__ size_t row_offset(const Tile& tile, int beams, int row) {
  const size_t beam = size_t(tile.request) * beams + row / HEADS_PER_GROUP;
  return ((beam * GROUPS + tile.group) * HEADS_PER_GROUP + row % HEADS_PER_GROUP) * WIDTH;
}

__device__ __forceinline__ void copy(
    Shared& s, const Work& work, const TensorMap* keys, const TensorMap* values, int padded_slots) {
  int stage = 0;
  u32 parity = 1;
  for_each_tile(work, [&](const Tile& tile) {
    const int pair = tile.request * GROUPS + tile.group;
    for (int block = tile.first; block < tile.last; ++block) {
      barrier_wait(shared_address(&s.empty[stage]), parity);
      const u32 keys_full = shared_address(&s.keys_full[stage]), values_full = shared_address(&s.values_full[stage]);
      barrier_expect(keys_full, OPERAND_BYTES);
      copy_box(shared_address(s.keys[stage]), keys, 0, pair * padded_slots + block * BLOCK, keys_full);
      barrier_expect(values_full, OPERAND_BYTES);
      copy_box(shared_address(s.values[stage]), values, block * BLOCK, pair * WIDTH, values_full);
      if (++stage == STAGES) stage = 0, parity ^= 1;
    }
  });
}

// Two threads round each row of a group's queries to E4M3 under the row's own scale.
__device__ __forceinline__ void load_query(Shared& s, const Tile& tile, const bf16* query, int beams, int group, int thread) {
  const int row = thread / 2, half = thread % 2, global_row = tile.first_row + group * GROUP_ROWS + row;
  uint4 line[8] = {};
  if (global_row < tile.rows) {
    const uint4* from = reinterpret_cast<const uint4*>(query + row_offset(tile, beams, global_row) + half * 64);
#pragma unroll
    for (int i = 0; i < 8; ++i) line[i] = from[i];
  }
  const u32* pairs = reinterpret_cast<const u32*>(line);
  float amax = LEAST_AMAX;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const float low = __uint_as_float(pairs[i] << 16), high = __uint_as_float(pairs[i] & 0xffff0000u);
    amax = max_nan(amax, max_nan(fabsf(low), fabsf(high)));
  }
  amax = max_nan(amax, __shfl_xor_sync(~0u, amax, 1));
  const float inverse = __fdiv_rn(448.0f, amax);
#pragma unroll
  for (int chunk = 0; chunk < 4; ++chunk) {
    u32 codes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 first = pairs[chunk * 8 + i * 2], second = pairs[chunk * 8 + i * 2 + 1];
      const u32 low = to_e4m3_pair(__uint_as_float(first << 16) * inverse, __uint_as_float(first & 0xffff0000u) * inverse);
      const u32 high =
          to_e4m3_pair(__uint_as_float(second << 16) * inverse, __uint_as_float(second & 0xffff0000u) * inverse);
      codes[i] = low | high << 16;
    }
    u8* to = s.query[group] + row * WIDTH + ((half * 4 + chunk) ^ (row & 7)) * 16;
    *reinterpret_cast<uint4*>(to) = make_uint4(codes[0], codes[1], codes[2], codes[3]);
  }
  if (half == 0) s.query_amax[group][row] = amax;
  fence_for_wgmma();
  named_barrier(1 + group, 128);
}

struct Softmax {
  float scale[2], top[2], sum[2], rescale[2];  // of rows r and r + 8; sums are of this thread's columns
};

// Scores of one block become probabilities times 2**8, as the operand that multiplies values.
__device__ __forceinline__ void probabilities(Softmax& state, float (&score)[64], u32 (&code)[4][4], int visible, int pair) {
  if (visible < BLOCK) {
#pragma unroll
    for (int i = 0; i < 64; ++i)
      if (i / 4 * 8 + pair * 2 + i % 2 >= visible) score[i] = -__int_as_float(0x7f800000);
  }
  float shift[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    float top = score[2 * j];
#pragma unroll
    for (int i = 0; i < 64; i += 4) top = fmaxf(top, fmaxf(score[i + 2 * j], score[i + 2 * j + 1]));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    top = fmaxf(state.top[j], ceilf(top * state.scale[j]));
    state.rescale[j] = exp2_fast(state.top[j] - top);
    state.top[j] = top;
    state.sum[j] *= state.rescale[j];
    shift[j] = PROBABILITY_SHIFT - top;
  }
#pragma unroll
  for (int step = 0; step < 4; ++step) {
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const int j = part % 2, at = step * 16 + part / 2 * 8 + 2 * j;
      float p[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        p[i] = exp2_fast(fmaf(score[at + i / 2 * 4 + i % 2], state.scale[j], shift[j]));
        state.sum[j] += p[i];
      }
      code[step][part] = to_e4m3_pair(p[0], p[1]) | u32(to_e4m3_pair(p[2], p[3])) << 16;
    }
  }
}

__device__ __forceinline__ void multiply_keys(float (&score)[64], u32 query, u32 keys) {
  const u64 a = swizzled_rows(query), b = swizzled_rows(keys);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < WIDTH / 32; ++step) wgmma_64x128x32(score, a + 2 * step, b + 2 * step, step);
  wgmma_commit();
}

__device__ __forceinline__ void multiply_values(float (&product)[64], const u32 (&code)[4][4], u32 values) {
  const u64 b = swizzled_rows(values);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < BLOCK / 32; ++step) wgmma_64x128x32(product, code[step], b + 2 * step, step);
  wgmma_commit();
}

// A warp's 16 rows, divided by their sums, in bfloat16.
__device__ __forceinline__ void store_rows(
    u8* patch, const Tile& tile, const float (&total)[64], const float (&factor)[2], bf16* out, int beams, int first_row,
    int lane) {
#pragma unroll
  for (int part = 0; part < 2; ++part) {
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
      const int j = i / 2 % 2, row = lane / 4 + 8 * j, chunk = i / 4 ^ (row & 7);
      const float low = total[part * 32 + i] * factor[j], high = total[part * 32 + i + 1] * factor[j];
      *reinterpret_cast<u32*>(patch + row * 128 + chunk * 16 + lane % 4 * 4) = to_bfloat16_pair(low, high);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = i * 4 + lane / 8, chunk = lane % 8;
      const uint4 line = *reinterpret_cast<uint4*>(patch + row * 128 + (chunk ^ (row & 7)) * 16);
      if (first_row + row < tile.rows)
        *reinterpret_cast<uint4*>(out + row_offset(tile, beams, first_row + row) + part * 64 + chunk * 8) = line;
    }
    __syncwarp();
  }
}

struct Outputs {
  bf16* out;
  float *part, *part_max, *part_sum;
};

__device__ __forceinline__ void attend(
    Shared& s, const Work& work, const bf16* query, const float* key_scale, const float* value_scale,
    const Outputs& outputs, int beams, float scale) {
  const int thread = threadIdx.x - COPIERS, group = thread / 128, warp = thread % 128 / 32, lane = thread % 32;
  const int row = warp * 16 + lane / 4;
  const u32 query_at = shared_address(s.query[group]);
  int stage = 0;
  u32 parity = 0;
  for_each_tile(work, [&](const Tile& tile) {
    load_query(s, tile, query, beams, group, thread % 128);
    const int pair = tile.request * GROUPS + tile.group;
    Softmax state;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      state.scale[j] = __fdiv_rn(s.query_amax[group][row + 8 * j], 448.0f) * (scale * key_scale[pair]);
      state.top[j] = -__int_as_float(0x7f800000);
      state.sum[j] = 0.0f;
    }
    float total[64], score[64], product[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) total[i] = 0.0f;
    u32 code[4][4];
    auto add = [&](const float (&product)[64]) {
      if (lane == 0) barrier_arrive(shared_address(&s.empty[stage]));
#pragma unroll
      for (int i = 0; i < 64; ++i) total[i] = fmaf(total[i], state.rescale[i / 2 % 2], product[i]);
    };

    barrier_wait(shared_address(&s.keys_full[stage]), parity);
    multiply_keys(score, query_at, shared_address(s.keys[stage]));
    wgmma_wait<0>();
    probabilities(state, score, code, tile.length - tile.first * BLOCK, lane % 4);
    for (int block = tile.first + 1; block < tile.last; ++block) {
      const int next = stage + 1 == STAGES ? 0 : stage + 1;
      const u32 next_parity = next ? parity : parity ^ 1;
      barrier_wait(shared_address(&s.values_full[stage]), parity);
      barrier_wait(shared_address(&s.keys_full[next]), next_parity);
      multiply_values(product, code, shared_address(s.values[stage]));
      multiply_keys(score, query_at, shared_address(s.keys[next]));
      wgmma_wait<1>();
      add(product);
      wgmma_wait<0>();
      probabilities(state, score, code, tile.length - block * BLOCK, lane % 4);
      stage = next;
      parity = next_parity;
    }
    barrier_wait(shared_address(&s.values_full[stage]), parity);
    multiply_values(product, code, shared_address(s.values[stage]));
    wgmma_wait<0>();
    add(product);
    if (++stage == STAGES) stage = 0, parity ^= 1;

#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int step = 1; step < 4; step *= 2) state.sum[j] += __shfl_xor_sync(~0u, state.sum[j], step);
    if (tile.last - tile.first == tile.blocks) {
      const float factor[2] = {value_scale[pair] / state.sum[0], value_scale[pair] / state.sum[1]};
      const int first_row = tile.first_row + group * GROUP_ROWS + warp * 16;
      store_rows(s.query[group] + warp * 16 * WIDTH, tile, total, factor, outputs.out, beams, first_row, lane);
    } else {
      const size_t part = (2 * size_t(blockIdx.x) + (tile.first == 0)) * TILE_ROWS + group * GROUP_ROWS + row;
#pragma unroll
      for (int i = 0; i < 64; i += 2) {
        float* to = outputs.part + (part + i / 2 % 2 * 8) * WIDTH + i / 4 * 8 + lane % 4 * 2;
        *reinterpret_cast<float2*>(to) = make_float2(total[i], total[i + 1]);
      }
      if (lane % 4 == 0) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          outputs.part_max[part + 8 * j] = state.top[j];
          outputs.part_sum[part + 8 * j] = state.sum[j];
        }
      }
    }
    named_barrier(1 + group, 128);  // before the next tile's queries take their place
  });
}

extern "C" __global__ void __launch_bounds__(COPIERS + ATTENDERS, 1) beam_attention_fp8(
    const bf16* query, const __grid_constant__ TensorMap keys, const __grid_constant__ TensorMap values,
    const float* key_scale, const float* value_scale, const int* lengths, const int* counts, bf16* out, float* part,
    float* part_max, float* part_sum, int batch, int beams, int padded_slots, int scale_bits) {
  extern __shared__ u8 dynamic[];
  Shared& s = *reinterpret_cast<Shared*>((reinterpret_cast<u64>(dynamic) + 1023) / 1024 * 1024);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      barrier_init(shared_address(&s.keys_full[stage]), 1);
      barrier_init(shared_address(&s.values_full[stage]), 1);
      barrier_init(shared_address(&s.empty[stage]), ATTENDERS / 32);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  const Work work{lengths, counts, batch};
  if (threadIdx.x < COPIERS) {
    registers_lower<24>();
    if (threadIdx.x == 0) copy(s, work, &keys, &values, padded_slots);
  } else {
    registers_raise<240>();
    attend(
        s, work, query, key_scale, value_scale, Outputs{out, part, part_max, part_sum}, beams, __int_as_float(scale_bits));
  }
}
