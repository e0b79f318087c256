// mol_expert_ffn on one instruction set (the argument) against double precision: sizes that fill no vector, chunk or
// tile, one to many tokens per expert, experts without tokens, biases, both activations, addends, several threads.
#include <algorithm>
#include <vector>

#include "elements.h"

namespace {

constexpr int32_t kDtypes[] = {MOL_FLOAT32, MOL_BFLOAT16, MOL_FLOAT16};
constexpr int kGap = 8;  // elements between tokens

struct Case {
  int32_t dtype = MOL_FLOAT32;
  int32_t num_tokens = 1, top_k = 1, num_experts = 2, hidden_size = 8, intermediate_size = 8;
  bool has_bias = false, has_addend = false, is_interleaved = false, is_clamped = false;
  int32_t max_tokens_per_expert = 0;
};

// Numbers of about 1/16, or 1: sums of some thousands of them stay within float16.
void write_number(void* element, int32_t dtype, bool is_weight, std::mt19937& random) {
  write_random(element, dtype, random);
  if (!is_weight) return;
  if (dtype == MOL_FLOAT32) {
    float value;
    std::memcpy(&value, element, sizeof value);
    value /= 16;
    std::memcpy(element, &value, sizeof value);
  } else {
    uint16_t half;
    std::memcpy(&half, element, sizeof half);
    half = static_cast<uint16_t>(half - (4u << (dtype == MOL_BFLOAT16 ? 7 : 10)));
    std::memcpy(element, &half, sizeof half);
  }
}

// A task whose memory is stale where it must not be read: gaps between tokens, weights of experts without tokens.
class Layer {
 public:
  explicit Layer(const Case& c, uint32_t seed = 1)
      : case_(c),
        random_(seed),
        bytes_(element_bytes(c.dtype)),
        stride_(c.hidden_size + kGap),
        hidden_(row_bytes()),
        output_(row_bytes()),
        w13_(2 * weights() * bytes_),
        w2_(weights() * bytes_),
        w13_bias_(c.has_bias ? 2 * c.num_experts * c.intermediate_size : 0),
        w2_bias_(c.has_bias ? c.num_experts * c.hidden_size : 0),
        ids_(c.num_tokens * c.top_k),
        topk_weights_(c.num_tokens * c.top_k),
        addend_(c.has_addend ? c.num_tokens * c.hidden_size : 0) {
    deal_out();
    fill();
    task = {};
    task.hidden = hidden_.data(), task.output = output_.data();
    task.hidden_token_stride = task.output_token_stride = stride_;
    task.w13 = w13_.data(), task.w2 = w2_.data();
    task.w13_bias = c.has_bias ? w13_bias_.data() : nullptr, task.w2_bias = c.has_bias ? w2_bias_.data() : nullptr;
    task.topk_ids = ids_.data(), task.topk_weights = topk_weights_.data();
    task.addend = c.has_addend ? addend_.data() : nullptr;
    task.num_tokens = c.num_tokens, task.top_k = c.top_k, task.num_experts = c.num_experts;
    task.hidden_size = c.hidden_size, task.intermediate_size = c.intermediate_size;
    task.dtype = c.dtype, task.interleaved = c.is_interleaved;
    task.max_tokens_per_expert = c.max_tokens_per_expert;
    task.gate_alpha = c.is_clamped ? 1.702f : 1.0f, task.up_offset = c.is_clamped ? 1.0f : 0.0f;
    task.clamp_limit = c.is_clamped ? 1.0f : HUGE_VALF;
  }

  mol_expert_ffn_task task;

  void run(int32_t isa, mol_pool* pool) {
    output_.make_stale();
    task.isa = isa, task.pool = pool;
    CHECK(mol_expert_ffn(&task) == MOL_OK);
  }
  bool same_output(const Layer& other) const { return output_.same_bytes(other.output_); }
  bool is_untouched() const { return is_stale(output_.data(), output_.num_bytes()); }

