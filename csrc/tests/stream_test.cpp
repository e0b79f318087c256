// Exercises the streams without Python, for sanitizers and for measuring: random traffic with cross waits in each
// timing, destruction under way, pacing accuracy and submission cost. Exits 0 when all checks hold.
#include <time.h>

#include <vector>

#include "check.h"

static double now_s() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + time.tv_nsec * 1e-9;
}

static int32_t increment(const void* cell) {
  ++*static_cast<int64_t*>(const_cast<void*>(cell));
  return 0;
}
static int32_t fail(const void*) { return MOL_ERROR_INJECTED; }

// Four streams pass a token round: each increments one shared cell, ordered by waits alone, and copies it to a log.
static void ring_of_waits(int32_t timing) {
  constexpr int kStreams = 4, kRounds = 200;
  mol_stream* streams[kStreams];
  for (int i = 0; i < kStreams; ++i) streams[i] = mol_stream_create("ring", 0, 0, timing, 7, 20e-6);
  int64_t cell = 0;
  std::vector<int64_t> log(kRounds * kStreams, -1);
  mol_stream* last = nullptr;
  int64_t last_seq = 0;
  for (int i = 0; i < kRounds * kStreams; ++i) {
    mol_stream* stream = streams[i % kStreams];
    if (last != nullptr) mol_stream_wait(stream, last, last_seq);
    mol_stream_call(stream, increment, &cell, i);
    void* dst = &log[i];
    const void* src = &cell;
    const int64_t num_bytes = sizeof(cell);
    last_seq = mol_stream_copy(stream, 1, &dst, &src, &num_bytes, i);
    last = stream;
  }
  CHECK(mol_stream_synchronize(last, last_seq, 0) == 0);
  for (int i = 0; i < kRounds * kStreams; ++i) CHECK(log[i] == i + 1);
  for (mol_stream* stream : streams) mol_stream_destroy(stream);
}

static void destroy_never_hangs() {
  for (int round = 0; round < 20; ++round) {
    mol_stream* a = mol_stream_create("a", 0, 0, round % 3, round, 50e-6);
    mol_stream* b = mol_stream_create("b", 0, 0, round % 3, round, 50e-6);
    mol_stream* c = mol_stream_create("c", 0, 0, round % 3, round, 50e-6);
    int64_t cell = 0;
    mol_stream_wait(a, b, 3);  // a and b wait for each other: a ring
    mol_stream_wait(b, a, 2);
    mol_stream_wait(c, b, 99);  // never submitted
    for (mol_stream* stream : {a, b, c}) mol_stream_call(stream, increment, &cell, 0);
    mol_stream_wait(b, a, 1000);
    if (round % 2)
      mol_stream_destroy(a), mol_stream_destroy(c), mol_stream_destroy(b);
    else
      mol_stream_destroy(c), mol_stream_destroy(b), mol_stream_destroy(a);
    CHECK(cell == 0);
  }
}

static void destroy_runs_out_what_can_run() {
  for (int32_t timing : {MOL_TIMING_EAGER, MOL_TIMING_LAZY, MOL_TIMING_JITTER}) {
    mol_stream* a = mol_stream_create("a", 0, 0, timing, 1, 100e-6);
    mol_stream* b = mol_stream_create("b", 0, 0, timing, 1, 100e-6);
    int64_t cell = 0;
    int64_t seq = 0;
    for (int i = 0; i < 50; ++i) seq = mol_stream_call(a, increment, &cell, 0);
    mol_stream_wait(b, a, seq);
    mol_stream_call(b, increment, &cell, 0);
    mol_stream_destroy(b);
    mol_stream_destroy(a);
    CHECK(cell == 51);
  }
}

static void failures_are_reported_once() {
  mol_stream* stream = mol_stream_create("fail", 0, 0, MOL_TIMING_EAGER, 0, 0);
  int64_t cell = 0;
  mol_stream_call(stream, fail, nullptr, 0);
  const int64_t seq = mol_stream_call(stream, increment, &cell, 0);
  CHECK(mol_stream_synchronize(stream, seq, 0) == MOL_ERROR_INJECTED);
  CHECK(mol_stream_synchronize(stream, seq, 0) == 0);
  CHECK(cell == 1);
  mol_stream_destroy(stream);
}

static void measure_pacing() {
  constexpr double kBandwidth = 2e9;
  constexpr int kCopies = 100;
  std::vector<char> from(1 << 20, 1), to(1 << 20);
  for (const int64_t num_bytes : {int64_t{64} << 10, int64_t{1} << 20}) {
    mol_stream* stream = mol_stream_create("paced", kBandwidth, 10e-6, MOL_TIMING_EAGER, 0, 0);
    void* dst = to.data();
    const void* src = from.data();
    int64_t seq = 0;
    const double start_s = now_s();
    for (int i = 0; i < kCopies; ++i) seq = mol_stream_copy(stream, 1, &dst, &src, &num_bytes, 0);
    mol_stream_synchronize(stream, seq, 0);
    const double took_s = now_s() - start_s;
    const double model_s = kCopies * (10e-6 + num_bytes / kBandwidth);
    CHECK(took_s >= model_s);
    mol_stream_totals totals;
    mol_stream_get_totals(stream, &totals);
    CHECK(totals.num_copies == kCopies && totals.num_bytes == kCopies * num_bytes);
    std::printf("paced, %7lld bytes x %d: %.3f ms, model %.3f ms (%+.2f %%), busy %.3f ms\n",
                static_cast<long long>(num_bytes), kCopies, took_s * 1e3, model_s * 1e3, (took_s / model_s - 1) * 100,
                totals.busy_ns * 1e-6);
    double single_s = 0;
    for (int i = 0; i < 50; ++i) {
      const double begin_s = now_s();
      mol_stream_synchronize(stream, mol_stream_copy(stream, 1, &dst, &src, &num_bytes, 0), 0);
      single_s += now_s() - begin_s;
    }
    std::printf("paced, %7lld bytes alone: %.1f us more than the model\n", static_cast<long long>(num_bytes),
                (single_s / 50 - 10e-6 - num_bytes / kBandwidth) * 1e6);
    mol_stream_destroy(stream);
  }
}

static void measure_submission() {
  constexpr int kCalls = 20000;
  mol_stream* stream = mol_stream_create("busy", 0, 0, MOL_TIMING_EAGER, 0, 0);
  int64_t cell = 0, seq = 0;
  double start_s = now_s();
  for (int i = 0; i < kCalls; ++i) seq = mol_stream_call(stream, increment, &cell, 0);
  const double submit_s = now_s() - start_s;
  mol_stream_synchronize(stream, seq, 0);
  const double all_s = now_s() - start_s;
  start_s = now_s();
  for (int i = 0; i < kCalls / 10; ++i) {
    mol_stream_synchronize(stream, mol_stream_call(stream, increment, &cell, 0), 0);
  }
  const double round_trip_s = now_s() - start_s;
  std::printf("submission %.2f us, throughput %.2f us a call, submit-and-wait round trip %.1f us\n",
              submit_s / kCalls * 1e6, all_s / kCalls * 1e6, round_trip_s / (kCalls / 10) * 1e6);
  mol_stream_destroy(stream);
}

int main() {
  for (int32_t timing : {MOL_TIMING_EAGER, MOL_TIMING_LAZY, MOL_TIMING_JITTER}) ring_of_waits(timing);
  destroy_never_hangs();
  destroy_runs_out_what_can_run();
  failures_are_reported_once();
  measure_pacing();
  measure_submission();
  std::puts("stream_test: all checks hold");
  return 0;
}
