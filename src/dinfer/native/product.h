// Products of a few rows with a packed weight, and the packing.
//
// A panel is 32 outputs. Its weights lie in steps of 64 bytes of inputs (32 bfloat16 or 64 int8
// values), a step in two tiles of 16 outputs: tile[i][j] holds, in 4 bytes, the inputs of place i
// for output j. So both AMX tiles and vectors of AVX-512 read a weight once, in order.
#pragma once
#include "vectors.h"

// Outputs of a panel, and most of several side by side; rows that go through one at once.
constexpr int COLUMNS = 32, MOST = 256, BAND = 32;
constexpr int TILE = 1024, STEP = 2 * TILE,
              AHEAD = 2 * STEP;  // bytes; weights are fetched so far ahead

struct Linear {          // as in products.py
  const char* weights;   // [panels][steps][2][16][16][4 bytes]
  const float* scales;   // int8: [outputs]; else null
  const int32_t* lifts;  // int8: 128 * sum of an output's codes, where rows are raised by 128
  const float* bias;     // [outputs] or null
  int64_t steps, panels;
};

// Inputs, with room for whole bands. Of a band's rows the first 64 bytes lie together, then the
// next ones, and so on: rows a power of two apart would push each other out of the cache.
struct Rows {
  char* data;      // bfloat16, or int8 codes
  float* scales;   // int8: of each row
  int64_t stride;  // bytes of a row

  char* at(int64_t row, int64_t byte) const {
    return data + row / BAND * BAND * stride + byte / 64 * 64 * BAND + row % BAND * 64 + byte % 64;
  }
};

// Panels first, first + gap, ...: `count` of them, whose outputs lie side by side.
struct Panels {
  int64_t first, count = 1, gap = 1;
};

#ifdef __AMX_TILE__
struct Tiles {
  Tiles() {
    alignas(64) uint8_t config[64] = {1};
    for (int i = 0; i < 8; i++) {
      config[16 + 2 * i] = 64;
      config[48 + i] = 16;
    }
    // To some compilers the instruction reads 8 bytes, and the rest need not be there.
    __asm__ volatile("" : : "r"(config) : "memory");
    _tile_loadconfig(config);
  }
  ~Tiles() { _tile_release(); }
};

#define MULTIPLY(sum, rows, weights)  \
  if constexpr (INT8)                 \
    _tile_dpbssd(sum, rows, weights); \
  else                                \
    _tile_dpbf16ps(sum, rows, weights);

// One panel times a band, into rows `stride` numbers apart. fetch: the weights are not near yet.
template <bool INT8>
inline void band(const char* x, int64_t rows, const char* w, int64_t steps, bool fetch, float* out,
                 int64_t stride) {
  const bool two = rows > 16;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t s = 0; s < steps; s++, w += STEP, x += 64 * BAND) {
    if (fetch)
      for (int line = 0; line < STEP; line += 64) _mm_prefetch(w + AHEAD + line, _MM_HINT_T0);
    _tile_loadd(6, w, 64);
    _tile_loadd(4, x, 64);
    MULTIPLY(0, 4, 6)
    _tile_loadd(7, w + TILE, 64);
    MULTIPLY(1, 4, 7)
    if (two) {
      _tile_loadd(5, x + TILE, 64);
      MULTIPLY(2, 5, 6)
      MULTIPLY(3, 5, 7)
    }
  }
  _tile_stored(0, out, 4 * stride);
  _tile_stored(1, out + 16, 4 * stride);
  if (two) {
    _tile_stored(2, out + 16 * stride, 4 * stride);
    _tile_stored(3, out + 16 * stride + 16, 4 * stride);
  }
}
#else
struct Tiles {
  Tiles() {}
};

template <bool INT8, int N>
inline void some_rows(const char* x, const char* w, int64_t steps, bool fetch, float* out,
                      int64_t stride) {
  __m512i left[N], right[N];
  for (int r = 0; r < N; r++) left[r] = right[r] = _mm512_setzero_si512();
  for (int64_t s = 0; s < steps; s++, w += STEP, x += 64 * BAND)
    for (int i = 0; i < 64; i += 4) {
      __m512i a = _mm512_load_si512(w + 16 * i), b = _mm512_load_si512(w + TILE + 16 * i);
      if (fetch) {
        _mm_prefetch(w + AHEAD + 16 * i, _MM_HINT_T0);
        _mm_prefetch(w + AHEAD + TILE + 16 * i, _MM_HINT_T0);
      }
      for (int r = 0; r < N; r++) {
        __m512i row = spread(x + r * 64 + i);
        if constexpr (INT8) {
          left[r] = _mm512_dpbusd_epi32(left[r], row, a);
          right[r] = _mm512_dpbusd_epi32(right[r], row, b);
        } else {
          left[r] = (__m512i)dot((__m512)left[r], row, a);
          right[r] = (__m512i)dot((__m512)right[r], row, b);
        }
      }
    }
  for (int r = 0; r < N; r++) {
    _mm512_storeu_si512(out + r * stride, left[r]);
    _mm512_storeu_si512(out + r * stride + 16, right[r]);
  }
}

