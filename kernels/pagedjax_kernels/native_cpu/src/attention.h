// Paged attention: online softmax over blocks of keys, in float32.
//
// A row's result does not depend on what else is in the call: blocks of kBlock keys and chunks of a few lie at fixed
// places of a row, each chunk is summed up on its own, and chunks are merged in their order, whoever computed them.
#pragma once

#include <algorithm>
#include <atomic>
#include <vector>

#include "parallel.h"
#include "plan.h"
#include "scores.h"
#include "values.h"
#include "vector.h"

namespace pagedjax {

constexpr int kSlice = 64;      // head dims that are taken at once
constexpr int kMaxDim = 256;
constexpr int kAhead = 64;      // lines asked for at a time while a vector's worth of keys is transposed

// Running softmax of M query vectors: largest score, sum of weights, weighted sum of values.
struct Sums {
  float *top, *total, *value;  // [M], [M], [M, D]
};

template <typename Q, typename KV>
class Attention {
 public:
  explicit Attention(const AttentionArgs& args) : a_(args), group_(args.H / args.K) {}

  void Run(xla::ffi::ThreadPool& pool) {
    const Plan plan(a_, static_cast<int>(pool.num_threads()));
    const std::vector<Unit>& units = plan.units;
    parts_ = plan.parts;
    partial_.resize(plan.num_vectors * (PaddedDim() + 2));
    remaining_ = std::vector<std::atomic<int>>(parts_.size());
    for (size_t i = 0; i < parts_.size(); i++) remaining_[i] = parts_[i].count;
    for (int b = 0; b < a_.B; b++)
      if (a_.kv_lens[b] <= 0) Zero(a_.cu_q_lens[b], a_.cu_q_lens[b + 1]);
    Zero(a_.cu_q_lens[a_.B], a_.T);
    ParallelFor(pool, static_cast<int>(units.size()),
                [&](int i, int later) { Compute(units[i], later < 0 ? nullptr : &units[later]); });
  }

 private:
  using QType = typename Q::Type;
  using KVType = typename KV::Type;
  static constexpr int kStep = KV::kParts * kLanes;  // dims that are loaded at once

  void Zero(int64_t first, int64_t last) {
    QType* out = static_cast<QType*>(a_.out);
    if (last > first) std::memset(out + first * a_.H * a_.D, 0, sizeof(QType) * (last - first) * a_.H * a_.D);
  }

  // A block's tokens [first, last) of one row: where the pages hold their keys and values, from the unit's first head on.
  struct Block {
    const KVType* keys[kBlock];
    const float* scales[kBlock];
    int start, first, last;  // `start` is the token at place 0
  };

  struct Scratch {
    std::vector<float> memory;
    float *q, *scores, *kt, *v;
    Block blocks[2];
    float key_scales[kBlock], value_scales[kBlock];
    Sums sums, chunk;
  };

  static Sums Cut(float*& at, int64_t M, int64_t D) {
    Sums s{at, at + M, at + 2 * M};
    at += M * (D + 2);
    return s;
  }

  Scratch& Prepare(int64_t M) {
    static thread_local Scratch s;
    const int64_t D = PaddedDim(), need = M * (D + kBlock + 2 * (D + 2)) + kBlock * (kSlice + D) + kLanes;
    if (static_cast<int64_t>(s.memory.size()) < need) s.memory.resize(need);
    float* at = s.memory.data();
    s.kt = at, at += kSlice * kBlock;
    s.v = at, at += kBlock * D;
    s.q = at, at += M * D;
    s.scores = at, at += M * kBlock;
    s.sums = Cut(at, M, D);
    s.chunk = Cut(at, M, D);
    return s;
  }

  // Vectors are whole: what is behind D is zero, in the pages too.
  int64_t PaddedDim() const { return (a_.Dc + kStep - 1) / kStep * kStep; }

