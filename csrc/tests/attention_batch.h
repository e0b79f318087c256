// One task for mol_attention with random contents, and what double precision makes of it. All memory that the task must
// not read is stale: gaps between tokens, unused slots and blocks, blocks before the window. All that it must not write
// is watched.
#pragma once
#include <algorithm>
#include <vector>

#include "elements.h"

struct Sequence {
  int32_t seq_len, query_len;
};

struct Case {
  int32_t dtype = MOL_FLOAT32, cache_dtype = MOL_FLOAT32;
  int32_t head_dim = 8, block_size = 16, num_heads = 2, num_kv_heads = 1;
  int32_t sliding_window = 0;
  float soft_cap = 0;
  bool has_sinks = false;
  std::vector<Sequence> seqs;
};

class Batch {
  static constexpr int kPaddingTokens = 2;  // behind the last sequence's
  static constexpr int kGap = 8;            // elements between tokens
  static constexpr double kMinusInfinity = -HUGE_VAL;

 public:
  explicit Batch(const Case& c, uint32_t seed = 1)
      : case_(c),
        random_(seed),
        num_tokens_(count_tokens(c)),
        head_bytes_(2 * c.block_size * (c.head_dim * element_bytes(c.cache_dtype) + (is_quantised() ? 4 : 0))),
        table_stride_(count_table_stride(c)),
        num_blocks_(count_blocks(c) + 2),
        query_(row_bytes(num_tokens_, c.num_heads)),
        output_(row_bytes(num_tokens_, c.num_heads)),
        key_(row_bytes(num_tokens_, c.num_kv_heads)),
        value_(row_bytes(num_tokens_, c.num_kv_heads)),
        cache_(num_blocks_ * c.num_kv_heads * head_bytes_),
        context_(cache_.num_bytes()),
        block_table_(c.seqs.size() * table_stride_),
        query_start_(c.seqs.size() + 1),
        seq_lens_(c.seqs.size()),
        slot_mapping_(num_tokens_),
        sinks_(c.has_sinks ? c.num_heads : 0),
        log_sum_exp_(num_tokens_ * c.num_heads) {
    const float scale = 1.0f / std::sqrt(static_cast<float>(c.head_dim));
    task = {};
    task.query = query_.data(), task.key = key_.data(), task.value = value_.data(), task.output = output_.data();
    task.query_token_stride = task.output_token_stride = c.num_heads * c.head_dim + kGap;
    task.key_token_stride = task.value_token_stride = c.num_kv_heads * c.head_dim + kGap;
    task.kv_cache = cache_.data(), task.num_blocks = num_blocks_;
    task.block_table = block_table_.data(), task.block_table_stride = table_stride_;
    task.query_start = query_start_.data(), task.seq_lens = seq_lens_.data();
    task.slot_mapping = slot_mapping_.data();
    task.sinks = c.has_sinks ? sinks_.data() : nullptr, task.log_sum_exp = log_sum_exp_.data();
    task.num_seqs = static_cast<int32_t>(c.seqs.size()), task.num_tokens = num_tokens_;
    task.num_heads = c.num_heads, task.num_kv_heads = c.num_kv_heads, task.head_dim = c.head_dim;
    task.block_size = c.block_size, task.dtype = c.dtype, task.cache_dtype = c.cache_dtype;
    task.isa = MOL_ISA_AUTO, task.sliding_window = c.sliding_window;
    task.append = task.attend = 1, task.scale = scale, task.soft_cap = c.soft_cap;

    fill_rows(query_, c.num_heads);
    fill_rows(key_, c.num_kv_heads);
    fill_rows(value_, c.num_kv_heads);
    for (int head = 0; c.has_sinks && head < c.num_heads; ++head) sinks_[head] = 0.75f * head - 1.0f;
    std::fill_n(slot_mapping_.data(), num_tokens_, -1);
    place_sequences();
    context_.copy_from(cache_);
    find_expected();
  }

  mol_attention_task task;

