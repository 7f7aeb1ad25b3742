// softmax(q k / sqrt d) v over stored slots, for 16 queries in the lanes of a vector.
//
// Online softmax (arXiv 1805.02867) over BLOCK slots at a time. A query's result depends on its own
// slots alone, so it is the same to the last bit in any batch.
#pragma once
#include <cmath>

#include "vectors.h"

constexpr int BLOCK = 128, LANES = 16, TEAMS = 4;  // slots at once; queries of a vector; vectors of a task

struct Task {        // queries first..last (row-major: row, head of the group) of one span and key head
  int64_t span, head, first, last;
};

struct Span {        // as in body.py
  int64_t start, stop;  // rows
  int64_t slot;         // of a run its first slot; else -1 less the place in `listed` where its slots begin
  int64_t count;        // slots
};

struct Heads {       // one layer
  const bf16* q;         // [rows, heads, d]
  const bf16 *keys, *values;  // [slots, kv_heads, d]
  float* out;            // [rows, heads * d]
  int64_t heads, kv_heads, size;
};

// What a thread needs for heads of one size.
struct Desk {
  uint32_t* q;      // [TEAMS][d / 2][LANES] pairs
  float* sums;      // [TEAMS][d][LANES]
  float* scores;    // [BLOCK][LANES]
  uint32_t* pairs;  // [BLOCK / 2][LANES] probabilities of two slots
  uint32_t* values; // [BLOCK / 2][d] values of two slots

  static int64_t bytes(int64_t d) {
    return 4 * (TEAMS * LANES * (d / 2 + d) + BLOCK * LANES * 3 / 2 + BLOCK / 2 * d);
  }
  Desk(char* memory, int64_t d) {
    q = reinterpret_cast<uint32_t*>(memory);
    sums = reinterpret_cast<float*>(q + TEAMS * LANES * d / 2);
    scores = sums + TEAMS * LANES * d;
    pairs = reinterpret_cast<uint32_t*>(scores + BLOCK * LANES);
    values = pairs + BLOCK / 2 * LANES;
  }
};

// Queries of up to 16 rows, their pairs of channels side by side.
inline void lay_queries(const bf16* const* q, int64_t d, uint32_t* out) {
  for (int64_t c = 0; c < d / 2; c += 16) {
    __m512i words[16];
    for (int i = 0; i < 16; i++) words[i] = _mm512_loadu_si512(q[i] + 2 * c);
    transpose(words);
    for (int i = 0; i < 16; i++) _mm512_storeu_si512(out + (c + i) * LANES, words[i]);
  }
}

inline void lay_values(const bf16* const* v, int64_t count, int64_t d, uint32_t* out) {
  for (int64_t s = 0; s < count; s += 2, out += d)
    for (int64_t c = 0; c < d; c += 16) {
      auto wide = [&](int64_t slot) {
        if (slot == count) return _mm512_setzero_si512();
        return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(v[slot] + c)));
      };
      _mm512_storeu_si512(out + c, _mm512_or_si512(wide(s), _mm512_slli_epi32(wide(s + 1), 16)));
    }
}

// scores[slot][lane]; returns the greatest of each lane.
template <int N>
inline __m512 score(const bf16* const* k, const uint32_t* q, int64_t d, __m512 scale, float* out) {
  __m512 sums[N];
  for (int i = 0; i < N; i++) sums[i] = _mm512_setzero_ps();
  for (int64_t c = 0; c < d / 2; c++) {
    __m512i pair = _mm512_loadu_si512(q + c * LANES);
    for (int i = 0; i < N; i++) sums[i] = dot(sums[i], pair, spread(k[i] + 2 * c));
  }
  __m512 most = _mm512_set1_ps(-INFINITY);
  for (int i = 0; i < N; i++) {
    sums[i] = _mm512_mul_ps(sums[i], scale);
    most = _mm512_max_ps(most, sums[i]);
    _mm512_storeu_ps(out + i * LANES, sums[i]);
  }
  return most;
}

