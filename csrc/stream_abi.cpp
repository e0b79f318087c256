// The C face of the streams.
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <system_error>
#include <utility>

#include "stream.h"

using mol::Operation;
using mol::OperationKind;
using Lock = std::unique_lock<std::mutex>;

mol_stream* mol_stream_create(const char* name, double bandwidth_bytes_per_s, double latency_s, int32_t timing,
                              uint64_t seed, double jitter_max_s) {
  const mol::StreamConfig config = {bandwidth_bytes_per_s, latency_s, timing, seed, jitter_max_s};
  try {
    auto stream = std::make_shared<mol_stream>(name, config);
    stream->self = stream;
    return stream.get();
  } catch (const std::system_error&) {  // no thread to be had
    return nullptr;
  }
}

void mol_stream_destroy(mol_stream* stream) {
  if (stream == nullptr) return;
  stream->stop();
  // Waits of other streams may still refer to it; the last of them frees it.
  const std::shared_ptr<mol_stream> last = std::move(stream->self);
}

int64_t mol_stream_copy(mol_stream* stream, int64_t num_segments, void* const* dst, const void* const* src,
                        const int64_t* num_bytes, int64_t tag) {
  Operation operation;
  operation.kind = OperationKind::kCopy;
  operation.tag = tag;
  operation.segments.reserve(static_cast<size_t>(num_segments));
  for (int64_t i = 0; i < num_segments; ++i) {
    operation.segments.push_back({dst[i], src[i], num_bytes[i]});
    operation.num_bytes += num_bytes[i];
  }
  return stream->submit(std::move(operation));
}

int64_t mol_stream_fill(mol_stream* stream, void* dst, int32_t byte, int64_t num_bytes) {
  Operation operation;
  operation.kind = OperationKind::kFill;
  operation.byte = byte;
  operation.segments.push_back({dst, nullptr, num_bytes});
  return stream->submit(std::move(operation));
}

static int64_t submit_call(mol_stream* stream, OperationKind kind, int32_t (*function)(const void*),
                           const void* argument, int64_t tag) {
  Operation operation;
  operation.kind = kind;
  operation.tag = tag;
  operation.function = function;
  operation.argument = argument;
  return stream->submit(std::move(operation));
}

int64_t mol_stream_call(mol_stream* stream, int32_t (*function)(const void*), const void* argument, int64_t tag) {
  return submit_call(stream, OperationKind::kCall, function, argument, tag);
}

int64_t mol_stream_wait_call(mol_stream* stream, int32_t (*function)(const void*), const void* argument, int64_t tag) {
  return submit_call(stream, OperationKind::kWaitCall, function, argument, tag);
}

int64_t mol_stream_wait(mol_stream* stream, mol_stream* other, int64_t seq) {
  Operation operation;
  operation.kind = OperationKind::kWait;
  operation.other = other->self;
  operation.other_seq = seq;
  return stream->submit(std::move(operation));
}

int32_t mol_stream_synchronize(mol_stream* stream, int64_t seq, double stall_timeout_s) {
  return stream->synchronize(seq, stall_timeout_s);
}

void mol_stream_get_status(mol_stream* stream, mol_stream_status* status) {
  Lock lock(mol::streams_mutex());
  *status = stream->status();
}

int64_t mol_stream_submitted(mol_stream* stream) {
  Lock lock(mol::streams_mutex());
  return stream->submitted;
}

int64_t mol_stream_completed(mol_stream* stream) {
  Lock lock(mol::streams_mutex());
  return stream->completed;
}

void mol_stream_get_totals(mol_stream* stream, mol_stream_totals* totals) {
  Lock lock(mol::streams_mutex());
  *totals = stream->totals;
}

void mol_stream_set_recording(mol_stream* stream, int64_t capacity) {
  Lock lock(mol::streams_mutex());
  stream->record_capacity = std::max<int64_t>(capacity, 0);
  while (static_cast<int64_t>(stream->records.size()) > stream->record_capacity) stream->records.pop_front();
}

int64_t mol_stream_drain_records(mol_stream* stream, mol_record* records, int64_t capacity) {
  Lock lock(mol::streams_mutex());
  const int64_t num_drained = std::min<int64_t>(capacity, static_cast<int64_t>(stream->records.size()));
  std::copy_n(stream->records.begin(), num_drained, records);
  stream->records.erase(stream->records.begin(), stream->records.begin() + num_drained);
  return num_drained;
}

int32_t mol_stream_set_affinity(mol_stream* stream, const int32_t* cpus, int32_t num_cpus) {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  for (int32_t i = 0; i < num_cpus; ++i) {
    if (cpus[i] < 0 || cpus[i] >= CPU_SETSIZE) return MOL_ERROR_BAD_ARGUMENT;
    CPU_SET(cpus[i], &mask);
  }
  const int error = pthread_setaffinity_np(stream->thread.native_handle(), sizeof(mask), &mask);
  return error == 0 ? MOL_OK : MOL_ERROR_BAD_ARGUMENT;
}