  // Runs the task on a cache that lacks the new tokens, and checks every byte of output and cache.
  void check(int32_t isa, mol_pool* pool) {
    cache_.copy_from(context_);
    output_.make_stale();
    log_sum_exp_.make_stale();
    task.isa = isa, task.pool = pool;
    CHECK(mol_attention(&task) == MOL_OK);
    check_output();
    if (is_quantised()) return;  // find_expected has seen the cache, and read what it expects from it
    for (int32_t seq = 0; seq < task.num_seqs; ++seq) check_cached(seq);
  }
  void check_refused(const mol_attention_task& bad_task, int32_t error = MOL_ERROR_BAD_ARGUMENT) {
    cache_.copy_from(context_);
    output_.make_stale();
    log_sum_exp_.make_stale();
    CHECK(mol_attention(&bad_task) == error);
    CHECK(is_untouched());
  }
  bool is_untouched() const {
    return cache_.same_bytes(context_) && is_stale(output_.data(), output_.num_bytes()) &&
           is_stale(log_sum_exp_.data(), log_sum_exp_.num_bytes());
  }
  bool same_results(const Batch& other) const {
    return output_.same_bytes(other.output_) && log_sum_exp_.same_bytes(other.log_sum_exp_) &&
           cache_.same_bytes(other.cache_);
  }

 private:
  Case case_;
  std::mt19937 random_;
  const int32_t num_tokens_;
  const int64_t head_bytes_, table_stride_, num_blocks_;
  Buffer<uint8_t> query_, output_, key_, value_, cache_, context_;
  Buffer<int32_t> block_table_, query_start_, seq_lens_;
  Buffer<int64_t> slot_mapping_;
  Buffer<float> sinks_, log_sum_exp_;
  std::vector<std::vector<int32_t>> blocks_;  // of each sequence
  std::vector<double> expected_, expected_log_sum_exp_;

  static int32_t count_tokens(const Case& c) {
    int32_t count = kPaddingTokens;
    for (const Sequence& s : c.seqs) count += s.query_len;
    return count;
  }
  static int64_t blocks_of(const Case& c, const Sequence& s) { return (s.seq_len + c.block_size - 1) / c.block_size; }
  static int64_t count_blocks(const Case& c) {
    int64_t count = 0;
    for (const Sequence& s : c.seqs) count += blocks_of(c, s);
    return count;
  }
  static int64_t count_table_stride(const Case& c) {
    int64_t stride = 0;
    for (const Sequence& s : c.seqs) stride = std::max(stride, blocks_of(c, s));
    return stride;
  }
  // Products of 8-bit integers leave the weights 8 bits: their bound is one on the relative RMS of all results.
  static constexpr double kRoundedWeightsError = 0.008;
  bool rounds_weights() const {
    const int32_t isa = task.isa == MOL_ISA_AUTO ? mol_best_isa(case_.cache_dtype) : task.isa;
    return isa == MOL_ISA_AVX512VNNI && case_.cache_dtype == MOL_INT8 && case_.head_dim % 64 == 0;
  }
  bool is_quantised() const { return element_bytes(case_.cache_dtype) == 1; }
  // The last token has no gap behind it.
  int64_t row_bytes(int64_t num_rows, int num_heads) const {
    return (num_rows * (num_heads * case_.head_dim + kGap) - kGap) * element_bytes(case_.dtype);
  }

  void fill_rows(Buffer<uint8_t>& rows, int num_heads) {
    const int64_t bytes = element_bytes(case_.dtype), row = num_heads * case_.head_dim;
    for (int32_t token = 0; token < num_tokens_ - kPaddingTokens; ++token) {
      for (int64_t i = 0; i < row; ++i) write_random(&rows[(token * (row + kGap) + i) * bytes], case_.dtype, random_);
    }
  }

