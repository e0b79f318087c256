// What the rows of a piece have summed up: cleared, scaled down when a greater logit comes, joined with another
// segment's, saved for a thread that joins.
#pragma once
#include "attention_micro.h"

namespace mol {

template <class Vec, int D>
class RowSums {
 public:
  // stride: floats of a row's output, whole pairs of vectors.
  RowSums(Sums& sums, int num_rows, int stride) : sums_(sums), num_rows_(num_rows), stride_(stride) {}

  float* output(int row) const { return sums_.output + row * stride_; }
  float& row_max(int row) const { return sums_.row_max[row]; }
  float& row_sum(int row) const { return sums_.row_sum[row]; }

  void clear() const {
    __builtin_memset(sums_.output, 0, num_rows_ * stride_ * sizeof(float));
    for (int row = 0; row < num_rows_; ++row) row_max(row) = -__builtin_inff(), row_sum(row) = 0.0f;
  }

  // From sums relative to old_max to sums relative to `reference`.
  void rescale(int row, float old_max, float reference) const {
    if (old_max == -__builtin_inff()) return;  // nothing but zeros so far
    const V factor = exp_not_above_0<Vec>(Vec::set(old_max - reference));
    row_sum(row) *= Vec::first(factor);
    for (int dim = 0; dim < stride_; dim += Vec::kLanes) {
      Vec::store(output(row) + dim, Vec::mul(Vec::load(output(row) + dim), factor));
    }
  }

  // Relative to the greater of the greatest logits.
  void add(const RowSums& segment) const {
    for (int row = 0; row < num_rows_; ++row) {
      const float own_max = row_max(row), segment_max = segment.row_max(row);
      // Written so that a NaN on either side stays.
      const float new_max = segment_max < own_max ? own_max : segment_max;
      const float own_weight = M::weight(own_max, new_max), segment_weight = M::weight(segment_max, new_max);
      row_max(row) = new_max;
      row_sum(row) = row_sum(row) * own_weight + segment.row_sum(row) * segment_weight;
      const V own_factor = Vec::set(own_weight), segment_factor = Vec::set(segment_weight);
      for (int dim = 0; dim < stride_; dim += Vec::kLanes) {
        const V scaled = Vec::mul(Vec::load(segment.output(row) + dim), segment_factor);
        Vec::store(output(row) + dim, Vec::fma(Vec::load(output(row) + dim), own_factor, scaled));
      }
    }
  }

  // To and from partial_floats(task, num_rows) floats.
  void save(float* partial) const {
    __builtin_memcpy(partial, sums_.output, num_rows_ * stride_ * sizeof(float));
    __builtin_memcpy(partial + num_rows_ * stride_, sums_.row_max, num_rows_ * sizeof(float));
    __builtin_memcpy(partial + num_rows_ * (stride_ + 1), sums_.row_sum, num_rows_ * sizeof(float));
  }
  void load(const float* partial) const {
    __builtin_memcpy(sums_.output, partial, num_rows_ * stride_ * sizeof(float));
    __builtin_memcpy(sums_.row_max, partial + num_rows_ * stride_, num_rows_ * sizeof(float));
    __builtin_memcpy(sums_.row_sum, partial + num_rows_ * (stride_ + 1), num_rows_ * sizeof(float));
  }

 private:
  using M = Micro<Vec, D>;
  using V = typename Vec::V;

  Sums& sums_;
  const int num_rows_, stride_;
};

}  // namespace mol
