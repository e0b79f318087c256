// The vector operations with one lane, in plain C++: runs anywhere, slow. The place to read what they mean. Included
// after <math.h> and <string.h>, into a namespace of the including translation unit.
inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

struct VecScalar : mol::VecDefaults {
  using V = float;
  static constexpr int kLanes = 1;
  static constexpr int kSums = 1;
  template <class T>
  static constexpr bool kIsInterleaved = false;

  static V set(float x) { return x; }
  static V fma(V a, V b, V c) { return a * b + c; }
  static V add(V a, V b) { return a + b; }
  static V sub(V a, V b) { return a - b; }
  static V mul(V a, V b) { return a * b; }
  static V div(V a, V b) { return a / b; }
  static V max(V a, V b) { return a > b ? a : b; }  // b if either is NaN, as the x86 instruction has it
  static V abs(V a) { return fabsf(a); }
  static V copy_sign(V magnitude, V sign) { return copysignf(magnitude, sign); }
  static V round(V a) { return nearbyintf(a); }
  static V times_power_of_two(V a, V n) {  // n >= -126, else zero_if_less drops the result; NaN times anything is NaN
    return a * float_of(n >= -126.0f ? static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23 : 0);
  }
  static V zero_if_less(V x, V limit, V a) { return x < limit ? 0.0f : a; }

  static V load(const float* p) { return *p; }
  static void keep_in_register(V&) {}
  static V widen(const BFloat16* p) { return float_of(static_cast<uint32_t>(p->bits) << 16); }
  static V widen(const Float16* p) {
    const uint32_t sign = (p->bits & 0x8000u) << 16, magnitude = p->bits & 0x7fffu;
    if (magnitude >= 0x7c00) return float_of(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);  // infinity, NaN
    return copysignf(float_of(magnitude << 13) * 0x1p112f, float_of(sign));  // 2^(127 - 15): subnormals come out right
  }

  static V widen(const float* p) { return *p; }
  static V widen(const Int8* p) { return p->bits; }
  static V widen(const Fp8* p) {  // through float16, which makes it 2^-8 of the value (kElementUnit)
    const Float16 half = {static_cast<uint16_t>((p->bits & 0x80) << 8 | (p->bits & 0x7f) << 7)};
    return widen(&half);
  }
  template <class S>
  static void load_pair(const S* p, V& a, V& b) {
    a = widen(p), b = widen(p + 1);
  }
  // head_dim is a multiple of 8, so that no pair is left in part.
  template <class S>
  static void load_part(const S* p, int, V& a, V& b) {
    load_pair(p, a, b);
  }

  static void store(float* p, V a) { *p = a; }
  static void narrow(float* p, V a) { *p = a; }
  // To bfloat16, nearest even; any NaN becomes the quiet one.
  static void narrow(BFloat16* p, V a) {
    const uint32_t bits = bits_of(a);
    p->bits = a != a ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
  static void narrow(Float16* p, V a) {
    const uint32_t sign = bits_of(a) >> 16 & 0x8000, magnitude = bits_of(a) & 0x7fffffff;
    uint32_t bits;
    if (magnitude > 0x7f800000) {
      bits = 0x7e00;  // NaN
    } else if (magnitude >= 0x477ff000) {
      bits = 0x7c00;  // 65520 and more round to infinity
    } else if (magnitude < 0x38800000) {
      bits = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000;  // subnormal: the sum's last bit is worth 2^-24
    } else {
      bits = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    }
    p->bits = static_cast<uint16_t>(sign | bits);
  }
  template <class T>
  static void store_pair(T* p, V a, V b) {
    narrow(p, a);
    narrow(p + 1, b);
  }
  template <class T>
  static void store_part(T* p, int, V a, V b) {
    store_pair(p, a, b);
  }

  static void interleave(V&, V&) {}
  static void deinterleave(V&, V&) {}

  static float first(V a) { return a; }
  static float reduce_sum(V a) { return a; }
  static float reduce_max(V a) { return a; }
  static void sum_lanes(const V (&sums)[kSums], float* totals) { totals[0] = sums[0]; }
};
