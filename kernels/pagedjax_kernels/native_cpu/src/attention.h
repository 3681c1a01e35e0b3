// Paged attention: online softmax over blocks of keys, in float32.
//
// A query's result does not depend on what else is in the call: blocks of kBlock keys and chunks of a few lie at fixed
// places of a row, each chunk is summed up on its own, and chunks are merged in their order, whoever computed them.
#pragma once

#include <algorithm>
#include <atomic>
#include <vector>

#include "parallel.h"
#include "vector.h"

namespace pagedjax {

constexpr int kBlock = 64;
constexpr int kSlice = 64;      // head dims that are transposed at once
constexpr int kMaxDim = 256;
constexpr int kTileRows = 32;   // query vectors that share the conversion of a block
constexpr int kAhead = 6;       // tokens asked for at a time, while others are computed
constexpr int kPrefetch = 2;    // into the second-level cache: the first one is full of the current block
constexpr int kSplitTokens = 2;  // rows with at most so many queries are split by keys, the others by queries

struct AttentionArgs {
  const void* q;              // [T, H, D]
  void* out;                  // [T, H, D]
  const void* kv;             // one layer's pages [N, S, 2K, Dc]
  const float* scales;        // [N, S, 2K], or null
  const int32_t* page_table;  // [B, P]
  const int32_t* kv_lens;     // [B]
  const int32_t* cu_q_lens;   // [B + 1]
  const float* sinks;         // [H], or null
  int64_t T, H, D, B, P, S, K, Dc;
  int window;                 // 0: all
  float scale, soft_cap;      // soft_cap 0: off
  int chunk;                  // keys that are summed up on their own: a multiple of kBlock
};

// Tokens of a row that are computed together: queries [first, last) of the row, heads [head, last_head), keys of one
// chunk or (chunk < 0) of all.
struct Unit {
  int row, first, last, head, last_head, chunk, slot;
};

// Running softmax of M query vectors: largest score, sum of weights, weighted sum of values.
struct Sums {
  float *top, *total, *value;  // [M], [M], [M, D]
};

template <typename Q, typename KV>
class Attention {
 public:
  explicit Attention(const AttentionArgs& args) : a_(args), group_(args.H / args.K) {}

  void Run(xla::ffi::ThreadPool& pool) {
    Plan(static_cast<int>(pool.num_threads()));
    ParallelFor(pool, static_cast<int>(units_.size()), [this](int i) { Compute(units_[i]); });
  }

 private:
  using QType = typename Q::Type;
  using KVType = typename KV::Type;
  static constexpr int kStep = KV::kParts * kLanes;  // dims that are loaded at once

  int FirstKey(int position) const { return a_.window > 0 ? std::max(0, position - a_.window + 1) : 0; }

  void Plan(int threads) {
    const int tile = std::max<int>(1, kTileRows / group_);
    int64_t num_slots = 0, num_parts = 0;
    for (int b = 0; b < a_.B; b++) {
      const int queries = a_.cu_q_lens[b + 1] - a_.cu_q_lens[b], length = a_.kv_lens[b];
      if (queries > kSplitTokens)
        for (int i = 0; i < queries; i += tile)
          for (int k = 0; k < a_.K; k++)
            units_.push_back({b, i, std::min(i + tile, queries), k, k + 1, -1, -1});
      else if (queries > 0 && length > 0)
        num_parts += (length - 1) / a_.chunk - FirstKey(length - queries) / a_.chunk + 1;
    }
    // All heads of a token adjoin in memory: they are taken apart only where threads would idle.
    const int heads = num_parts + static_cast<int64_t>(units_.size()) >= 4 * threads ? a_.K : 1;
    for (int b = 0; b < a_.B; b++) {
      const int queries = a_.cu_q_lens[b + 1] - a_.cu_q_lens[b], length = a_.kv_lens[b];
      if (queries <= 0 || queries > kSplitTokens) continue;
      if (length <= 0) {
        Zero(a_.cu_q_lens[b], a_.cu_q_lens[b + 1]);
        continue;
      }
      const int first = FirstKey(length - queries) / a_.chunk, last = (length - 1) / a_.chunk;
      for (int k = 0; k < a_.K; k += heads) {
        const int slot = last > first ? static_cast<int>(parts_.size()) : -1;
        if (slot >= 0) parts_.push_back({num_slots, first, last - first + 1});
        for (int chunk = first; chunk <= last; chunk++)
          units_.push_back({b, 0, queries, k, std::min<int>(k + heads, a_.K), chunk, slot});
        if (slot >= 0) num_slots += (last - first + 1) * SlotSize(queries, std::min<int>(heads, a_.K - k));
      }
    }
    Zero(a_.cu_q_lens[a_.B], a_.T);
    partial_.resize(num_slots);
    remaining_ = std::vector<std::atomic<int>>(parts_.size());
    for (size_t i = 0; i < parts_.size(); i++) remaining_[i] = parts_[i].count;
  }

