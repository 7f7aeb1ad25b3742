// softmax(q k / sqrt d) v over stored slots, for 16 queries in the lanes of a vector.
//
// Online softmax (arXiv 1805.02867) over BLOCK slots at a time. A query's result depends on its own
// slots alone, so it is the same to the last bit in any batch.
#pragma once
#include <cmath>
#include <cstring>

#include "vectors.h"

constexpr int BLOCK = 128, LANES = 16,
              TEAMS = 4;  // slots at once; queries of a team; teams of a task
#ifdef __AMX_TILE__
constexpr int PART = 32;  // slots that are mixed at once
#else
constexpr int PART = 2;
#endif

struct Task {  // queries first..last (by row, then by head of the group) of one span and key head
  int64_t span, head, first, last;
};

struct Span {           // as runner/native_cpu.py lays them out
  int64_t start, stop;  // rows
  int64_t
      slot;  // of a run its first slot; else -1 less the place in `listed` where its slots begin
  int64_t count;  // slots
};

struct Heads {                // one layer
  const bf16* q;              // [rows, heads, d]
  const bf16 *keys, *values;  // [kv_heads, slots, d]
  int64_t slots, heads, kv_heads, size;
};

// What a thread needs for heads of one size.
struct Desk {
  uint32_t* q;        // [TEAMS][d / 2][LANES] pairs of channels
  float* sums;        // of each team, laid out as `mix` wants them
  float* scores;      // [BLOCK][LANES]
  uint32_t* chances;  // [BLOCK / 2][LANES] pairs of slots
  uint32_t* values;   // [BLOCK / 2][d] pairs of slots, channels as `place_of` says
  bf16* keys;         // [64][d], those that lie in no run

  static int64_t bytes(int64_t d) {
    return 4 * (TEAMS * LANES * (d / 2 + d) + BLOCK * LANES * 3 / 2 + BLOCK / 2 * d + 32 * d);
  }
  Desk(char* memory, int64_t d) {
    q = reinterpret_cast<uint32_t*>(memory);
    sums = reinterpret_cast<float*>(q + TEAMS * LANES * d / 2);
    scores = sums + TEAMS * LANES * d;
    chances = reinterpret_cast<uint32_t*>(scores + BLOCK * LANES);
    values = chances + BLOCK / 2 * LANES;
    keys = reinterpret_cast<bf16*>(values + BLOCK / 2 * d);
  }
};

struct Slots {  // a block of them, for one head
  const bf16 *keys[BLOCK], *values[BLOCK];
  int64_t count, stride;  // stride: from one slot to the next, in numbers; 0 where they are no run

  int64_t whole() const { return (count + PART - 1) / PART * PART; }
};

// Queries of 16 rows, their pairs of channels side by side.
inline void lay_queries(const bf16* const* q, int64_t d, uint32_t* out) {
  for (int64_t c = 0; c < d / 2; c += 16) {
    __m512i words[16];
    for (int i = 0; i < 16; i++) words[i] = _mm512_loadu_si512(q[i] + 2 * c);
    transpose(words);
    for (int i = 0; i < 16; i++) _mm512_storeu_si512(out + (c + i) * LANES, words[i]);
  }
}

// Of each 32 channels those come first that `unpacklo` takes.
inline int64_t place_of(int64_t channel) {
  const int64_t four = channel / 4 % 8;
  return channel / 32 * 32 + four % 2 * 16 + four / 2 * 4 + channel % 4;
}

// Behind the last slot lie zeros, to a whole part.
inline void lay_values(const Slots& slots, int64_t d, uint32_t* out) {
  auto row = [&](int64_t slot, int64_t c) {
    return slot < slots.count ? _mm512_loadu_si512(slots.values[slot] + c) : _mm512_setzero_si512();
  };
  for (int64_t s = 0; s < slots.whole(); s += 2, out += d)
    for (int64_t c = 0; c < d; c += 32) {
      const __m512i one = row(s, c), other = row(s + 1, c);
      _mm512_storeu_si512(out + c, _mm512_unpacklo_epi16(one, other));
      _mm512_storeu_si512(out + c + 16, _mm512_unpackhi_epi16(one, other));
    }
}

