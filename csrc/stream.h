// A stream: a FIFO queue of copies, calls and waits with one thread of its own. stream.cpp runs the queue,
// stream_abi.cpp is the C face of it.
//
// One process-wide mutex guards the queues and counters of all streams. Operations run outside it, so it is held for
// well under a microsecond at a time, and in return waits between streams need no lock order, demand (lazy timing) can
// spread from stream to stream, and a ring of waits can be seen whole when a stream is destroyed.
#pragma once

#include <sys/types.h>

#include <array>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "moe_lightning.h"

namespace mol {

enum class OperationKind { kCopy, kFill, kCall, kWaitCall, kWait };

struct Segment {
  void* dst;
  const void* src;
  int64_t num_bytes;
};

struct Operation {
  OperationKind kind;
  int64_t seq = 0;
  int64_t tag = 0;
  int64_t submit_ns = 0;
  int64_t num_bytes = 0;  // of a copy
  std::vector<Segment> segments;
  int32_t (*function)(const void*) = nullptr;
  const void* argument = nullptr;
  int32_t byte = 0;                   // of a fill
  std::shared_ptr<mol_stream> other;  // of a wait; keeps a destroyed stream's counters readable
  int64_t other_seq = 0;
};

struct StreamConfig {
  double bandwidth_bytes_per_s;  // 0: unpaced
  double latency_s;
  int32_t timing;
  uint64_t seed;
  double jitter_max_s;
};

// Somebody asleep until a stream has completed seq: a host thread or another stream's thread.
struct Waiter {
  int64_t seq;
  std::condition_variable* wake;
};

int64_t now_ns();
std::mutex& streams_mutex();

}  // namespace mol

struct mol_stream {
  mol_stream(const char* name, const mol::StreamConfig& config);
  mol_stream(const mol_stream&) = delete;
  mol_stream& operator=(const mol_stream&) = delete;

  // Called by the host, without the mutex.
  int64_t submit(mol::Operation operation);
  int32_t synchronize(int64_t seq, double stall_timeout_s);
  mol_stream_status status() const;
  void stop();  // runs out what can still run, drops the rest, joins the thread

  const std::string name;
  const mol::StreamConfig config;
  std::shared_ptr<mol_stream> self;  // the host's reference, given up by mol_stream_destroy
  std::thread thread;

  // All below is guarded by streams_mutex().
  std::deque<mol::Operation> queue;
  int64_t submitted = 0;
  int64_t completed = 0;
  int64_t demanded = 0;  // lazy timing: operations up to this one may run
  bool stopping = false;
  bool gone = false;  // stopped: what has not completed never will
  pid_t thread_id = 0;
  std::condition_variable wake;
  std::vector<mol::Waiter*> waiters;
  const mol_stream* blocked_on = nullptr;  // the wait that the thread is in now, and for which seq
  int64_t blocked_seq = 0;
  int64_t running_tag = 0;
  int64_t running_since_ns = 0;  // 0: no copy, fill or call is running
  int32_t failure = 0;           // first code since the last report
  mol_stream_totals totals = {};
  std::deque<mol_record> records;
  int64_t record_capacity = 0;

 private:
  using Lock = std::unique_lock<std::mutex>;
  // Enough to know the end of any operation that is still recent; older ends lie before every start that is to come.
  static constexpr int64_t kNumEndsKept = 64;

  void run();
  bool wait_for_turn(Lock& lock);                              // false: nothing left to run
  bool run_wait(const mol::Operation& operation, Lock& lock);  // false: dropped
  void run_work(const mol::Operation& operation, Lock& lock);
  void complete(int64_t seq);
  void demand(int64_t seq);
  bool is_stuck() const;
  bool has_dead_thread() const;  // of this stream, or of one that it waits for
  int64_t end_of(int64_t seq) const;
  int64_t jitter_ns(int64_t seq) const;

  // When the last operation ended on the modelled time line: for a paced copy the end that its bandwidth gives,
  // which the thread's real wake-up can only follow.
  int64_t line_ns_ = 0;
  std::array<int64_t, kNumEndsKept> ends_ns_ = {};  // of seq at seq % kNumEndsKept
};
