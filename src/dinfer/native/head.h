// The likeliest token of each row and its probability, without the row's logits: online softmax
// (arXiv 1805.02867) in the lanes of a vector, over some panels at a time.
#pragma once
#include <cmath>

#include "product.h"

// Panels whose logits exist at once, and their columns.
constexpr int RUN = 4, WIDE = RUN * COLUMNS;

struct Piece {  // as in products.py: a part of the vocabulary
  Linear weight;
  int64_t first, columns;  // its first token, and how many of the panels' columns are tokens
};

struct Best {  // of one row in one thread: lane by lane
  float top[LANES], norm[LANES];
  int32_t token[LANES];
};

inline void begin(Best& best) {
  for (int i = 0; i < LANES; i++) {
    best.top[i] = -1e30f;
    best.norm[i] = 0;
    best.token[i] = 0;
  }
}

inline void online_softmax(Best& best, const float* logits, int32_t first) {
  const Floats before = load(best.top);
  const Ints lanes = lane_numbers();
  Floats top = before, sum{};
  Ints token = load_ints(best.token);
  for (int i = 0; i < WIDE; i += LANES) {
    const Floats x = load(logits + i);
    token = x > top ? lanes + (first + i) : token;
    top = greater(top, x);
  }
  for (int i = 0; i < WIDE; i += LANES) sum += exponential(load(logits + i) - top);
  store(best.norm, fma(load(best.norm), exponential(before - top), sum));
  store(best.top, top);
  store_ints(best.token, token);
}

// Logits of columns that are no tokens, or of the mask, become -infinity.
inline void close(float* logits, int64_t rows, int64_t columns, int64_t mask) {
  for (int64_t r = 0; r < rows; r++, logits += WIDE) {
    for (int64_t i = columns < 0 ? 0 : columns; i < COLUMNS; i++) logits[i] = -INFINITY;
    if (mask >= 0 && mask < COLUMNS) logits[mask] = -INFINITY;
  }
}

// The share of one thread in one piece; `best`: one for each row.
template <class K>
inline void search(const Rows& x, int64_t rows, const Piece& piece, Share runs, int64_t mask,
                   Best* best) {
  alignas(64) float logits[BAND * WIDE];
  const Linear& w = piece.weight;
  for (int64_t run = runs.first; run < runs.last; run++)
    for (int64_t r = 0; r < rows; r += BAND) {
      const int64_t count = rows - r < BAND ? rows - r : BAND;
      for (int64_t i = 0; i < RUN; i++) {
        const int64_t p = run * RUN + i, first = p * COLUMNS;
        float* place = logits + i * COLUMNS;
        if (p < w.panels) {
          const Block<K> block{w, x, p, r, count};
          multiply(block, r == 0, place, WIDE);
          if (K::CODES) finish(block, place, WIDE);
        }
        close(place, count, piece.columns - first, mask - piece.first - first);
      }
      for (int64_t k = 0; k < count; k++)
        online_softmax(best[r + k], logits + k * WIDE,
                       static_cast<int32_t>(piece.first + run * WIDE));
    }
}

// All lanes of all threads; `best[thread * stride]` is the row's.
inline void reduce(const Best* best, int64_t stride, int threads, int64_t* token, float* prob) {
  float top = -INFINITY, norm = 0;
  int32_t found = INT32_MAX;
  for (int t = 0; t < threads; t++)
    for (int i = 0; i < LANES; i++) {
      const Best& b = best[t * stride];
      if (b.top[i] > top || (b.top[i] == top && b.token[i] < found)) {
        top = b.top[i];
        found = b.token[i];
      }
    }
  for (int t = 0; t < threads; t++)
    for (int i = 0; i < LANES; i++)
      norm += best[t * stride].norm[i] * std::exp(best[t * stride].top[i] - top);
  *token = found;
  *prob = 1 / norm;
}
