// A thread pool for one kind of work: many small independent pieces handed out by an atomic counter, so that a core
// taken by another process slows the job by its share and no more. What a piece is, its caller decides.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "moe_lightning.h"

struct mol_pool {
 public:
  using Body = void (*)(void* context, int64_t piece);

  // num_threads counts the caller of run(). Workers may run on any CPU of the list, or with `nodes` in turns on those
  // of one memory node; empty: the creator's mask.
  mol_pool(int32_t num_threads, const int32_t* cpus, int32_t num_cpus, const int32_t* nodes);
  ~mol_pool();
  mol_pool(const mol_pool&) = delete;
  mol_pool& operator=(const mol_pool&) = delete;

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }  // the caller of run() included

  // Calls body(context, piece) once for each piece in 0..num_pieces-1 and returns when all are done: a barrier.
  // Two callers take turns.
  void run(int64_t num_pieces, Body body, void* context);

 private:
  void work_loop();
  void take_pieces();
  void stop();

  std::mutex run_mutex_;  // one run at a time

  // The present run. A worker joins it under mutex_ and only while it is open, so one that wakes late finds it
  // closed and goes back to sleep: nobody waits for a worker that had nothing left to do.
  std::mutex mutex_;
  std::condition_variable run_opened_, worker_left_;
  bool is_open_ = false, is_stopping_ = false;
  int32_t num_joined_ = 0;
  Body body_ = nullptr;
  void* context_ = nullptr;
  int64_t num_pieces_ = 0;
  std::atomic<int64_t> next_piece_{0};
  std::atomic<uint64_t> epoch_{0};  // counts runs (and the stop), for workers that still spin
  std::vector<std::thread> workers_;
};

namespace mol {

// The same for any callable body(piece). pool may be nullptr: all on the calling thread.
template <class Body>
void run_pieces(mol_pool* pool, int64_t num_pieces, Body& body) {
  if (pool == nullptr) {
    for (int64_t piece = 0; piece < num_pieces; ++piece) body(piece);
  } else {
    pool->run(num_pieces, [](void* context, int64_t piece) { (*static_cast<Body*>(context))(piece); }, &body);
  }
}

// The calling thread's own, made at its first piece, so that its pages lie near the thread's core; nullptr if there is
// no memory.
template <class Scratch>
Scratch* own_scratch() {
  thread_local std::unique_ptr<Scratch> scratch;
  if (!scratch) scratch.reset(new (std::nothrow) Scratch);
  return scratch.get();
}

}  // namespace mol