  // Keys [low, high) that a unit's queries see.
  std::pair<int, int> KeysOf(const Unit& u) const {
    const int before = a_.kv_lens[u.row] - a_.Queries(u.row);
    const int low = a_.FirstKey(before + u.first), high = before + u.last;
    if (u.chunk < 0) return {low, high};
    return {std::max(low, u.chunk * a_.chunk), std::min(high, (u.chunk + 1) * a_.chunk)};
  }

  // `later` is what this thread computes next, if anything: its first keys are asked for already.
  void Compute(const Unit& u, const Unit* later) {
    const int64_t M = (u.last - u.first) * group_;
    Scratch& s = Prepare(M * (u.last_head - u.head));
    for (int k = u.head; k < u.last_head; k++) LoadQueries(u, k, s.q + (k - u.head) * M * PaddedDim());
    const auto [low, high] = KeysOf(u);
    Block *now = &s.blocks[0], *next = &s.blocks[1];
    FindKeys(u, {low, high}, *now);
    for (int chunk = low / a_.chunk; chunk * a_.chunk < high; chunk++) {
      const Sums sums = chunk == low / a_.chunk ? s.sums : s.chunk;
      Clear(M * (u.last_head - u.head), sums);
      for (int start = now->start; start < std::min(high, (chunk + 1) * a_.chunk); start += kBlock) {
        if (start + kBlock < high)
          FindKeys(u, {start + kBlock, high}, *next);
        else if (later)
          FindKeys(*later, KeysOf(*later), *next);
        else
          next->first = next->last = 0;
        OneBlock(u, *now, *next, M, s, sums);
        std::swap(now, next);
      }
      if (chunk > low / a_.chunk) Merge(M * (u.last_head - u.head), s.chunk, s.sums);
    }
    if (u.part < 0) {
      for (int k = u.head; k < u.last_head; k++) Finish(u, k, M, Of(s.sums, (k - u.head) * M));
      return;
    }
    const int64_t size = M * (u.last_head - u.head);
    std::memcpy(PartOf(u, u.chunk), s.sums.top, sizeof(float) * size * (PaddedDim() + 2));
    if (remaining_[u.part].fetch_sub(1, std::memory_order_acq_rel) == 1) MergeParts(u, M, s);
  }

  // The sums of query vectors from m on.
  Sums Of(Sums s, int64_t m) const { return {s.top + m, s.total + m, s.value + m * PaddedDim()}; }

  float* PartOf(const Unit& u, int chunk) {
    const Part& part = parts_[u.part];
    const int64_t vectors = (u.last - u.first) * group_ * (u.last_head - u.head);
    return partial_.data() + (part.offset + (chunk - part.first) * vectors) * (PaddedDim() + 2);
  }

  void MergeParts(const Unit& u, int64_t M, Scratch& s) {
    const Part& part = parts_[u.part];
    const int64_t size = M * (u.last_head - u.head);
    for (int c = 0; c < part.count; c++) {
      float* at = PartOf(u, part.first + c);
      if (c == 0)
        std::memcpy(s.sums.top, at, sizeof(float) * size * (PaddedDim() + 2));
      else
        Merge(size, {at, at + size, at + 2 * size}, s.sums);
    }
    for (int k = u.head; k < u.last_head; k++) Finish(u, k, M, Of(s.sums, (k - u.head) * M));
  }

  // into += sums of later keys
  void Merge(int64_t M, Sums later, Sums into) {
    const int64_t D = PaddedDim();
    for (int64_t m = 0; m < M; m++) {
      const float most = std::max(into.top[m], later.top[m]);
      if (most == -kInf) continue;
      const float old = Exp(into.top[m] - most), add = Exp(later.top[m] - most);
      into.top[m] = most;
      into.total[m] = into.total[m] * old + later.total[m] * add;
      float* x = into.value + m * D;
      const float* y = later.value + m * D;
      for (int64_t d = 0; d < D; d++) x[d] = x[d] * old + y[d] * add;
    }
  }

