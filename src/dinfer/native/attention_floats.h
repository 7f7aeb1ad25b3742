// Attention in float32, whatever keys and values are stored in: any width of vectors.
#pragma once
#include <type_traits>

// What a thread needs for heads of one size.
template <class T>
struct FloatAttention {
  using Query = float;
  static constexpr int CHANNELS = LANES == 8 ? 8 : 16, SLOTS = 12;  // summed in registers at once
  int64_t d;
  float *q, *sums;        // [TEAMS][d][LANES]
  float *scores, *probs;  // [BLOCK][LANES]
  float *keys, *values;   // bfloat16: [BLOCK][d], widened
  const float *key[BLOCK], *value[BLOCK];

  static constexpr bool WIDENS = !std::is_same_v<T, float>;

  static int64_t bytes(int64_t d) {
    return 4 * (2 * TEAMS * LANES * d + 2 * BLOCK * LANES + (WIDENS ? 2 * BLOCK * d : 0));
  }
  FloatAttention(char* memory, int64_t size) : d(size) {
    q = reinterpret_cast<float*>(memory);
    sums = q + TEAMS * LANES * d;
    scores = sums + TEAMS * LANES * d;
    probs = scores + BLOCK * LANES;
    keys = probs + BLOCK * LANES;
    values = keys + BLOCK * d;
  }

  static int64_t whole(int64_t count) { return count; }

  void begin(int64_t teams) { memset(sums, 0, 4 * teams * LANES * d); }

  void load_queries(int64_t team, const float* const* rows) const {
    float* out = q + team * LANES * d;
    for (int64_t c = 0; c < d; c += LANES) {
      Floats x[LANES];
      for (int i = 0; i < LANES; i++) x[i] = load(rows[i] + c);
      transpose(x);
      for (int i = 0; i < LANES; i++) store(out + (c + i) * LANES, x[i]);
    }
  }

  void load_block(const Slots<T>& slots) {
    for (int64_t s = 0; s < slots.count; s++) {
      if constexpr (WIDENS) {
        for (int64_t c = 0; c < d; c += LANES) {
          store(keys + s * d + c, load(slots.keys[s] + c));
          store(values + s * d + c, load(slots.values[s] + c));
        }
        key[s] = keys + s * d;
        value[s] = values + s * d;
      } else {
        key[s] = slots.keys[s];
        value[s] = slots.values[s];
      }
    }
  }

  template <int N>
  void score_some(const float* from, int64_t slot) const {
    Floats sum[N]{};
    for (int64_t c = 0; c < d; c++) {
      const Floats x = load(from + c * LANES);
      for (int i = 0; i < N; i++) sum[i] = fma(x, all(key[slot + i][c]), sum[i]);
    }
    for (int i = 0; i < N; i++) store(scores + (slot + i) * LANES, sum[i]);
  }
  template <int N>
  void score_up_to(int64_t count, const float* from, int64_t slot) const {
    if (count == N) return score_some<N>(from, slot);
    if constexpr (N > 1) score_up_to<N - 1>(count, from, slot);
  }

  // Products of queries and keys.
  void score(int64_t team, const Slots<T>& slots) const {
    const float* from = q + team * LANES * d;
    for (int64_t s = 0; s < slots.count; s += SLOTS)
      score_up_to<SLOTS>(slots.count - s < SLOTS ? slots.count - s : SLOTS, from, s);
  }

  void store_probs(int64_t slot, Floats one, Floats other) const {
    store(probs + slot * LANES, one);
    if (slot + 1 < BLOCK) store(probs + (slot + 1) * LANES, other);
  }

  // Sums of values by probabilities, on top of what was there times `shrink`.
  void pv_product(int64_t team, const Slots<T>& slots, Floats shrink) const {
    float* out = sums + team * LANES * d;
    for (int64_t c = 0; c < d; c += CHANNELS) {
      Floats sum[CHANNELS];
      for (int i = 0; i < CHANNELS; i++) sum[i] = load(out + (c + i) * LANES) * shrink;
      for (int64_t s = 0; s < slots.count; s++) {
        const Floats p = load(probs + s * LANES);
        const float* v = value[s] + c;
        for (int i = 0; i < CHANNELS; i++) sum[i] = fma(p, all(v[i]), sum[i]);
      }
      for (int i = 0; i < CHANNELS; i++) store(out + (c + i) * LANES, sum[i]);
    }
  }

  template <class Write>
  void store_output(int64_t team, Floats by, int64_t lanes, Write write) const {
    const float* from = sums + team * LANES * d;
    for (int64_t c = 0; c < d; c += LANES) {
      Floats x[LANES];
      for (int i = 0; i < LANES; i++) x[i] = load(from + (c + i) * LANES) * by;
      transpose(x);
      for (int64_t lane = 0; lane < lanes; lane++) write(lane, c, x[lane]);
    }
  }
};