  int64_t SlotSize(int queries, int heads) const { return int64_t{queries} * group_ * heads * (PaddedDim() + 2); }

  void Zero(int64_t first, int64_t last) {
    QType* out = static_cast<QType*>(a_.out);
    if (last > first) std::memset(out + first * a_.H * a_.D, 0, sizeof(QType) * (last - first) * a_.H * a_.D);
  }

  struct Part {
    int64_t offset;  // of its first chunk in partial_
    int first, count;
  };

  struct Scratch {
    std::vector<float> memory;
    float *q, *scores, *kt, *v;
    const KVType* keys[kBlock];  // values follow them
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

  void Compute(const Unit& u) {
    const int64_t M = (u.last - u.first) * group_;
    const int length = a_.kv_lens[u.row], queries = a_.cu_q_lens[u.row + 1] - a_.cu_q_lens[u.row];
    const int begin = FirstKey(length - queries + u.first), end = length - queries + u.last;
    const int first = u.chunk >= 0 ? u.chunk : begin / a_.chunk;
    Scratch& s = Prepare(M * (u.last_head - u.head));
    for (int k = u.head; k < u.last_head; k++) LoadQueries(u, k, s.q + (k - u.head) * M * PaddedDim());
    for (int chunk = first; chunk * a_.chunk < end && (u.chunk < 0 || chunk == first); chunk++) {
      const Sums sums = chunk == first ? s.sums : s.chunk;
      OneChunk(u, std::max(begin, chunk * a_.chunk), std::min(end, (chunk + 1) * a_.chunk), M, s, sums);
      if (chunk > first) Merge(M * (u.last_head - u.head), s.chunk, s.sums);
    }
    if (u.slot < 0) {
      for (int k = u.head; k < u.last_head; k++) Finish(u, k, M, Of(s.sums, (k - u.head) * M));
      return;
    }
    const int64_t size = M * (u.last_head - u.head);
    std::memcpy(Slot(u, u.chunk), s.sums.top, sizeof(float) * size * (PaddedDim() + 2));
    if (remaining_[u.slot].fetch_sub(1, std::memory_order_acq_rel) == 1) MergeParts(u, M, s);
  }

  // The sums of query vectors from m on.
  Sums Of(Sums s, int64_t m) const { return {s.top + m, s.total + m, s.value + m * PaddedDim()}; }

  float* Slot(const Unit& u, int chunk) {
    const Part& part = parts_[u.slot];
    return partial_.data() + part.offset + (chunk - part.first) * SlotSize(u.last - u.first, u.last_head - u.head);
  }