// Two steps of a block, and what is made of the sums at last. `score`: products of queries and
// keys, [slot][lane]. `mix`: sums of values by chances, on top of what was there times `shrink`
// (lanes).
#ifdef __AMX_TILE__
inline void score(const Desk& desk, const uint32_t* q, const Slots& slots, int64_t d) {
  for (int64_t s = 0; s < slots.count; s += 64) {
    const bf16* rows[4];
    int64_t strides[4], groups = 0;
    for (; groups < 4 && s + 16 * groups < slots.count; groups++) {
      const int64_t first = s + 16 * groups, left = slots.count - first;
      rows[groups] = slots.keys[first];
      strides[groups] = 2 * slots.stride;
      if (slots.stride && left >= 16) continue;
      bf16* copy = desk.keys + 16 * groups * d;
      for (int64_t i = 0; i < 16 && i < left; i++)
        memcpy(copy + i * d, slots.keys[first + i], 2 * d);
      rows[groups] = copy;
      strides[groups] = 2 * d;
    }
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t c = 0; c < d; c += 32) {
      _tile_loadd(5, q + c / 2 * LANES, 4 * LANES);
      _tile_loadd(4, rows[0] + c, strides[0]);
      _tile_dpbf16ps(0, 4, 5);
      if (groups > 1) {
        _tile_loadd(6, rows[1] + c, strides[1]);
        _tile_dpbf16ps(1, 6, 5);
      }
      if (groups > 2) {
        _tile_loadd(4, rows[2] + c, strides[2]);
        _tile_dpbf16ps(2, 4, 5);
      }
      if (groups > 3) {
        _tile_loadd(6, rows[3] + c, strides[3]);
        _tile_dpbf16ps(3, 6, 5);
      }
    }
    float* out = desk.scores + s * LANES;
    _tile_stored(0, out, 4 * LANES);
    if (groups > 1) _tile_stored(1, out + 16 * LANES, 4 * LANES);
    if (groups > 2) _tile_stored(2, out + 32 * LANES, 4 * LANES);
    if (groups > 3) _tile_stored(3, out + 48 * LANES, 4 * LANES);
  }
}

// Sums are [lane][d]; chances become [part][lane][slot].
inline void mix(const Desk& desk, float* sums, int64_t whole, int64_t d, __m512 shrink) {
  float by[LANES];
  _mm512_storeu_ps(by, shrink);
  for (int lane = 0; lane < LANES; lane++)
    for (int64_t c = 0; c < d; c += 16) {
      float* place = sums + lane * d + c;
      _mm512_storeu_ps(place, _mm512_mul_ps(_mm512_loadu_ps(place), _mm512_set1_ps(by[lane])));
    }
  for (int64_t s = 0; s < whole; s += PART) {
    __m512i words[16];
    uint32_t* part = desk.chances + s / 2 * LANES;
    for (int i = 0; i < 16; i++) words[i] = _mm512_loadu_si512(part + i * LANES);
    transpose(words);
    for (int i = 0; i < 16; i++) _mm512_storeu_si512(part + i * LANES, words[i]);
  }
  for (int64_t c = 0; c < d; c += 32) {
    _tile_loadd(0, sums + c, 4 * d);
    _tile_loadd(1, sums + c + 16, 4 * d);
    for (int64_t s = 0; s < whole; s += PART) {
      const uint32_t* v = desk.values + s / 2 * d + c;
      _tile_loadd(4, desk.chances + s / 2 * LANES, 4 * LANES);
      _tile_loadd(5, v, 4 * d);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(6, v + 16, 4 * d);
      _tile_dpbf16ps(1, 4, 6);
    }
    _tile_stored(0, sums + c, 4 * d);
    _tile_stored(1, sums + c + 16, 4 * d);
  }
}

template <class Write>
inline void give(const float* sums, int64_t d, __m512 by, int64_t lanes, Write write) {
  float each[LANES];
  _mm512_storeu_ps(each, by);
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  for (int64_t lane = 0; lane < lanes; lane++)
    for (int64_t c = 0; c < d; c += 32) {
      const float* place = sums + lane * d + c;
      const __m512 factor = _mm512_set1_ps(each[lane]);
      const __m512 x = _mm512_mul_ps(_mm512_loadu_ps(place), factor);
      const __m512 y = _mm512_mul_ps(_mm512_loadu_ps(place + 16), factor);
      write(lane, c, _mm512_permutex2var_ps(x, first, y));
      write(lane, c + 16, _mm512_permutex2var_ps(x, second, y));
    }
}
#else
template <int N>
inline void score_some(const bf16* const* k, const uint32_t* q, int64_t d, float* out) {
  __m512 sums[N];
  for (int i = 0; i < N; i++) sums[i] = _mm512_setzero_ps();
  for (int64_t c = 0; c < d / 2; c++) {
    __m512i pair = _mm512_loadu_si512(q + c * LANES);
    for (int i = 0; i < N; i++) sums[i] = dot(sums[i], pair, spread(k[i] + 2 * c));
  }
  for (int i = 0; i < N; i++) _mm512_storeu_ps(out + i * LANES, sums[i]);
}

inline void score(const Desk& desk, const uint32_t* q, const Slots& slots, int64_t d) {
  int64_t s = 0;
  for (; s + 8 <= slots.count; s += 8) score_some<8>(slots.keys + s, q, d, desk.scores + s * LANES);
  for (; s < slots.count; s++) score_some<1>(slots.keys + s, q, d, desk.scores + s * LANES);
}

