// mol_attention: checks the task, appends the new keys and values, then attends. Decides what runs where (instruction
// set, tiles, order of work); the arithmetic of a tile is attention_kernel.h.
#include "attention.h"

#include <string.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <new>
#include <numeric>
#include <vector>

#include "pool.h"
#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace mol {
namespace {

// ---------------------------------------------------------------- instruction sets

// The CPU must have the instructions and the OS must save the registers (XCR0); a hypervisor may offer one alone.
int32_t find_best_isa() {
#if defined(__x86_64__)
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return MOL_ISA_SCALAR;
  const unsigned needed1 = bit_OSXSAVE | bit_AVX | bit_FMA | bit_F16C;
  if ((ecx & needed1) != needed1) return MOL_ISA_SCALAR;
  unsigned xcr0, xcr0_high;
  __asm__("xgetbv" : "=a"(xcr0), "=d"(xcr0_high) : "c"(0));
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return MOL_ISA_SCALAR;

  const unsigned ymm_state = 0x06, zmm_state = 0xe6;  // SSE + AVX; and opmask + ZMM_Hi256 + Hi16_ZMM
  const unsigned needed512 = bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ;
  if ((xcr0 & zmm_state) == zmm_state && (ebx & needed512) == needed512 && attend_tile_avx512(MOL_FLOAT32)) {
    return MOL_ISA_AVX512;
  }
  if ((xcr0 & ymm_state) == ymm_state && (ebx & bit_AVX2) && attend_tile_avx2(MOL_FLOAT32)) return MOL_ISA_AVX2;
#endif
  return MOL_ISA_SCALAR;
}

// nullptr: not available here. AUTO never means scalar: a kernel that much slower must be asked for by name.
AttendTile kernel_for(int32_t isa, int32_t dtype) {
  if (isa == MOL_ISA_AUTO) isa = std::max<int32_t>(mol_best_isa(), MOL_ISA_AVX2);
  if (!mol_isa_available(isa)) return nullptr;
  switch (isa) {
    case MOL_ISA_SCALAR:
      return attend_tile_scalar(dtype);
    case MOL_ISA_AVX2:
      return attend_tile_avx2(dtype);
    default:
      return attend_tile_avx512(dtype);
  }
}

// ---------------------------------------------------------------- argument checks

bool has_valid_scalars(const mol_attention_task& task) {
  if (task.kv_cache == nullptr || task.num_blocks < 1 || task.block_size < 1) return false;
  if (task.num_tokens < 0 || task.num_seqs < 0) return false;
  if (task.num_kv_heads < 1 || task.num_heads < 1 || task.num_heads % task.num_kv_heads != 0) return false;
  if (task.head_dim < 8 || task.head_dim > kMaxHeadDim || task.head_dim % 8 != 0) return false;
  if (task.dtype < MOL_FLOAT32 || task.dtype > MOL_FLOAT16) return false;
  if (task.isa < MOL_ISA_AUTO || task.isa > MOL_ISA_AVX512) return false;
  if (task.sliding_window < 0 || !std::isfinite(task.scale)) return false;
  return std::isfinite(task.soft_cap) && task.soft_cap >= 0.0f;
}

bool has_valid_append(const mol_attention_task& task) {
  if (task.num_tokens == 0) return true;  // tensors without elements come as null pointers
  const int64_t row = static_cast<int64_t>(task.num_kv_heads) * task.head_dim;
  if (task.key == nullptr || task.value == nullptr || task.slot_mapping == nullptr) return false;
  if (task.key_token_stride < row || task.value_token_stride < row) return false;
  const int64_t num_slots = task.num_blocks * task.block_size;
  return std::all_of(task.slot_mapping, task.slot_mapping + task.num_tokens,
                     [=](int64_t slot) { return slot < num_slots; });
}

// Every block that some query reads must exist. Blocks before the window are not read: a cache may have freed them.
bool has_valid_blocks(const mol_attention_task& task, int32_t seq, int32_t query_len) {
  const int64_t seq_len = task.seq_lens[seq];
  int64_t begin = 0;
  if (task.sliding_window > 0) begin = std::max<int64_t>(0, seq_len - query_len + 1 - task.sliding_window);
  const int64_t end_block = (seq_len + task.block_size - 1) / task.block_size;
  if (end_block > task.block_table_stride) return false;
  const int32_t* blocks = task.block_table + seq * task.block_table_stride;
  return std::all_of(blocks + begin / task.block_size, blocks + end_block,
                     [&](int32_t block) { return block >= 0 && block < task.num_blocks; });
}

bool has_valid_attend(const mol_attention_task& task) {
  if (task.num_tokens == 0) return true;
  const int64_t row = static_cast<int64_t>(task.num_heads) * task.head_dim;
  if (task.query == nullptr || task.output == nullptr || task.query_start == nullptr) return false;
  if (task.query_token_stride < row || task.output_token_stride < row) return false;
  if (task.num_seqs > 0 && (task.block_table == nullptr || task.seq_lens == nullptr)) return false;
  if (task.query_start[0] < 0 || task.query_start[task.num_seqs] > task.num_tokens) return false;
  for (int32_t seq = 0; seq < task.num_seqs; ++seq) {
    const int32_t query_len = task.query_start[seq + 1] - task.query_start[seq];
    const int32_t seq_len = task.seq_lens[seq];
    if (query_len < 0 || seq_len < 0) return false;
    if (query_len == 0 || seq_len == 0) continue;
    if (seq_len < query_len || !has_valid_blocks(task, seq, query_len)) return false;
  }
  return true;
}

// ---------------------------------------------------------------- append

int64_t element_size(const mol_attention_task& task) { return task.dtype == MOL_FLOAT32 ? 4 : 2; }

void append_token(const mol_attention_task& task, int64_t token) {
  const int64_t slot = task.slot_mapping[token];
  if (slot < 0) return;
  const int64_t row_bytes = task.head_dim * element_size(task);
  const int64_t block_bytes = task.block_size * row_bytes;
  const char* key = static_cast<const char*>(task.key) + token * task.key_token_stride * element_size(task);
  const char* value = static_cast<const char*>(task.value) + token * task.value_token_stride * element_size(task);
  char* target = static_cast<char*>(task.kv_cache) + slot / task.block_size * task.num_kv_heads * 2 * block_bytes +
                 slot % task.block_size * row_bytes;
  for (int32_t head = 0; head < task.num_kv_heads; ++head) {
    memcpy(target, key + head * row_bytes, row_bytes);
    memcpy(target + block_bytes, value + head * row_bytes, row_bytes);
    target += 2 * block_bytes;
  }
}

// ---------------------------------------------------------------- tiles

// Query tokens without any context (padding of a batch) get zeros.
void clear_output(const mol_attention_task& task, int32_t seq) {
  for (int64_t token = task.query_start[seq]; token < task.query_start[seq + 1]; ++token) {
    memset(static_cast<char*>(task.output) + token * task.output_token_stride * element_size(task), 0,
           task.num_heads * task.head_dim * element_size(task));
  }
}

// Cuts one sequence into tiles, the last tokens first: they see most keys, and long pieces of work should start early.
void add_tiles(const mol_attention_task& task, int32_t seq, std::vector<Tile>& tiles) {
  const int32_t begin = task.query_start[seq], end = task.query_start[seq + 1];
  const int32_t group = task.num_heads / task.num_kv_heads;
  const int32_t heads_per_tile = std::min(group, kMaxTileRows);
  const int32_t tokens_per_tile = kMaxTileRows / heads_per_tile;
  for (int32_t tile_end = end; tile_end > begin; tile_end -= tokens_per_tile) {
    const int32_t first_token = std::max(begin, tile_end - tokens_per_tile);
    for (int32_t kv_head = 0; kv_head < task.num_kv_heads; ++kv_head) {
      for (int32_t head = 0; head < group; head += heads_per_tile) {
        tiles.push_back({seq, kv_head, kv_head * group + head, std::min(heads_per_tile, group - head), first_token,
                         tile_end - first_token});
      }
    }
  }
}

std::vector<Tile> make_tiles(const mol_attention_task& task) {
  std::vector<int32_t> seqs(task.num_seqs);
  std::iota(seqs.begin(), seqs.end(), 0);
  const auto cost = [&](int32_t seq) {
    return static_cast<int64_t>(task.query_start[seq + 1] - task.query_start[seq]) * task.seq_lens[seq];
  };
  std::stable_sort(seqs.begin(), seqs.end(), [&](int32_t a, int32_t b) { return cost(a) > cost(b); });
  std::vector<Tile> tiles;
  for (int32_t seq : seqs) {
    if (cost(seq) == 0) break;
    add_tiles(task, seq, tiles);
  }
  return tiles;
}

// ---------------------------------------------------------------- running it

// Made at a thread's first tile, so that its pages lie near the thread's core; nullptr if there is no memory.
Scratch* own_scratch() {
  thread_local std::unique_ptr<Scratch> scratch;
  if (!scratch) scratch.reset(new (std::nothrow) Scratch);
  return scratch.get();
}

template <class Body>
void run_pieces(mol_pool* pool, int64_t num_pieces, Body& body) {
  if (pool == nullptr) {
    for (int64_t piece = 0; piece < num_pieces; ++piece) body(piece);
  } else {
    pool->run(num_pieces, [](void* context, int64_t piece) { (*static_cast<Body*>(context))(piece); }, &body);
  }
}

void append(const mol_attention_task& task) {
  // About 64 KB a piece: a decode step's few tokens are not worth waking a thread for.
  const int64_t token_bytes = 2 * static_cast<int64_t>(task.num_kv_heads) * task.head_dim * element_size(task);
  const int64_t tokens_per_piece = std::max<int64_t>(1, 65536 / token_bytes);
  auto append_piece = [&](int64_t piece) {
    const int64_t end = std::min<int64_t>(task.num_tokens, (piece + 1) * tokens_per_piece);
    for (int64_t token = piece * tokens_per_piece; token < end; ++token) append_token(task, token);
  };
  run_pieces(task.pool, (task.num_tokens + tokens_per_piece - 1) / tokens_per_piece, append_piece);
}

int32_t attend(const mol_attention_task& task, AttendTile attend_tile) {
  for (int32_t seq = 0; seq < task.num_seqs; ++seq) {
    if (task.seq_lens[seq] == 0) clear_output(task, seq);
  }
  const std::vector<Tile> tiles = make_tiles(task);
  std::atomic<bool> lacks_memory{false};
  auto attend_piece = [&](int64_t piece) {
    Scratch* scratch = own_scratch();
    if (scratch == nullptr) {
      lacks_memory = true;
    } else {
      attend_tile(task, tiles[piece], *scratch);
    }
  };
  run_pieces(task.pool, static_cast<int64_t>(tiles.size()), attend_piece);
  return lacks_memory ? MOL_ERROR_OUT_OF_MEMORY : MOL_OK;
}

}  // namespace
}  // namespace mol

