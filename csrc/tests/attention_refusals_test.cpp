// What mol_attention refuses: with the right code, and before the first byte is written.
#include "attention_batch.h"

namespace {

Case small_case() {
  Case c;
  c.head_dim = 16, c.num_heads = 4, c.num_kv_heads = 2, c.sliding_window = 0;
  c.seqs = {{20, 2}, {5, 3}};
  return c;
}

void bad_scalars_are_refused() {
  Batch batch(small_case());
  using Task = mol_attention_task;
  void (*const changes[])(Task&) = {
      [](Task& t) { t.kv_cache = nullptr; },
      [](Task& t) { t.num_blocks = 0; },
      [](Task& t) { t.num_blocks = 1; },
      [](Task& t) { t.block_size = 0; },
      [](Task& t) { t.block_size = -16; },
      [](Task& t) { t.head_dim = 0; },
      [](Task& t) { t.head_dim = 12; },
      [](Task& t) { t.head_dim = 264; },
      [](Task& t) { t.num_heads = 3; },
      [](Task& t) { t.num_heads = INT32_MAX; },
      [](Task& t) { t.num_kv_heads = 0; },
      [](Task& t) { t.num_kv_heads = -2; },
      [](Task& t) { t.dtype = MOL_INT8; },
      [](Task& t) { t.dtype = -1; },
      [](Task& t) { t.cache_dtype = MOL_BFLOAT16; },
      [](Task& t) { t.cache_dtype = 5; },
      [](Task& t) { t.isa = -1; },
      [](Task& t) { t.isa = MOL_ISA_AVX512BF16 + 1000; },
      [](Task& t) { t.query = nullptr; },
      [](Task& t) { t.output = nullptr; },
      [](Task& t) { t.key = nullptr; },
      [](Task& t) { t.value = nullptr; },
      [](Task& t) { t.block_table = nullptr; },
      [](Task& t) { t.query_start = nullptr; },
      [](Task& t) { t.seq_lens = nullptr; },
      [](Task& t) { t.slot_mapping = nullptr; },
      [](Task& t) { t.num_tokens = -1; },
      [](Task& t) { t.num_tokens = 4; },
      [](Task& t) { t.num_seqs = -1; },
      [](Task& t) { t.query_token_stride = 63; },
      [](Task& t) { t.output_token_stride = -72; },
      [](Task& t) { t.key_token_stride = 31; },
      [](Task& t) { t.value_token_stride = 0; },
      [](Task& t) { t.block_table_stride = 1; },
      [](Task& t) { t.sliding_window = -1; },
      [](Task& t) { t.scale = NAN; },
      [](Task& t) { t.scale = HUGE_VALF; },
      [](Task& t) { t.soft_cap = -1.0f; },
      [](Task& t) { t.soft_cap = NAN; },
  };
  for (const auto& change : changes) {
    announce("in bad_scalars_are_refused: change %d", static_cast<int>(&change - changes));
    Task task = batch.task;
    change(task);
    task.isa = task.isa == MOL_ISA_AUTO ? int32_t{MOL_ISA_SCALAR} : task.isa;
    batch.check_refused(task);
  }
  CHECK(mol_attention(nullptr) == MOL_ERROR_BAD_ARGUMENT);
}

// One number in one of the arrays that lead to memory.
template <class T>
void bad_entries_are_refused(const T* mol_attention_task::* array, int64_t size, int64_t index,
                             std::initializer_list<T> bad_values) {
  Batch batch(small_case());
  Buffer<T> changed(size);
  for (const T bad_value : bad_values) {
    std::memcpy(changed.data(), batch.task.*array, changed.num_bytes());
    changed[index] = bad_value;
    announce("in bad_entries_are_refused: entry %d = %lld", static_cast<int>(index), static_cast<long long>(bad_value));
    mol_attention_task task = batch.task;
    task.*array = changed.data(), task.isa = MOL_ISA_SCALAR;
    batch.check_refused(task);
  }
}

void bad_entries_are_refused() {
  using Task = mol_attention_task;
  const int64_t num_blocks = Batch(small_case()).task.num_blocks;
  bad_entries_are_refused<int64_t>(&Task::slot_mapping, 7, 4, {num_blocks * 16, INT64_MAX});
  bad_entries_are_refused<int32_t>(&Task::block_table, 4, 1, {-1, static_cast<int32_t>(num_blocks), INT32_MAX});
  bad_entries_are_refused<int32_t>(&Task::query_start, 3, 0, {-1, 3, INT32_MIN, INT32_MAX});
  bad_entries_are_refused<int32_t>(&Task::query_start, 3, 1, {-1, 6, INT32_MIN, INT32_MAX});
  bad_entries_are_refused<int32_t>(&Task::query_start, 3, 2, {1, 8, INT32_MIN, INT32_MAX});
  bad_entries_are_refused<int32_t>(&Task::seq_lens, 2, 0, {1, -1, 33, INT32_MIN, INT32_MAX});
}

void an_instruction_set_that_cannot_run_is_refused() {
  Batch batch(small_case());
  for (int32_t isa = MOL_ISA_AUTO; isa <= MOL_ISA_AVX512VNNI; ++isa) {
    mol_attention_task task = batch.task;
    task.isa = isa;
    if (!mol_isa_available(isa)) batch.check_refused(task, MOL_ERROR_UNSUPPORTED_ISA);
  }
}

void auto_is_the_best() {
  if (!mol_isa_available(MOL_ISA_AUTO)) return;
  Batch chosen(small_case()), best(small_case());
  chosen.check(MOL_ISA_AUTO, nullptr);
  best.check(mol_best_isa(best.task.cache_dtype), nullptr);
  CHECK(chosen.same_results(best));
}

// Tensors without elements come as null pointers.
void a_task_without_tokens_does_nothing() {
  Batch batch(small_case());
  mol_attention_task task = batch.task;
  task.query = task.key = task.value = task.output = nullptr;
  task.block_table = task.query_start = task.seq_lens = nullptr, task.slot_mapping = nullptr;
  task.num_tokens = task.num_seqs = 0, task.isa = MOL_ISA_SCALAR;
  batch.check_refused(task, MOL_OK);
}

}  // namespace

int main() {
  bad_scalars_are_refused();
  bad_entries_are_refused();
  an_instruction_set_that_cannot_run_is_refused();
  auto_is_the_best();
  a_task_without_tokens_does_nothing();
  std::puts("attention_refusals_test: all checks hold");
  return 0;
}
