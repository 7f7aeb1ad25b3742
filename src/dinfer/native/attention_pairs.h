// Attention on stored bfloat16 with AVX-512's products of pairs, or with AMX's tiles.
#pragma once

struct PairAttention {
  using Query = bf16;
#if defined(__AMX_TILE__)
  static constexpr int PART = 32;  // slots whose values are summed at once
#else
  static constexpr int PART = 2;
#endif
  int64_t d;
  uint32_t* q;       // [TEAMS][d / 2][LANES] pairs of channels
  float* sums;       // of each team, as `pv_product` wants them
  float* scores;     // [BLOCK][LANES]
  uint32_t* probs;   // [BLOCK / 2][LANES] pairs of slots
  uint32_t* values;  // [BLOCK / 2][d] pairs of slots, channels as `place_of` says
  bf16* keys;        // [64][d], those that lie in no run

  static int64_t bytes(int64_t d) {
    return 4 * (TEAMS * LANES * (d / 2 + d) + BLOCK * LANES * 3 / 2 + BLOCK / 2 * d + 32 * d);
  }
  PairAttention(char* memory, int64_t size) : d(size) {
    q = reinterpret_cast<uint32_t*>(memory);
    sums = reinterpret_cast<float*>(q + TEAMS * LANES * d / 2);
    scores = sums + TEAMS * LANES * d;
    probs = reinterpret_cast<uint32_t*>(scores + BLOCK * LANES);
    values = probs + BLOCK / 2 * LANES;
    keys = reinterpret_cast<bf16*>(values + BLOCK / 2 * d);
  }

  static int64_t whole(int64_t count) { return (count + PART - 1) / PART * PART; }

  void begin(int64_t teams) { memset(sums, 0, 4 * teams * LANES * d); }

  void load_queries(int64_t team, const bf16* const* rows) const {
    uint32_t* out = q + team * LANES * d / 2;
    for (int64_t c = 0; c < d / 2; c += LANES) {
      Floats words[LANES];
      for (int i = 0; i < LANES; i++)
        words[i] = load(reinterpret_cast<const float*>(rows[i] + 2 * c));
      transpose(words);
      for (int i = 0; i < LANES; i++)
        store(reinterpret_cast<float*>(out + (c + i) * LANES), words[i]);
    }
  }

  // Of each 32 channels those come first that `unpacklo` takes.
  static int64_t place_of(int64_t channel) {
    const int64_t four = channel / 4 % 8;
    return channel / 32 * 32 + four % 2 * 16 + four / 2 * 4 + channel % 4;
  }

  // Behind the last slot lie zeros, to a whole part.
  void load_block(const Slots<bf16>& slots) const {
    auto row = [&](int64_t slot, int64_t c) {
      return slot < slots.count ? _mm512_loadu_si512(slots.values[slot] + c)
                                : _mm512_setzero_si512();
    };
    uint32_t* out = values;
    for (int64_t s = 0; s < whole(slots.count); s += 2, out += d)
      for (int64_t c = 0; c < d; c += 32) {
        const __m512i one = row(s, c), other = row(s + 1, c);
        _mm512_storeu_si512(out + c, _mm512_unpacklo_epi16(one, other));
        _mm512_storeu_si512(out + c + 16, _mm512_unpackhi_epi16(one, other));
      }
  }

  // Pairs (one, other) as bfloat16 in one word each.
  void store_probs(int64_t slot, Floats one, Floats other) const {
    const Ints lanes = lane_numbers();
    const Ints beside = (lanes + 16) << 16;
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)other, (__m512)one);
    _mm512_storeu_si512(probs + slot / 2 * LANES,
                        _mm512_permutexvar_epi16((__m512i)(lanes | beside), both));
  }