int32_t mol_best_isa(void) {
  static const int32_t isa = mol::find_best_isa();
  return isa;
}

int32_t mol_isa_available(int32_t isa) {
  switch (isa) {
    case MOL_ISA_AUTO:
      return mol_best_isa() > MOL_ISA_SCALAR;
    case MOL_ISA_SCALAR:
      return 1;
    case MOL_ISA_AVX2:  // every CPU with AVX-512 has it
      return mol_best_isa() >= MOL_ISA_AVX2 && mol::attend_tile_avx2(MOL_FLOAT32) != nullptr;
    case MOL_ISA_AVX512:
      return mol_best_isa() >= MOL_ISA_AVX512;
    default:
      return 0;
  }
}

int32_t mol_attention(const void* argument) {
  if (argument == nullptr) return MOL_ERROR_BAD_ARGUMENT;
  const mol_attention_task& task = *static_cast<const mol_attention_task*>(argument);
  // All checks come before the first write: a refused task leaves cache and output as they were.
  if (!mol::has_valid_scalars(task)) return MOL_ERROR_BAD_ARGUMENT;
  if (task.append && !mol::has_valid_append(task)) return MOL_ERROR_BAD_ARGUMENT;
  if (task.attend && !mol::has_valid_attend(task)) return MOL_ERROR_BAD_ARGUMENT;
  const mol::AttendTile attend_tile = mol::kernel_for(task.isa, task.dtype);
  if (task.attend && attend_tile == nullptr) return MOL_ERROR_UNSUPPORTED_ISA;
  try {
    if (task.num_tokens == 0) return MOL_OK;
    if (task.append) mol::append(task);
    return task.attend ? mol::attend(task, attend_tile) : MOL_OK;  // append ended in a barrier
  } catch (const std::bad_alloc&) {
    return MOL_ERROR_OUT_OF_MEMORY;
  }
}
