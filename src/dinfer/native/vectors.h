// Vectors of 16 floats (AVX-512) and what the kernels share.
#pragma once
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

using bf16 = uint16_t;

inline __m512 widen(const bf16* x) {
  __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

inline void narrow(bf16* out, __m512 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), (__m256i)_mm512_cvtneps_pbh(x));
}

// Pairs (x[i], y[i]) as bfloat16 in one 32-bit word each.
inline __m512i paired(__m512 x, __m512 y) {
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i beside = _mm512_slli_epi32(_mm512_add_epi32(lanes, _mm512_set1_epi32(16)), 16);
  return _mm512_permutexvar_epi16(_mm512_or_si512(lanes, beside),
                                  (__m512i)_mm512_cvtne2ps_pbh(y, x));
}

inline __m512 dot(__m512 sum, __m512i x, __m512i y) {
  return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)y);
}

inline __m512i spread(const void* pair) {
  return _mm512_set1_epi32(*static_cast<const int32_t*>(pair));
}

// e^x to 2 units in the last place for x <= 88; 0 from -104 on. What is no number stays none: of
// max(a, b) it is b that comes through, whatever it is.
inline __m512 exponential(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(-104.0f), x);
  __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
  // ln 2 in two parts (Cody and Waite), then the Taylor series.
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693145751953125f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(1.428606765330187e-6f), r);
  __m512 p = _mm512_set1_ps(1.0f / 720);
  for (float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
  return _mm512_scalef_ps(p, n);
}

// 1 / x to 2 units in the last place: a guess of 14 bits and a step of Newton's.
inline __m512 inverse(__m512 x) {
  __m512 y = _mm512_rcp14_ps(x);
  return _mm512_mul_ps(y, _mm512_fnmadd_ps(x, y, _mm512_set1_ps(2.0f)));
}

inline __m512 silu(__m512 x) {
  __m512 e =
      exponential(_mm512_min_ps(_mm512_set1_ps(80.0f), _mm512_sub_ps(_mm512_setzero_ps(), x)));
  return _mm512_mul_ps(x, inverse(_mm512_add_ps(_mm512_set1_ps(1.0f), e)));
}

// Words of 16 rows of 16, transposed in place.
inline void transpose(__m512i (&x)[16]) {
  __m512i y[16];
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; j++) {
      x[i + 2 * j] = _mm512_unpacklo_epi64(y[i + j], y[i + j + 2]);
      x[i + 2 * j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + j + 2]);
    }
  for (int i = 0; i < 4; i++) {
    y[i] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88);
    y[i + 4] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xdd);
    y[i + 8] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88);
    y[i + 12] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; i++) {
    x[i] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0x88);
    x[i + 8] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0xdd);
  }
}

// The part of `count` that thread `number` of `threads` takes.
struct Share {
  int64_t first, last;
  Share(int64_t from, int64_t to) : first(from), last(to) {}
  Share(int64_t count, int number, int threads)
      : first(count * number / threads), last(count * (number + 1) / threads) {}
};
