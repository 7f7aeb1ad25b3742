// softmax(q k / sqrt d) v over stored slots, for LANES queries in the lanes of a vector.
//
// Online softmax (arXiv 1805.02867) over BLOCK slots at a time. A query's result depends on its own
// slots alone, so it is the same to the last bit in any batch.
//
//   task: up to 64 queries of one key head, in teams       scores of a team with a block of slots
//   +--------+--------+- - -+--------+                     [slot][lane]:   q0  q1  q2 ...
//   | team 0 | team 1 |     |        |   LANES queries             slot 0 [ s | s | s | ... ]
//   +--------+--------+- - -+--------+   each                      slot 1 [ s | s | s | ... ]
#pragma once
#include <cmath>
#include <cstring>

#include "product.h"

constexpr int BLOCK = 128, TEAMS = 64 / LANES;

struct Task {  // queries first..last (by row, then by head of the group) of one span and key head
  int64_t span, head, first, last;
};

struct Span {           // as runner/native_cpu.py lays them out
  int64_t start, stop;  // rows
  int64_t
      slot;  // of a run its first slot; else -1 less the place in `listed` where its slots begin
  int64_t count;  // slots
  int64_t mask;   // place in `masks` where [rows][slots] flags begin; -1 = every row sees all slots
};

struct Seen {  // by the spans of a step
  const int64_t* listed;
  const uint8_t* masks;
};

// One layer. Shadow rows, from row `shadow` on, see a key and value of their own besides.
template <class T, class Query>
struct Heads {
  const Query* q;                  // [rows, heads, d]
  const T *keys, *values;          // [kv_heads, slots, d]
  const T *own_keys, *own_values;  // [kv_heads, shadow rows, d]
  int64_t slots, heads, kv_heads, size, shadow, shadows;
};

template <class T>
struct Slots {  // a block of them, for one head
  const T *keys[BLOCK], *values[BLOCK];
  int64_t count, stride;  // stride: from one slot to the next, in numbers; 0 where they are no run
};

#include "attention_floats.h"
#if defined(__AVX512BF16__)
#include "attention_pairs.h"
#endif

template <class T>
struct AttentionOf {
  using Type = FloatAttention<T>;
};
#if defined(__AVX512BF16__)
template <>
struct AttentionOf<bf16> {
  using Type = PairAttention;
};
#endif

// Scores of slots that a lane's row does not see become -infinity. masks: of each lane, from the
// block's first slot on.
inline void mask_scores(float* scores, const uint8_t* const* masks, int64_t count) {
  for (int lane = 0; lane < LANES; lane++)
    for (int64_t s = 0; s < count; s++)
      if (!masks[lane][s]) scores[s * LANES + lane] = -INFINITY;
}

// One block of slots for one team of queries. top and norm: greatest score so far and the sum of
// e^(score - top), by lane.
template <class A, class T>
inline void online_softmax(const A& a, int64_t team, const Slots<T>& slots,
                           const uint8_t* const* masks, Floats& top, Floats& norm) {
  a.score(team, slots);
  if (masks) mask_scores(a.scores, masks, slots.count);
  const Floats scale = all(1.0f / std::sqrt(static_cast<float>(a.d)));
  Floats most = top;
  for (int64_t s = 0; s < slots.count; s++)
    most = greater(most, load(a.scores + s * LANES) * scale);
  const Floats shrink = exponential(top - most);
  top = most;
  norm *= shrink;
  auto prob = [&](int64_t slot) {
    if (slot >= slots.count) return Floats{};
    return exponential(load(a.scores + slot * LANES) * scale - top);
  };
  const int64_t whole = A::whole(slots.count);
  for (int64_t s = 0; s < whole; s += 2) {
    const Floats one = prob(s), other = prob(s + 1);
    norm += one + other;
    a.store_probs(s, one, other);
  }
  a.pv_product(team, slots, shrink);
}

