// What every C++ test uses: a check that ends the test, memory whose every byte is accounted for, and the instruction
// set that the command line names.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "moe_lightning.h"

// What a failure prints besides its place, if this thread has told.
inline thread_local char case_under_test[256] = "";

#define CHECK(condition)                                                                       \
  do {                                                                                         \
    if (!(condition)) {                                                                        \
      std::fprintf(stderr, "%s:%d: %s %s\n", __FILE__, __LINE__, #condition, case_under_test); \
      std::exit(1);                                                                            \
    }                                                                                          \
  } while (0)

// There if the test is built with a sanitizer: called after its report.
extern "C" __attribute__((weak)) void __sanitizer_set_death_callback(void (*callback)(void));

template <class... Values>
void announce(const char* format, Values... values) {
  std::snprintf(case_under_test, sizeof case_under_test, format, values...);
  if (__sanitizer_set_death_callback == nullptr) return;
  __sanitizer_set_death_callback([] { std::fprintf(stderr, "%s\n", case_under_test); });
}

#if defined(__SANITIZE_ADDRESS__)
#define MOL_TEST_HAS_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define MOL_TEST_HAS_ASAN 1
#endif
#endif

constexpr uint8_t kStale = 0xff;  // NaN in every float type
constexpr int kExitSkipped = 77;  // CMakeLists.txt tells ctest
#ifdef MOL_TEST_HAS_ASAN
constexpr int64_t kGuardBytes = 0;  // AddressSanitizer watches the first byte outside, for reads too
#else
constexpr int64_t kGuardBytes = 64;
#endif

inline bool is_stale(const void* bytes, int64_t num_bytes) {
  const uint8_t* begin = static_cast<const uint8_t*>(bytes);
  for (int64_t i = 0; i < num_bytes; ++i) {
    if (begin[i] != kStale) return false;
  }
  return true;
}

// `size` elements, stale at first, in an allocation of exactly their size or between guards that must stay as they are.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t size)
      : num_bytes_(size * static_cast<int64_t>(sizeof(T))),
        memory_(static_cast<uint8_t*>(std::malloc(num_bytes_ + 2 * kGuardBytes))) {
    std::memset(memory_, kStale, num_bytes_ + 2 * kGuardBytes);
  }
  ~Buffer() {
    CHECK(is_stale(memory_, kGuardBytes));
    CHECK(is_stale(memory_ + kGuardBytes + num_bytes_, kGuardBytes));
    std::free(memory_);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  T* data() { return reinterpret_cast<T*>(memory_ + kGuardBytes); }
  const T* data() const { return reinterpret_cast<const T*>(memory_ + kGuardBytes); }
  T& operator[](int64_t index) { return data()[index]; }
  const T& operator[](int64_t index) const { return data()[index]; }
  int64_t num_bytes() const { return num_bytes_; }
  void make_stale() { std::memset(data(), kStale, num_bytes_); }
  void copy_from(const Buffer& other) { std::memcpy(data(), other.data(), num_bytes_); }
  bool same_bytes(const Buffer& other) const { return std::memcmp(data(), other.data(), num_bytes_) == 0; }

 private:
  int64_t num_bytes_;
  uint8_t* memory_;
};

// The instruction set that the only argument names. Leaves the test as skipped if this machine can't run it.
inline int32_t isa_from_arguments(int num_arguments, char** arguments) {
  const char* const names[] = {"auto", "scalar", "avx2", "avx512", "avx512bf16", "avx512vnni"};
  CHECK(num_arguments == 2);
  for (int32_t isa = MOL_ISA_SCALAR; isa <= MOL_ISA_AVX512VNNI; ++isa) {
    if (std::strcmp(arguments[1], names[isa]) != 0) continue;
    if (mol_isa_available(isa)) return isa;
    std::printf("%s cannot run here\n", names[isa]);
    std::exit(kExitSkipped);
  }
  std::fprintf(stderr, "no instruction set is called %s\n", arguments[1]);
  std::exit(1);
}
