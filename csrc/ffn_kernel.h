// The expert FFN for any instruction set: a template over Vec, the vector operations of one (scalar_vec.h has the
// plainest ones), and W, the element type of weights and tokens.
//
// A few tokens are multiplied with weights that come from memory, each weight once. So everything here serves two ends:
// the weights are read in long runs, with the next ones on their way; and the tokens, which every row of weights needs,
// stay in L1. Where they don't fit, the columns are taken in chunks.
//
// The bits of a token's result depend on the number of its expert's tokens (it decides on chunks and tiles), on nothing
// else: not on threads, pieces or the other tokens.
//
// Neither this header nor ffn.h includes a C++ library, see attention_micro.h.
#pragma once
#include "ffn.h"
#include "vec_math.h"

namespace mol {

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

template <class Vec, class W>
class FfnPieceKernel {
 public:
  static int64_t operand_bytes(int64_t num_columns) { return padded(num_columns) * static_cast<int64_t>(sizeof(X)); }

  static void gather(const FfnPlan& plan, int64_t index) {
    const FfnBlock& block = plan.blocks[index];
    const mol_expert_ffn_task& task = *plan.task;
    const Tokens tokens = hidden_tokens(plan, block);
    for (int t = 0; t < block.num_tokens; ++t) {
      const int64_t token = plan.slot_tokens[block.first_slot + t];
      const W* row = static_cast<const W*>(task.hidden) + token * task.hidden_token_stride;
      tokens.for_steps(t, 0, task.hidden_size, [&](int64_t column, X* target) {
        Op::pack(row + column, smaller(kStep, task.hidden_size - column), target);
      });
    }
  }

  static void gate_up(const FfnPlan& plan, int64_t index, FfnScratch& scratch) {
    const mol_expert_ffn_task& task = *plan.task;
    const Piece piece(plan, index, task.intermediate_size, plan.gate_up_rows);
    const Piece following(plan, index + plan.num_threads, task.intermediate_size, plan.gate_up_rows);
    const Weights weights = gate_up_weights(task, piece.expert->expert);
    const W* next = gate_up_weights(task, following.expert->expert).gate + following.begin * weights.row_stride;
    for (int64_t row = piece.begin; row < piece.end; row += piece.rows_per_pass()) {
      const int num_rows = smaller(piece.rows_per_pass(), piece.end - row);
      const Rows gate = {weights.gate + row * weights.row_stride, weights.row_stride, num_rows};
      const Rows up = {weights.up + row * weights.row_stride, weights.row_stride, num_rows};
      for (int b = 0; b < piece.expert->num_blocks; ++b) {
        const FfnBlock& block = plan.blocks[piece.expert->first_block + b];
        const Tokens tokens = hidden_tokens(plan, block);
        multiply(gate, up.first, tokens, scratch.gate);
        multiply(up, next, tokens, scratch.up);
        add_bias(weights.gate_bias, weights.bias_stride, row, num_rows, block.num_tokens, scratch.gate);
        add_bias(weights.up_bias, weights.bias_stride, row, num_rows, block.num_tokens, scratch.up);
        activate(plan, block, row, num_rows, scratch);
      }
    }
  }

  static void down(const FfnPlan& plan, int64_t index, FfnScratch& scratch) {
    const mol_expert_ffn_task& task = *plan.task;
    const Piece piece(plan, index, task.hidden_size, plan.down_rows);
    const Piece following(plan, index + plan.num_threads, task.hidden_size, plan.down_rows);
    const int64_t stride = task.intermediate_size;
    const W* weights = down_weights(task, piece.expert->expert);
    const W* next = down_weights(task, following.expert->expert) + following.begin * stride;
    const float* bias = task.w2_bias ? task.w2_bias + piece.expert->expert * task.hidden_size : nullptr;
    for (int64_t row = piece.begin; row < piece.end; row += piece.rows_per_pass()) {
      const int num_rows = smaller(piece.rows_per_pass(), piece.end - row);
      for (int b = 0; b < piece.expert->num_blocks; ++b) {
        const FfnBlock& block = plan.blocks[piece.expert->first_block + b];
        multiply({weights + row * stride, stride, num_rows}, next, inner_tokens(plan, block), scratch.gate);
        add_bias(bias, 1, row, num_rows, block.num_tokens, scratch.gate);
        for (int t = 0; t < block.num_tokens; ++t) {
          float* target = plan.slot_outputs + (block.first_slot + t) * task.hidden_size + row;
          __builtin_memcpy(target, scratch.gate + t * FfnScratch::kStride, num_rows * sizeof(float));
        }
      }
    }
  }

