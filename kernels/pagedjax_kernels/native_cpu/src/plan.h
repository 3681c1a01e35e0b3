// How a call is cut into pieces that threads compute on their own.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace pagedjax {

constexpr int kTileRows = 32;    // query vectors that share the conversion of a block
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

  int Queries(int row) const { return cu_q_lens[row + 1] - cu_q_lens[row]; }
  // The first key that a query at `position` of its row sees.
  int FirstKey(int position) const { return window > 0 ? std::max(0, position - window + 1) : 0; }
};

// Tokens of a row that are computed together: queries [first, last) of the row, heads [head, last_head), keys of one
// chunk, whose sums belong to `part` (-1: it is the only chunk), or (chunk < 0) of all.
struct Unit {
  int row, first, last, head, last_head, chunk, part;
};

// Units of a row that together make one result: their sums are kept at `offset`, counted in query vectors.
struct Part {
  int64_t offset;
  int first, count;  // chunks
};

struct Plan {
  std::vector<Unit> units;
  std::vector<Part> parts;
  int64_t num_vectors = 0;  // of sums that parts keep

  Plan(const AttentionArgs& a, int threads) {
    int64_t num_chunks = 0;
    for (int b = 0; b < a.B; b++) {
      if (a.kv_lens[b] <= 0 || a.Queries(b) <= 0) continue;
      if (a.Queries(b) > kSplitTokens)
        AddTiles(a, b);
      else
        num_chunks += LastChunk(a, b) - FirstChunk(a, b) + 1;
    }
    // All heads of a token adjoin in memory: they are taken apart only where threads would idle.
    const bool together = num_chunks + static_cast<int64_t>(units.size()) >= 4 * threads;
    for (int b = 0; b < a.B; b++)
      if (a.kv_lens[b] > 0 && a.Queries(b) > 0 && a.Queries(b) <= kSplitTokens) AddChunks(a, b, together ? a.K : 1);
  }

 private:
  static int FirstChunk(const AttentionArgs& a, int b) { return a.FirstKey(a.kv_lens[b] - a.Queries(b)) / a.chunk; }
  static int LastChunk(const AttentionArgs& a, int b) { return (a.kv_lens[b] - 1) / a.chunk; }

  void AddTiles(const AttentionArgs& a, int b) {
    const int tile = std::max<int>(1, kTileRows / (a.H / a.K)), queries = a.Queries(b);
    for (int i = 0; i < queries; i += tile)
      for (int k = 0; k < a.K; k++) units.push_back({b, i, std::min(i + tile, queries), k, k + 1, -1, -1});
  }

  void AddChunks(const AttentionArgs& a, int b, int heads) {
    const int first = FirstChunk(a, b), count = LastChunk(a, b) - first + 1;
    for (int k = 0; k < a.K; k += heads) {
      const int last_head = std::min<int>(k + heads, a.K), part = count > 1 ? static_cast<int>(parts.size()) : -1;
      for (int chunk = first; chunk < first + count; chunk++)
        units.push_back({b, 0, a.Queries(b), k, last_head, chunk, part});
      if (part < 0) continue;
      parts.push_back({num_vectors, first, count});
      num_vectors += int64_t{count} * a.Queries(b) * (a.H / a.K) * (last_head - k);
    }
  }
};

}  // namespace pagedjax
