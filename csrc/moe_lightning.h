// The whole C ABI of libmoe_lightning_cpu: plain C types only, no torch and no Python headers, loaded by ctypes.
// Four nouns live behind it: streams (FIFO queues of copies and calls, each with a thread of its own), attention over
// the paged host KV cache, the expert FFN, and the read probe that both are measured against. Every function may be
// called without the GIL.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MOL_API __attribute__((visibility("default")))

// Raised whenever a signature or struct below changes; the Python side refuses another value.
#define MOL_ABI_VERSION 5
MOL_API int32_t mol_abi_version(void);
// Hash of the csrc sources that this library was built from; a stale build fails loudly.
MOL_API const char* mol_source_hash(void);

// ---------------------------------------------------------------- streams
typedef struct mol_stream mol_stream;

// When an operation may run.
enum {
  MOL_TIMING_EAGER = 0,   // as soon as everything before it in its stream is done
  MOL_TIMING_LAZY = 1,    // only once somebody waits for it (the host, or a wait that another stream executes)
  MOL_TIMING_JITTER = 2,  // after a random delay of 0..jitter_max_s, reproducible from the seed
};

// One finished operation. Times are CLOCK_MONOTONIC nanoseconds, comparable with Python's time.monotonic_ns().
typedef struct {
  int64_t tag;       // the caller's, given at submission
  int64_t start_ns;  // when it began to run (waits for other streams are not part of it)
  int64_t end_ns;
  int64_t num_bytes;  // bytes of a copy, 0 for calls
} mol_record;

// Totals since creation.
typedef struct {
  int64_t busy_ns;    // time in copies and calls, pacing included, waits and jitter excluded
  int64_t num_bytes;  // bytes copied
  int64_t num_copies;
  int64_t num_calls;
} mol_stream_totals;

// bandwidth_bytes_per_s 0: unpaced. A paced copy takes latency_s + bytes / bandwidth, by sleeping after the memcpy.
MOL_API mol_stream* mol_stream_create(const char* name, double bandwidth_bytes_per_s, double latency_s, int32_t timing,
                                      uint64_t seed, double jitter_max_s);
// Runs out the queue of operations that can still run, joins the thread, frees.
MOL_API void mol_stream_destroy(mol_stream* stream);

// Each submission returns the operation's sequence number (1, 2, 3, ... per stream) and never blocks. "The stream
// has completed seq" is what an event means: an event is the pair (stream, seq).
// One copy operation of num_segments pieces (scatter/gather), paced and recorded as one.
MOL_API int64_t mol_stream_copy(mol_stream* stream, int64_t num_segments, void* const* dst, const void* const* src,
                                const int64_t* num_bytes, int64_t tag);
MOL_API int64_t mol_stream_fill(mol_stream* stream, void* dst, int32_t byte, int64_t num_bytes);
// function(argument) runs on the stream's thread; non-zero means failure, see mol_stream_synchronize.
MOL_API int64_t mol_stream_call(mol_stream* stream, int32_t (*function)(const void*), const void* argument,
                                int64_t tag);
// The same, for a function that only waits, for something that is no stream of ours: neither its time nor the call is
// counted, and nothing is recorded.
MOL_API int64_t mol_stream_wait_call(mol_stream* stream, int32_t (*function)(const void*), const void* argument,
                                     int64_t tag);
MOL_API int64_t mol_stream_wait(mol_stream* stream, mol_stream* other, int64_t seq);

// Blocks until the stream has completed seq. Returns 0, or the code of the first failed call of this stream since
// the last report (the stream goes on after a failed call; the code is reported once). Returns MOL_ERROR_STALLED once
// no stream of this process has completed anything for stall_timeout_s (0: waits for ever): an operation may still be
// running then, and destroying the stream would wait for it. Returns MOL_ERROR_ENDED, within a second or so, if the
// thread of the stream, or of one that it waits for, is no more.
MOL_API int32_t mol_stream_synchronize(mol_stream* stream, int64_t seq, double stall_timeout_s);

