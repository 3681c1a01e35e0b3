// Keys and values of a step's tokens into their slots, in place.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "vector.h"

namespace pagedjax {

struct UpdateArgs {
  const void *k, *v;     // [T, K, D]
  const int32_t* slots;  // [T]; those outside [0, num_slots) are dropped
  void* kv;              // one layer's pages [num_slots, 2K, Dc]
  float* scales;         // [num_slots, 2K], or null
  int64_t T, K, D, num_slots, Dc;
};

// One head of one token. int8: scaled so that its largest element becomes 127, rounded to nearest, ties to even.
template <typename X, typename KV>
void Write(const typename X::Type* x, typename KV::Type* to, float* scale, int64_t D, int64_t Dc) {
  if constexpr (std::is_same_v<KV, Int8>) {
    float most = 0;
    for (int64_t d = 0; d < D; d++) most = std::max(most, std::fabs(X::Get(x[d])));
    *scale = most / 127.0f;
    const float inverse = *scale > 0 ? 1.0f / *scale : 0.0f;
    for (int64_t d = 0; d < D; d++)
      to[d] = static_cast<int8_t>(std::nearbyint(std::clamp(X::Get(x[d]) * inverse, -127.0f, 127.0f)));
  } else if constexpr (std::is_same_v<X, KV>) {
    std::memcpy(to, x, sizeof(*to) * D);
  } else {
    for (int64_t d = 0; d < D; d++) to[d] = KV::Put(X::Get(x[d]));
  }
  std::memset(static_cast<void*>(to + D), 0, sizeof(*to) * (Dc - D));
}

template <typename X, typename KV>
void Update(const UpdateArgs& a) {
  for (int64_t t = 0; t < a.T; t++) {
    const int64_t slot = a.slots[t];
    if (slot < 0 || slot >= a.num_slots) continue;
    for (int64_t h = 0; h < 2 * a.K; h++) {
      const auto* x = static_cast<const typename X::Type*>(h % 2 ? a.v : a.k) + (t * a.K + h / 2) * a.D;
      float* scale = a.scales ? a.scales + slot * 2 * a.K + h : nullptr;
      Write<X, KV>(x, static_cast<typename KV::Type*>(a.kv) + (slot * 2 * a.K + h) * a.Dc, scale, a.D, a.Dc);
    }
  }
}

}  // namespace pagedjax
