// The steps of mol_attention besides the kernels: check, append, cut into pieces.
#pragma once
#include <vector>

#include "attention.h"

namespace mol {

// Whether shapes, strides, lengths, slots and the blocks that are read lie within the task's arrays.
bool is_valid(const mol_attention_task& task);

// Writes K and V of tokens [begin, end) to their slots, quantised if the cache is.
void append_tokens(const mol_attention_task& task, int64_t begin, int64_t end);

// Pieces that together attend for all query tokens with a context, longest sequences first; and the joins that make
// one output of the pieces that share a sequence's context.
struct AttentionPlan {
  std::vector<Piece> pieces;
  std::vector<Join> joins;
  int64_t num_partial_floats = 0;
};
AttentionPlan plan_attention(const mol_attention_task& task, int num_threads);

}  // namespace mol