  // The first position whose block holds a key that some new token sees.
  int32_t first_kept(const Sequence& s) const {
    if (case_.sliding_window == 0) return 0;
    const int64_t first = int64_t{s.seq_len} - s.query_len + 1 - case_.sliding_window;
    return static_cast<int32_t>(std::max<int64_t>(0, first) / case_.block_size * case_.block_size);
  }
  int64_t slot_of(int32_t seq, int32_t position) const {
    return int64_t{blocks_[seq][position / case_.block_size]} * case_.block_size + position % case_.block_size;
  }

  // Gives each sequence blocks in no order, and appends what comes before its new tokens.
  void place_sequences() {
    std::vector<int32_t> free_blocks(num_blocks_);
    for (int64_t i = 0; i < num_blocks_; ++i) free_blocks[i] = static_cast<int32_t>(i);
    std::shuffle(free_blocks.begin(), free_blocks.end(), random_);
    int32_t token = 0;
    query_start_[0] = 0;
    for (int32_t seq = 0; seq < task.num_seqs; ++seq) {
      const Sequence& s = case_.seqs[seq];
      seq_lens_[seq] = s.seq_len;
      query_start_[seq + 1] = query_start_[seq] + s.query_len;
      blocks_.emplace_back(free_blocks.end() - blocks_of(case_, s), free_blocks.end());
      free_blocks.resize(free_blocks.size() - blocks_of(case_, s));
      for (int64_t i = first_kept(s) / case_.block_size; i < blocks_of(case_, s); ++i) {
        block_table_[seq * table_stride_ + i] = blocks_[seq][i];
      }
      append_context(seq);
      for (int32_t i = 0; i < s.query_len; ++i, ++token) {
        if (s.seq_len > 0) slot_mapping_[token] = slot_of(seq, s.seq_len - s.query_len + i);
      }
    }
  }
  void append_context(int32_t seq) {
    const Sequence& s = case_.seqs[seq];
    const int32_t begin = first_kept(s), num_tokens = s.seq_len - s.query_len - begin;
    if (num_tokens <= 0) return;
    const int64_t row = case_.num_kv_heads * case_.head_dim, bytes = element_bytes(case_.dtype);
    Buffer<uint8_t> key(num_tokens * row * bytes), value(num_tokens * row * bytes);
    Buffer<int64_t> slots(num_tokens);
    for (int64_t i = 0; i < num_tokens * row; ++i) {
      write_random(&key[i * bytes], case_.dtype, random_);
      write_random(&value[i * bytes], case_.dtype, random_);
    }
    std::memset(key.data(), 0, case_.head_dim * bytes);  // a scale of zero, if quantised
    for (int32_t i = 0; i < num_tokens; ++i) slots[i] = slot_of(seq, begin + i);
    mol_attention_task append = task;
    append.query = append.output = nullptr, append.block_table = append.query_start = append.seq_lens = nullptr;
    append.key = key.data(), append.value = value.data(), append.slot_mapping = slots.data();
    append.key_token_stride = append.value_token_stride = row;
    append.num_tokens = num_tokens, append.num_seqs = 0, append.attend = 0;
    CHECK(mol_attention(&append) == MOL_OK);
    for (int32_t i = 0; i < num_tokens; ++i) check_row(seq, begin + i, &key[i * row * bytes], &value[i * row * bytes]);
  }