  void LoadQueries(const Unit& u, int k, float* q) {
    const int64_t D = PaddedDim();
    const QType* from = static_cast<const QType*>(a_.q);
    for (int i = u.first; i < u.last; i++)
      for (int64_t g = 0; g < group_; g++, q += D) {
        const QType* x = from + ((a_.cu_q_lens[u.row] + i) * a_.H + k * group_ + g) * a_.D;
        for (int64_t i = 0; i < D; i++) {
          const int64_t d = DimOf<KV>(i);
          q[i] = d < a_.D ? Q::Get(x[d]) * a_.scale : 0.0f;
        }
      }
  }

  void Clear(int64_t M, Sums sums) const {
    std::fill(sums.top, sums.top + M, -kInf);
    std::fill(sums.total, sums.total + M, 0.0f);
    std::fill(sums.value, sums.value + M * PaddedDim(), 0.0f);
  }

  // Adds the keys of a block to the sums of the unit's heads, and asks for the block after it.
  void OneBlock(const Unit& u, const Block& block, const Block& next, int64_t M, Scratch& s, Sums all) {
    const int64_t D = PaddedDim(), head_bytes = 2 * a_.Dc * sizeof(KVType);
    Ahead ahead(next.keys + next.first, next.keys + next.last, (u.last_head - u.head) * head_bytes);
    const int lines = static_cast<int>((head_bytes + 127) / 128);  // of a key; the other half with its value
    for (int k = u.head; k < u.last_head; k++) {
      const float* q = s.q + (k - u.head) * M * D;
      const Sums sums = Of(all, (k - u.head) * M);
      const int64_t offset = (k - u.head) * 2 * a_.Dc;
      LoadScales(block, k - u.head, s);
      std::fill(s.scores, s.scores + M * kBlock, 0.0f);
      for (int64_t d = 0; d < D; d += kSlice) {
        const int64_t dims = std::min<int64_t>(kSlice, D - d);
        if (u.chunk >= 0 && M <= kFew && d + dims <= a_.Dc) {
          ScoresInPlace(q + d, block, offset + d, dims, M, s.scores, ahead, lines);
        } else {
          TransposeKeys(block, offset, d, dims, s, ahead);
          ScoresOfTransposed(q + d, D, s.kt, dims, M, s.scores);
        }
      }
      Weigh(u, block, M, s, sums);
      AddValues(block, offset + a_.Dc, M, s, sums.value, ahead, lines);
    }
    ahead.All();
  }

  // Where the keys of the first block of tokens [low, high) are. A vector's worth of places around them is filled, with any
  // key that can be read.
  void FindKeys(const Unit& u, std::pair<int, int> range, Block& block) const {
    const int low = range.first, high = range.second, start = low / kBlock * kBlock;
    block.start = start;
    block.first = std::max(low, start) - start;
    block.last = std::min(high, start + kBlock) - start;
    const int32_t* table = a_.page_table + u.row * a_.P;
    const int64_t stride = 2 * a_.K;
    for (int t = block.first; t < block.last;) {
      const int64_t page = (start + t) / a_.S, offset = (start + t) - page * a_.S;
      const int end = std::min<int64_t>(block.last, t + a_.S - offset);
      int64_t head = (int64_t{table[page]} * a_.S + offset) * stride + 2 * u.head;
      for (; t < end; t++, head += stride) {
        block.keys[t] = static_cast<const KVType*>(a_.kv) + head * a_.Dc;
        if constexpr (KV::kScaled) block.scales[t] = a_.scales + head;
      }
    }
    for (int t = block.first / kLanes * kLanes; t < block.first; t++) block.keys[t] = block.keys[block.first];
    for (int t = block.last; t % kLanes; t++) block.keys[t] = block.keys[block.first];
  }

  void LoadScales(const Block& block, int head, Scratch& s) const {
    if constexpr (KV::kScaled)
      for (int t = block.first; t < block.last; t++) {
        s.key_scales[t] = block.scales[t][2 * head];
        s.value_scales[t] = block.scales[t][2 * head + 1];
      }
  }

