// A few tokens times rows of weights that come from memory, each weight once.
//
// Everything here serves two ends: the weights are read in long runs, with the next ones on their way; and the tokens,
// which every row of weights needs, stay in L1. Where they don't fit, the columns are taken in chunks.
#pragma once
#include "ffn_operand.h"

namespace mol {

template <class W>
struct FfnRows {
  const W* first;
  int64_t stride;
  int num_rows;
};

// Bytes of weights between those that are multiplied and those that are fetched: what memory can have on its way. Where
// several groups of tokens take turns with the same rows, some more, since a row stays in use for longer. Both are the
// best of 4 to 64 KB on Zen 5.
constexpr int64_t kBytesAhead = 8192, kBytesAheadOfGroups = 12288;

// Where the weights lie that are due kBytesAhead after a row's columns, in the order in which multiply takes them;
// behind the last one comes `next`. Where the rows are no single run of memory, the distance is in whole rows.
template <class Vec, class W>
class FfnAhead {
  using Tokens = FfnTokens<Vec, W>;

 public:
  FfnAhead(const FfnRows<W>& rows, const W* next, const Tokens& tokens)
      : rows_(rows), next_(next), num_columns_(tokens.num_columns) {
    distance_ = (tokens.num_groups > 1 ? kBytesAheadOfGroups : kBytesAhead) / static_cast<int64_t>(sizeof(W));
    is_one_run_ = tokens.num_columns <= tokens.chunk && rows.stride == tokens.num_columns;
    if (is_one_run_) return;
    const int step = tokens.row_by_row ? 1 : Tokens::kRowsPerTile;
    distance_ = distance_ / tokens.chunk_columns(0) / step * step;
    if (distance_ < step) distance_ = step;
  }
  void set_chunk(int64_t begin, int64_t end) {
    begin_ = begin;
    after_ = end < num_columns_ ? rows_.first + end : next_;
  }
  const W* of(int row) const {
    if (is_one_run_) {
      const int64_t offset = row * rows_.stride + distance_, all = rows_.num_rows * rows_.stride;
      return offset < all ? rows_.first + offset : next_ + (offset - all);
    }
    const int64_t target = row + distance_;
    if (target < rows_.num_rows) return rows_.first + target * rows_.stride + begin_;
    return after_ + (target - rows_.num_rows) * rows_.stride;
  }

 private:
  const FfnRows<W>& rows_;
  const W* next_;
  const int64_t num_columns_;
  const W* after_ = nullptr;
  int64_t begin_ = 0, distance_ = 0;  // in weights if all rows are one run, else in rows
  bool is_one_run_ = false;
};

template <class Vec, class W>
class FfnMultiply {
  using Tokens = FfnTokens<Vec, W>;
  using Ahead = FfnAhead<Vec, W>;
  using Op = Operand<Vec, W>;
  using V = typename Vec::V;
  using X = typename Op::X;
  using Part = typename Op::Part;
  static constexpr int kStep = Op::kStep, kSums = Vec::kSums;
  static constexpr int kRowsPerTile = Tokens::kRowsPerTile;
  static constexpr int kMaxTokensRowByRow = Tokens::kMaxTokensRowByRow;
  static constexpr int kMaxTokensPerTile = Tokens::kMaxTokensPerTile;

 public:
  // out[token][row] = tokens . rows, with `next` to be read after them.
  static void multiply(const FfnRows<W>& rows, const W* next, const Tokens& tokens, float* out) {
    Ahead ahead(rows, next, tokens);
    for (int64_t begin = 0; begin < tokens.num_columns; begin += tokens.chunk) {
      const int64_t num_columns = tokens.chunk_columns(begin);
      ahead.set_chunk(begin, begin + num_columns);
      for (int row = 0; row < rows.num_rows;) {
        int num_rows = 0;
        for (int group = 0; group < tokens.num_groups; ++group) {
          const int token = tokens.group_begin(group);
          const Tile tile = {
              rows.first + row * rows.stride + begin,  rows.stride, num_columns, tokens.group_tokens(begin, group),
              out + token * FfnScratch::kStride + row, begin == 0};
          const int num_tokens = tokens.group_begin(group + 1) - token;
          if (tokens.row_by_row) {
            num_rows = smaller(kSums / num_tokens, rows.num_rows - row);
            multiply_row_by_row(tile, num_tokens, row, num_rows, ahead);
          } else {
            num_rows = kRowsPerTile;
            const int first_row = kRowsPerTile * group / tokens.num_groups;
            const int end_row = kRowsPerTile * (group + 1) / tokens.num_groups;
            multiply_together<kMaxTokensPerTile>(tile, num_tokens, row, first_row, end_row, ahead);
          }
        }
        row += num_rows;
      }
    }
  }

 private:
  struct Tile {
    const W* weights;
    int64_t stride;
    int64_t num_columns;
    const X* tokens;
    float* out;
    bool is_first;  // chunk: sets out, later ones add to it
  };