// Sums are [d][lane].
inline void mix(const Desk& desk, float* sums, int64_t whole, int64_t d, __m512 shrink) {
  for (int64_t c = 0; c < d; c += 16) {
    __m512 sum[16];
    for (int i = 0; i < 16; i++)
      sum[i] = _mm512_mul_ps(_mm512_loadu_ps(sums + (c + i) * LANES), shrink);
    for (int64_t s = 0; s < whole; s += 2) {
      __m512i pair = _mm512_loadu_si512(desk.chances + s / 2 * LANES);
      const uint32_t* v = desk.values + s / 2 * d + c;
      for (int i = 0; i < 16; i++) sum[i] = dot(sum[i], pair, spread(v + i));
    }
    for (int i = 0; i < 16; i++) _mm512_storeu_ps(sums + (c + i) * LANES, sum[i]);
  }
}

template <class Write>
inline void give(const float* sums, int64_t d, __m512 by, int64_t lanes, Write write) {
  for (int64_t c = 0; c < d; c += 16) {
    __m512i words[16];
    for (int i = 0; i < 16; i++)
      words[i] = (__m512i)_mm512_mul_ps(_mm512_loadu_ps(sums + place_of(c + i) * LANES), by);
    transpose(words);
    for (int64_t lane = 0; lane < lanes; lane++) write(lane, c, (__m512)words[lane]);
  }
}
#endif

// One block of slots for one team of queries. top and norm: greatest score so far and the sum of
// e^(score - top), by lane.
inline void fold(const Desk& desk, int64_t team, const Slots& slots, int64_t d, __m512& top,
                 __m512& norm) {
  score(desk, desk.q + team * LANES * d / 2, slots, d);
  const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(static_cast<float>(d)));
  __m512 most = top;
  for (int64_t s = 0; s < slots.count; s++)
    most = _mm512_max_ps(most, _mm512_mul_ps(_mm512_loadu_ps(desk.scores + s * LANES), scale));
  const __m512 shrink = exponential(_mm512_sub_ps(top, most));
  top = most;
  norm = _mm512_mul_ps(norm, shrink);
  auto chance = [&](int64_t slot) {
    if (slot >= slots.count) return _mm512_setzero_ps();
    return exponential(_mm512_fmsub_ps(_mm512_loadu_ps(desk.scores + slot * LANES), scale, top));
  };
  for (int64_t s = 0; s < slots.whole(); s += 2) {
    __m512 one = chance(s), other = chance(s + 1);
    norm = _mm512_add_ps(norm, _mm512_add_ps(one, other));
    _mm512_storeu_si512(desk.chances + s / 2 * LANES, paired(one, other));
  }
  mix(desk, desk.sums + team * LANES * d, slots.whole(), d, shrink);
}

// What comes out goes to `write(row, channel, 16 numbers)`.
template <class Write>
inline void attend(const Heads& h, const Span& span, const int64_t* listed, const Task& task,
                   const Desk& desk, Write write) {
  const int64_t d = h.size, fan = h.heads / h.kv_heads, wide = h.heads * d;
  const int64_t teams = (task.last - task.first + LANES - 1) / LANES;
  __m512 top[TEAMS], norm[TEAMS];
  // Lanes behind the last query repeat it.
  auto query = [&](int64_t team, int64_t lane) {
    const int64_t number = task.first + team * LANES + lane;
    return number < task.last ? number : task.last - 1;
  };
  auto row = [&](int64_t number) { return span.start + number / fan; };
  auto channel = [&](int64_t number) { return (task.head * fan + number % fan) * d; };
  for (int64_t t = 0; t < teams; t++) {
    const bf16* q[LANES];
    for (int i = 0; i < LANES; i++) q[i] = h.q + row(query(t, i)) * wide + channel(query(t, i));
    lay_queries(q, d, desk.q + t * LANES * d / 2);
    top[t] = _mm512_set1_ps(-1e30f);
    norm[t] = _mm512_setzero_ps();
  }
  memset(desk.sums, 0, 4 * teams * LANES * d);
  Slots slots;
  slots.stride = span.slot >= 0 ? d : 0;
  for (int64_t low = 0; low < span.count; low += BLOCK) {
    slots.count = span.count - low < BLOCK ? span.count - low : BLOCK;
    for (int64_t s = 0; s < slots.count; s++) {
      int64_t slot = span.slot >= 0 ? span.slot + low + s : listed[-1 - span.slot + low + s];
      slots.keys[s] = h.keys + (task.head * h.slots + slot) * d;
      slots.values[s] = h.values + (task.head * h.slots + slot) * d;
    }
    lay_values(slots, d, desk.values);
    for (int64_t t = 0; t < teams; t++) fold(desk, t, slots, d, top[t], norm[t]);
  }
  for (int64_t t = 0; t < teams; t++) {
    const int64_t left = task.last - task.first - t * LANES;
    give(desk.sums + t * LANES * d, d, inverse(norm[t]), left < LANES ? left : LANES,
         [&](int64_t lane, int64_t c, __m512 y) {
           write(row(query(t, lane)), channel(query(t, lane)) + c, y);
         });
  }
}
