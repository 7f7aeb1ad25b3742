// The product of a panel with a part of a band, in vectors of any width.
//
// A block of rows times vectors of outputs is summed in registers: rows come one number (or pair,
// or four codes) at a time, spread over all lanes. Which rows go together changes no result.
#pragma once
#include "product.h"

// Vectors of outputs and rows of a block: as many sums as there are registers for.
constexpr int VECS = LANES == 4 ? 4 : 2, BLOCK_ROWS = LANES == 16 ? 8 : 6;
constexpr int PASSES = COLUMNS / (VECS * LANES);

// Where vector v of a pass lies in a step, and a line of it in its tile.
template <class K>
constexpr int64_t vector_at(int pass, int v) {
  const int number = pass * VECS + v, each = 16 / LANES;
  return number / each * TILE<K> + number % each * 4 * LANES;
}

inline Ints spread(const void* word) {
  int32_t value;
  memcpy(&value, word, 4);
  return all_ints(value);
}
inline Floats spread_float(const void* number) {
  float value;
  memcpy(&value, number, 4);
  return all(value);
}

#if defined(__AVX512BF16__)
inline Floats dot(Floats sum, Ints x, Ints y) {
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)y);
}
#endif

// Sums of products of neighbouring 16-bit numbers.
inline Ints pairs(Ints x, Ints y) {
#if defined(__AVX512BW__)
  return (Ints)_mm512_madd_epi16((__m512i)x, (__m512i)y);
#elif defined(__AVX2__)
  return (Ints)_mm256_madd_epi16((__m256i)x, (__m256i)y);
#else
  return (x << 16 >> 16) * (y << 16 >> 16) + (x >> 16) * (y >> 16);
#endif
}

// sum + x y over the four bytes of each word. The left bytes are unsigned for VNNI.
inline Ints dot_bytes(Ints sum, Ints x, Ints y) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)x, (__m512i)y);
#elif defined(__AVXVNNI__)
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)x, (__m256i)y);
#elif defined(__ARM_FEATURE_DOTPROD)
  return (Ints)vdotq_s32((int32x4_t)sum, (int8x16_t)x, (int8x16_t)y);
#elif defined(__AVX512BW__)
  const __m512i both = _mm512_maddubs_epi16((__m512i)x, (__m512i)y);
  return sum + (Ints)_mm512_madd_epi16(both, _mm512_set1_epi16(1));
#elif defined(__AVX2__)
  const __m256i both = _mm256_maddubs_epi16((__m256i)x, (__m256i)y);  // int4: far from its limit
  return sum + (Ints)_mm256_madd_epi16(both, _mm256_set1_epi16(1));
#else
  typedef int16_t Shorts __attribute__((vector_size(4 * LANES)));
  const Shorts even = (Shorts)y << 8 >> 8, odd = (Shorts)y >> 8;
  return sum + pairs(x & 0xff00ff, (Ints)even) + pairs((x >> 8) & 0xff00ff, (Ints)odd);
#endif
}

template <int N>
using Sums = Floats[N][VECS];

// The words of one place times N rows, whose numbers for it begin at `x`.
template <int N>
inline void place(Float32, Sums<N>& sums, const Ints (&w)[VECS], const char* x) {
  for (int r = 0; r < N; r++) {
    const Floats row = spread_float(x + r * LINE<Float32>);
    for (int v = 0; v < VECS; v++) sums[r][v] = fma(row, (Floats)w[v], sums[r][v]);
  }
}

template <int N>
inline void place(BFloat16, Sums<N>& sums, const Ints (&w)[VECS], const char* x) {
#if defined(__AVX512BF16__)
  for (int r = 0; r < N; r++) {
    const Ints row = spread(x + r * LINE<BFloat16>);
    for (int v = 0; v < VECS; v++) sums[r][v] = dot(sums[r][v], row, w[v]);
  }
#else
  Floats wide[VECS];
  for (int v = 0; v < VECS; v++) wide[v] = (Floats)(w[v] << 16);
  for (int r = 0; r < N; r++) {
    const Floats row = spread_float(x + r * LINE<BFloat16>);
    for (int v = 0; v < VECS; v++) sums[r][v] = fma(row, wide[v], sums[r][v]);
  }
  for (int v = 0; v < VECS; v++) wide[v] = (Floats)(w[v] & static_cast<int32_t>(0xffff0000));
  for (int r = 0; r < N; r++) {
    const Floats row = spread_float(x + r * LINE<BFloat16> + 4);
    for (int v = 0; v < VECS; v++) sums[r][v] = fma(row, wide[v], sums[r][v]);
  }
#endif
}

template <int N>
inline void place(Int8, Sums<N>& sums, const Ints (&w)[VECS], const char* x) {
#if defined(INT8_ROWS_WIDE)
  typedef int16_t Shorts __attribute__((vector_size(4 * LANES)));
  Ints wide[VECS];
  for (int v = 0; v < VECS; v++) wide[v] = (Ints)((Shorts)w[v] << 8 >> 8);
  for (int r = 0; r < N; r++) {
    const Ints row = spread(x + r * LINE<Int8>);
    for (int v = 0; v < VECS; v++) sums[r][v] = (Floats)((Ints)sums[r][v] + pairs(row, wide[v]));
  }
  for (int v = 0; v < VECS; v++) wide[v] = (Ints)((Shorts)w[v] >> 8);
  for (int r = 0; r < N; r++) {
    const Ints row = spread(x + r * LINE<Int8> + 4);
    for (int v = 0; v < VECS; v++) sums[r][v] = (Floats)((Ints)sums[r][v] + pairs(row, wide[v]));
  }
#else
  for (int r = 0; r < N; r++) {
    const Ints row = spread(x + r * LINE<Int8>);
    for (int v = 0; v < VECS; v++) sums[r][v] = (Floats)dot_bytes((Ints)sums[r][v], row, w[v]);
  }
#endif
}