  // Dims [d, d + kStep) of a key or value, where Dc has so many; else a copy with zeros behind them.
  const KVType* Dims(const KVType* x, int64_t d, KVType (&copy)[kStep]) const {
    if (d + kStep <= a_.Dc) return x + d;
    for (int64_t i = 0; i < kStep; i++) copy[i] = d + i < a_.Dc ? x[d + i] : KVType(0);
    return copy;
  }

  // scores[M, kBlock] += the products of `dims` dims from `offset` on, keys read as they lie.
  void ScoresInPlace(const float* q, const Block& block, int64_t offset, int64_t dims, int64_t M, float* scores, Ahead& ahead,
                     int lines) const {
    const int64_t D = PaddedDim();
    for (int t = block.first / kLanes * kLanes; t < block.last; t += kLanes) {
      for (int64_t m = 0; m < M; m += kFewRows)
        ScoreFew<KV>(std::min<int64_t>(kFewRows, M - m), q + m * D, D, block.keys + t, offset, dims,
                     scores + m * kBlock + t, ahead, lines);
    }
  }

  // kt[dims, kBlock] from dims [d, d + dims) of the keys at `offset`.
  void TransposeKeys(const Block& block, int64_t offset, int64_t d, int64_t dims, Scratch& s, Ahead& ahead) const {
    for (int t = block.first / kLanes * kLanes; t < block.last; t += kLanes) {
      ahead.Lines(kAhead);
      for (int64_t i = 0; i < dims; i += kStep) {
        TransposePart<0>(block.keys + t, offset, d + i, s.kt + i * kBlock + t);
        if constexpr (KV::kParts > 1) TransposePart<1>(block.keys + t, offset, d + i, s.kt + (i + kLanes) * kBlock + t);
      }
    }
  }

  template <int kPart>
  void TransposePart(const KVType* const* keys, int64_t offset, int64_t d, float* kt) const {
    Vec rows[kLanes];
    if (d + kStep <= a_.Dc) {
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; j++) rows[j] = KV::template Load<kPart>(keys[j] + offset + d);
    } else {
      KVType copy[kStep];
      for (int j = 0; j < kLanes; j++) rows[j] = KV::template Load<kPart>(Dims(keys[j] + offset, d, copy));
    }
    Transpose(rows);
#pragma GCC unroll 16
    for (int j = 0; j < kLanes; j++) Store(kt + j * kBlock, rows[j]);
  }

  void LoadValues(const Block& block, int64_t offset, Scratch& s) const {
    const int64_t D = PaddedDim();
    KVType copy[kStep];
    for (int t = block.first; t < block.last; t++)
      for (int64_t d = 0; d < D; d += kStep) {
        const KVType* x = Dims(block.keys[t] + offset, d, copy);
        Store(s.v + t * D + d, KV::template Load<0>(x));
        if constexpr (KV::kParts > 1) Store(s.v + t * D + d + kLanes, KV::template Load<1>(x));
      }
  }

  // Scores -> weights, 0 where a query does not see a key; what was summed up before is scaled to the new maximum.
  void Weigh(const Unit& u, const Block& block, int64_t M, Scratch& s, Sums sums) {
    const int64_t D = PaddedDim();
    const int first = block.first, last = block.last;
    const int position = a_.kv_lens[u.row] - a_.Queries(u.row) + u.first;
    for (int64_t m = 0; m < M; m++) {
      float* x = s.scores + m * kBlock;
      const int mine = position + static_cast<int>(m / group_);
      const int begin = std::max(first, a_.FirstKey(mine) - block.start), end = std::min(last, mine + 1 - block.start);
      if constexpr (KV::kScaled)
        for (int t = first; t < last; t++) x[t] *= s.key_scales[t];
      if (a_.soft_cap > 0)
        for (int t = first; t < last; t++) x[t] = a_.soft_cap * std::tanh(x[t] / a_.soft_cap);
      for (int t = 0; t < begin && t < kBlock; t++) x[t] = -kInf;
      for (int t = std::max(end, 0); t < kBlock; t++) x[t] = -kInf;
      Vec most = Load(x);
      for (int t = kLanes; t < kBlock; t += kLanes) {
        Vec y = Load(x + t);
        most = y > most ? y : most;
      }
      const float top = std::max(sums.top[m], Max(most));
      const float zero = top == -kInf ? 0.0f : top;
      Vec total{};
      for (int t = 0; t < kBlock; t += kLanes) {
        Vec w = Exp(Load(x + t) - zero);
        total += w;
        Store(x + t, w);
      }
      if constexpr (KV::kScaled)
        for (int t = first; t < last; t++) x[t] *= s.value_scales[t];
      const float old = Exp(sums.top[m] - zero);
      sums.top[m] = top;
      sums.total[m] = sums.total[m] * old + Sum(total);
      if (old != 1.0f)
        for (int64_t d = 0; d < D; d += kLanes) Store(sums.value + m * D + d, Load(sums.value + m * D + d) * old);
    }
  }

