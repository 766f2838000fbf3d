// Grouped GEMM in fp8_block over rows sorted by expert, with gathered inputs and, where SWIGLU, the activation and the
// requantization to 1 x 128 blocks in its epilogue.
//
// Four warps copy, eight multiply. A tile is 128 sorted rows times 256 weight rows: with SWIGLU 128 of the gate and the
// matching 128 of up. Each of the two warp groups that multiply owns half of its columns, and computes one half of the
// rows after the other; while it adds a product of 128 values of K, scaled, to its float32 sums, the other group's
// product keeps the tensor cores busy. A half without rows is left out. A block of threads stays for many tiles, and the
// copies of the next one run ahead during an epilogue.
//
// Tried without gain on an H200: clusters that share weights (its two blocks wait for each other), fixed turns of the two
// groups. Of the time at 16,384 tokens the float32 additions take 18 %, the epilogue 15 %, copies none that shows.
//
// Compile-time: K, N (rows of one expert's weight; with SWIGLU twice the width), SWIGLU, GATHER, GROUP_M.

#include "../hopper.cuh"

#define BLOCK_M 128
#define BLOCK_K 128
#define STAGES 4
#define COPIERS 128
#define MULTIPLIERS 256
#define ROW_BYTES BLOCK_K
#define X_BYTES (BLOCK_M * ROW_BYTES)
#define BOX_ROWS 64
#define BOX_BYTES (BOX_ROWS * ROW_BYTES)
#define WEIGHT_BYTES (4 * BOX_BYTES)
#define STAGE_BYTES (X_BYTES + WEIGHT_BYTES)
#define K_BLOCKS (K / BLOCK_K)
#define WIDTH (SWIGLU ? N / 2 : N)
#define TILE_N (SWIGLU ? 128 : 256)
#define TILES ((WIDTH + TILE_N - 1) / TILE_N)
#define PATCH_BYTES 2048  // in which a warp brings its results in order

struct Shared {
  u8 stage[STAGES][STAGE_BYTES];
  u8 patch[MULTIPLIERS / 32][PATCH_BYTES];
  float x_scale[STAGES][BLOCK_M];
  float weight_scale[STAGES][2];
  float amax[2][BLOCK_M];
  u64 full[STAGES], empty[STAGES];
};

struct Place {
  int block, column;

  // Groups of blocks go over the columns together, so that each weight is read into the cache once.
  __device__ __forceinline__ Place(int tile, int blocks) {
    const int group = tile / (GROUP_M * TILES), first = group * GROUP_M;
    const int together = min(blocks - first, GROUP_M), within = tile - group * (GROUP_M * TILES);
    column = within / together * TILE_N;
    block = first + within % together;
  }
};

struct Rows {
  const u8* x;
  const float* x_scale;
  int x_scale_row_stride, x_scale_block_stride;
  const int* token;
  const int* expert_of_block;
};

// How many halves of a block's 128 rows hold any.
__device__ __forceinline__ int filled_halves(const Rows& rows, int first_row) {
  return (rows.token[first_row] >= 0) + (rows.token[first_row + BLOCK_M / 2] >= 0);
}

__device__ __forceinline__ void copy(
    Shared& s, const Rows& rows, const TensorMap* weight, const float* weight_scale, int blocks) {
  const int thread = threadIdx.x, chunk = thread & 7;
  int stage = 0;
  u32 parity = 1;
  for (int tile = blockIdx.x; tile < blocks * TILES; tile += gridDim.x) {
    const Place place(tile, blocks);
    const int expert = rows.expert_of_block[place.block];
    const int first_row = place.block * BLOCK_M, halves = filled_halves(rows, first_row);
    auto source = [&](int row) { return GATHER ? max(rows.token[first_row + row], 0) : first_row + row; };
    u32 offset[BLOCK_M / 16];
#pragma unroll
    for (int i = 0; i < BLOCK_M / 16; ++i) offset[i] = u32(source(thread / 8 + 16 * i)) * K + chunk * 16;
    const float* x_scale = rows.x_scale + size_t(source(thread)) * rows.x_scale_row_stride;
    const int second = SWIGLU ? WIDTH + place.column : min(place.column + 128, N - 128);
    const float* tile_scale =
        weight_scale + (size_t(expert) * (N / 128) + (thread ? second : place.column) / 128) * K_BLOCKS;
    for (int k = 0; k < K_BLOCKS; ++k) {
      barrier_wait(shared_address(&s.empty[stage]), parity);
      const u32 x_at = shared_address(s.stage[stage]), full = shared_address(&s.full[stage]);
      if (thread == 0) {
        barrier_expect(full, WEIGHT_BYTES);
#pragma unroll
        for (int box = 0; box < 4; ++box) {
          const int row = SWIGLU ? box % 2 * WIDTH + place.column + box / 2 * BOX_ROWS : place.column + box * BOX_ROWS;
          copy_box(x_at + X_BYTES + box * BOX_BYTES, weight, k * BLOCK_K, expert * N + row, full);
        }
      }
      const u8* x = rows.x + k * BLOCK_K;
      const u32 to = x_at + thread / 8 * ROW_BYTES + ((chunk ^ (thread / 8 & 7)) << 4);
#pragma unroll
      for (int i = 0; i < BLOCK_M / 16; ++i)
        if (i / (BLOCK_M / 32) < halves) copy_16_bytes(to + i * 16 * ROW_BYTES, x + offset[i]);
      copy_4_bytes(shared_address(&s.x_scale[stage][thread]), x_scale + k * rows.x_scale_block_stride);
      if (thread < 2) copy_4_bytes(shared_address(&s.weight_scale[stage][thread]), tile_scale + k);
      barrier_arrive_after_copies(full);
      if (++stage == STAGES) stage = 0, parity ^= 1;
    }
  }
}

