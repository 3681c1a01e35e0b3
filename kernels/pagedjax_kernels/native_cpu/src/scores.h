// Products of queries and keys, in two ways: a block of keys that is transposed once for many queries, or, for few, each key
// as it lies in its page. They add in different orders, so which one is taken must follow from a row's own queries.
#pragma once

#include <utility>

#include "vector.h"

namespace pagedjax {

constexpr int kBlock = 64;  // keys that are computed together
constexpr int kFewRows = 3;  // queries whose sums, with a key, fit the registers
constexpr int kFew = 8;      // up to so many query vectors transposing a block costs more than it saves

// What is computed next, asked for a few cache lines at a time: a burst would fill the buffers that loads need too. Pages
// lie anywhere, so the machine does not foresee them.
class Ahead {
 public:
  // `bytes` from each of the places [token, last) on.
  template <typename T>
  Ahead(const T* const* token, const T* const* last, int64_t bytes)
      : token_(reinterpret_cast<const char* const*>(token)), last_(reinterpret_cast<const char* const*>(last)), bytes_(bytes) {}

  [[gnu::always_inline]] void Lines(int count) {
    for (; count > 0 && token_ < last_; count--) {
      __builtin_prefetch(*token_ + at_, 0, 2);  // into the second-level cache: the first one is full of the current block
      at_ += 64;
      if (at_ >= bytes_) at_ = 0, token_++;
    }
  }

  void All() { Lines(1 << 30); }

 private:
  const char* const* token_;
  const char* const* last_;
  int64_t bytes_, at_ = 0;
};

template <int kNum>
void ScoreRows(const float* q, int64_t stride, const float* kt, int64_t dims, float* scores) {
  for (int c = 0; c < kBlock; c += kColumns * kLanes) {
    Vec sum[kNum][kColumns];
    for (int r = 0; r < kNum; r++)
      for (int j = 0; j < kColumns; j++) sum[r][j] = Load(scores + r * kBlock + c + j * kLanes);
    for (int64_t d = 0; d < dims; d++) {
      Vec key[kColumns];
      for (int j = 0; j < kColumns; j++) key[j] = Load(kt + d * kBlock + c + j * kLanes);
      for (int r = 0; r < kNum; r++)
        for (int j = 0; j < kColumns; j++) sum[r][j] += q[r * stride + d] * key[j];
    }
    for (int r = 0; r < kNum; r++)
      for (int j = 0; j < kColumns; j++) Store(scores + r * kBlock + c + j * kLanes, sum[r][j]);
  }
}

// scores[M, kBlock] += q[M, dims] kt[dims, kBlock]
inline void ScoresOfTransposed(const float* q, int64_t stride, const float* kt, int64_t dims, int64_t M, float* scores) {
  int64_t m = 0;
  for (; m + kRows <= M; m += kRows) ScoreRows<kRows>(q + m * stride, stride, kt, dims, scores + m * kBlock);
  const float* rest = q + m * stride;
  if (M - m == 1) ScoreRows<1>(rest, stride, kt, dims, scores + m * kBlock);
  if (M - m == 2) ScoreRows<2>(rest, stride, kt, dims, scores + m * kBlock);
  if (M - m == 3) ScoreRows<3>(rest, stride, kt, dims, scores + m * kBlock);
}

// Lane by lane products of one key's dims [0, kVectors * kLanes) with kNum queries, summed up over the vectors.
template <typename KV, int kNum, int... kVector>
[[gnu::always_inline]] inline void Products(const Vec (&q)[kNum][sizeof...(kVector)], const typename KV::Type* key,
                                            Vec (&sum)[kNum], std::integer_sequence<int, kVector...>) {
  constexpr int kStep = KV::kParts * kLanes;
  const Vec x[] = {KV::template Load<kVector % KV::kParts>(key + kVector / KV::kParts * kStep)...};
  for (int r = 0; r < kNum; r++) {
    sum[r] = q[r][0] * x[0];
    for (int j = 1; j < static_cast<int>(sizeof...(kVector)); j++) sum[r] += q[r][j] * x[j];
  }
}

// The sums over all lanes of kCount neighbouring keys' products, still spread over kLanes / kCount lanes each. Two halves
// are put together by exchanging half of their lanes, so a vector's worth of keys takes kLanes - 1 additions.
template <typename KV, int kNum, int kCount, int kVectors>
[[gnu::always_inline]] inline void SumKeys(const Vec (&q)[kNum][kVectors], const typename KV::Type* const* keys, int64_t d,
                                           Vec (&sum)[kNum], Ahead& ahead, int lines) {
  if constexpr (kCount == 1) {
    ahead.Lines(lines);
    Products<KV, kNum>(q, keys[0] + d, sum, std::make_integer_sequence<int, kVectors>{});
  } else {
    constexpr int kHalf = kCount / 2;
    Vec other[kNum];
    SumKeys<KV, kNum, kHalf, kVectors>(q, keys, d, sum, ahead, lines);
    SumKeys<KV, kNum, kHalf, kVectors>(q, keys + kHalf, d, other, ahead, lines);
    for (int r = 0; r < kNum; r++) {
      Exchange<kHalf>(sum[r], other[r], std::make_integer_sequence<int, kLanes>{});
      sum[r] += other[r];
    }
  }
}

template <typename KV, int kNum, int kVectors>
void ScoreVectors(const float* q, int64_t stride, const typename KV::Type* const* keys, int64_t d, float* scores, Ahead& ahead,
                  int lines) {
  Vec x[kNum][kVectors], sum[kNum];
  for (int r = 0; r < kNum; r++)
    for (int j = 0; j < kVectors; j++) x[r][j] = Load(q + r * stride + j * kLanes);
  SumKeys<KV, kNum, kLanes, kVectors>(x, keys, d, sum, ahead, lines);
  for (int r = 0; r < kNum; r++) Store(scores + r * kBlock, Load(scores + r * kBlock) + sum[r]);
}

template <typename KV, int kNum>
void ScoreSlice(const float* q, int64_t stride, const typename KV::Type* const* keys, int64_t d, int64_t dims,
                float* scores, Ahead& ahead, int lines) {
  constexpr int kWide = kFewVectors > KV::kParts ? kFewVectors : KV::kParts;
  int64_t i = 0;
  for (; i + kWide * kLanes <= dims; i += kWide * kLanes)
    ScoreVectors<KV, kNum, kWide>(q + i, stride, keys, d + i, scores, ahead, lines);
  for (; i < dims; i += KV::kParts * kLanes) ScoreVectors<KV, kNum, KV::kParts>(q + i, stride, keys, d + i, scores, ahead, lines);
}

// scores[num, kLanes] (rows of kBlock) += q[num, dims] keys[kLanes, d : d + dims], num <= kFewRows
template <typename KV>
void ScoreFew(int64_t num, const float* q, int64_t stride, const typename KV::Type* const* keys, int64_t d, int64_t dims,
              float* scores, Ahead& ahead, int lines) {
  if (num == 1) ScoreSlice<KV, 1>(q, stride, keys, d, dims, scores, ahead, lines);
  if (num == 2) ScoreSlice<KV, 2>(q, stride, keys, d, dims, scores, ahead, lines);
  if (num == 3) ScoreSlice<KV, 3>(q, stride, keys, d, dims, scores, ahead, lines);
}

}  // namespace pagedjax
