// The loops of the read probe, for any instruction set: templates over Vec, the few vector operations that each
// read_probe_<isa>.cpp defines. They add up 64-bit words, the least work that no compiler can leave out; bound by the
// cache lines that a core can have under way.
//
// Includes no C++ library, for the reason given in attention_kernel.h.
#pragma once
#include <string.h>

#include "read_probe.h"

namespace mol {

constexpr int kBytesPerLine = 64;
constexpr int kLinesPerStep = 4;  // of one stream, before the next one's turn

template <class Vec, int kNumStreams, int kPrefetchBytes>
uint64_t sum_words(const char* data, int64_t num_bytes) {
  constexpr int kStepBytes = kLinesPerStep * kBytesPerLine;
  constexpr int kVectorsPerLine = kBytesPerLine / static_cast<int>(sizeof(typename Vec::V));
  const int64_t stream_bytes = num_bytes / kNumStreams / kStepBytes * kStepBytes;
  typename Vec::V sums[kLinesPerStep];
  for (auto& sum : sums) sum = Vec::zero();
  for (int64_t offset = 0; offset < stream_bytes; offset += kStepBytes) {
    for (int stream = 0; stream < kNumStreams; ++stream) {
      const char* step = data + stream * stream_bytes + offset;
      for (int line = 0; line < kLinesPerStep; ++line) {
        // Runs past the end of the data, which a prefetch may.
        if (kPrefetchBytes > 0) __builtin_prefetch(step + line * kBytesPerLine + kPrefetchBytes);
      }
      for (int line = 0; line < kLinesPerStep; ++line) {
        for (int i = 0; i < kVectorsPerLine; ++i) {
          sums[line] = Vec::add(sums[line], Vec::load(step + line * kBytesPerLine + i * sizeof(typename Vec::V)));
        }
      }
    }
  }
  uint64_t total = 0;
  for (const auto& sum : sums) total += Vec::reduce(sum);
  for (int64_t offset = kNumStreams * stream_bytes; offset < num_bytes; offset += 8) {
    uint64_t word = 0;
    memcpy(&word, data + offset, static_cast<size_t>(num_bytes - offset < 8 ? num_bytes - offset : 8));
    total += word;
  }
  return total;
}

constexpr int kPrefetchBytes = 1024;  // 16 lines: about what the line fill buffers of a core hold

template <class Vec>
SumWords sum_words_for(int32_t pattern) {
  switch (pattern) {
    case MOL_READ_SEQUENTIAL:
      return sum_words<Vec, 1, 0>;
    case MOL_READ_TWO_STREAMS:
      return sum_words<Vec, 2, 0>;
    case MOL_READ_TWO_STREAMS_PREFETCH:
      return sum_words<Vec, 2, kPrefetchBytes>;
    default:
      return sum_words<Vec, 4, kPrefetchBytes>;
  }
}

}  // namespace mol