// Adds a row's own key and value, lane by lane: `by` becomes what the sums are multiplied with, and
// the own values' weights are returned.
template <class T, class Query>
inline Floats add_own(const Query* const* q, const T* const* keys, int64_t d, Floats top,
                      Floats norm, Floats& by) {
  Floats score{};
  for (int lane = 0; lane < LANES; lane++) {
    Floats sum{};
    for (int64_t c = 0; c < d; c += LANES) sum = fma(load(q[lane] + c), load(keys[lane] + c), sum);
    score[lane] = sum_of(sum) / std::sqrt(static_cast<float>(d));
  }
  const Floats most = greater(top, score);
  const Floats shrink = exponential(top - most), own = exponential(score - most);
  const Floats whole = fma(norm, shrink, own);
  by = shrink / whole;
  return own / whole;
}

// What comes out goes to `write(row, channel, LANES numbers)`.
template <class A, class T, class Write>
inline void attend(A& a, const Heads<T, typename A::Query>& h, const Span& span, const Seen& seen,
                   const Task& task, Write write) {
  using Query = typename A::Query;
  const int64_t d = h.size, fan = h.heads / h.kv_heads, wide = h.heads * d;
  const int64_t teams = (task.last - task.first + LANES - 1) / LANES;
  Floats top[TEAMS], norm[TEAMS];
  const Query* q[TEAMS][LANES];
  int64_t row[TEAMS][LANES], channel[TEAMS][LANES];
  for (int64_t t = 0; t < teams; t++) {
    for (int i = 0; i < LANES; i++) {  // lanes behind the last query repeat it
      const int64_t number = task.first + t * LANES + i;
      const int64_t query = number < task.last ? number : task.last - 1;
      row[t][i] = span.start + query / fan;
      channel[t][i] = (task.head * fan + query % fan) * d;
      q[t][i] = h.q + row[t][i] * wide + channel[t][i];
    }
    a.load_queries(t, q[t]);
    top[t] = all(-1e30f);
    norm[t] = Floats{};
  }
  a.begin(teams);
  Slots<T> slots;
  slots.stride = span.slot >= 0 ? d : 0;
  const T *keys = h.keys + task.head * h.slots * d, *values = h.values + task.head * h.slots * d;
  for (int64_t low = 0; low < span.count; low += BLOCK) {
    slots.count = span.count - low < BLOCK ? span.count - low : BLOCK;
    for (int64_t s = 0; s < slots.count; s++) {
      const int64_t place = low + s;
      const int64_t slot = span.slot >= 0 ? span.slot + place : seen.listed[-1 - span.slot + place];
      slots.keys[s] = keys + slot * d;
      slots.values[s] = values + slot * d;
    }
    a.load_block(slots);
    for (int64_t t = 0; t < teams; t++) {
      const uint8_t* masks[LANES];
      for (int i = 0; span.mask >= 0 && i < LANES; i++)
        masks[i] = seen.masks + span.mask + (row[t][i] - span.start) * span.count + low;
      online_softmax(a, t, slots, span.mask >= 0 ? masks : nullptr, top[t], norm[t]);
    }
  }
  for (int64_t t = 0; t < teams; t++) {
    const int64_t left = task.last - task.first - t * LANES;
    Floats by = inverse(norm[t]), own{};
    const bool shadow = span.start >= h.shadow;
    auto own_row = [&](const T* x, int64_t lane) {
      return x + (task.head * h.shadows + row[t][lane] - h.shadow) * d;
    };
    if (shadow) {
      const T* own_keys[LANES];
      for (int i = 0; i < LANES; i++) own_keys[i] = own_row(h.own_keys, i);
      own = add_own(q[t], own_keys, d, top[t], norm[t], by);
    }
    a.store_output(t, by, left < LANES ? left : LANES, [&](int64_t lane, int64_t c, Floats y) {
      if (shadow) y = fma(all(own[lane]), load(own_row(h.own_values, lane) + c), y);
      write(row[t][lane], channel[t][lane] + c, y);
    });
  }
}