  static void combine(const FfnPlan& plan, int64_t token) {
    const mol_expert_ffn_task& task = *plan.task;
    W* target = static_cast<W*>(task.output) + token * task.output_token_stride;
    const float* addend = task.addend ? task.addend + token * task.hidden_size : nullptr;
    for (int64_t column = 0; column < task.hidden_size; column += kStep) {
      const int num_columns = smaller(kStep, task.hidden_size - column);
      alignas(64) float ends[kStep] = {};
      V a = Vec::set(0.0f), b = Vec::set(0.0f);
      if (addend) load_floats(addend + column, num_columns, ends, a, b);
      for (int k = 0; k < task.top_k; ++k) {
        const int64_t slot = plan.token_slots[token * task.top_k + k];
        if (slot < 0) continue;
        const V weight = Vec::set(task.topk_weights[token * task.top_k + k]);
        V x, y;
        load_floats(plan.slot_outputs + slot * task.hidden_size + column, num_columns, ends, x, y);
        a = Vec::fma(weight, x, a), b = Vec::fma(weight, y, b);
      }
      if (Vec::template kIsInterleaved<W>) Vec::deinterleave(a, b);
      if (num_columns == kStep) {
        Vec::store_pair(target + column, a, b);
      } else {
        Vec::store_part(target + column, num_columns, a, b);
      }
    }
  }

 private:
  using Op = Operand<Vec, W>;
  using V = typename Vec::V;
  using X = typename Op::X;
  using Part = typename Op::Part;
  static constexpr int kLanes = Vec::kLanes, kStep = Op::kStep;
  static constexpr int kSums = Vec::kSums;
  static_assert(kRowsPerPass % kStep == 0);
  // Up to so many tokens whole rows of weights are taken one after the other: one stream of addresses, the fastest to
  // read. More tokens need more work per load than one row gives.
  static constexpr int kMaxTokensRowByRow = kSums < Op::kMaxTokensRowByRow ? kSums : Op::kMaxTokensRowByRow;
  static constexpr int kRowsPerTile = 2;
  static constexpr int kMaxTokensPerTile = kSums < kRowsPerTile ? 1 : kSums / kRowsPerTile;
  // Of tokens and weights that share L1 (32 KB and more), the tokens' part.
  static constexpr int kTokenBytes = 32 << 10;

  static constexpr int smaller(int64_t a, int64_t b) { return static_cast<int>(a < b ? a : b); }
  static int64_t padded(int64_t num_columns) { return (num_columns + kStep - 1) / kStep * kStep; }

  // ---------------------------------------------------------------- tokens

  // The operands of a block: [chunks of columns, groups of tokens, steps, tokens of the group, kStep], so that a tile
  // reads one run of memory.
  struct Tokens {
    X* first;
    int num_tokens;
    int64_t num_columns;
    bool row_by_row;
    int num_groups;
    int64_t chunk;  // columns

    Tokens(X* first_, int num_tokens_, int64_t num_columns_)
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

  static Tokens hidden_tokens(const FfnPlan& plan, const FfnBlock& block) {
    char* first = plan.hidden_operands + block.first_slot * plan.hidden_operand_bytes;
    return Tokens(reinterpret_cast<X*>(first), block.num_tokens, plan.task->hidden_size);
  }
  static Tokens inner_tokens(const FfnPlan& plan, const FfnBlock& block) {
    char* first = plan.inner_operands + block.first_slot * plan.inner_operand_bytes;
    return Tokens(reinterpret_cast<X*>(first), block.num_tokens, plan.task->intermediate_size);
  }

