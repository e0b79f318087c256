// mol_attention: checks the task, appends the new keys and values, then attends. Decides what runs where (instruction
// set, threads); the pieces of work are attention_plan.cpp's, their arithmetic attention_kernel.h's.
#include <string.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <new>
#include <vector>

#include "attention_task.h"
#include "pool.h"
#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace mol {
namespace {

// ---------------------------------------------------------------- instruction sets

// A bit for each MOL_ISA_* that can run. The CPU must have the instructions and the OS must save the registers (XCR0);
// a hypervisor may offer one alone.
uint32_t find_isas() {
  uint32_t isas = 1u << MOL_ISA_SCALAR;
#if defined(__x86_64__)
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return isas;
  const unsigned needed1 = bit_OSXSAVE | bit_AVX | bit_FMA | bit_F16C;
  if ((ecx & needed1) != needed1) return isas;
  unsigned xcr0, xcr0_high;
  __asm__("xgetbv" : "=a"(xcr0), "=d"(xcr0_high) : "c"(0));
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return isas;
  const unsigned num_subleaves = eax;

  const unsigned ymm_state = 0x06, zmm_state = 0xe6;  // SSE + AVX; and opmask + ZMM_Hi256 + Hi16_ZMM
  if ((xcr0 & ymm_state) != ymm_state || !(ebx & bit_AVX2)) return isas;
  if (MOL_HAVE_AVX2) isas |= 1u << MOL_ISA_AVX2;
  const unsigned needed512 = bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ;
  if ((xcr0 & zmm_state) != zmm_state || (ebx & needed512) != needed512) return isas;
  if (MOL_HAVE_AVX512) isas |= 1u << MOL_ISA_AVX512;
  if (MOL_HAVE_AVX512VNNI && (ecx & bit_AVX512VNNI)) isas |= 1u << MOL_ISA_AVX512VNNI;
  const bool has_vbmi = ecx & bit_AVX512VBMI;
  if (num_subleaves < 1 || !__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx)) return isas;
  if (MOL_HAVE_AVX512BF16 && (eax & bit_AVX512BF16) && has_vbmi) isas |= 1u << MOL_ISA_AVX512BF16;
#endif
  return isas;
}

// VDPBF16PS as fast as an FMA: every AMD CPU that has it. Intel's run it at half the rate.
bool has_fast_bfloat16() {
#if defined(__x86_64__)
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid(0, &eax, &ebx, &ecx, &edx) && ebx == signature_AMD_ebx && ecx == signature_AMD_ecx &&
         edx == signature_AMD_edx;
#else
  return false;
#endif
}

int32_t find_best_isa(int32_t cache_dtype) {
  if (cache_dtype == MOL_INT8 && mol_isa_available(MOL_ISA_AVX512VNNI)) return MOL_ISA_AVX512VNNI;
  const bool is_made_bfloat16 = cache_dtype == MOL_BFLOAT16 || cache_dtype == MOL_FP8_E4M3;
  if (is_made_bfloat16 && mol_isa_available(MOL_ISA_AVX512BF16) && has_fast_bfloat16()) {
    return MOL_ISA_AVX512BF16;
  }
  if (mol_isa_available(MOL_ISA_AVX512)) return MOL_ISA_AVX512;
  return mol_isa_available(MOL_ISA_AVX2) ? MOL_ISA_AVX2 : MOL_ISA_SCALAR;
}

// Empty: not available here. AUTO never means scalar: a kernel that much slower must be asked for by name.
AttentionKernel kernel_for(const mol_attention_task& task) {
  if (!mol_isa_available(task.isa)) return {};
  switch (task.isa == MOL_ISA_AUTO ? mol_best_isa(task.cache_dtype) : task.isa) {
    case MOL_ISA_SCALAR:
      return attention_kernel_scalar(task);
    case MOL_ISA_AVX2:
      return attention_kernel_avx2(task);
    case MOL_ISA_AVX512:
      return attention_kernel_avx512(task);
    case MOL_ISA_AVX512BF16:
      return attention_kernel_avx512bf16(task);
    default:
      return attention_kernel_avx512vnni(task);
  }
}

// ---------------------------------------------------------------- running it