  static void multiply_row_by_row(const Tile& tile, int num_tokens, int row, int num_rows, const Ahead& ahead) {
    constexpr int kMax = kMaxTokensRowByRow;
    if (num_tokens == 1) return row_by_row<1>(tile, row, num_rows, ahead);
    if (num_tokens == 2) return row_by_row<smaller(kMax, 2)>(tile, row, num_rows, ahead);
    if (num_tokens == 3) return row_by_row<smaller(kMax, 3)>(tile, row, num_rows, ahead);
    return row_by_row<kMax>(tile, row, num_rows, ahead);
  }
  template <int T>
  static void multiply_together(const Tile& tile, int num_tokens, int row, int first_row, int end_row,
                                const Ahead& ahead) {
    if (num_tokens == T) {
      together<T>(tile, ahead.of(row), first_row, end_row);
    } else if constexpr (T > 1) {
      multiply_together<T - 1>(tile, num_tokens, row, first_row, end_row, ahead);
    }
  }

  // One row after the other, T tokens each. Bound by memory: 2 T FLOP per weight.
  template <int T>
  static void row_by_row(const Tile& tile, int first_row, int num_rows, const Ahead& ahead) {
    V sums[kSums];
    for (int i = 0; i < kSums; ++i) sums[i] = Vec::set(0.0f);
    for (int row = 0; row < num_rows; ++row) {
      const W* weights = tile.weights + row * tile.stride;
      const W* fetched = ahead.of(first_row + row);
      V sums0[T], sums1[T];
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) sums0[t] = sums1[t] = Vec::set(0.0f);
      int64_t column = 0;
      for (; column + kStep <= tile.num_columns; column += kStep) {
        fetch(fetched, column);
        add_dots<T>(sums0, sums1, Op::load(weights + column), tile.tokens + column * T);
      }
      if (column < tile.num_columns) {
        const int left = static_cast<int>(tile.num_columns - column);
        add_dots<T>(sums0, sums1, Op::load(weights + column, left), tile.tokens + column * T);
      }
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) sums[row * T + t] = Vec::add(sums0[t], sums1[t]);
    }
    alignas(64) float totals[kSums];
    Vec::sum_lanes(sums, totals);
    for (int row = 0; row < num_rows; ++row) {
      for (int t = 0; t < T; ++t) put(tile, t, row, totals[row * T + t]);
    }
  }

  // Two rows at once: 2 T sums, AVX-512 up to 16 + 2 (4 if widened) weights of 32 registers, AVX2 8 + 4 of 16, tokens
  // from L1. From about 12 tokens on bound by the dot products: 2 per cycle, each with T + 2 loads for 2 T of them.
  template <int T>
  static void together(const Tile& tile, const W* fetched, int first_fetched, int end_fetched) {
    if constexpr (kSums >= 2 * T) {
      V sums[kSums];
#pragma GCC unroll 16
      for (int i = 0; i < kSums; ++i) sums[i] = Vec::set(0.0f);
      const auto add = [&](const Part& row0, const Part& row1, const X* tokens) {
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) {
          const Part token = Op::load_token(tokens + t * kStep);
          sums[2 * t] = Op::add_dot(sums[2 * t], row0, token);
          sums[2 * t + 1] = Op::add_dot(sums[2 * t + 1], row1, token);
        }
      };
      const W *weights0 = tile.weights, *weights1 = tile.weights + tile.stride;
      int64_t column = 0;
      for (; column + kStep <= tile.num_columns; column += kStep) {
        for (int row = first_fetched; row < end_fetched; ++row) fetch(fetched + row * tile.stride, column);
        add(Op::load(weights0 + column), Op::load(weights1 + column), tile.tokens + column * T);
      }
      if (column < tile.num_columns) {
        const int left = static_cast<int>(tile.num_columns - column);
        add(Op::load(weights0 + column, left), Op::load(weights1 + column, left), tile.tokens + column * T);
      }
      alignas(64) float totals[kSums];
      Vec::sum_lanes(sums, totals);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        put(tile, t, 0, totals[2 * t]);
        put(tile, t, 1, totals[2 * t + 1]);
      }
    }
  }

  template <int T>
  static void add_dots(V (&sums0)[T], V (&sums1)[T], const Part& weights, const X* tokens) {
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t) Op::add_dot(sums0[t], sums1[t], weights, Op::load_token(tokens + t * kStep));
  }
  // The lines of a step's columns. Where a line holds more, only its first columns fetch it.
  static void fetch(const W* weights, int64_t column) {
    constexpr int kLineColumns = 64 / sizeof(W);
    if constexpr (Vec::kLanes > 1) {
      if (kStep < kLineColumns && column % kLineColumns != 0) return;
#pragma GCC unroll 4
      for (int i = 0; i < kStep; i += kLineColumns) __builtin_prefetch(weights + column + i);
    }
  }
  static void put(const Tile& tile, int token, int row, float total) {
    float& out = tile.out[token * FfnScratch::kStride + row];
    out = tile.is_first ? total : out + total;
  }
};

}  // namespace mol