  // ---------------------------------------------------------------- weights

  // Piece `index` of all experts' rows. Past the last piece it is the last one: there is nothing better to prefetch.
  struct Piece {
    const FfnExpert* expert;
    int64_t begin, end;  // rows

    Piece(const FfnPlan& plan, int64_t index, int64_t num_rows, int64_t rows_per_piece) {
      const int64_t pieces_per_expert = (num_rows + rows_per_piece - 1) / rows_per_piece;
      index = index < plan.num_experts * pieces_per_expert ? index : plan.num_experts * pieces_per_expert - 1;
      expert = plan.experts + index / pieces_per_expert;
      begin = index % pieces_per_expert * rows_per_piece;
      end = begin + smaller(rows_per_piece, num_rows - begin);
    }
    int rows_per_pass() const { return expert->num_blocks > 1 ? kRowsPerPass : static_cast<int>(end - begin); }
  };

  struct Rows {
    const W* first;
    int64_t stride;
    int num_rows;
  };

  struct Weights {
    const W *gate, *up;
    const float *gate_bias, *up_bias;
    int64_t row_stride, bias_stride;
  };
  static Weights gate_up_weights(const mol_expert_ffn_task& task, int64_t expert) {
    const int64_t size = task.intermediate_size, width = task.hidden_size;
    const int64_t up_row = task.interleaved ? 1 : size, step = task.interleaved ? 2 : 1;
    const W* gate = static_cast<const W*>(task.w13) + expert * 2 * size * width;
    const float* bias = task.w13_bias ? task.w13_bias + expert * 2 * size : nullptr;
    return {gate, gate + up_row * width, bias, bias ? bias + up_row : nullptr, step * width, step};
  }
  static const W* down_weights(const mol_expert_ffn_task& task, int64_t expert) {
    return static_cast<const W*>(task.w2) + expert * task.hidden_size * task.intermediate_size;
  }

  // Where the weights lie that are due some KB after a row's columns, in the order in which multiply takes them; behind
  // the last one comes `next`. The distance is what the memory has on its way at most, in whole rows of a chunk.
  class Ahead {
   public:
    Ahead(const Rows& rows, const W* next, const Tokens& tokens) : rows_(rows), next_(next) {
      const int64_t distance = (tokens.num_groups > 1 ? 12288 : 8192) / static_cast<int64_t>(sizeof(W));
      is_one_run_ = tokens.num_columns <= tokens.chunk && rows.stride == tokens.num_columns;
      distance_ = is_one_run_ ? distance : distance / smaller(tokens.chunk, tokens.num_columns) & -kRowsPerTile;
      if (!is_one_run_ && distance_ < (tokens.row_by_row ? 1 : kRowsPerTile)) distance_ = tokens.row_by_row ? 1 : 2;
    }
    void set_chunk(int64_t begin, int64_t end) {
      begin_ = begin;
      after_ = end < rows_.stride ? rows_.first + end : next_;
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
    const Rows& rows_;
    const W* next_;
    const W* after_ = nullptr;
    int64_t begin_ = 0, distance_ = 0;  // in weights if all rows are one run, else in rows
    bool is_one_run_ = false;
  };

  // ---------------------------------------------------------------- products

  // out[token][row] = tokens . rows, with `next` to be read after them.
  static void multiply(const Rows& rows, const W* next, const Tokens& tokens, float* out) {
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

  struct Tile {
    const W* weights;
    int64_t stride;
    int64_t num_columns;
    const X* tokens;
    float* out;
    bool is_first;  // chunk: sets out, later ones add to it
  };

  template <int N>
  struct Count {};

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
    if constexpr (kLanes > 1) {
      if (kStep < kLineColumns && column % kLineColumns != 0) return;
#pragma GCC unroll 4
      for (int i = 0; i < kStep; i += kLineColumns) __builtin_prefetch(weights + column + i);
    }
  }
  static void put(const Tile& tile, int token, int row, float total) {
    float& out = tile.out[token * FfnScratch::kStride + row];
    out = tile.is_first ? total : out + total;
  }