  template <int kNum>
  void AddTile(const float* weights, bool converted, const Block& block, int64_t offset, const Scratch& s,
               float* value, Ahead& ahead, int lines) const {
    constexpr int kWide = kColumns > KV::kParts ? kColumns : KV::kParts;
    const int64_t D = PaddedDim();
    const auto add = [&](int64_t d, auto vectors) {
      if (converted)
        AddRows<kNum>(weights, Converted{s.v + d, D}, block.first, block.last, D, value + d, ahead, lines, vectors);
      else
        AddRows<kNum>(weights, InPages<KV>{block.keys, offset + d}, block.first, block.last, D, value + d, ahead, lines, vectors);
    };
    int64_t d = 0;
    for (; d + kWide * kLanes <= D; d += kWide * kLanes) add(d, std::make_integer_sequence<int, kWide>{});
    for (; d < D; d += kStep) add(d, std::make_integer_sequence<int, KV::kParts>{});
  }

  // value[M, D] += weights[M, first : last] v[first : last, D], the values at `offset` of their keys
  void AddValues(const Block& block, int64_t offset, int64_t M, Scratch& s, float* value, Ahead& ahead,
                 int lines) const {
    const int64_t D = PaddedDim();
    const bool converted = M > kRows || a_.Dc % kStep;  // once for all queries, unless there are few of them
    if (converted) LoadValues(block, offset, s);
    int64_t m = 0;
    for (; m + kRows <= M; m += kRows)
      AddTile<kRows>(s.scores + m * kBlock, converted, block, offset, s, value + m * D, ahead, lines);
    const float* weights = s.scores + m * kBlock;
    if (M - m == 1) AddTile<1>(weights, converted, block, offset, s, value + m * D, ahead, lines);
    if (M - m == 2) AddTile<2>(weights, converted, block, offset, s, value + m * D, ahead, lines);
    if (M - m == 3) AddTile<3>(weights, converted, block, offset, s, value + m * D, ahead, lines);
  }

  void Finish(const Unit& u, int k, int64_t M, Sums sums) {
    const int64_t D = PaddedDim();
    QType* out = static_cast<QType*>(a_.out);
    for (int64_t m = 0; m < M; m++) {
      const int64_t head = k * group_ + m % group_, token = a_.cu_q_lens[u.row] + u.first + m / group_;
      float total = sums.total[m], factor = 1;
      if (a_.sinks) {
        const float most = std::max(sums.top[m], a_.sinks[head]);
        factor = most == -kInf ? 1.0f : Exp(sums.top[m] - most);
        total = most == -kInf ? 0.0f : total * factor + Exp(a_.sinks[head] - most);
      }
      factor = total > 0 ? factor / total : 0.0f;
      QType* to = out + (token * a_.H + head) * a_.D;
      for (int64_t i = 0; i < D; i++)
        if (const int64_t d = DimOf<KV>(i); d < a_.D) to[d] = Q::Put(sums.value[m * D + i] * factor);
    }
  }

  AttentionArgs a_;
  int64_t group_;
  std::vector<Part> parts_;
  std::vector<float> partial_;
  std::vector<std::atomic<int>> remaining_;
};

}  // namespace pagedjax