  const uint8_t* head_block(int64_t slot, int kv_head) const {
    return cache_.data() + (slot / case_.block_size * case_.num_kv_heads + kv_head) * head_bytes_;
  }
  // K (part 0) or V (part 1) of one head in the cache.
  double cached(int64_t slot, int kv_head, int part, int dim) const {
    const int64_t bytes = element_bytes(case_.cache_dtype), part_bytes = case_.block_size * case_.head_dim * bytes;
    const int64_t offset = slot % case_.block_size;
    const uint8_t* block = head_block(slot, kv_head);
    const double number =
        decoded(block + part * part_bytes + (offset * case_.head_dim + dim) * bytes, case_.cache_dtype);
    if (!is_quantised()) return number;
    return number * decoded(block + 2 * part_bytes + (part * case_.block_size + offset) * 4, MOL_FLOAT32);
  }
  // key, value: [Hk, D] as they were given to append.
  void check_row(int32_t seq, int32_t position, const uint8_t* key, const uint8_t* value) const {
    const int64_t bytes = element_bytes(case_.dtype), slot = slot_of(seq, position);
    for (int part = 0; part < 2; ++part) {
      for (int kv_head = 0; kv_head < case_.num_kv_heads; ++kv_head) {
        const uint8_t* given = (part == 0 ? key : value) + kv_head * case_.head_dim * bytes;
        double greatest = 0;
        for (int dim = 0; dim < case_.head_dim; ++dim) {
          greatest = std::max(greatest, std::fabs(decoded(given + dim * bytes, case_.dtype)));
        }
        for (int dim = 0; dim < case_.head_dim; ++dim) {
          const double exact = decoded(given + dim * bytes, case_.dtype);
          // Half a unit: of the whole range / 127, or of the element's own binade (2^-4), least 2^-10 of 448.
          const double error = case_.cache_dtype == MOL_INT8 ? greatest / 254
                               : case_.cache_dtype == MOL_FP8_E4M3
                                   ? std::max(std::fabs(exact) / 16, greatest / 448 / 1024)
                                   : 0.0;
          CHECK(std::fabs(cached(slot, kv_head, part, dim) - exact) <= error * 1.00001);
        }
      }
    }
  }
  void check_cached(int32_t seq) const {
    const Sequence& s = case_.seqs[seq];
    const int64_t bytes = element_bytes(case_.dtype);
    for (int32_t i = 0; s.seq_len > 0 && i < s.query_len; ++i) {
      const int64_t row = (query_start_[seq] + i) * task.key_token_stride * bytes;
      check_row(seq, s.seq_len - s.query_len + i, &key_[row], &value_[row]);
    }
  }

  // Appends the new tokens, checks the whole cache, and attends in double precision to what it holds.
  void find_expected() {
    mol_attention_task append = task;
    append.attend = 0;
    CHECK(mol_attention(&append) == MOL_OK);
    check_unused_slots();
    expected_.assign(int64_t{num_tokens_} * case_.num_heads * case_.head_dim, 0.0);
    expected_log_sum_exp_.assign(int64_t{num_tokens_} * case_.num_heads, kMinusInfinity);
    for (int32_t seq = 0; seq < task.num_seqs; ++seq) {
      if (case_.seqs[seq].seq_len == 0) continue;
      check_cached(seq);
      for (int kv_head = 0; kv_head < case_.num_kv_heads; ++kv_head) attend_exactly(seq, kv_head);
    }
  }
  void check_unused_slots() const {
    std::vector<bool> is_used(num_blocks_ * case_.block_size, false);
    for (int32_t seq = 0; seq < task.num_seqs; ++seq) {
      const Sequence& s = case_.seqs[seq];
      for (int32_t position = first_kept(s); position < s.seq_len; ++position) is_used[slot_of(seq, position)] = true;
    }
    const int64_t row = case_.head_dim * element_bytes(case_.cache_dtype), part = case_.block_size * row;
    for (int64_t slot = 0; slot < num_blocks_ * case_.block_size; ++slot) {
      for (int kv_head = 0; kv_head < case_.num_kv_heads && !is_used[slot]; ++kv_head) {
        const uint8_t* block = head_block(slot, kv_head);
        const int64_t offset = slot % case_.block_size;
        CHECK(is_stale(block + offset * row, row) && is_stale(block + part + offset * row, row));
        if (!is_quantised()) continue;
        const uint8_t* scales = block + 2 * part + offset * 4;
        CHECK(is_stale(scales, 4) && is_stale(scales + case_.block_size * 4, 4));
      }
    }
  }
  void attend_exactly(int32_t seq, int kv_head) {
    const Sequence& s = case_.seqs[seq];
    const int dims = case_.head_dim, group = case_.num_heads / case_.num_kv_heads;
    std::vector<double> keys(int64_t{s.seq_len} * dims), values(keys.size()), weights(s.seq_len), query(dims);
    for (int32_t position = first_kept(s); position < s.seq_len; ++position) {
      for (int dim = 0; dim < dims; ++dim) {
        keys[int64_t{position} * dims + dim] = cached(slot_of(seq, position), kv_head, 0, dim);
        values[int64_t{position} * dims + dim] = cached(slot_of(seq, position), kv_head, 1, dim);
      }
    }
    for (int32_t row = 0; row < s.query_len * group; ++row) {
      const int32_t i = row / group, head = kv_head * group + row % group, end = s.seq_len - s.query_len + i + 1;
      const int64_t token = query_start_[seq] + i;
      const int32_t begin = case_.sliding_window > 0 ? std::max(0, end - case_.sliding_window) : 0;
      for (int dim = 0; dim < dims; ++dim) query[dim] = element(query_, token, head, dim);
      double greatest = case_.has_sinks ? sinks_[head] : kMinusInfinity;
      for (int32_t key = begin; key < end; ++key) {
        double logit = 0;
        for (int dim = 0; dim < dims; ++dim) logit += query[dim] * keys[int64_t{key} * dims + dim];
        logit *= task.scale;
        if (case_.soft_cap > 0) logit = case_.soft_cap * std::tanh(logit / case_.soft_cap);
        weights[key] = logit;
        greatest = std::max(greatest, logit);
      }
      double sum = case_.has_sinks ? std::exp(sinks_[head] - greatest) : 0.0;
      double* result = &expected_[(token * case_.num_heads + head) * dims];
      for (int32_t key = begin; key < end; ++key) {
        const double weight = std::exp(weights[key] - greatest);
        sum += weight;
        for (int dim = 0; dim < dims; ++dim) result[dim] += weight * values[int64_t{key} * dims + dim];
      }
      for (int dim = 0; dim < dims; ++dim) result[dim] /= sum;
      expected_log_sum_exp_[token * case_.num_heads + head] = greatest + std::log(sum);
    }
  }
  double element(const Buffer<uint8_t>& rows, int64_t token, int head, int dim) const {
    const int64_t index = token * task.query_token_stride + head * case_.head_dim + dim;
    return decoded(&rows[index * element_bytes(case_.dtype)], case_.dtype);
  }

