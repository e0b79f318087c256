// mol_read_probe on one instruction set (the argument): reads each byte once and none beside, whatever the sizes,
// patterns and threads.
#include <random>
#include <vector>

#include "check.h"

namespace {

uint64_t sum_of_words(const Buffer<uint8_t>& data) {
  uint64_t sum = 0;
  for (int64_t offset = 0; offset < data.num_bytes(); offset += 8) {
    uint64_t word = 0;
    std::memcpy(&word, &data[offset], data.num_bytes() - offset < 8 ? data.num_bytes() - offset : 8);
    sum += word;
  }
  return sum;
}

void reads_each_byte_once(int32_t isa) {
  std::mt19937 random(1);
  for (const int32_t num_threads : {0, 3}) {
    mol_pool* pool = num_threads ? mol_pool_create(num_threads, nullptr, 0, nullptr) : nullptr;
    for (const int64_t num_bytes : {0, 1, 7, 8, 63, 257, 1024, 4097, (256 << 10) + 3, (1 << 20) + 263}) {
      Buffer<uint8_t> data(num_bytes);
      for (int64_t i = 0; i < num_bytes; ++i) data[i] = static_cast<uint8_t>(random());
      for (int32_t pattern = MOL_READ_SEQUENTIAL; pattern <= MOL_READ_FOUR_STREAMS_PREFETCH; ++pattern) {
        uint64_t sum = 1;
        CHECK(mol_read_probe(data.data(), num_bytes, pattern, isa, pool, &sum) == MOL_OK);
        CHECK(sum == sum_of_words(data));
      }
    }
    mol_pool_destroy(pool);
  }
}

void bad_arguments_are_refused(int32_t isa) {
  Buffer<uint8_t> data(64);
  uint64_t sum = 1;
  CHECK(mol_read_probe(nullptr, 64, 0, isa, nullptr, &sum) == MOL_ERROR_BAD_ARGUMENT);
  CHECK(mol_read_probe(data.data(), -1, 0, isa, nullptr, &sum) == MOL_ERROR_BAD_ARGUMENT);
  CHECK(mol_read_probe(data.data(), 64, -1, isa, nullptr, &sum) == MOL_ERROR_BAD_ARGUMENT);
  CHECK(mol_read_probe(data.data(), 64, 4, isa, nullptr, &sum) == MOL_ERROR_BAD_ARGUMENT);
  CHECK(mol_read_probe(data.data(), 64, 0, 99, nullptr, &sum) == MOL_ERROR_BAD_ARGUMENT);
  CHECK(mol_read_probe(data.data(), 64, 0, isa, nullptr, nullptr) == MOL_ERROR_BAD_ARGUMENT);
  CHECK(sum == 1);
}

}  // namespace

int main(int num_arguments, char** arguments) {
  const int32_t isa = isa_from_arguments(num_arguments, arguments);
  reads_each_byte_once(isa);
  bad_arguments_are_refused(isa);
  std::puts("read_probe_test: all checks hold");
  return 0;
}
