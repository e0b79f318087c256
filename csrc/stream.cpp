// Runs the queues: order, waits, pacing, lazy demand and jitter.
#include "stream.h"

#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

namespace mol {

int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

std::mutex& streams_mutex() {
  // Never destroyed: threads of streams that nobody closed may outlive static destructors at process exit.
  static std::mutex* const mutex = new std::mutex;
  return *mutex;
}

static void sleep_until(int64_t end_ns) {
  const timespec end = {static_cast<time_t>(end_ns / 1'000'000'000), static_cast<long>(end_ns % 1'000'000'000)};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &end, nullptr) == EINTR) {
  }
}

static uint64_t hash_name(const std::string& name) {  // FNV-1a: streams of one seed must not share their delays
  uint64_t hash = 0xcbf29ce484222325;
  for (const unsigned char letter : name) hash = (hash ^ letter) * 0x100000001b3;
  return hash;
}

static uint64_t splitmix64(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace mol

// Operations that the streams of this process have completed; guarded by streams_mutex().
static int64_t total_completed = 0;
// How often a host wait looks for progress, and whether the threads are still there.
static constexpr double kSecondsPerLook = 1;

// A thread can end alone, without any of our code running: by the exit system call, or killed by a seccomp filter.
static bool is_dead(pid_t thread_id) { return thread_id != 0 && tgkill(getpid(), thread_id, 0) != 0 && errno == ESRCH; }

using mol::now_ns;
using mol::Operation;
using mol::OperationKind;
using mol::streams_mutex;

mol_stream::mol_stream(const char* stream_name, const mol::StreamConfig& stream_config)
    : name(stream_name), config(stream_config) {
  if (config.timing != MOL_TIMING_LAZY) demanded = std::numeric_limits<int64_t>::max();
  thread = std::thread([this] { run(); });
}

int64_t mol_stream::submit(Operation operation) {
  operation.submit_ns = now_ns();
  int64_t seq;
  bool runnable;
  {
    Lock lock(streams_mutex());
    seq = operation.seq = ++submitted;
    queue.push_back(std::move(operation));
    runnable = seq <= demanded;
  }
  // After unlocking, so that the thread does not wake only to wait for the mutex; costs nothing if it is not asleep.
  if (runnable) wake.notify_one();
  return seq;
}

int32_t mol_stream::synchronize(int64_t seq, double stall_timeout_s) {
  Lock lock(streams_mutex());
  if (completed < seq) {
    demand(seq);
    std::condition_variable done;
    mol::Waiter waiter = {seq, &done};
    waiters.push_back(&waiter);
    const double patience_s = stall_timeout_s > 0 ? stall_timeout_s : std::numeric_limits<double>::infinity();
    const std::chrono::duration<double> look(std::min(kSecondsPerLook, patience_s / 8));
    int64_t seen = total_completed, seen_ns = now_ns();
    int32_t code = MOL_OK;
    while (completed < seq && code == MOL_OK) {
      if (done.wait_for(lock, look) == std::cv_status::no_timeout) continue;
      if (total_completed != seen) {
        seen = total_completed;
        seen_ns = now_ns();
      } else if ((now_ns() - seen_ns) * 1e-9 >= patience_s) {
        code = MOL_ERROR_STALLED;
      }
      if (has_dead_thread()) code = MOL_ERROR_ENDED;
    }
    waiters.erase(std::find(waiters.begin(), waiters.end(), &waiter));
    if (completed < seq) return code;
  }
  return std::exchange(failure, 0);
}

mol_stream_status mol_stream::status() const {
  mol_stream_status status = {};
  status.submitted = submitted;
  status.completed = completed;
  status.tag = running_tag;
  status.since_ns = running_since_ns;
  status.awaited = const_cast<mol_stream*>(blocked_on);
  status.awaited_seq = blocked_seq;
  status.state = is_dead(thread_id)      ? MOL_STREAM_ENDED
                 : running_since_ns != 0 ? MOL_STREAM_RUNNING
                 : blocked_on != nullptr ? MOL_STREAM_WAITING
                                         : MOL_STREAM_IDLE;
  return status;
}

void mol_stream::stop() {
  {
    Lock lock(streams_mutex());
    stopping = true;
    demanded = std::numeric_limits<int64_t>::max();
    wake.notify_one();
  }
  thread.join();
  std::deque<Operation> dropped;
  Lock lock(streams_mutex());
  gone = true;
  dropped.swap(queue);
}

void mol_stream::run() {
  pthread_setname_np(pthread_self(), name.substr(0, 15).c_str());
  // The default slack of 50 us would be added to every paced copy.
  prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
  Lock lock(streams_mutex());
  thread_id = gettid();
  while (wait_for_turn(lock)) {
    const Operation operation = std::move(queue.front());
    queue.pop_front();
    if (operation.kind != OperationKind::kWait) {
      run_work(operation, lock);
    } else if (!run_wait(operation, lock)) {
      return;
    }
    complete(operation.seq);
  }
}

bool mol_stream::wait_for_turn(Lock& lock) {
  wake.wait(lock, [this] { return stopping || (!queue.empty() && queue.front().seq <= demanded); });
  return !queue.empty();
}

bool mol_stream::run_wait(const Operation& operation, Lock& lock) {
  mol_stream& other = *operation.other;
  const int64_t seq = operation.other_seq;
  if (other.completed < seq) {
    other.demand(seq);
    blocked_on = &other;
    blocked_seq = seq;
    mol::Waiter waiter = {seq, &wake};
    other.waiters.push_back(&waiter);
    while (other.completed < seq && !(stopping && is_stuck())) {
      if (!stopping) {
        wake.wait(lock);
      } else {
        // Other streams may get stuck later without telling; being destroyed, this one can afford to look again.
        wake.wait_for(lock, std::chrono::milliseconds(1));
      }
    }
    other.waiters.erase(std::find(other.waiters.begin(), other.waiters.end(), &waiter));
    blocked_on = nullptr;
  }
  line_ns_ = std::max(line_ns_, other.end_of(seq));
  return other.completed >= seq;
}

void mol_stream::run_work(const Operation& operation, Lock& lock) {
  running_tag = operation.tag;
  running_since_ns = now_ns();
  lock.unlock();
  if (config.timing == MOL_TIMING_JITTER) mol::sleep_until(now_ns() + jitter_ns(operation.seq));
  int64_t start_ns = now_ns();
  int32_t code = 0;
  if (operation.kind == OperationKind::kCopy) {
    for (const mol::Segment& segment : operation.segments) {
      std::memcpy(segment.dst, segment.src, static_cast<size_t>(segment.num_bytes));
    }
  } else if (operation.kind == OperationKind::kFill) {
    std::memset(operation.segments[0].dst, operation.byte, static_cast<size_t>(operation.segments[0].num_bytes));
  } else {
    code = operation.function(operation.argument);
  }
  int64_t end_ns = now_ns();
  if (operation.kind == OperationKind::kCopy && config.bandwidth_bytes_per_s > 0) {
    // With a backlog the copy began, for the link, when the one before it ended, however late this thread woke up;
    // otherwise sleeping too long would lower the bandwidth that a stream achieves.
    if (config.timing == MOL_TIMING_EAGER) start_ns = std::max(line_ns_, operation.submit_ns);
    const double model_s = config.latency_s + operation.num_bytes / config.bandwidth_bytes_per_s;
    const int64_t model_end_ns = start_ns + static_cast<int64_t>(model_s * 1e9);
    if (model_end_ns > end_ns) {
      end_ns = model_end_ns;
      if (model_end_ns > now_ns()) mol::sleep_until(model_end_ns);
    }
  }
  lock.lock();
  running_since_ns = 0;
  line_ns_ = end_ns;
  if (failure == 0) failure = code;
  if (operation.kind == OperationKind::kWaitCall) return;
  totals.busy_ns += end_ns - start_ns;
  totals.num_bytes += operation.num_bytes;
  totals.num_copies += operation.kind == OperationKind::kCopy;
  totals.num_calls += operation.kind == OperationKind::kCall;
  if (record_capacity > 0) {
    if (static_cast<int64_t>(records.size()) >= record_capacity) records.pop_front();
    records.push_back({operation.tag, start_ns, end_ns, operation.num_bytes});
  }
}

void mol_stream::complete(int64_t seq) {
  ends_ns_[static_cast<size_t>(seq % kNumEndsKept)] = line_ns_;
  completed = seq;
  ++total_completed;
  for (const mol::Waiter* waiter : waiters) {
    if (waiter->seq <= completed) waiter->wake->notify_one();
  }
}

void mol_stream::demand(int64_t seq) {
  if (seq <= demanded) return;
  demanded = seq;
  wake.notify_one();
}

// Whether the wait that this stream is in can never end, provided that the host submits nothing more: it leads to
// something never submitted, to a destroyed stream, or round in a ring.
bool mol_stream::is_stuck() const {
  std::vector<const mol_stream*> seen;
  const mol_stream* stream = this;
  while (stream->blocked_on != nullptr) {
    const mol_stream* other = stream->blocked_on;
    if (other->completed >= stream->blocked_seq) return false;
    if (other->gone || stream->blocked_seq > other->submitted) return true;
    seen.push_back(stream);
    if (std::find(seen.begin(), seen.end(), other) != seen.end()) return true;
    stream = other;
  }
  return false;
}

bool mol_stream::has_dead_thread() const {
  std::vector<const mol_stream*> seen;
  for (const mol_stream* stream = this; stream != nullptr; stream = stream->blocked_on) {
    if (is_dead(stream->thread_id)) return true;
    if (std::find(seen.begin(), seen.end(), stream) != seen.end()) break;
    seen.push_back(stream);
  }
  return false;
}

int64_t mol_stream::end_of(int64_t seq) const {
  const bool kept = seq > 0 && seq <= completed && completed - seq < kNumEndsKept;
  return kept ? ends_ns_[static_cast<size_t>(seq % kNumEndsKept)] : 0;
}

int64_t mol_stream::jitter_ns(int64_t seq) const {
  // Counted, not drawn from a running generator: the delay of an operation depends on the seed, the stream's name and
  // seq alone. The top 53 bits make a double in 0..1.
  const uint64_t bits =
      mol::splitmix64(config.seed ^ mol::hash_name(name) ^ mol::splitmix64(static_cast<uint64_t>(seq)));
  return static_cast<int64_t>(config.jitter_max_s * 1e9 * (static_cast<double>(bits >> 11) * 0x1p-53));
}
