// The likeliest token of each row and its probability, without the row's logits: online softmax
// (arXiv 1805.02867) in 16 lanes, over some panels at a time.
#pragma once
#include <cmath>

#include "product.h"

constexpr int RUN = 4,
              WIDE = RUN * COLUMNS;  // panels whose logits exist at once, and their columns

struct Piece {  // as in products.py: a part of the vocabulary
  Linear weight;
  int64_t first, columns;  // its first token, and how many of the panels' columns are tokens
};

struct Best {  // of one row in one thread: lane by lane
  float top[16], norm[16];
  int32_t token[16];
};

inline void begin(Best& best) {
  for (int i = 0; i < 16; i++) {
    best.top[i] = -1e30f;
    best.norm[i] = 0;
    best.token[i] = 0;
  }
}

inline void fold(Best& best, const float* logits, int32_t first) {
  __m512 before = _mm512_loadu_ps(best.top), top = before, sum = _mm512_setzero_ps();
  __m512i token = _mm512_loadu_si512(best.token);
  __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (int i = 0; i < WIDE; i += 16) {
    __m512 x = _mm512_loadu_ps(logits + i);
    __mmask16 higher = _mm512_cmp_ps_mask(x, top, _CMP_GT_OQ);
    token = _mm512_mask_add_epi32(token, higher, lanes, _mm512_set1_epi32(first + i));
    top = _mm512_max_ps(top, x);
  }
  for (int i = 0; i < WIDE; i += 16)
    sum = _mm512_add_ps(sum, exponential(_mm512_sub_ps(_mm512_loadu_ps(logits + i), top)));
  __m512 shrink = exponential(_mm512_sub_ps(before, top));
  _mm512_storeu_ps(best.norm, _mm512_fmadd_ps(_mm512_loadu_ps(best.norm), shrink, sum));
  _mm512_storeu_ps(best.top, top);
  _mm512_storeu_si512(best.token, token);
}

// The columns of a panel that are tokens and may be chosen, 16 in a mask.
inline __mmask16 open_to(int64_t first, int64_t columns, int64_t closed) {
  const int64_t left = columns - first;
  uint32_t mask = left >= 16 ? 0xffff : left > 0 ? (1u << left) - 1 : 0;
  if (closed >= first && closed < first + 16) mask &= ~(1u << (closed - first));
  return static_cast<__mmask16>(mask);
}

// The share of one thread in one piece; `best`: one for each row.
template <bool INT8>
inline void search(const Rows& x, int64_t rows, const Piece& piece, Share runs, int64_t mask,
                   Best* best) {
  alignas(64) float out[BAND * COLUMNS], logits[BAND * WIDE];
  const Linear& w = piece.weight;
  const __m512 none = _mm512_set1_ps(-INFINITY);
  for (int64_t run = runs.first; run < runs.last; run++)
    for (int64_t r = 0; r < rows; r += BAND) {
      const int64_t count = rows - r < BAND ? rows - r : BAND;
      for (int64_t i = 0; i < RUN; i++) {
        const int64_t p = run * RUN + i;
        if (p < w.panels) {
          const char* weights = w.weights + p * w.steps * STEP;
          band<INT8>(x.data + r * x.stride, count, weights, w.steps, r == 0, out, COLUMNS);
          if (INT8) finish<INT8>(w, x, r, count, p, out, COLUMNS);
        }
        for (int64_t half = 0; half < COLUMNS; half += 16) {
          const __mmask16 open = open_to(p * COLUMNS + half, piece.columns, mask - piece.first);
          float* place = logits + i * COLUMNS + half;
          for (int64_t k = 0; k < count; k++)
            _mm512_storeu_ps(place + k * WIDE,
                             _mm512_mask_loadu_ps(none, open, out + k * COLUMNS + half));
        }
      }
      for (int64_t k = 0; k < count; k++)
        fold(best[r + k], logits + k * WIDE, static_cast<int32_t>(piece.first + run * WIDE));
    }
}

// All lanes of all threads; `best[thread * stride]` is the row's.
inline void conclude(const Best* best, int64_t stride, int threads, int64_t* token, float* chance) {
  float top = -INFINITY, norm = 0;
  int32_t found = INT32_MAX;
  for (int t = 0; t < threads; t++)
    for (int i = 0; i < 16; i++) {
      const Best& b = best[t * stride];
      if (b.top[i] > top || (b.top[i] == top && b.token[i] < found)) {
        top = b.top[i];
        found = b.token[i];
      }
    }
  for (int t = 0; t < threads; t++)
    for (int i = 0; i < 16; i++)
      norm += best[t * stride].norm[i] * std::exp(best[t * stride].top[i] - top);
  *token = found;
  *chance = 1 / norm;
}