enum {
  MOL_STREAM_IDLE = 0,     // nothing to run, or (lazy) nothing that somebody waits for
  MOL_STREAM_RUNNING = 1,  // a copy, fill or call
  MOL_STREAM_WAITING = 2,  // for another stream
  MOL_STREAM_ENDED = 3,    // its thread is no more
};
typedef struct {
  int64_t submitted, completed;
  int64_t tag;          // while running, or ended in an operation: the operation's
  int64_t since_ns;     // when that began, else 0
  mol_stream* awaited;  // while waiting: the other stream, and which of its operations
  int64_t awaited_seq;
  int32_t state;  // MOL_STREAM_*
} mol_stream_status;
MOL_API void mol_stream_get_status(mol_stream* stream, mol_stream_status* status);
MOL_API int64_t mol_stream_submitted(mol_stream* stream);
MOL_API int64_t mol_stream_completed(mol_stream* stream);
MOL_API void mol_stream_get_totals(mol_stream* stream, mol_stream_totals* totals);
// Recording is off at first (capacity 0). The ring keeps the newest `capacity` records.
MOL_API void mol_stream_set_recording(mol_stream* stream, int64_t capacity);
// Moves up to `capacity` oldest records out; returns how many.
MOL_API int64_t mol_stream_drain_records(mol_stream* stream, mol_record* records, int64_t capacity);
// Which CPUs the stream's thread may run on (new threads inherit the caller's mask, which may be a single core).
MOL_API int32_t mol_stream_set_affinity(mol_stream* stream, const int32_t* cpus, int32_t num_cpus);

// ---------------------------------------------------------------- attention
enum { MOL_FLOAT32 = 0, MOL_BFLOAT16 = 1, MOL_FLOAT16 = 2, MOL_INT8 = 3, MOL_FP8_E4M3 = 4 };
enum {
  MOL_ISA_AUTO = 0,
  MOL_ISA_SCALAR = 1,
  MOL_ISA_AVX2 = 2,
  MOL_ISA_AVX512 = 3,
  MOL_ISA_AVX512BF16 = 4,  // what it has nothing of its own for runs as AVX512; so does AVX512VNNI
  MOL_ISA_AVX512VNNI = 5,
};
enum {
  MOL_OK = 0,
  MOL_ERROR_BAD_ARGUMENT = 1,
  MOL_ERROR_UNSUPPORTED_ISA = 2,
  MOL_ERROR_OUT_OF_MEMORY = 3,
  MOL_ERROR_INJECTED = 99,  // tests only
  MOL_ERROR_STALLED = -1,   // of mol_stream_synchronize alone
  MOL_ERROR_ENDED = -2,     // as above
};

typedef struct mol_pool mol_pool;
// A thread pool for the kernels: the thread that calls one works too, so num_threads 1 makes no thread.
// Workers may run on any of the CPUs; with `nodes` (one for each CPU, or NULL), in turns on those of one memory node.
MOL_API mol_pool* mol_pool_create(int32_t num_threads, const int32_t* cpus, int32_t num_cpus, const int32_t* nodes);
MOL_API void mol_pool_destroy(mol_pool* pool);

// One task: append the new keys and values to the cache, then attend. Shapes in comments; strides in elements.
// T tokens of S sequences; Hq query heads, Hk key/value heads, D head_dim, B block_size.
typedef struct {
  const void* query;  // [T, Hq, D]
  const void* key;    // [T, Hk, D]
  const void* value;  // [T, Hk, D]
  void* output;       // [T, Hq, D]
  int64_t query_token_stride, key_token_stride, value_token_stride, output_token_stride;
  // [num_blocks, Hk, 2 (K, V), B, D], contiguous. If quantised, [num_blocks, Hk, head bytes]: K [B, D], V [B, D], one
  // byte each, then the tokens' K scales [B] and V scales [B] in fp32; an element is worth its number times the scale.
  void* kv_cache;
  int64_t num_blocks;          // block ids are checked against it
  const int32_t* block_table;  // [S, block_table_stride]
  int64_t block_table_stride;
  const int32_t* query_start;   // [S + 1] first token of each sequence in the T tokens
  const int32_t* seq_lens;      // [S] context length, the new tokens included
  const int64_t* slot_mapping;  // [T] block * B + offset where the token's K and V go; negative: not written
  const float* sinks;           // [Hq] extra logit per head without a value, or NULL
  float* log_sum_exp;           // [T, Hq] log of the sum of exp(logit), sinks included, or NULL
  int32_t num_seqs, num_tokens, num_heads, num_kv_heads, head_dim, block_size;
  int32_t dtype;           // of query, key, value and output: MOL_FLOAT32, _BFLOAT16 or _FLOAT16
  int32_t cache_dtype;     // the same, or MOL_INT8 or MOL_FP8_E4M3 with a scale per token and head, found on append
  int32_t isa;             // MOL_ISA_*
  int32_t sliding_window;  // a query sees itself and the window-1 tokens before it; 0: no window
  int32_t append;          // 0: the cache holds the new tokens already
  int32_t attend;          // 0: append only
  float scale;
  float soft_cap;  // 0: none; else cap * tanh(logit / cap)
  mol_pool* pool;  // NULL: the calling thread alone
} mol_attention_task;