template <bool INT8>
inline void band(const char* x, int64_t rows, const char* w, int64_t steps, bool fetch, float* out,
                 int64_t stride) {
  for (int64_t r = 0; r < rows; r += 8)
    some_rows<INT8, 8>(x + r * 64, w, steps, fetch, out + r * stride, stride);
}
#endif

// Sums of a band as numbers: with scales and bias.
template <bool INT8>
inline void finish(const Linear& w, const Rows& x, int64_t first, int64_t rows, int64_t panel,
                   float* out, int64_t stride) {
  for (int half = 0; half < COLUMNS; half += 16) {
    int64_t column = panel * COLUMNS + half;
    __m512 scale = INT8 ? _mm512_loadu_ps(w.scales + column) : _mm512_set1_ps(1.0f);
    __m512 bias = w.bias ? _mm512_loadu_ps(w.bias + column) : _mm512_setzero_ps();
    for (int64_t r = 0; r < rows; r++) {
      float* place = out + r * stride + half;
      __m512 y = _mm512_loadu_ps(place);
      if constexpr (INT8) {
        __m512i sums = _mm512_castps_si512(y);
        if (w.lifts) sums = _mm512_sub_epi32(sums, _mm512_loadu_si512(w.lifts + column));
        y = _mm512_mul_ps(_mm512_cvtepi32_ps(sums),
                          _mm512_mul_ps(scale, _mm512_set1_ps(x.scales[first + r])));
      }
      _mm512_storeu_ps(place, _mm512_add_ps(y, bias));
    }
  }
}

// Some rows of x W^T in some panels: `write(row, numbers)`. A band stays in the first cache while
// all the panels have it.
template <bool INT8, class Write>
inline void product(const Rows& x, Share rows, const Linear& w, Panels panels, Write write) {
  alignas(64) float out[BAND * MOST];
  const int64_t stride = panels.count * COLUMNS;
  for (int64_t r = rows.first; r < rows.last; r += BAND) {
    const int64_t count = rows.last - r < BAND ? rows.last - r : BAND;
    for (int64_t i = 0; i < panels.count; i++) {
      const int64_t p = panels.first + i * panels.gap;
      float* place = out + i * COLUMNS;
      band<INT8>(x.data + r * x.stride, count, w.weights + p * w.steps * STEP, w.steps,
                 r == rows.first, place, stride);
      if (INT8 || w.bias) finish<INT8>(w, x, r, count, p, place, stride);
    }
    for (int64_t i = 0; i < count; i++) write(r + i, out + i * stride);
  }
}

// As many rows as stay in the second cache while the weights come by.
inline int64_t near(const Rows& x) {
  const int64_t many = (int64_t(1) << 20) / x.stride / BAND * BAND;
  return many < 4 * BAND ? 4 * BAND : many;
}

// Numbers i..i + 15 of `x * factor * weight` (no weight: 1).
inline __m512 scaled(const float* x, float factor, const float* weight, int64_t i) {
  __m512 y = _mm512_mul_ps(_mm512_loadu_ps(x + i), _mm512_set1_ps(factor));
  return weight ? _mm512_mul_ps(y, _mm512_loadu_ps(weight + i)) : y;
}

// One row of `size` such numbers as the input of a product.
template <bool INT8>
inline void put(const Rows& out, int64_t row, const float* x, float factor, const float* weight,
                int64_t size) {
  if constexpr (!INT8) {
    for (int64_t i = 0; i < size; i += 16)
      narrow(reinterpret_cast<bf16*>(out.at(row, 2 * i)), scaled(x, factor, weight, i));
    return;
  }
  __m512 most = _mm512_setzero_ps();
  for (int64_t i = 0; i < size; i += 16)
    most = _mm512_max_ps(most, _mm512_abs_ps(scaled(x, factor, weight, i)));
  float scale = _mm512_reduce_max_ps(most) / 127;
  scale = scale > 1e-32f ? scale : 1e-32f;
  out.scales[row] = scale;
  for (int64_t i = 0; i < size; i += 16) {
    __m512i codes =
        _mm512_cvtps_epi32(_mm512_div_ps(scaled(x, factor, weight, i), _mm512_set1_ps(scale)));
#ifndef __AMX_TILE__
    codes = _mm512_add_epi32(codes, _mm512_set1_epi32(128));
#endif
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out.at(row, i)), _mm512_cvtepi32_epi8(codes));
  }
}