  void MergeParts(const Unit& u, int64_t M, Scratch& s) {
    const Part& part = parts_[u.slot];
    const int64_t size = M * (u.last_head - u.head);
    for (int c = 0; c < part.count; c++) {
      float* at = Slot(u, part.first + c);
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

  // Sums of the unit's heads over keys [low, high) of one chunk.
  void OneChunk(const Unit& u, int low, int high, int64_t M, Scratch& s, Sums all) {
    const int64_t D = PaddedDim(), size = M * (u.last_head - u.head);
    std::fill(all.top, all.top + size, -kInf);
    std::fill(all.total, all.total + size, 0.0f);
    std::fill(all.value, all.value + size * D, 0.0f);
    Ahead ahead = Lines(u, low, std::min(high, low / kBlock * kBlock + kBlock));
    Fetch(ahead, a_.chunk);
    for (int block = low / kBlock * kBlock; block < high; block += kBlock) {
      const int first = std::max(low, block) - block, last = std::min(high, block + kBlock) - block;
      ahead = Lines(u, block + kBlock, std::min(high, block + 2 * kBlock));
      for (int k = u.head; k < u.last_head; k++) {
        const float* q = s.q + (k - u.head) * M * D;
        const Sums sums = Of(all, (k - u.head) * M);
        FindKeys(u.row, k, block, first, last, s);
        std::fill(s.scores, s.scores + M * kBlock, 0.0f);
        for (int64_t d = 0; d < D; d += kSlice) {
          const int64_t dims = std::min<int64_t>(kSlice, D - d);
          TransposeKeys(d, dims, first, last, s, ahead);
          Scores(q + d, D, s.kt, dims, M, s.scores);
        }
        Weigh(u, block, first, last, M, s, sums);
        AddValues(first, last, M, s, sums.value);
      }
      Fetch(ahead, kBlock);
    }
  }

  // Where the keys of head k are. A vector's worth of places around [first, last) is filled: zeros stand for no key.
  void FindKeys(int row, int k, int block, int first, int last, Scratch& s) {
    static const KVType kNothing[2 * kMaxDim] = {};
    const int32_t* table = a_.page_table + row * a_.P;
    for (int t = first / kLanes * kLanes; t < last || t % kLanes; t++) {
      if (t < first || t >= last) {
        s.keys[t] = kNothing;
        s.key_scales[t] = s.value_scales[t] = 0;
        continue;
      }
      const int64_t slot = int64_t{table[(block + t) / a_.S]} * a_.S + (block + t) % a_.S;
      s.keys[t] = static_cast<const KVType*>(a_.kv) + (slot * 2 * a_.K + 2 * k) * a_.Dc;
      if constexpr (KV::kScaled) {
        s.key_scales[t] = a_.scales[slot * 2 * a_.K + 2 * k];
        s.value_scales[t] = a_.scales[slot * 2 * a_.K + 2 * k + 1];
      }
    }
  }

  // Tokens [at, end) of a row whose keys and values, `bytes` for the heads of a unit, are asked for ahead of their use.
  // Pages lie anywhere, so the machine does not foresee them; within a page it does, if it is read in order.
  struct Ahead {
    const int32_t* table;
    int64_t offset, bytes;
    int at, end;
  };

  Ahead Lines(const Unit& u, int first, int last) const {
    const int64_t bytes = 2 * a_.Dc * sizeof(KVType);
    return {a_.page_table + u.row * a_.P, u.head * bytes, (u.last_head - u.head) * bytes, first, last};
  }

  void Fetch(Ahead& ahead, int tokens) const {
    const int64_t token_bytes = 2 * a_.K * a_.Dc * sizeof(KVType);
    for (; tokens > 0 && ahead.at < ahead.end; ahead.at++, tokens--) {
      const int64_t slot = int64_t{ahead.table[ahead.at / a_.S]} * a_.S + ahead.at % a_.S;
      const char* x = static_cast<const char*>(a_.kv) + slot * token_bytes + ahead.offset;
      for (int64_t i = 0; i < ahead.bytes; i += 64) __builtin_prefetch(x + i, 0, kPrefetch);
    }
  }

  // Dims [d, d + kStep) of a key or value, where Dc has so many; else a copy with zeros behind them.
  const KVType* Dims(const KVType* x, int64_t d, KVType (&copy)[kStep]) const {
    if (d + kStep <= a_.Dc) return x + d;
    for (int64_t i = 0; i < kStep; i++) copy[i] = d + i < a_.Dc ? x[d + i] : KVType(0);
    return copy;
  }

  // kt[dims, kBlock] from keys [kBlock, d : d + dims].
  void TransposeKeys(int64_t d, int64_t dims, int first, int last, Scratch& s, Ahead& ahead) {
    for (int t = first / kLanes * kLanes; t < last; t += kLanes) {
      Fetch(ahead, kAhead);
      for (int64_t i = 0; i < dims; i += kStep) {
        TransposePart<0>(s.keys + t, d + i, s.kt + i * kBlock + t);
        if constexpr (KV::kParts > 1) TransposePart<1>(s.keys + t, d + i, s.kt + (i + kLanes) * kBlock + t);
      }
    }
  }

  template <int kPart>
  void TransposePart(const KVType* const* keys, int64_t d, float* kt) const {
    Vec rows[kLanes];
    if (d + kStep <= a_.Dc) {
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; j++) rows[j] = KV::template Load<kPart>(keys[j] + d);
    } else {
      KVType copy[kStep];
      for (int j = 0; j < kLanes; j++) rows[j] = KV::template Load<kPart>(Dims(keys[j], d, copy));
    }
    Transpose(rows);
#pragma GCC unroll 16
    for (int j = 0; j < kLanes; j++) Store(kt + j * kBlock, rows[j]);
  }

  void LoadValues(int first, int last, Scratch& s) {
    const int64_t D = PaddedDim();
    KVType copy[kStep];
    for (int t = first; t < last; t++)
      for (int64_t d = 0; d < D; d += kStep) {
        const KVType* x = Dims(s.keys[t] + a_.Dc, d, copy);
        Store(s.v + t * D + d, KV::template Load<0>(x));
        if constexpr (KV::kParts > 1) Store(s.v + t * D + d + kLanes, KV::template Load<1>(x));
      }
  }

  template <int kNum>
  static void ScoreRows(const float* q, int64_t stride, const float* kt, int64_t dims, float* scores) {
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
  static void Scores(const float* q, int64_t stride, const float* kt, int64_t dims, int64_t M, float* scores) {
    int64_t m = 0;
    for (; m + kRows <= M; m += kRows) ScoreRows<kRows>(q + m * stride, stride, kt, dims, scores + m * kBlock);
    const float* rest = q + m * stride;
    if (M - m == 1) ScoreRows<1>(rest, stride, kt, dims, scores + m * kBlock);
    if (M - m == 2) ScoreRows<2>(rest, stride, kt, dims, scores + m * kBlock);
    if (M - m == 3) ScoreRows<3>(rest, stride, kt, dims, scores + m * kBlock);
  }

  // Scores -> weights, 0 where a query does not see a key; what was summed up before is scaled to the new maximum.
  void Weigh(const Unit& u, int block, int first, int last, int64_t M, Scratch& s, Sums sums) {
    const int64_t D = PaddedDim();
    const int position = a_.kv_lens[u.row] - (a_.cu_q_lens[u.row + 1] - a_.cu_q_lens[u.row]) + u.first;
    for (int64_t m = 0; m < M; m++) {
      float* x = s.scores + m * kBlock;
      const int mine = position + static_cast<int>(m / group_);
      const int begin = std::max(first, FirstKey(mine) - block), end = std::min(last, mine + 1 - block);
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

  // Values out of the scratch memory, or as they lie in the pages.
  struct Converted {
    const float* v;
    int64_t stride;
    template <int kVector>
    Vec Load(int t) const {
      return pagedjax::Load(v + t * stride + kVector * kLanes);
    }
  };
  struct InPages {
    const KVType* const* keys;
    int64_t offset;
    template <int kVector>
    Vec Load(int t) const {
      return KV::template Load<kVector % KV::kParts>(keys[t] + offset + kVector / KV::kParts * kStep);
    }
  };

  template <int kNum, typename Values, int... kVector>
  static void AddRows(const float* weights, Values values, int first, int last, int64_t D, float* value,
                      std::integer_sequence<int, kVector...>) {
    constexpr int kWide = sizeof...(kVector);
    Vec sum[kNum][kWide];
    for (int r = 0; r < kNum; r++)
      for (int j = 0; j < kWide; j++) sum[r][j] = Load(value + r * D + j * kLanes);
    for (int t = first; t < last; t++) {
      const Vec x[kWide] = {values.template Load<kVector>(t)...};
      for (int r = 0; r < kNum; r++)
        for (int j = 0; j < kWide; j++) sum[r][j] += weights[r * kBlock + t] * x[j];
    }
    for (int r = 0; r < kNum; r++)
      for (int j = 0; j < kWide; j++) Store(value + r * D + j * kLanes, sum[r][j]);
  }

  template <int kNum>
  void AddTile(const float* weights, bool converted, int first, int last, const Scratch& s, float* value) {
    constexpr int kWide = kColumns > KV::kParts ? kColumns : KV::kParts;
    const int64_t D = PaddedDim();
    const auto add = [&](int64_t d, auto vectors) {
      if (converted)
        AddRows<kNum>(weights, Converted{s.v + d, D}, first, last, D, value + d, vectors);
      else
        AddRows<kNum>(weights, InPages{s.keys, a_.Dc + d}, first, last, D, value + d, vectors);
    };
    int64_t d = 0;
    for (; d + kWide * kLanes <= D; d += kWide * kLanes) add(d, std::make_integer_sequence<int, kWide>{});
    for (; d < D; d += kStep) add(d, std::make_integer_sequence<int, KV::kParts>{});
  }

  // value[M, D] += weights[M, first : last] v[first : last, D]
  void AddValues(int first, int last, int64_t M, Scratch& s, float* value) {
    const int64_t D = PaddedDim();
    const bool converted = M > kRows || a_.Dc % kStep;  // once for all queries, unless there are few of them
    if (converted) LoadValues(first, last, s);
    int64_t m = 0;
    for (; m + kRows <= M; m += kRows)
      AddTile<kRows>(s.scores + m * kBlock, converted, first, last, s, value + m * D);
    const float* weights = s.scores + m * kBlock;
    if (M - m == 1) AddTile<1>(weights, converted, first, last, s, value + m * D);
    if (M - m == 2) AddTile<2>(weights, converted, first, last, s, value + m * D);
    if (M - m == 3) AddTile<3>(weights, converted, first, last, s, value + m * D);
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
  std::vector<Unit> units_;
  std::vector<Part> parts_;
  std::vector<float> partial_;
  std::vector<std::atomic<int>> remaining_;
};

}  // namespace pagedjax
