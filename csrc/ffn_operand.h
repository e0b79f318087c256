// The tokens of the expert FFN as its kernels multiply them: in which format, and in which order.
//
// None of ffn_*.h includes a C++ library, see attention_micro.h.
#pragma once
#include "ffn.h"

namespace mol {
namespace {  // a copy for each instruction set

constexpr int smaller(int64_t a, int64_t b) { return static_cast<int>(a < b ? a : b); }

}  // namespace

// How weights meet tokens. Weights are taken in steps of kStep columns: as two vectors in fp32, in load_pair's order,
template <class Vec, class W, bool kDots16Bit = Vec::template kHasDot16Bit<W>>
struct Operand {
  using V = typename Vec::V;
  using X = float;  // a token's element
  static constexpr int kStep = 2 * Vec::kLanes;
  static constexpr int kMaxTokensRowByRow = 2;
  struct Part {
    V a, b;
  };
  static Part load(const W* weights) {
    Part part;
    Vec::load_pair(weights, part.a, part.b);
    return part;
  }
  static Part load(const W* weights, int num_columns) {
    Part part;
    Vec::load_part(weights, num_columns, part.a, part.b);
    return part;
  }
  static Part load_token(const X* token) {
    V a = Vec::load(token), b = Vec::load(token + Vec::kLanes);
    Vec::keep_in_register(a);
    Vec::keep_in_register(b);
    return {a, b};
  }
  static V add_dot(V sum, const Part& a, const Part& b) { return Vec::fma(a.b, b.b, Vec::fma(a.a, b.a, sum)); }
  // The same in two sums, so that one addition need not wait for the other.
  static void add_dot(V& sum0, V& sum1, const Part& a, const Part& b) {
    sum0 = Vec::fma(a.a, b.a, sum0);
    sum1 = Vec::fma(a.b, b.b, sum1);
  }
  static void pack(const W* source, int num_columns, X* target) {
    const Part part = num_columns == kStep ? load(source) : load(source, num_columns);
    Vec::store(target, part.a);
    Vec::store(target + Vec::kLanes, part.b);
  }
};
// or as they are, where 16-bit elements have a dot product of their own.
template <class Vec, class W>
struct Operand<Vec, W, true> {
  using V = typename Vec::V;
  using X = uint16_t;
  static constexpr int kStep = 2 * Vec::kLanes;
  static constexpr int kMaxTokensRowByRow = 4;
  using Part = typename Vec::Bits;
  static Part load(const W* weights) { return Vec::load_bits(&weights->bits, kStep); }
  static Part load(const W* weights, int num_columns) { return Vec::load_bits(&weights->bits, num_columns); }
  static Part load_token(const X* token) {
    Part part = Vec::load_bits(token, kStep);
    Vec::keep_in_register(part);
    return part;
  }
  static V add_dot(V sum, const Part& a, const Part& b) { return Vec::dot(sum, a, b); }
  static void add_dot(V& sum0, V&, const Part& a, const Part& b) { sum0 = Vec::dot(sum0, a, b); }
  static void pack(const W* source, int num_columns, X* target) {
    if (num_columns < kStep) __builtin_memset(target, 0, kStep * sizeof(X));
    __builtin_memcpy(target, source, num_columns * sizeof(X));
  }
};

// The operands of a block: [chunks of columns, groups of tokens, steps, tokens of the group, kStep], so that a tile
// reads one run of memory.
template <class Vec, class W>
struct FfnTokens {
  using Op = Operand<Vec, W>;
  using X = typename Op::X;
  static constexpr int kStep = Op::kStep, kSums = Vec::kSums;
  // Up to so many tokens whole rows of weights are taken one after the other: one stream of addresses, the fastest to
  // read. More tokens need more work per load than one row gives.
  static constexpr int kMaxTokensRowByRow = kSums < Op::kMaxTokensRowByRow ? kSums : Op::kMaxTokensRowByRow;
  static constexpr int kRowsPerTile = 2;
  static constexpr int kMaxTokensPerTile = kSums < kRowsPerTile ? 1 : kSums / kRowsPerTile;
  // Of tokens and weights that share L1 (32 KB and more), the tokens' part.
  static constexpr int kTokenBytes = 32 << 10;

  X* first;
  int num_tokens;
  int64_t num_columns;
  bool row_by_row;
  int num_groups;
  int64_t chunk;  // columns

  FfnTokens(X* first_, int num_tokens_, int64_t num_columns_)
      : first(first_), num_tokens(num_tokens_), num_columns(num_columns_) {
    row_by_row = kSums < 2 * kRowsPerTile || num_tokens <= kMaxTokensRowByRow;
    const int most = row_by_row ? kMaxTokensRowByRow : kMaxTokensPerTile;
    num_groups = (num_tokens + most - 1) / most;
    // Two groups of four are faster than one of eight: less to reduce while memory waits, and a longer way ahead.
    if (!row_by_row && num_tokens > 6 && num_groups == 1) num_groups = 2;
    chunk = kTokenBytes / static_cast<int64_t>(sizeof(X)) / kMaxBlockTokens / kStep * kStep;
    const int64_t all_columns = padded(num_columns);
    if (row_by_row && all_columns * num_tokens * static_cast<int64_t>(sizeof(X)) <= kTokenBytes) chunk = all_columns;
  }

  static int64_t padded(int64_t num_columns) { return (num_columns + kStep - 1) / kStep * kStep; }
  int group_begin(int group) const {
    return group * (num_tokens / num_groups) + smaller(group, num_tokens % num_groups);
  }
  int64_t chunk_columns(int64_t begin) const { return smaller(chunk, num_columns - begin); }
  const X* group_tokens(int64_t chunk_begin, int group) const {
    return first + chunk_begin * num_tokens + group_begin(group) * padded(chunk_columns(chunk_begin));
  }

  // Calls body(column, target) for the steps of a token's columns [begin, end); begin is a multiple of kStep.
  template <class Body>
  void for_steps(int token, int64_t begin, int64_t end, Body body) const {
    int group = num_groups - 1;
    while (group_begin(group) > token) --group;
    const int tokens_in_group = group_begin(group + 1) - group_begin(group);
    while (begin < end) {
      const int64_t chunk_begin = begin / chunk * chunk;
      X* steps = const_cast<X*>(group_tokens(chunk_begin, group)) + (token - group_begin(group)) * kStep;
      for (; begin < end && begin < chunk_begin + chunk; begin += kStep) {
        body(begin, steps + (begin - chunk_begin) * tokens_in_group);
      }
    }
  }
};

}  // namespace mol
