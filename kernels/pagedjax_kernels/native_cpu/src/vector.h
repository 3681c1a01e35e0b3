// Vectors of floats as wide as the machine's registers, by the compiler's vector extensions (GCC, Clang): no intrinsics,
// so that one source serves AVX-512, AVX2 and NEON.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

namespace pagedjax {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
// Vectors of a row that one micro-kernel keeps: with kRows rows of sums they have to fit the registers.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kColumns = 4;
#else
constexpr int kColumns = 2;
#endif
constexpr int kRows = 4;
// Vectors of a query that stay in registers while keys go past.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kFewVectors = 4;
#else
constexpr int kFewVectors = 2;
#endif
constexpr float kInf = std::numeric_limits<float>::infinity();

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t IntVec __attribute__((vector_size(kLanes * 4)));
typedef uint32_t UintVec __attribute__((vector_size(kLanes * 4)));
typedef _Float16 Halves __attribute__((vector_size(kLanes * 2)));
typedef int8_t Bytes __attribute__((vector_size(kLanes)));

inline Vec Load(const float* x) {
  Vec v;
  std::memcpy(&v, x, sizeof v);
  return v;
}

inline void Store(float* x, Vec v) { std::memcpy(x, &v, sizeof v); }

inline Vec Splat(float x) { return x - Vec{}; }

// What pages or queries hold. One step takes kParts * kLanes elements and gives kParts vectors; which element a lane holds
// is DimOf's matter. All that queries and pages have in common is the order, so any order does.
struct F32 {
  using Type = float;
  static constexpr int kParts = 1;
  static constexpr bool kScaled = false;
  template <int kPart>
  static Vec Load(const Type* x) {
    return pagedjax::Load(x);
  }
  static float Get(Type x) { return x; }
  static Type Put(float x) { return x; }
};

struct BF16 {
  using Type = uint16_t;
  static constexpr int kParts = 2;
  static constexpr bool kScaled = false;
  // A pair of elements is one word: widening the even and the odd ones apart takes one instruction each.
  template <int kPart>
  static Vec Load(const Type* x) {
    UintVec bits;
    std::memcpy(&bits, x, sizeof bits);
    if constexpr (kPart == 0)
      bits <<= 16;
    else
      bits &= 0xffff0000u;
    Vec v;
    std::memcpy(&v, &bits, sizeof v);
    return v;
  }
  static float Get(Type x) {
    uint32_t bits = static_cast<uint32_t>(x) << 16;
    float v;
    std::memcpy(&v, &bits, sizeof v);
    return v;
  }
  static Type Put(float x) {  // to nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if (x != x) return static_cast<Type>((bits >> 16) | 0x40);
    return static_cast<Type>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
};

struct F16 {
  using Type = _Float16;
  static constexpr int kParts = 1;
  static constexpr bool kScaled = false;
  template <int kPart>
  static Vec Load(const Type* x) {
    Halves halves;
    std::memcpy(&halves, x, sizeof halves);
    return __builtin_convertvector(halves, Vec);
  }
  static float Get(Type x) { return static_cast<float>(x); }
  static Type Put(float x) { return static_cast<Type>(x); }
};

struct Int8 {
  using Type = int8_t;
  static constexpr int kParts = 1;
  static constexpr bool kScaled = true;
  template <int kPart>
  static Vec Load(const Type* x) {
    Bytes bytes;
    std::memcpy(&bytes, x, sizeof bytes);
    return __builtin_convertvector(bytes, Vec);
  }
};

// float8_e4m3fn: 1 sign, 4 exponent (bias 7), 3 mantissa bits; no infinities, 0x7f is NaN.
struct F8Table {
  float values[256];
  F8Table() {
    for (int i = 0; i < 256; i++) {
      int exponent = (i >> 3) & 15, mantissa = i & 7;
      float x = exponent ? std::ldexp(1.0f + mantissa / 8.0f, exponent - 7) : std::ldexp(mantissa / 8.0f, -6);
      if ((i & 127) == 127) x = std::numeric_limits<float>::quiet_NaN();
      values[i] = i & 128 ? -x : x;
    }
  }
};
inline const F8Table kF8;

struct F8 {
  using Type = uint8_t;
  static constexpr int kParts = 1;
  static constexpr bool kScaled = true;
  template <int kPart>
  static Vec Load(const Type* x) {
    Vec v;
    for (int i = 0; i < kLanes; i++) v[i] = kF8.values[x[i]];
    return v;
  }
};

// The element that lane `i` of the vectors of T holds.
template <typename T>
constexpr int64_t DimOf(int64_t i) {
  constexpr int step = T::kParts * kLanes;
  return i / step * step + i % kLanes * T::kParts + i % step / kLanes;
}

// Each lane takes that which lies kStep after it, around the end.
template <int kStep, int... kLane>
[[gnu::always_inline]] inline Vec Rotate(Vec v, std::integer_sequence<int, kLane...>) {
#if defined(__clang__)
  return __builtin_shufflevector(v, v, ((kLane + kStep) % kLanes)...);
#else
  return __builtin_shuffle(v, IntVec{((kLane + kStep) % kLanes)...});
#endif
}

template <int kStep = kLanes / 2>
[[gnu::always_inline]] inline float Max(Vec v) {
  const Vec w = Rotate<kStep>(v, std::make_integer_sequence<int, kLanes>{});
  v = w > v ? w : v;
  if constexpr (kStep == 1) return v[0];
  else return Max<kStep / 2>(v);
}

template <int kStep = kLanes / 2>
[[gnu::always_inline]] inline float Sum(Vec v) {
  v += Rotate<kStep>(v, std::make_integer_sequence<int, kLanes>{});
  if constexpr (kStep == 1) return v[0];
  else return Sum<kStep / 2>(v);
}

// e^x for x <= 0, to about one unit in the last place; 0 below -87 (and for -infinity).
inline Vec Exp(Vec x) {
  const Vec low = Splat(-87.0f);
  Vec y = x < low ? low : x;
  // x = n ln 2 + r, |r| <= ln(2) / 2; adding and subtracting 1.5 * 2^23 rounds to an integer.
  Vec n = y * 1.44269504088896341f + 12582912.0f;
  n = n - 12582912.0f;
  Vec r = y - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  // Taylor coefficients: the first term left out is r^8 / 8! < 6e-9.
  Vec p = Splat(1.0f / 5040);
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  IntVec bits = (__builtin_convertvector(n, IntVec) + 127) << 23;
  Vec scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return x < low ? Vec{} : p * scale;
}

inline float Exp(float x) { return Exp(Splat(x))[0]; }

template <int kStep, int... kLane>
[[gnu::always_inline]] inline void Exchange(Vec& a, Vec& b, std::integer_sequence<int, kLane...>) {
  // Of the 2 x 2 matrix of blocks of kStep lanes in a over b, the off-diagonal blocks change places.
#if defined(__clang__)
  Vec x = __builtin_shufflevector(a, b, (kLane & kStep ? kLane - kStep + kLanes : kLane)...);
  Vec y = __builtin_shufflevector(a, b, (kLane & kStep ? kLane + kLanes : kLane + kStep)...);
#else
  Vec x = __builtin_shuffle(a, b, IntVec{(kLane & kStep ? kLane - kStep + kLanes : kLane)...});
  Vec y = __builtin_shuffle(a, b, IntVec{(kLane & kStep ? kLane + kLanes : kLane + kStep)...});
#endif
  a = x;
  b = y;
}

template <int kStep>
[[gnu::always_inline]] inline void TransposeSteps(Vec (&rows)[kLanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; i++)
    if (!(i & kStep)) Exchange<kStep>(rows[i], rows[i + kStep], std::make_integer_sequence<int, kLanes>{});
  if constexpr (kStep > 1) TransposeSteps<kStep / 2>(rows);
}

// A square matrix, transposed in place.
[[gnu::always_inline]] inline void Transpose(Vec (&rows)[kLanes]) { TransposeSteps<kLanes / 2>(rows); }

}  // namespace pagedjax
