// The thread pool through the C ABI: several callers of one pool, pools made and destroyed while others work.
#include <atomic>
#include <thread>

#include "attention_batch.h"

namespace {

constexpr int kCallers = 3, kRounds = 12;

int32_t any_isa() { return mol_isa_available(MOL_ISA_AUTO) ? MOL_ISA_AUTO : MOL_ISA_SCALAR; }

Case some_work(int32_t seq_len) {
  Case c;
  c.head_dim = 16, c.num_heads = 4, c.num_kv_heads = 2, c.block_size = 16;
  c.seqs = {{seq_len, 1}, {40, 5}};
  return c;
}

void callers_of_one_pool_take_turns() {
  mol_pool* pool = mol_pool_create(3, nullptr, 0, nullptr);
  CHECK(pool != nullptr);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < kCallers; ++caller) {
    callers.emplace_back([=] {
      Batch batch(some_work(1500 + 700 * caller), caller);
      for (int round = 0; round < kRounds; ++round) batch.check(any_isa(), pool);
    });
  }
  for (std::thread& caller : callers) caller.join();
  mol_pool_destroy(pool);
}

// From threads that work to threads that spin, sleep, or have not even begun.
void pools_come_and_go_under_load() {
  std::atomic<bool> is_over{false};
  std::thread load([&] {
    mol_pool* pool = mol_pool_create(2, nullptr, 0, nullptr);
    Batch batch(some_work(1500));
    while (!is_over) batch.check(any_isa(), pool);
    mol_pool_destroy(pool);
  });
  Batch batch(some_work(300));
  for (int round = 0; round < 40; ++round) {
    mol_pool* pool = mol_pool_create(1 + round % 7, nullptr, 0, nullptr);
    CHECK(pool != nullptr);
    if (round % 3) batch.check(any_isa(), pool);
    if (round % 3 == 2) std::this_thread::sleep_for(std::chrono::microseconds(200));
    mol_pool_destroy(pool);
  }
  is_over = true;
  load.join();
}

void pools_that_cannot_be_are_refused() {
  const int32_t no_cpu[] = {-1}, beyond[] = {1 << 20}, absent[] = {1023};
  CHECK(mol_pool_create(0, nullptr, 0, nullptr) == nullptr);
  CHECK(mol_pool_create(-1, nullptr, 0, nullptr) == nullptr);
  CHECK(mol_pool_create(2, nullptr, 1, nullptr) == nullptr);
  CHECK(mol_pool_create(2, no_cpu, -1, nullptr) == nullptr);
  CHECK(mol_pool_create(2, no_cpu, 1, nullptr) == nullptr);
  CHECK(mol_pool_create(2, beyond, 1, nullptr) == nullptr);
  // Threads that were started by then are joined.
  if (std::thread::hardware_concurrency() < 1023) CHECK(mol_pool_create(3, absent, 1, nullptr) == nullptr);
}

}  // namespace

int main() {
  callers_of_one_pool_take_turns();
  pools_come_and_go_under_load();
  pools_that_cannot_be_are_refused();
  std::puts("pool_test: all checks hold");
  return 0;
}