  // The root mean square of the errors over that of the results: rounding of the product of the gates, and of the
  // result. And no single result far off.
  void check() {
    const double luck = 1.0 + 4.0 / std::sqrt(case_.num_tokens * case_.hidden_size);  // of a few results
    const double bound = luck * (case_.dtype == MOL_BFLOAT16 ? 0.0025 : case_.dtype == MOL_FLOAT16 ? 0.00035 : 1e-5);
    std::vector<double> expected = find_expected();
    double sum = 0, error_sum = 0, greatest = 0;
    for (int64_t token = 0; token < case_.num_tokens; ++token) {
      for (int64_t column = 0; column < case_.hidden_size; ++column) {
        const double exact = expected[token * case_.hidden_size + column];
        const double error = decoded(element(output_, token * stride_ + column), case_.dtype) - exact;
        CHECK(error == error);
        sum += exact * exact, error_sum += error * error, greatest = std::max(greatest, std::fabs(error));
      }
      CHECK(is_stale(element(output_, token * stride_ + case_.hidden_size), kGap * bytes_));
    }
    CHECK(std::sqrt(error_sum) <= bound * std::sqrt(sum));
    CHECK(greatest <= 16 * bound * std::sqrt(sum / (case_.num_tokens * case_.hidden_size)));
  }

 private:
  const Case case_;
  std::mt19937 random_;
  const int64_t bytes_, stride_;
  Buffer<uint8_t> hidden_, output_, w13_, w2_;
  Buffer<float> w13_bias_, w2_bias_;
  Buffer<int32_t> ids_;
  Buffer<float> topk_weights_, addend_;

  int64_t row_bytes() const { return case_.num_tokens * (case_.hidden_size + kGap) * element_bytes(case_.dtype); }
  int64_t weights() const {
    return static_cast<int64_t>(case_.num_experts) * case_.hidden_size * case_.intermediate_size;
  }
  const uint8_t* element(const Buffer<uint8_t>& buffer, int64_t index) const { return &buffer[index * bytes_]; }
  int64_t count(int32_t expert) const { return std::count(ids_.data(), ids_.data() + ids_.num_bytes() / 4, expert); }
  bool is_computed(int32_t expert) const {
    return expert >= 0 && (case_.max_tokens_per_expert == 0 || count(expert) <= case_.max_tokens_per_expert);
  }

  // Expert 1 never gets a token; one choice in eight is computed elsewhere.
  void deal_out() {
    for (int64_t i = 0; i < case_.num_tokens * case_.top_k; ++i) {
      const int32_t expert = static_cast<int32_t>(random_() % case_.num_experts);
      ids_[i] = i % 8 == 7 ? -1 : expert == 1 ? 0 : expert;
      topk_weights_[i] = std::uniform_real_distribution<float>(0.1f, 1.0f)(random_);
    }
  }
  void fill() {
    for (int64_t i = 0; i < case_.num_tokens * case_.hidden_size; ++i) {
      const int64_t index = i / case_.hidden_size * stride_ + i % case_.hidden_size;
      write_number(&hidden_[index * bytes_], case_.dtype, false, random_);
    }
    const int64_t size = static_cast<int64_t>(case_.hidden_size) * case_.intermediate_size;
    const auto number = [&] { return std::uniform_real_distribution<float>(-0.5f, 0.5f)(random_); };
    for (int32_t expert = 0; expert < case_.num_experts; ++expert) {
      if (count(expert) == 0 || !is_computed(expert)) continue;
      for (int64_t i = 0; i < 2 * size; ++i) {
        write_number(&w13_[(expert * 2 * size + i) * bytes_], case_.dtype, true, random_);
      }
      for (int64_t i = 0; i < size; ++i) {
        write_number(&w2_[(expert * size + i) * bytes_], case_.dtype, true, random_);
      }
      if (!case_.has_bias) continue;
      for (int64_t i = 0; i < 2 * case_.intermediate_size; ++i) {
        w13_bias_[expert * 2 * case_.intermediate_size + i] = number();
      }
      for (int64_t i = 0; i < case_.hidden_size; ++i) w2_bias_[expert * case_.hidden_size + i] = number();
    }
    for (int64_t i = 0; i < addend_.num_bytes() / 4; ++i) addend_[i] = number();
  }

