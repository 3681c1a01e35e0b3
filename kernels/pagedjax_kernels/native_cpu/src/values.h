// Sums of values by weights, a few query vectors at a time.
#pragma once

#include <utility>

#include "scores.h"
#include "vector.h"

namespace pagedjax {

// Values out of the scratch memory, or as they lie in the pages.
struct Converted {
  const float* v;
  int64_t stride;
  template <int kVector>
  Vec Load(int t) const {
    return pagedjax::Load(v + t * stride + kVector * kLanes);
  }
};
template <typename KV>
struct InPages {
  const typename KV::Type* const* keys;
  int64_t offset;
  template <int kVector>
  Vec Load(int t) const {
    return KV::template Load<kVector % KV::kParts>(keys[t] + offset + kVector / KV::kParts * (KV::kParts * kLanes));
  }
};

// value[kNum, D] += weights[kNum, first : last] of as many vectors of the values.
template <int kNum, typename Values, int... kVector>
void AddRows(const float* weights, Values values, int first, int last, int64_t D, float* value, Ahead& ahead, int lines,
                    std::integer_sequence<int, kVector...>) {
  constexpr int kWide = sizeof...(kVector);
  Vec sum[kNum][kWide];
  for (int r = 0; r < kNum; r++)
    for (int j = 0; j < kWide; j++) sum[r][j] = Load(value + r * D + j * kLanes);
  for (int t = first; t < last; t++) {
    ahead.Lines(lines);
    const Vec x[kWide] = {values.template Load<kVector>(t)...};
    for (int r = 0; r < kNum; r++)
      for (int j = 0; j < kWide; j++) sum[r][j] += weights[r * kBlock + t] * x[j];
  }
  for (int r = 0; r < kNum; r++)
    for (int j = 0; j < kWide; j++) Store(value + r * D + j * kLanes, sum[r][j]);
}

}  // namespace pagedjax
