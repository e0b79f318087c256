// mol_read_probe: reads memory as fast as a kernel could hope to, the bound for a kernel's speed. Decides how the
// memory is cut into pieces; how a piece is read is read_probe_loop.h.
#include "read_probe.h"

#include <algorithm>
#include <atomic>

#include "pool.h"

namespace mol {
namespace {

// Streams start anew in each piece (which costs 3 % at 256 KB), but a core that falls behind must not delay the rest.
constexpr int64_t kMinPieceBytes = 256 << 10, kMaxPieceBytes = 8 << 20, kPageBytes = 4096;
constexpr int64_t kPiecesPerThread = 16;

int64_t piece_bytes_for(int64_t num_bytes, const mol_pool* pool) {
  const int64_t num_pieces = kPiecesPerThread * (pool == nullptr ? 1 : pool->num_threads());
  return std::clamp(num_bytes / num_pieces / kPageBytes * kPageBytes, kMinPieceBytes, kMaxPieceBytes);
}

SumWords loop_for(int32_t isa, int32_t pattern) {
  if (isa == MOL_ISA_AUTO) isa = mol_best_isa(MOL_FLOAT32);
  if (!mol_isa_available(isa)) return nullptr;
  switch (isa) {
    case MOL_ISA_SCALAR:
      return sum_words_scalar(pattern);
    case MOL_ISA_AVX2:
      return sum_words_avx2(pattern);
    default:  // an extension of AVX-512 reads no faster
      return sum_words_avx512(pattern);
  }
}

struct Probe {
  const char* data;
  int64_t num_bytes;
  int64_t piece_bytes;
  SumWords sum_words;
  std::atomic<uint64_t> sum{0};

  static void run_piece(void* context, int64_t piece) {
    Probe& probe = *static_cast<Probe*>(context);
    const int64_t begin = piece * probe.piece_bytes;
    const int64_t end = std::min(probe.num_bytes, begin + probe.piece_bytes);
    probe.sum.fetch_add(probe.sum_words(probe.data + begin, end - begin), std::memory_order_relaxed);
  }
};

}  // namespace
}  // namespace mol

int32_t mol_read_probe(const void* data, int64_t num_bytes, int32_t pattern, int32_t isa, mol_pool* pool,
                       uint64_t* sum) {
  if (data == nullptr || num_bytes < 0 || sum == nullptr) return MOL_ERROR_BAD_ARGUMENT;
  if (pattern < MOL_READ_SEQUENTIAL || pattern > MOL_READ_FOUR_STREAMS_PREFETCH) return MOL_ERROR_BAD_ARGUMENT;
  if (isa < MOL_ISA_AUTO || isa > MOL_ISA_AVX512VNNI) return MOL_ERROR_BAD_ARGUMENT;
  const mol::SumWords sum_words = mol::loop_for(isa, pattern);
  if (sum_words == nullptr) return MOL_ERROR_UNSUPPORTED_ISA;

  const int64_t piece_bytes = mol::piece_bytes_for(num_bytes, pool);
  const int64_t num_pieces = (num_bytes + piece_bytes - 1) / piece_bytes;
  mol::Probe probe{static_cast<const char*>(data), num_bytes, piece_bytes, sum_words};
  if (pool == nullptr) {
    for (int64_t piece = 0; piece < num_pieces; ++piece) mol::Probe::run_piece(&probe, piece);
  } else {
    pool->run(num_pieces, mol::Probe::run_piece, &probe);
  }
  *sum = probe.sum.load();
  return MOL_OK;
}