  std::vector<double> numbers(const Buffer<uint8_t>& buffer) const {
    std::vector<double> result(buffer.num_bytes() / bytes_);
    for (size_t i = 0; i < result.size(); ++i) result[i] = decoded(element(buffer, i), case_.dtype);
    return result;
  }
  static double dot(const std::vector<double>& rows, int64_t row, const std::vector<double>& x) {
    double sum = 0;
    for (size_t i = 0; i < x.size(); ++i) sum += rows[row * x.size() + i] * x[i];
    return sum;
  }
  std::vector<double> find_expected() const {
    const int64_t size = case_.intermediate_size, width = case_.hidden_size;
    const std::vector<double> w13 = numbers(w13_), w2 = numbers(w2_);
    std::vector<double> result(case_.num_tokens * width, 0.0), x(width), inner(size);
    for (int64_t token = 0; token < case_.num_tokens; ++token) {
      for (int64_t i = 0; i < width; ++i) {
        x[i] = decoded(element(hidden_, token * stride_ + i), case_.dtype);
        if (case_.has_addend) result[token * width + i] = addend_[token * width + i];
      }
      for (int k = 0; k < case_.top_k; ++k) {
        const int32_t expert = ids_[token * case_.top_k + k];
        if (!is_computed(expert)) continue;
        for (int64_t i = 0; i < size; ++i) {
          const int64_t gate_row = case_.is_interleaved ? 2 * i : i,
                        up_row = case_.is_interleaved ? 2 * i + 1 : size + i;
          double gate = dot(w13, expert * 2 * size + gate_row, x), up = dot(w13, expert * 2 * size + up_row, x);
          if (case_.has_bias) {
            gate += w13_bias_[expert * 2 * size + gate_row];
            up += w13_bias_[expert * 2 * size + up_row];
          }
          gate = std::min<double>(gate, task.clamp_limit);
          up = std::clamp<double>(up, -task.clamp_limit, task.clamp_limit);
          inner[i] = gate / (1.0 + std::exp(-task.gate_alpha * gate)) * (up + task.up_offset);
        }
        for (int64_t i = 0; i < width; ++i) {
          const double bias = case_.has_bias ? w2_bias_[expert * width + i] : 0.0;
          result[token * width + i] +=
              topk_weights_[token * case_.top_k + k] * (dot(w2, expert * width + i, inner) + bias);
        }
      }
    }
    return result;
  }
};

void announce_case(const char* test, const Case& c) {
  announce("in %s: dtype %d, %d tokens, top %d of %d, %d x %d, bias %d, addend %d, interleaved %d, clamped %d", test,
           c.dtype, c.num_tokens, c.top_k, c.num_experts, c.hidden_size, c.intermediate_size, c.has_bias, c.has_addend,
           c.is_interleaved, c.is_clamped);
}

// Each type meets each number of tokens with sizes of several chunks and of less than a vector; the options take turns.
void everything_at_once(int32_t isa, mol_pool* pool) {
  constexpr int32_t kSizes[][2] = {{8, 8}, {24, 40}, {1096, 72}, {56, 2088}};
  int turn = 0;
  for (const int32_t dtype : kDtypes) {
    for (const int32_t num_tokens : {1, 2, 3, 4, 5, 7, 9, 12, 16, 17, 40}) {
      Case c;
      c.dtype = dtype, c.num_tokens = num_tokens;
      c.hidden_size = kSizes[turn % 4][0], c.intermediate_size = kSizes[turn % 4][1];
      c.num_experts = 2 + 5 * (turn % 3), c.top_k = 1 + turn % 3;
      c.has_bias = turn % 5 < 2, c.has_addend = turn % 7 < 2, c.is_interleaved = turn % 11 < 4,
      c.is_clamped = turn % 3 == 1;
      if (turn % 6 == 5) c.max_tokens_per_expert = 4;
      announce_case("everything_at_once", c);
      Layer layer(c, turn);
      layer.run(isa, turn % 2 ? pool : nullptr);
      layer.check();
      ++turn;
    }
  }
}

void any_number_of_threads_makes_the_same_bits(int32_t isa) {
  for (const int32_t dtype : kDtypes) {
    Case c;
    c.dtype = dtype, c.num_tokens = 37, c.top_k = 2, c.num_experts = 4;
    c.hidden_size = 136, c.intermediate_size = 520;
    announce_case("any_number_of_threads_makes_the_same_bits", c);
    Layer alone(c);
    alone.run(isa, nullptr);
    alone.check();
    for (const int32_t num_threads : {1, 3, 7}) {
      mol_pool* pool = mol_pool_create(num_threads, nullptr, 0, nullptr);
      CHECK(pool != nullptr);
      Layer layer(c);
      layer.run(isa, pool);
      CHECK(layer.same_output(alone));
      mol_pool_destroy(pool);
    }
  }
}

void bad_tasks_are_refused(int32_t isa) {
  Case c;
  c.num_tokens = 3, c.top_k = 2;
  announce_case("bad_tasks_are_refused", c);
  Layer layer(c);
  layer.task.isa = isa;
  const auto refused = [&](auto change) {
    mol_expert_ffn_task task = layer.task;
    change(task);
    return mol_expert_ffn(&task) == MOL_ERROR_BAD_ARGUMENT;
  };
  using Task = mol_expert_ffn_task;
  int32_t id_too_high[] = {0, 0, 0, 2, 0, 0};
  CHECK(mol_expert_ffn(nullptr) == MOL_ERROR_BAD_ARGUMENT);
  CHECK(refused([&](Task& t) { t.topk_ids = id_too_high; }));
  CHECK(refused([](Task& t) { t.topk_ids = nullptr; }));
  CHECK(refused([](Task& t) { t.topk_weights = nullptr; }));
  CHECK(refused([](Task& t) { t.hidden = nullptr; }));
  CHECK(refused([](Task& t) { t.output = nullptr; }));
  CHECK(refused([](Task& t) { t.w13 = nullptr; }));
  CHECK(refused([](Task& t) { t.w2 = nullptr; }));
  CHECK(refused([](Task& t) { t.num_tokens = -1; }));
  CHECK(refused([](Task& t) { t.top_k = 0; }));
  CHECK(refused([](Task& t) { t.num_experts = 0; }));
  CHECK(refused([](Task& t) { t.hidden_size = 12; }));
  CHECK(refused([](Task& t) { t.intermediate_size = 0; }));
  CHECK(refused([](Task& t) { t.hidden_token_stride = 7; }));
  CHECK(refused([](Task& t) { t.output_token_stride = 7; }));
  CHECK(refused([](Task& t) { t.dtype = MOL_INT8; }));
  CHECK(refused([](Task& t) { t.isa = 99; }));
  CHECK(refused([](Task& t) { t.max_tokens_per_expert = -1; }));
  CHECK(refused([](Task& t) { t.gate_alpha = NAN; }));
  CHECK(refused([](Task& t) { t.clamp_limit = 0; }));
  CHECK(refused([](Task& t) { t.up_offset = HUGE_VALF; }));
  CHECK(layer.is_untouched());
}

}  // namespace

int main(int num_arguments, char** arguments) {
  const int32_t isa = isa_from_arguments(num_arguments, arguments);
  mol_pool* pool = mol_pool_create(3, nullptr, 0, nullptr);
  CHECK(pool != nullptr);
  everything_at_once(isa, pool);
  mol_pool_destroy(pool);
  any_number_of_threads_makes_the_same_bits(isa);
  bad_tasks_are_refused(isa);
  std::puts("ffn_test: all checks hold");
  return 0;
}
