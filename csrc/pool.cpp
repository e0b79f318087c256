#include "pool.h"

#include <pthread.h>
#include <sched.h>

#include <chrono>
#include <map>
#include <new>
#include <system_error>

namespace {
// Long enough to bridge the gap between two layers' tasks, short enough to leave the core to whoever computes next:
// a futex wake costs about as much.
constexpr std::chrono::microseconds kSpinTime{50};

// The CPUs of each node, or all in one.
std::vector<cpu_set_t> masks_of(const int32_t* cpus, int32_t num_cpus, const int32_t* nodes) {
  std::map<int32_t, cpu_set_t> by_node;
  for (int32_t c = 0; c < num_cpus; ++c) {
    const int32_t node = nodes == nullptr ? 0 : nodes[c];
    if (by_node.count(node) == 0) CPU_ZERO(&by_node[node]);
    CPU_SET(cpus[c], &by_node[node]);
  }
  std::vector<cpu_set_t> masks;
  for (const auto& [node, mask] : by_node) masks.push_back(mask);
  return masks;
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}
}  // namespace

mol_pool::mol_pool(int32_t num_threads, const int32_t* cpus, int32_t num_cpus, const int32_t* nodes) {
  try {
    const std::vector<cpu_set_t> masks = masks_of(cpus, num_cpus, nodes);
    for (int32_t i = 1; i < num_threads; ++i) {
      workers_.emplace_back([this] { work_loop(); });
      if (masks.empty()) continue;
      const cpu_set_t& mask = masks[i % masks.size()];
      const int error = pthread_setaffinity_np(workers_.back().native_handle(), sizeof mask, &mask);
      if (error != 0) throw std::system_error(error, std::generic_category());
    }
  } catch (...) {
    stop();  // a half-made pool must not leave threads behind
    throw;
  }
}

mol_pool::~mol_pool() { stop(); }

void mol_pool::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    is_stopping_ = true;
    epoch_.fetch_add(1);
  }
  run_opened_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void mol_pool::run(int64_t num_pieces, Body body, void* context) {
  if (workers_.empty() || num_pieces < 2) {
    for (int64_t piece = 0; piece < num_pieces; ++piece) body(context, piece);
    return;
  }
  std::lock_guard<std::mutex> turn(run_mutex_);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    body_ = body;
    context_ = context;
    num_pieces_ = num_pieces;
    next_piece_.store(0, std::memory_order_relaxed);
    is_open_ = true;
    epoch_.fetch_add(1);
  }
  run_opened_.notify_all();
  take_pieces();
  std::unique_lock<std::mutex> lock(mutex_);
  is_open_ = false;
  worker_left_.wait(lock, [this] { return num_joined_ == 0; });
}

void mol_pool::take_pieces() {
  for (;;) {
    const int64_t piece = next_piece_.fetch_add(1, std::memory_order_relaxed);
    if (piece >= num_pieces_) return;
    body_(context_, piece);
  }
}

void mol_pool::work_loop() {
  uint64_t seen = 0;
  for (;;) {
    const auto spin_end = std::chrono::steady_clock::now() + kSpinTime;
    while (epoch_.load() == seen && std::chrono::steady_clock::now() < spin_end) relax();

    std::unique_lock<std::mutex> lock(mutex_);
    run_opened_.wait(lock, [&] { return is_stopping_ || epoch_.load() != seen; });
    seen = epoch_.load();
    if (is_stopping_) return;
    if (!is_open_) continue;
    ++num_joined_;
    lock.unlock();
    take_pieces();
    lock.lock();
    if (--num_joined_ == 0 && !is_open_) worker_left_.notify_one();
  }
}

mol_pool* mol_pool_create(int32_t num_threads, const int32_t* cpus, int32_t num_cpus, const int32_t* nodes) {
  if (num_threads < 1 || num_cpus < 0 || (num_cpus > 0 && cpus == nullptr)) return nullptr;
  for (int32_t c = 0; c < num_cpus; ++c) {
    if (cpus[c] < 0 || cpus[c] >= CPU_SETSIZE) return nullptr;
  }
  try {
    return new mol_pool(num_threads, cpus, num_cpus, nodes);
  } catch (const std::system_error&) {  // no thread to be had, or a CPU that this process may not use
    return nullptr;
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void mol_pool_destroy(mol_pool* pool) { delete pool; }
