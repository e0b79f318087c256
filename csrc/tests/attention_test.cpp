// mol_attention on one instruction set (the argument) against double precision: decode, prefill, chunks, windows,
// sinks, soft caps, groups of heads, block sizes, head lengths, all types, long contexts cut up for several threads.
#include "attention_batch.h"

namespace {

constexpr int32_t kDtypes[] = {MOL_FLOAT32, MOL_BFLOAT16, MOL_FLOAT16};
constexpr int32_t kBlockSizes[] = {1, 7, 16, 48, 128};
constexpr int32_t kHeadDims[] = {8, 80, 128, 256};
constexpr int32_t kHeads[][2] = {{2, 2}, {4, 2}, {3, 1}, {8, 1}};  // query heads, key/value heads
constexpr int32_t kWindows[] = {0, 5, 33, INT32_MAX};

void announce_case(const char* test, const Case& c) {
  announce("in %s: dtype %d, cache %d, head_dim %d, block_size %d, heads %d/%d, window %d, cap %g, sinks %d", test,
           c.dtype, c.cache_dtype, c.head_dim, c.block_size, c.num_heads, c.num_kv_heads, c.sliding_window, c.soft_cap,
           c.has_sinks);
}

// Each type meets each block size with each head length; windows, groups, caps and sinks take turns.
void everything_at_once(int32_t isa, mol_pool* pool) {
  int turn = 0;
  for (const int32_t dtype : kDtypes) {
    for (const int32_t cache_dtype : {dtype, int32_t{MOL_INT8}, int32_t{MOL_FP8_E4M3}}) {
      for (const int32_t block_size : kBlockSizes) {
        for (const int32_t head_dim : kHeadDims) {
          Case c;
          c.dtype = dtype, c.cache_dtype = cache_dtype, c.block_size = block_size, c.head_dim = head_dim;
          c.num_heads = kHeads[turn % 4][0], c.num_kv_heads = kHeads[turn % 4][1];
          c.sliding_window = kWindows[(turn + turn / 4) % 4];
          c.soft_cap = turn % 3 == 1 ? 1.5f : 0.0f;
          c.has_sinks = turn % 5 < 2;
          c.seqs = {{1, 1}, {67, 1}, {0, 2}, {41, 6}, {5, 5}};
          announce_case("everything_at_once", c);
          Batch(c, turn).check(isa, turn % 2 ? pool : nullptr);
          ++turn;
        }
      }
    }
  }
}

// More rows than a piece takes, so that K and V are widened first; more heads in a group than a piece takes.
void many_rows(int32_t isa, mol_pool* pool) {
  for (const int32_t dtype : kDtypes) {
    for (const int32_t cache_dtype : {dtype, int32_t{MOL_INT8}, int32_t{MOL_FP8_E4M3}}) {
      for (const int32_t num_heads : {4, 70}) {
        Case c;
        c.dtype = dtype, c.cache_dtype = cache_dtype, c.head_dim = 40, c.block_size = 48, c.num_heads = num_heads;
        if (num_heads == 70) c.seqs = {{50, 1}, {9, 3}};
        if (num_heads == 4) c.seqs = {{100, 40}, {35, 35}}, c.sliding_window = 20;
        announce_case("many_rows", c);
        Batch(c).check(isa, pool);
      }
    }
  }
}

// Contexts of several segments: each number of threads makes the same bits.
void long_contexts(int32_t isa) {
  for (const int32_t cache_dtype : {MOL_FLOAT32, MOL_BFLOAT16, MOL_INT8, MOL_FP8_E4M3}) {
    Case c;
    c.dtype = cache_dtype == MOL_FLOAT32 ? MOL_FLOAT32 : MOL_BFLOAT16, c.cache_dtype = cache_dtype;
    c.head_dim = cache_dtype == MOL_BFLOAT16 ? 128 : 24, c.block_size = cache_dtype == MOL_INT8 ? 7 : 48;
    c.has_sinks = true;
    c.seqs = {{5000, 1}, {2500, 1}};
    announce_case("long_contexts", c);
    Batch alone(c);
    alone.check(isa, nullptr);
    for (const int32_t num_threads : {1, 3, 7}) {
      mol_pool* pool = mol_pool_create(num_threads, nullptr, 0, nullptr);
      CHECK(pool != nullptr);
      Batch batch(c);
      batch.check(isa, pool);
      CHECK(batch.same_results(alone));
      mol_pool_destroy(pool);
    }
  }
}

}  // namespace

int main(int num_arguments, char** arguments) {
  const int32_t isa = isa_from_arguments(num_arguments, arguments);
  mol_pool* pool = mol_pool_create(3, nullptr, 0, nullptr);
  CHECK(pool != nullptr);
  everything_at_once(isa, pool);
  many_rows(isa, pool);
  mol_pool_destroy(pool);
  long_contexts(isa);
  std::puts("attention_test: all checks hold");
  return 0;
}