// silu(gate) * up. By tanh, off by at most 2**-11 of gate * up / 2, an eighth of what E4M3 rounds away, in one instruction
// of the slow unit; the exponential and the reciprocal are two, for which the tensor cores wait.
__device__ __forceinline__ float swiglu(float gate, float up) {
  const float half = 0.5f * gate;
  return fmaf(half, tanh_fast(half), half) * up;
}

__device__ __forceinline__ void multiply(
    Shared& s, const Rows& rows, int blocks, u8* out, float* out_scale, int out_scale_row_stride,
    int out_scale_block_stride) {
  const int thread = threadIdx.x - COPIERS, group = thread / 128, warp = thread % 128 / 32, lane = thread % 32;
  const int row = warp * 16 + lane / 4;  // of 64; the thread also holds row + 8
  u8* patch = s.patch[thread / 32];
  int stage = 0;
  u32 parity = 0;
  auto halves_of = [&](int tile) {
    return tile < blocks * TILES ? filled_halves(rows, Place(tile, blocks).block * BLOCK_M) : 0;
  };
  int halves = halves_of(blockIdx.x);
  for (int tile = blockIdx.x; tile < blocks * TILES; tile += gridDim.x) {
    const Place place(tile, blocks);
    const int first_row = place.block * BLOCK_M;
    // A last tile of 128 columns is shared out by rows.
    const bool narrow = !SWIGLU && place.column + 128 >= N;
    const int columns = narrow ? 0 : group;
    auto mine = [&](int half) { return half < halves && (!narrow || half == group); };
    float sum[2][64];
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < 64; ++i) sum[half][i] = 0.0f;

    for (int k = 0; k < K_BLOCKS; ++k) {
      barrier_wait(shared_address(&s.full[stage]), parity);
      fence_for_wgmma();
      const u32 x_at = shared_address(s.stage[stage]);
      const u64 weight = swizzled_rows(x_at + X_BYTES + columns * (2 * BOX_BYTES));
      const float first_scale = s.weight_scale[stage][SWIGLU ? 0 : columns];
      const float second_scale = s.weight_scale[stage][SWIGLU ? 1 : columns];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (mine(half)) {
          const u64 x = swizzled_rows(x_at + half * BOX_BYTES);
          float product[64];
          wgmma_fence();
#pragma unroll
          for (int step = 0; step < BLOCK_K / 32; ++step) wgmma_64x128x32(product, x + 2 * step, weight + 2 * step, step);
          wgmma_commit();
          const float upper = s.x_scale[stage][half * 64 + row], lower = s.x_scale[stage][half * 64 + row + 8];
          const float scale[2][2] = {
              {upper * first_scale, lower * first_scale}, {upper * second_scale, lower * second_scale}};
          wgmma_wait<0>();
#pragma unroll
          for (int i = 0; i < 64; ++i) sum[half][i] += product[i] * scale[i / 32][i / 2 % 2];
        }
      }
      if (lane == 0) barrier_arrive(shared_address(&s.empty[stage]));
      if (++stage == STAGES) stage = 0, parity ^= 1;
    }

    const int next_halves = halves_of(tile + gridDim.x);  // asked for before the epilogue, which hides it
    if (SWIGLU) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (mine(half)) {
          float upper = 0.0f, lower = 0.0f;
#pragma unroll
          for (int i = 0; i < 32; i += 2) {
            sum[half][i] = swiglu(sum[half][i], sum[half][32 + i]);
            sum[half][i + 1] = swiglu(sum[half][i + 1], sum[half][33 + i]);
            float& amax = i / 2 % 2 ? lower : upper;
            amax = max_nan(amax, max_nan(fabsf(sum[half][i]), fabsf(sum[half][i + 1])));
          }
#pragma unroll
          for (int step = 1; step < 4; step *= 2) {
            upper = max_nan(upper, __shfl_xor_sync(~0u, upper, step));
            lower = max_nan(lower, __shfl_xor_sync(~0u, lower, step));
          }
          if (lane % 4 == 0) {
            s.amax[group][half * 64 + row] = upper;
            s.amax[group][half * 64 + row + 8] = lower;
          }
        }
      }
      named_barrier(1, MULTIPLIERS);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (mine(half)) {
        const size_t warp_row = first_row + half * 64 + warp * 16;
        if (SWIGLU) {
          float inverse[2];
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const int at = half * 64 + row + 8 * j;
            const float amax = max_nan(max_nan(s.amax[0][at], s.amax[1][at]), 1e-12f);
            inverse[j] = __fdividef(448.0f, amax);
            if (group == 0 && lane % 4 == 0)
              out_scale[(warp_row + lane / 4 + 8 * j) * out_scale_row_stride +
                        size_t(place.column / 128) * out_scale_block_stride] = amax / 448.0f;
          }
          // 16 rows of 64 codes.
#pragma unroll
          for (int i = 0; i < 32; i += 2) {
            const int j = i / 2 % 2, to_row = lane / 4 + 8 * j, chunk = i / 8 ^ (to_row / 2 & 3);
            const u16 codes = to_e4m3_pair(sum[half][i] * inverse[j], sum[half][i + 1] * inverse[j]);
            *reinterpret_cast<u16*>(patch + to_row * 64 + chunk * 16 + i / 4 % 2 * 8 + lane % 4 * 2) = codes;
          }
          __syncwarp();
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int from_row = i * 8 + lane / 4, chunk = lane % 4;
            const uint4 line = *reinterpret_cast<uint4*>(patch + from_row * 64 + (chunk ^ (from_row / 2 & 3)) * 16);
            u8* to = out + (warp_row + from_row) * WIDTH + place.column + group * 64 + chunk * 16;
            *reinterpret_cast<uint4*>(to) = line;
          }
          __syncwarp();
        } else {
          // Twice 16 rows of 64 columns in bfloat16.
#pragma unroll
          for (int part = 0; part < 2; ++part) {
#pragma unroll
            for (int i = 0; i < 32; i += 2) {
              const int j = i / 2 % 2, to_row = lane / 4 + 8 * j, chunk = i / 4 ^ (to_row & 7);
              const u32 pair = to_bfloat16_pair(sum[half][part * 32 + i], sum[half][part * 32 + i + 1]);
              *reinterpret_cast<u32*>(patch + to_row * 128 + chunk * 16 + lane % 4 * 4) = pair;
            }
            __syncwarp();
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const int from_row = i * 4 + lane / 8, chunk = lane % 8;
              const uint4 line = *reinterpret_cast<uint4*>(patch + from_row * 128 + (chunk ^ (from_row & 7)) * 16);
              u8* to = out + ((warp_row + from_row) * N + place.column + columns * 128 + part * 64 + chunk * 8) * 2;
              *reinterpret_cast<uint4*>(to) = line;
            }
            __syncwarp();
          }
        }
      }
    }
    halves = next_halves;
  }
}

extern "C" __global__ void __launch_bounds__(COPIERS + MULTIPLIERS, 1) grouped_linear(
    const u8* x, const float* x_scale, int x_scale_row_stride, int x_scale_block_stride,
    const __grid_constant__ TensorMap weight, const float* weight_scale, const int* row_token,
    const int* expert_of_block, const int* block_count, u8* out, float* out_scale, int out_scale_row_stride,
    int out_scale_block_stride) {
  extern __shared__ u8 dynamic[];
  Shared& s = *reinterpret_cast<Shared*>((reinterpret_cast<u64>(dynamic) + 1023) / 1024 * 1024);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      barrier_init(shared_address(&s.full[stage]), COPIERS + 1);
      barrier_init(shared_address(&s.empty[stage]), MULTIPLIERS / 32);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  const Rows rows{x, x_scale, x_scale_row_stride, x_scale_block_stride, row_token, expert_of_block};
  const int blocks = *block_count;
  if (threadIdx.x < COPIERS) {
    registers_lower<40>();
    copy(s, rows, &weight, weight_scale, blocks);
  } else {
    registers_raise<232>();
    multiply(s, rows, blocks, out, out_scale, out_scale_row_stride, out_scale_block_stride);
  }
}