// One block of slots for one vector of queries. top and norm: greatest score so far and the sum of
// e^(score - top), per lane.
inline void fold(const Desk& desk, int team, const bf16* const* k, int64_t count, int64_t d, __m512& top, __m512& norm) {
  const uint32_t* q = desk.q + team * LANES * d / 2;
  float* sums = desk.sums + team * LANES * d;
  __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(static_cast<float>(d))), most = top;
  int64_t s = 0;
  for (; s + 8 <= count; s += 8) most = _mm512_max_ps(most, score<8>(k + s, q, d, scale, desk.scores + s * LANES));
  for (; s < count; s++) most = _mm512_max_ps(most, score<1>(k + s, q, d, scale, desk.scores + s * LANES));
  __m512 shrink = exponential(_mm512_sub_ps(top, most));
  top = most;
  norm = _mm512_mul_ps(norm, shrink);
  auto chance = [&](int64_t slot) {
    if (slot == count) return _mm512_setzero_ps();
    return exponential(_mm512_sub_ps(_mm512_loadu_ps(desk.scores + slot * LANES), top));
  };
  for (s = 0; s < count; s += 2) {
    __m512 one = chance(s), other = chance(s + 1);
    norm = _mm512_add_ps(norm, _mm512_add_ps(one, other));
    _mm512_storeu_si512(desk.pairs + s / 2 * LANES, paired(one, other));
  }
  for (int64_t c = 0; c < d; c += 16) {
    __m512 mix[16];
    for (int i = 0; i < 16; i++) mix[i] = _mm512_mul_ps(_mm512_loadu_ps(sums + (c + i) * LANES), shrink);
    for (s = 0; s < count; s += 2) {
      __m512i pair = _mm512_loadu_si512(desk.pairs + s / 2 * LANES);
      const uint32_t* v = desk.values + s / 2 * d + c;
      for (int i = 0; i < 16; i++) mix[i] = dot(mix[i], pair, spread(v + i));
    }
    for (int i = 0; i < 16; i++) _mm512_storeu_ps(sums + (c + i) * LANES, mix[i]);
  }
}

inline void attend(const Heads& h, const Span& span, const int64_t* listed, const Task& task, const Desk& desk) {
  const int64_t d = h.size, fan = h.heads / h.kv_heads, wide = h.heads * d, step = h.kv_heads * d;
  const int64_t teams = (task.last - task.first + LANES - 1) / LANES;
  __m512 top[TEAMS], norm[TEAMS];
  // Lanes behind the last query repeat it.
  auto place = [&](int64_t team, int64_t lane) {
    int64_t query = task.first + team * LANES + lane;
    query = query < task.last ? query : task.last - 1;
    return (span.start + query / fan) * wide + (task.head * fan + query % fan) * d;
  };
  for (int64_t t = 0; t < teams; t++) {
    const bf16* q[LANES];
    for (int i = 0; i < LANES; i++) q[i] = h.q + place(t, i);
    lay_queries(q, d, desk.q + t * LANES * d / 2);
    for (int64_t i = 0; i < d; i++) _mm512_storeu_ps(desk.sums + (t * d + i) * LANES, _mm512_setzero_ps());
    top[t] = _mm512_set1_ps(-1e30f);
    norm[t] = _mm512_setzero_ps();
  }
  for (int64_t low = 0; low < span.count; low += BLOCK) {
    int64_t count = span.count - low < BLOCK ? span.count - low : BLOCK;
    const bf16 *k[BLOCK], *v[BLOCK];
    for (int64_t s = 0; s < count; s++) {
      int64_t slot = span.slot >= 0 ? span.slot + low + s : listed[-1 - span.slot + low + s];
      k[s] = h.keys + slot * step + task.head * d;
      v[s] = h.values + slot * step + task.head * d;
    }
    lay_values(v, count, d, desk.values);
    for (int64_t t = 0; t < teams; t++) fold(desk, t, k, count, d, top[t], norm[t]);
  }
  for (int64_t t = 0; t < teams; t++)
    for (int64_t c = 0; c < d; c += 16) {
      __m512i words[16];
      for (int i = 0; i < 16; i++)
        words[i] = (__m512i)_mm512_div_ps(_mm512_loadu_ps(desk.sums + (t * d + c + i) * LANES), norm[t]);
      transpose(words);
      for (int i = 0; i < LANES && task.first + t * LANES + i < task.last; i++)
        _mm512_storeu_si512(h.out + place(t, i) + c, words[i]);
    }
}