  // ---------------------------------------------------------------- between the products

  static void add_bias(const float* bias, int64_t stride, int64_t first_row, int num_rows, int num_tokens, float* out) {
    if (bias == nullptr) return;
    for (int t = 0; t < num_tokens; ++t) {
      for (int row = 0; row < num_rows; ++row) out[t * FfnScratch::kStride + row] += bias[(first_row + row) * stride];
    }
  }

  // act(gate) * up, rounded to W, to the operands of w2.
  static void activate(const FfnPlan& plan, const FfnBlock& block, int64_t first_row, int num_rows,
                       const FfnScratch& scratch) {
    const Tokens tokens = inner_tokens(plan, block);
    for (int t = 0; t < block.num_tokens; ++t) {
      const float* gate = scratch.gate + t * FfnScratch::kStride - first_row;
      const float* up = scratch.up + t * FfnScratch::kStride - first_row;
      tokens.for_steps(t, first_row, first_row + num_rows, [&](int64_t column, X* target) {
        V a = gated(*plan.task, Vec::load(gate + column), Vec::load(up + column));
        V b = gated(*plan.task, Vec::load(gate + column + kLanes), Vec::load(up + column + kLanes));
        if (Vec::template kIsInterleaved<W>) Vec::deinterleave(a, b);
        W rounded[kStep];
        Vec::store_pair(rounded, a, b);
        Op::pack(rounded, smaller(kStep, first_row + num_rows - column), target);
      });
    }
  }

  // gate * sigmoid(alpha * gate) * (up + offset), both clamped first. Clamps let NaN through.
  static V gated(const mol_expert_ffn_task& task, V gate, V up) {
    const V zero = Vec::set(0.0f), one = Vec::set(1.0f);
    if (task.clamp_limit < __builtin_inff()) {
      const V lowest = Vec::set(-task.clamp_limit);
      gate = Vec::sub(zero, Vec::max(lowest, Vec::sub(zero, gate)));
      up = Vec::max(lowest, Vec::sub(zero, Vec::max(lowest, Vec::sub(zero, up))));
    }
    const V z = Vec::mul(gate, Vec::set(task.gate_alpha));
    // 1 / (1 + e) for z >= 0, else e / (1 + e), with e = exp(-|z|), which can't overflow.
    const V e = exp_not_above_0<Vec>(Vec::sub(zero, Vec::abs(z)));
    const V numerator = Vec::add(Vec::zero_if_less(z, zero, Vec::sub(one, e)), e);
    const V sigmoid = Vec::div(numerator, Vec::add(one, e));
    return Vec::mul(Vec::mul(gate, sigmoid), Vec::add(up, Vec::set(task.up_offset)));
  }

  // kStep floats in their order, of which num_columns may be read.
  static void load_floats(const float* source, int num_columns, float (&ends)[kStep], V& a, V& b) {
    if (num_columns < kStep) {
      __builtin_memcpy(ends, source, num_columns * sizeof(float));
      source = ends;
    }
    a = Vec::load(source), b = Vec::load(source + kLanes);
  }
};

template <class Vec, class W>
FfnKernel ffn_piece_kernel() {
  using Kernel = FfnPieceKernel<Vec, W>;
  return {Kernel::operand_bytes, Kernel::gather, Kernel::gate_up, Kernel::down, Kernel::combine};
}

template <class Vec>
FfnKernel ffn_kernel_for(int32_t dtype) {
  switch (dtype) {
    case MOL_FLOAT32:
      return ffn_piece_kernel<Vec, float>();
    case MOL_BFLOAT16:
      return ffn_piece_kernel<Vec, BFloat16>();
    case MOL_FLOAT16:
      return ffn_piece_kernel<Vec, Float16>();
    default:
      return {};
  }
}

}  // namespace mol