#if defined(__AMX_TILE__)
  // Products of queries and keys, [slot][lane].
  void score(int64_t team, const Slots<bf16>& slots) const {
    const uint32_t* from = q + team * LANES * d / 2;
    for (int64_t s = 0; s < slots.count; s += 64) {
      const bf16* rows[4];
      int64_t strides[4], groups = 0;
      for (; groups < 4 && s + 16 * groups < slots.count; groups++) {
        const int64_t first = s + 16 * groups, left = slots.count - first;
        rows[groups] = slots.keys[first];
        strides[groups] = 2 * slots.stride;
        if (slots.stride && left >= 16) continue;
        bf16* copy = keys + 16 * groups * d;
        for (int64_t i = 0; i < 16 && i < left; i++)
          memcpy(copy + i * d, slots.keys[first + i], 2 * d);
        rows[groups] = copy;
        strides[groups] = 2 * d;
      }
      score_tiles(from, rows, strides, groups, scores + s * LANES);
    }
  }

  void score_tiles(const uint32_t* from, const bf16* const* rows, const int64_t* strides,
                   int64_t groups, float* out) const {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t c = 0; c < d; c += 32) {
      _tile_loadd(5, from + c / 2 * LANES, 4 * LANES);
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
    _tile_stored(0, out, 4 * LANES);
    if (groups > 1) _tile_stored(1, out + 16 * LANES, 4 * LANES);
    if (groups > 2) _tile_stored(2, out + 32 * LANES, 4 * LANES);
    if (groups > 3) _tile_stored(3, out + 48 * LANES, 4 * LANES);
  }

  // Sums [lane][d] of values by probabilities, on top of what was there times `shrink` (lanes). The
  // probabilities become [part][lane][slot].
  void pv_product(int64_t team, const Slots<bf16>& slots, Floats shrink) const {
    float* out = sums + team * LANES * d;
    const int64_t count = whole(slots.count);
    for (int lane = 0; lane < LANES; lane++)
      for (int64_t c = 0; c < d; c += LANES) {
        float* place = out + lane * d + c;
        store(place, load(place) * shrink[lane]);
      }
    for (int64_t s = 0; s < count; s += PART) {
      Floats words[LANES];
      float* part = reinterpret_cast<float*>(probs + s / 2 * LANES);
      for (int i = 0; i < LANES; i++) words[i] = load(part + i * LANES);
      transpose(words);
      for (int i = 0; i < LANES; i++) store(part + i * LANES, words[i]);
    }
    for (int64_t c = 0; c < d; c += 32) {
      _tile_loadd(0, out + c, 4 * d);
      _tile_loadd(1, out + c + 16, 4 * d);
      for (int64_t s = 0; s < count; s += PART) {
        const uint32_t* v = values + s / 2 * d + c;
        _tile_loadd(4, probs + s / 2 * LANES, 4 * LANES);
        _tile_loadd(5, v, 4 * d);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, v + 16, 4 * d);
        _tile_dpbf16ps(1, 4, 6);
      }
      _tile_stored(0, out + c, 4 * d);
      _tile_stored(1, out + c + 16, 4 * d);
    }
  }

  template <class Write>
  void store_output(int64_t team, Floats by, int64_t lanes, Write write) const {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    for (int64_t lane = 0; lane < lanes; lane++)
      for (int64_t c = 0; c < d; c += 32) {
        const float* place = sums + (team * LANES + lane) * d + c;
        const __m512 x = (__m512)(load(place) * by[lane]);
        const __m512 y = (__m512)(load(place + 16) * by[lane]);
        write(lane, c, (Floats)_mm512_permutex2var_ps(x, first, y));
        write(lane, c + 16, (Floats)_mm512_permutex2var_ps(x, second, y));
      }
  }
#else
  template <int N>
  void score_some(const bf16* const* k, const uint32_t* from, float* out) const {
    Floats sum[N]{};
    for (int64_t c = 0; c < d / 2; c++) {
      const Ints pair = load_ints(from + c * LANES);
      for (int i = 0; i < N; i++) sum[i] = dot(sum[i], pair, spread(k[i] + 2 * c));
    }
    for (int i = 0; i < N; i++) store(out + i * LANES, sum[i]);
  }

  void score(int64_t team, const Slots<bf16>& slots) const {
    const uint32_t* from = q + team * LANES * d / 2;
    int64_t s = 0;
    for (; s + 8 <= slots.count; s += 8) score_some<8>(slots.keys + s, from, scores + s * LANES);
    for (; s < slots.count; s++) score_some<1>(slots.keys + s, from, scores + s * LANES);
  }

  // Sums are [d][lane].
  void pv_product(int64_t team, const Slots<bf16>& slots, Floats shrink) const {
    float* out = sums + team * LANES * d;
    for (int64_t c = 0; c < d; c += 16) {
      Floats sum[16];
      for (int i = 0; i < 16; i++) sum[i] = load(out + (c + i) * LANES) * shrink;
      for (int64_t s = 0; s < whole(slots.count); s += 2) {
        const Ints pair = load_ints(probs + s / 2 * LANES);
        const uint32_t* v = values + s / 2 * d + c;
        for (int i = 0; i < 16; i++) sum[i] = dot(sum[i], pair, spread(v + i));
      }
      for (int i = 0; i < 16; i++) store(out + (c + i) * LANES, sum[i]);
    }
  }

  template <class Write>
  void store_output(int64_t team, Floats by, int64_t lanes, Write write) const {
    const float* from = sums + team * LANES * d;
    for (int64_t c = 0; c < d; c += LANES) {
      Floats x[LANES];
      for (int i = 0; i < LANES; i++) x[i] = load(from + place_of(c + i) * LANES) * by;
      transpose(x);
      for (int64_t lane = 0; lane < lanes; lane++) write(lane, c, x[lane]);
    }
  }
#endif
};