// Causal: query token i of a sequence sees keys up to seq_len - query_len + i. Signature fits mol_stream_call.
MOL_API int32_t mol_attention(const void* task);
// What MOL_ISA_AUTO means here for a cache of this type: the fastest that this CPU and OS can run, or MOL_ISA_SCALAR
// where there is no vector kernel to be had (AUTO is refused then). And whether one is compiled in and runnable.
MOL_API int32_t mol_best_isa(int32_t cache_dtype);
MOL_API int32_t mol_isa_available(int32_t isa);

// ---------------------------------------------------------------- expert FFN
// output[t] = addend[t] + sum over k of topk_weights[t, k] * w2[e] (act(w1[e] x[t]) * (w3[e] x[t])), e = topk_ids[t,
// k]. T tokens, K choices of each, E experts, H hidden_size, I intermediate_size. Sums are fp32; the product of both
// gates is rounded to dtype between w13 and w2. Weights of experts without tokens are not read.
typedef struct {
  const void* hidden;                                // [T, H]
  void* output;                                      // [T, H]
  int64_t hidden_token_stride, output_token_stride;  // in elements
  const void* w13;                                   // [E, 2 I, H], contiguous: w1's rows (gate), then w3's (up)
  const void* w2;                                    // [E, H, I], contiguous
  const float* w13_bias;                             // [E, 2 I] or NULL
  const float* w2_bias;                              // [E, H] or NULL
  const int32_t* topk_ids;                           // [T, K]; negative: computed elsewhere
  const float* topk_weights;                         // [T, K]
  const float* addend;                               // [T, H], e.g. what other experts gave; or NULL
  int32_t num_tokens, top_k, num_experts, hidden_size, intermediate_size;  // sizes: multiples of 8
  int32_t dtype;                  // of hidden, output and weights: MOL_FLOAT32, _BFLOAT16 or _FLOAT16
  int32_t isa;                    // MOL_ISA_*
  int32_t max_tokens_per_expert;  // experts with more are left out; 0: none is
  int32_t interleaved;            // w13's rows are gate, up, gate, up, ...
  // act(g) = g * sigmoid(gate_alpha * g), times up + up_offset. silu: 1, infinity, 0; gpt-oss: 1.702, 7, 1.
  float gate_alpha, clamp_limit, up_offset;  // g <= clamp_limit, |up| <= clamp_limit
  mol_pool* pool;                            // NULL: the calling thread alone
} mol_expert_ffn_task;

// Signature fits mol_stream_call. The calling thread keeps its working memory for the next call.
MOL_API int32_t mol_expert_ffn(const void* task);

// ---------------------------------------------------------------- read probe
// How a piece of memory is read: by one stream of addresses, or by streams that take turns, each in its own part.
enum {
  MOL_READ_SEQUENTIAL = 0,
  MOL_READ_TWO_STREAMS = 1,
  MOL_READ_TWO_STREAMS_PREFETCH = 2,  // 1 KB ahead
  MOL_READ_FOUR_STREAMS_PREFETCH = 3,
};
// Reads each of num_bytes bytes once, in pieces that the pool's threads (NULL: the calling one) take from a queue. *sum
// becomes the sum of the 64-bit words of data, a last partial word filled up with zeros. AUTO may be the scalar loop.
MOL_API int32_t mol_read_probe(const void* data, int64_t num_bytes, int32_t pattern, int32_t isa, mol_pool* pool,
                               uint64_t* sum);

// ---------------------------------------------------------------- faults
// Calls for mol_stream_call that go wrong, to show what happens then: one fails, one never returns, one ends the
// thread.
MOL_API int32_t mol_fault_error(const void*);
MOL_API int32_t mol_fault_hang(const void*);
MOL_API int32_t mol_fault_end_thread(const void*);

#ifdef __cplusplus
}
#endif
