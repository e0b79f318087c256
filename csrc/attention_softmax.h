// The softmax of some rows over one chunk of keys, online: each chunk's weights are relative to the greatest logit so
// far. A key outside a row's range gets a weight that is not used (or zero, where products are of integers), whatever
// stale memory holds.
#pragma once
#include "attention_sums.h"

namespace mol {

// The keys of a chunk that a row sees, counted from its first.
struct KeyRange {
  int begin, end;
};
// The scales of a chunk's tokens; null if its elements have none.
struct ChunkScales {
  const float* keys = nullptr;
  const float* values = nullptr;
};

template <class Vec, class C, int D>
class Softmax {
 public:
  // chunk_len: keys that have scales. logit = product * scale, of elements without their unit.
  Softmax(float scale, float soft_cap, int chunk_len, ChunkScales scales)
      : scale_(scale * Vec::template kElementUnit<C>), soft_cap_(soft_cap), chunk_len_(chunk_len), scales_(scales) {}

  // Turns the products of R rows' queries with the chunk's keys into weights, and rescales what the rows have summed up
  // under the old greatest logit. Lanes stand for keys at fixed places of the chunk. Row by row at each step, so that
  // one row's chain of operations runs beside the others'. scores: [R, kScoreStride].
  template <int R>
  void weigh(int row, const KeyRange (&ranges)[R], float* scores, const RowSums<Vec, D>& sums,
             Integers& integers) const {
    V largest[R], lane_sums[R];
    float references[R], old_maxima[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      largest[r] = Vec::set(kMinusInfinity);
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; ++i) {
        float* part = scores + r * kScoreStride + i * kLanes;
        const V logits = seen(logits_of(Vec::load(part), i * kLanes), i * kLanes, ranges[r], kMinusInfinity);
        Vec::store(part, logits);
        largest[r] = Vec::max(largest[r], logits);
      }
    }
    bool is_rescaled = false;
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const float old_max = sums.row_max(row + r), chunk_max = Vec::reduce_max(largest[r]);
      const float new_max = chunk_max <= old_max ? old_max : chunk_max;  // NaN if the chunk has one
      // All logits minus infinity so far: any finite reference gives weight zero.
      references[r] = new_max == kMinusInfinity ? 0.0f : new_max;
      is_rescaled |= !(new_max == old_max);
      old_maxima[r] = old_max;
      sums.row_max(row + r) = new_max;
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      lane_sums[r] = Vec::set(0.0f);
      V weights[kVectors];
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; ++i) {
        float* part = scores + r * kScoreStride + i * kLanes;
        weights[i] = exp_not_above_0<Vec>(Vec::sub(Vec::load(part), Vec::set(references[r])));
        lane_sums[r] = Vec::add(lane_sums[r], weights[i]);
        if constexpr (sizeof(C) == 1) {
          const V scale = Vec::mul(load_scales(scales_.values, i * kLanes), Vec::set(Vec::template kElementUnit<C>));
          weights[i] = seen(Vec::mul(weights[i], scale), i * kLanes, ranges[r], 0.0f);
        }
        if constexpr (!kMultipliesIntegers) Vec::store(part, weights[i]);
      }
      if constexpr (kMultipliesIntegers) {
        const int first = (row + r) * kKeysPerChunk;
        integers.weight_units[row + r] =
            Vec::quantise_weights(weights, integers.weights_high + first, integers.weights_low + first);
      }
    }
    if (is_rescaled) {
      for (int r = 0; r < R; ++r) sums.rescale(row + r, old_maxima[r], references[r]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) sums.row_sum(row + r) += Vec::reduce_sum(lane_sums[r]);
  }

 private:
  using M = Micro<Vec, D>;
  using V = typename Vec::V;
  static constexpr int kLanes = Vec::kLanes, kVectors = kKeysPerChunk / kLanes;
  static constexpr float kMinusInfinity = -__builtin_inff();
  static constexpr bool kMultipliesIntegers = Vec::template kMultipliesIntegers<C>;

  const float scale_, soft_cap_;
  const int chunk_len_;
  const ChunkScales scales_;

  V logits_of(V products, int key) const {
    V logits = Vec::mul(products, Vec::set(scale_));
    if constexpr (sizeof(C) == 1) logits = Vec::mul(logits, load_scales(scales_.keys, key));
    return soft_cap_ > 0.0f ? capped(logits) : logits;
  }
  // Scales of keys [key, key + kLanes), not beyond the block; what lies there is masked afterwards.
  V load_scales(const float* scales, int key) const {
    if (key + kLanes <= chunk_len_) return Vec::load(scales + key);
    float part[kLanes] = {};
    for (int lane = 0; key + lane < chunk_len_; ++lane) part[lane] = scales[key + lane];
    return Vec::load(part);
  }
  // `outside` in the lanes of keys that the row does not see.
  static V seen(V x, int key, KeyRange range, float outside) {
    if (range.begin <= key && key + kLanes <= range.end) return x;
    float lanes[kLanes];
    Vec::store(lanes, x);
    for (int lane = 0; lane < kLanes; ++lane) {
      if (key + lane < range.begin || key + lane >= range.end) lanes[lane] = outside;
    }
    return Vec::load(lanes);
  }

  // cap * tanh(logit / cap), by tanh|y| = (1 - e) / (1 + e) with e = exp(-2 |y|).
  V capped(V logit) const {
    const V one = Vec::set(1.0f);
    const V y = Vec::mul(logit, Vec::set(1.0f / soft_cap_));
    const V e = exp_not_above_0<Vec>(Vec::mul(Vec::abs(y), Vec::set(-2.0f)));
    const V magnitude = Vec::mul(Vec::set(soft_cap_), Vec::div(Vec::sub(one, e), Vec::add(one, e)));
    return Vec::copy_sign(magnitude, logit);
  }
};

}  // namespace mol