void append(const mol_attention_task& task) {
  // About 64 KB a piece: a decode step's few tokens are not worth waking a thread for.
  const int64_t token_bytes = 2 * static_cast<int64_t>(task.num_kv_heads) * task.head_dim * 4;
  const int64_t tokens_per_piece = std::max<int64_t>(1, 131072 / token_bytes);
  auto append_piece = [&](int64_t piece) {
    const int64_t begin = piece * tokens_per_piece;
    append_tokens(task, begin, std::min<int64_t>(task.num_tokens, begin + tokens_per_piece));
  };
  run_pieces(task.pool, (task.num_tokens + tokens_per_piece - 1) / tokens_per_piece, append_piece);
}

// Query tokens without any context (padding of a batch) get zeros.
void clear_output(const mol_attention_task& task, int32_t seq) {
  const int64_t element_bytes = task.dtype == MOL_FLOAT32 ? 4 : 2;
  for (int64_t token = task.query_start[seq]; token < task.query_start[seq + 1]; ++token) {
    memset(static_cast<char*>(task.output) + token * task.output_token_stride * element_bytes, 0,
           task.num_heads * task.head_dim * element_bytes);
    if (task.log_sum_exp == nullptr) continue;
    std::fill_n(task.log_sum_exp + token * task.num_heads, task.num_heads, -INFINITY);
  }
}

int32_t attend(const mol_attention_task& task, const AttentionKernel& kernel) {
  for (int32_t seq = 0; seq < task.num_seqs; ++seq) {
    if (task.seq_lens[seq] == 0) clear_output(task, seq);
  }
  const int num_threads = task.pool == nullptr ? 1 : task.pool->num_threads();
  const AttentionPlan plan = plan_attention(task, num_threads);
  std::vector<float> partials(plan.num_partial_floats);
  std::atomic<bool> lacks_memory{false};
  const int64_t num_pieces = static_cast<int64_t>(plan.pieces.size());
  auto attend_piece = [&](int64_t index) {
    Scratch* scratch = own_scratch<Scratch>();
    if (scratch == nullptr) {
      lacks_memory = true;
      return;
    }
    // While all threads are alike, each takes every num_threads-th piece.
    const Piece* next = index + num_threads < num_pieces ? &plan.pieces[index + num_threads] : nullptr;
    kernel.attend(task, plan.pieces[index], next, *scratch, partials.data());
  };
  run_pieces(task.pool, num_pieces, attend_piece);
  // This thread may have come to no piece, and joins now.
  if (lacks_memory || own_scratch<Scratch>() == nullptr) return MOL_ERROR_OUT_OF_MEMORY;
  for (const Join& join : plan.joins) kernel.join(task, join, *own_scratch<Scratch>(), partials.data());
  return MOL_OK;
}

}  // namespace
}  // namespace mol

int32_t mol_best_isa(int32_t cache_dtype) {
  static const std::array<int32_t, MOL_FP8_E4M3 + 1> isas = [] {
    std::array<int32_t, MOL_FP8_E4M3 + 1> found;
    for (int32_t dtype = 0; dtype <= MOL_FP8_E4M3; ++dtype) found[dtype] = mol::find_best_isa(dtype);
    return found;
  }();
  return cache_dtype >= 0 && cache_dtype <= MOL_FP8_E4M3 ? isas[cache_dtype] : MOL_ISA_SCALAR;
}

int32_t mol_isa_available(int32_t isa) {
  static const uint32_t isas = mol::find_isas();
  if (isa == MOL_ISA_AUTO) return mol_best_isa(MOL_FLOAT32) > MOL_ISA_SCALAR;
  return isa > MOL_ISA_AUTO && isa <= MOL_ISA_AVX512VNNI && (isas >> isa & 1);
}

int32_t mol_attention(const void* argument) {
  if (argument == nullptr) return MOL_ERROR_BAD_ARGUMENT;
  const mol_attention_task& task = *static_cast<const mol_attention_task*>(argument);
  // All checks come before the first write: a refused task leaves cache and output as they were.
  if (!mol::is_valid(task)) return MOL_ERROR_BAD_ARGUMENT;
  const mol::AttentionKernel kernel = mol::kernel_for(task);
  if (task.attend && kernel.attend == nullptr) return MOL_ERROR_UNSUPPORTED_ISA;
  try {
    if (task.num_tokens == 0) return MOL_OK;
    if (task.append) mol::append(task);
    return task.attend ? mol::attend(task, kernel) : MOL_OK;  // append ended in a barrier
  } catch (const std::bad_alloc&) {
    return MOL_ERROR_OUT_OF_MEMORY;
  }
}
