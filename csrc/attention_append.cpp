// Puts the keys and values of new tokens into the paged cache.
#include <string.h>

#include <algorithm>
#include <cmath>

#include "attention_task.h"

namespace mol {
namespace {

float to_float(float x) { return x; }
float to_float(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
float to_float(Float16 x) {
  const uint32_t sign = (x.bits & 0x8000u) << 16, magnitude = x.bits & 0x7fffu;
  // 2^112 moves the exponent from a bias of 15 to one of 127; infinity and NaN would come out finite.
  const uint32_t bits = magnitude >= 0x7c00 ? 0x7f800000u | (magnitude & 0x3ff) << 13 : magnitude << 13;
  float value;
  memcpy(&value, &bits, sizeof value);
  if (magnitude < 0x7c00) value *= 0x1p112f;
  return sign ? -value : value;
}

constexpr float kLargestInt8 = 127.0f, kLargestFp8 = 448.0f;

// |x| <= 127, rounded to nearest even by adding 1.5 * 2^23.
uint8_t to_int8(float x) { return static_cast<uint8_t>(static_cast<int32_t>(x + 12582912.0f - 12582912.0f)); }

// |x| <= 448, to nearest even. Normal numbers begin at 2^-6; below, units of 2^-9 (adding 2^14 leaves these).
uint8_t to_fp8(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  const uint32_t sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
  if (magnitude < 0x3c800000) {
    const float shifted = fabsf(x) + 16384.0f;
    memcpy(&bits, &shifted, sizeof bits);
    return static_cast<uint8_t>(sign | (bits - 0x46800000));
  }
  return static_cast<uint8_t>(sign | ((magnitude - (120u << 23) + 0x7ffff + (magnitude >> 20 & 1)) >> 20));
}

// One head of one token: elements and their scale, the greatest magnitude over the largest number of the type. A NaN or
// infinity among them makes the scale one, which then shows in every result.
template <class T>
void quantise(const T* source, int head_dim, bool is_int8, uint8_t* target, float* scale) {
  float row[kMaxHeadDim], greatest = 0.0f;
  bool is_finite = true;
  for (int dim = 0; dim < head_dim; ++dim) {
    row[dim] = to_float(source[dim]);
    greatest = std::max(greatest, fabsf(row[dim]));
    is_finite &= std::isfinite(row[dim]);
  }
  *scale = is_finite ? greatest / (is_int8 ? kLargestInt8 : kLargestFp8) : NAN;
  const float factor = is_finite && *scale > 0.0f ? 1.0f / *scale : 0.0f;
  const float largest = is_int8 ? kLargestInt8 : kLargestFp8;
  for (int dim = 0; dim < head_dim; ++dim) {
    const float scaled = is_finite ? std::min(std::max(row[dim] * factor, -largest), largest) : 0.0f;
    target[dim] = is_int8 ? to_int8(scaled) : to_fp8(scaled);
  }
}

void quantise_as(int32_t dtype, const char* source, int head_dim, bool is_int8, uint8_t* target, float* scale) {
  if (dtype == MOL_FLOAT32) {
    quantise(reinterpret_cast<const float*>(source), head_dim, is_int8, target, scale);
  } else if (dtype == MOL_BFLOAT16) {
    quantise(reinterpret_cast<const BFloat16*>(source), head_dim, is_int8, target, scale);
  } else {
    quantise(reinterpret_cast<const Float16*>(source), head_dim, is_int8, target, scale);
  }
}

void append_token(const mol_attention_task& task, int64_t token) {
  const int64_t slot = task.slot_mapping[token];
  if (slot < 0) return;
  const int64_t element_bytes = task.dtype == MOL_FLOAT32 ? 4 : 2, row_bytes = task.head_dim * element_bytes;
  const char* key = static_cast<const char*>(task.key) + token * task.key_token_stride * element_bytes;
  const char* value = static_cast<const char*>(task.value) + token * task.value_token_stride * element_bytes;
  const int64_t head_bytes = head_block_bytes(task), offset = slot % task.block_size;
  const int64_t cached_row_bytes = task.head_dim * cache_element_bytes(task.cache_dtype);
  const int64_t value_offset = task.block_size * cached_row_bytes;
  char* block = static_cast<char*>(task.kv_cache) + slot / task.block_size * task.num_kv_heads * head_bytes;
  for (int32_t head = 0; head < task.num_kv_heads; ++head, block += head_bytes) {
    char* cached_key = block + offset * cached_row_bytes;
    char* cached_value = cached_key + value_offset;
    if (!is_quantised(task.cache_dtype)) {
      memcpy(cached_key, key + head * row_bytes, row_bytes);
      memcpy(cached_value, value + head * row_bytes, row_bytes);
      continue;
    }
    const bool is_int8 = task.cache_dtype == MOL_INT8;
    float* key_scale = reinterpret_cast<float*>(block + 2 * value_offset) + offset;
    quantise_as(task.dtype, key + head * row_bytes, task.head_dim, is_int8, reinterpret_cast<uint8_t*>(cached_key),
                key_scale);
    quantise_as(task.dtype, value + head * row_bytes, task.head_dim, is_int8, reinterpret_cast<uint8_t*>(cached_value),
                key_scale + task.block_size);
  }
}

}  // namespace

void append_tokens(const mol_attention_task& task, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token) append_token(task, token);
}

}  // namespace mol
