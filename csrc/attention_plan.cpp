// Cuts a task into pieces for the threads: large enough to read whole blocks, small enough that a thread whose core is
// taken by another process holds nobody up.
#include <algorithm>
#include <numeric>

#include "attention_task.h"

namespace mol {
namespace {

constexpr int64_t kPiecesPerThread = 16;

int32_t divided(int64_t a, int64_t b) { return static_cast<int32_t>((a + b - 1) / b); }

class Planner {
 public:
  Planner(const mol_attention_task& task, int num_threads)
      : task_(task), group_(task.num_heads / task.num_kv_heads), heads_per_piece_(std::min(group_, kMaxRows)) {
    std::vector<int32_t> seqs(task.num_seqs);
    std::iota(seqs.begin(), seqs.end(), 0);
    std::stable_sort(seqs.begin(), seqs.end(), [&](int32_t a, int32_t b) { return cost(a) > cost(b); });
    int64_t total_cost = 0;
    for (int32_t seq : seqs) total_cost += cost(seq);
    // One thread waits for nobody.
    piece_cost_ = num_threads == 1 ? total_cost : total_cost / (num_threads * kPiecesPerThread);
    for (int32_t seq : seqs) {
      if (cost(seq) == 0) break;
      if (query_len(seq) == 1) {
        add_decode(seq);
      } else {
        add_prefill(seq);
      }
    }
  }

  AttentionPlan plan;

 private:
  const mol_attention_task& task_;
  const int32_t group_, heads_per_piece_;
  int64_t piece_cost_;

  int32_t query_len(int32_t seq) const { return task_.query_start[seq + 1] - task_.query_start[seq]; }
  // Keys that are read, once for each query token.
  int64_t cost(int32_t seq) const {
    int64_t keys = task_.seq_lens[seq];
    if (task_.sliding_window > 0) keys = std::min(keys, int64_t{task_.sliding_window} + query_len(seq) - 1);
    return query_len(seq) * keys;
  }

  // The segments that some token of a piece sees.
  Piece piece_of(int32_t seq, int32_t first_token, int32_t num_tokens) const {
    const int64_t end = task_.seq_lens[seq] - task_.query_start[seq + 1] + first_token + num_tokens;
    int64_t begin = 0;
    if (task_.sliding_window > 0) begin = std::max<int64_t>(0, end - num_tokens + 1 - task_.sliding_window);
    Piece piece = {};
    piece.seq = seq;
    piece.first_token = first_token;
    piece.num_tokens = num_tokens;
    piece.first_segment = static_cast<int32_t>(begin / segment_keys(task_));
    piece.num_segments = divided(end, segment_keys(task_)) - piece.first_segment;
    piece.partial = -1;
    return piece;
  }

  // Heads apart first, since each reads a whole context's worth of its own; then the context.
  void add_decode(int32_t seq) {
    Piece piece = piece_of(seq, task_.query_start[seq], 1);
    const int32_t num_parts = std::max(1, divided(cost(seq), std::max<int64_t>(1, piece_cost_)));
    const int32_t most_kv_heads = std::max(1, kMaxRows / heads_per_piece_);
    const int32_t kv_heads = std::min(most_kv_heads, divided(task_.num_kv_heads, num_parts));
    const int32_t context_parts =
        kv_heads > 1 ? 1 : std::min(piece.num_segments, divided(num_parts, task_.num_kv_heads));
    for (int32_t kv_head = 0; kv_head < task_.num_kv_heads; kv_head += kv_heads) {
      piece.first_kv_head = kv_head;
      piece.num_kv_heads = std::min(kv_heads, task_.num_kv_heads - kv_head);
      for (piece.first_head = 0; piece.first_head < group_; piece.first_head += heads_per_piece_) {
        piece.num_heads = std::min(heads_per_piece_, group_ - piece.first_head);
        add_parts(piece, context_parts);
      }
    }
  }

  void add_parts(const Piece& whole, int32_t num_parts) {
    if (num_parts == 1) {
      plan.pieces.push_back(whole);
      return;
    }
    plan.joins.push_back({whole, num_parts});
    plan.joins.back().whole.partial = plan.num_partial_floats;
    for (int32_t part = 0; part < num_parts; ++part) {
      Piece piece = whole;
      const int32_t begin = static_cast<int64_t>(whole.num_segments) * part / num_parts;
      const int32_t end = static_cast<int64_t>(whole.num_segments) * (part + 1) / num_parts;
      piece.first_segment += begin;
      piece.num_segments = end - begin;
      piece.partial = plan.num_partial_floats;
      plan.num_partial_floats += partial_floats(task_, piece.num_rows());
      plan.pieces.push_back(piece);
    }
  }

  // The last tokens first: they see most keys, and long pieces should start early.
  void add_prefill(int32_t seq) {
    const int32_t begin = task_.query_start[seq], tokens_per_piece = kMaxRows / heads_per_piece_;
    for (int32_t end = task_.query_start[seq + 1]; end > begin; end -= tokens_per_piece) {
      const int32_t first_token = std::max(begin, end - tokens_per_piece);
      Piece piece = piece_of(seq, first_token, end - first_token);
      piece.num_kv_heads = 1;
      for (piece.first_kv_head = 0; piece.first_kv_head < task_.num_kv_heads; ++piece.first_kv_head) {
        for (piece.first_head = 0; piece.first_head < group_; piece.first_head += heads_per_piece_) {
          piece.num_heads = std::min(heads_per_piece_, group_ - piece.first_head);
          plan.pieces.push_back(piece);
        }
      }
    }
  }
};

}  // namespace

AttentionPlan plan_attention(const mol_attention_task& task, int num_threads) {
  return std::move(Planner(task, num_threads).plan);
}

}  // namespace mol