template <int N>
inline void place(Int4, Sums<N>& sums, const Ints (&w)[VECS], const char* x) {
  Ints bytes[VECS];
  for (int v = 0; v < VECS; v++) bytes[v] = w[v] & 0x0f0f0f0f;
  for (int r = 0; r < N; r++) {
    const Ints row = spread(x + r * LINE<Int4>);
    for (int v = 0; v < VECS; v++) sums[r][v] = (Floats)dot_bytes((Ints)sums[r][v], bytes[v], row);
  }
  for (int v = 0; v < VECS; v++) bytes[v] = (w[v] >> 4) & 0x0f0f0f0f;
  for (int r = 0; r < N; r++) {
    const Ints row = spread(x + r * LINE<Int4> + 32);
    for (int v = 0; v < VECS; v++) sums[r][v] = (Floats)dot_bytes((Ints)sums[r][v], bytes[v], row);
  }
}

// Some steps of N rows, added to `sums`.
template <class K, int N>
inline void add_steps(Sums<N>& sums, const char* x, const char* w, int64_t steps, int pass,
                      bool fetch) {
  constexpr int64_t CELL = K::INPUTS / 16 * sizeof(typename K::Cell);  // of a row for one place
  for (int64_t s = 0; s < steps; s++, w += STEP<K>, x += LINE<K> * BAND)
    for (int i = 0; i < K::PLACES; i++) {
      Ints words[VECS];
      for (int v = 0; v < VECS; v++) words[v] = load_ints(w + vector_at<K>(pass, v) + 64 * i);
      if (fetch)
        for (int v = 0; v < VECS; v += 64 / (4 * LANES))
          prefetch(w + AHEAD + vector_at<K>(pass, v) + 64 * i);
      place<N>(K{}, sums, words, x + CELL * i);
    }
}

template <class K, int N>
inline void some_rows(const Block<K>& b, int64_t row, int pass, bool fetch, float* out,
                      int64_t stride) {
  const char *x = b.line() + row * LINE<K>, *w = b.weights();
  out += row * stride + pass * VECS * LANES;
  if constexpr (!std::is_same_v<K, Int4>) {
    Sums<N> sums{};
    add_steps<K, N>(sums, x, w, b.w.steps, pass, fetch);
    for (int r = 0; r < N; r++)
      for (int v = 0; v < VECS; v++) store(out + r * stride + v * LANES, sums[r][v]);
  } else {
    const int64_t group = b.w.group;
    for (int64_t s = 0; s < b.w.steps;
         s += group, w += group * STEP<K>, x += group * LINE<K> * BAND) {
      Sums<N> sums{};
      add_steps<K, N>(sums, x, w, group, pass, fetch);
      for (int v = 0; v < VECS; v++) {
        const bf16* pair = b.scales(s / group) + (pass * VECS + v) * LANES;
        const Floats scale = load(pair), zero = fma(all(-8.0f), scale, load(pair + COLUMNS));
        for (int r = 0; r < N; r++) {
          float* at = out + r * stride + v * LANES;
          const float codes = b.sum(row + r, s);
          const Floats before = s ? load(at) : Floats{};
          store(at, fma(floats((Ints)sums[r][v]), scale, fma(all(codes), zero, before)));
        }
      }
    }
  }
}

// N rows or fewer.
template <class K, int N>
inline void up_to(int64_t rows, const Block<K>& b, int64_t row, int pass, bool fetch, float* out,
                  int64_t stride) {
  if (rows == N) return some_rows<K, N>(b, row, pass, fetch, out, stride);
  if constexpr (N > 1) up_to<K, N - 1>(rows, b, row, pass, fetch, out, stride);
}

// Rows of the block times its panel, into rows `stride` numbers apart: sums of codes as int32, all
// others as float. fetch: the weights are not near yet.
template <class K>
__attribute__((noinline)) void multiply_vectors(const Block<K>& b, bool fetch, float* out,
                                                int64_t stride) {
  const int64_t parts = (b.count + BLOCK_ROWS - 1) / BLOCK_ROWS;
  for (int pass = 0; pass < PASSES; pass++)
    for (int64_t i = 0; i < parts; i++) {
      const int64_t first = b.count * i / parts, last = b.count * (i + 1) / parts;
      up_to<K, BLOCK_ROWS>(last - first, b, first, pass, fetch && i == 0, out, stride);
    }
}

template <class K>
inline void multiply(const Block<K>& b, bool fetch, float* out, int64_t stride) {
#if defined(__AMX_TILE__)
  if constexpr (!std::is_same_v<K, Float32>) return multiply_tiles(b, fetch, out, stride);
#endif
  multiply_vectors(b, fetch, out, stride);
}