  void check_output() const {
    const int64_t bytes = element_bytes(case_.dtype), row = int64_t{case_.num_heads} * case_.head_dim;
    const int32_t num_used = num_tokens_ - kPaddingTokens;
    double squares = 0.0, error_squares = 0.0;
    const double log_sum_tolerance = rounds_weights() ? 2e-4 : 2e-5;  // queries have 15 bits then
    for (int64_t token = 0; token < num_used; ++token) {
      CHECK(is_stale(&output_[(token * (row + kGap) + row) * bytes], kGap * bytes));
      for (int head = 0; head < case_.num_heads; ++head) {
        for (int dim = 0; dim < case_.head_dim; ++dim) {
          const double exact = expected_[(token * case_.num_heads + head) * case_.head_dim + dim];
          const double got = element(output_, token, head, dim);
          CHECK(rounds_weights() ? std::isfinite(got) : std::fabs(got - exact) <= tolerance(exact, case_.dtype));
          squares += exact * exact, error_squares += (got - exact) * (got - exact);
        }
        const double exact = expected_log_sum_exp_[token * case_.num_heads + head];
        const double got = log_sum_exp_[token * case_.num_heads + head];
        CHECK(got == exact || std::fabs(got - exact) <= log_sum_tolerance * (1 + std::fabs(exact)));
      }
    }
    CHECK(std::sqrt(error_squares) <= kRoundedWeightsError * std::sqrt(squares));
    const int64_t used_bytes = num_used * (row + kGap) * bytes;
    CHECK(is_stale(output_.data() + used_bytes, output_.num_bytes() - used_bytes));
    CHECK(is_stale(&log_sum_exp_[int64_t{num_used} * case_.num_heads], kPaddingTokens * case_.num_heads * 4));
  }
};
