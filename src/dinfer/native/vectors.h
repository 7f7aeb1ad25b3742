// The portable vector layer: vectors of LANES floats through the vector extensions of g++ and
// clang++, and the few operations that need intrinsics. How wide they are follows from the flags
// that the file is compiled with: AVX-512 16 lanes, AVX2 8, anything else (NEON) 4.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

struct bf16 {  // the upper half of a float
  uint16_t bits;
};

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
typedef int8_t Bytes __attribute__((vector_size(LANES)));
// The same for addresses that are no multiple of the size.
typedef float AnyFloats __attribute__((vector_size(4 * LANES), aligned(1), may_alias));
typedef int32_t AnyInts __attribute__((vector_size(4 * LANES), aligned(1), may_alias));
typedef uint16_t AnyHalves __attribute__((vector_size(2 * LANES), aligned(1), may_alias));

inline Floats all(float x) {
  return x - Floats{};  // x - 0 is x, also where x is -0
}
inline Ints all_ints(int32_t x) {
  return x - Ints{};
}
inline Ints lane_numbers() {
  Ints out{};
  for (int i = 0; i < LANES; i++) out[i] = i;
  return out;
}

inline Floats load(const float* x) {
  return *reinterpret_cast<const AnyFloats*>(x);
}
inline Ints load_ints(const void* x) {
  return *static_cast<const AnyInts*>(x);
}
inline Floats load(const bf16* x) {
  const Halves bits = *reinterpret_cast<const AnyHalves*>(x);
  return (Floats)(__builtin_convertvector(bits, Words) << 16);
}

inline void store(float* out, Floats x) {
  *reinterpret_cast<AnyFloats*>(out) = x;
}
inline void store_ints(void* out, Ints x) {
  *static_cast<AnyInts*>(out) = x;
}

// Rounded to the nearest bfloat16, ties to even; NaN stays NaN.
inline Halves halves(Floats x) {
#if defined(__AVX512BF16__)
  return (Halves)_mm512_cvtneps_pbh((__m512)x);
#else
  const Words bits = (Words)x;
  const Words rounded = bits + 0x7fff + ((bits >> 16) & 1);
  return __builtin_convertvector((x == x ? rounded : (bits | 0x400000)) >> 16, Halves);
#endif
}
inline void store(bf16* out, Floats x) {
  *reinterpret_cast<AnyHalves*>(out) = halves(x);
}

// The compilers are told to fuse these into one rounding.
inline Floats fma(Floats x, Floats y, Floats z) {
  return x * y + z;
}

// `y` where either is NaN.
inline Floats greater(Floats x, Floats y) {
#if defined(__AVX512F__)
  return (Floats)_mm512_max_ps((__m512)x, (__m512)y);
#elif defined(__AVX2__)
  return (Floats)_mm256_max_ps((__m256)x, (__m256)y);
#else
  return x > y ? x : y;
#endif
}

inline Floats magnitude(Floats x) {
  return (Floats)((Words)x & 0x7fffffffu);
}

inline float sum_of(Floats x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#else
  float out = 0;
  for (int i = 0; i < LANES; i++) out += x[i];
  return out;
#endif
}
// The float whose bits, as an integer, are the greatest.
inline float greatest_of(Ints bits) {
  int32_t most = bits[0];
  for (int i = 1; i < LANES; i++) most = bits[i] > most ? bits[i] : most;
  float out;
  memcpy(&out, &most, 4);
  return out;
}

// To the nearest integers, ties to even.
inline Ints nearest(Floats x) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtps_epi32((__m256)x);
#else
  // Below 2^22 the sum's last bit is worth 1.
  return (Ints)(x + 12582912.0f) - 0x4b400000;
#endif
}
inline Floats floats(Ints x) {
  return __builtin_convertvector(x, Floats);
}

// e^x to 2 units in the last place for x <= 88; 0 below -87. NaN stays NaN.
inline Floats exponential(Floats x) {
#if defined(__AVX512F__)
  const Floats low = (Floats)_mm512_max_ps(_mm512_set1_ps(-104.0f), (__m512)x);
  const Floats n = (Floats)_mm512_roundscale_ps((__m512)(low * 1.44269504f), 8);
#else
  const Floats low = greater(all(-87.5f), x);
  const Ints whole = nearest(low * 1.44269504f);
  const Floats n = floats(whole);
#endif
  // ln 2 in two parts (Cody and Waite), then the Taylor series.
  Floats r = fma(n, all(-0.693145751953125f), low);
  r = fma(n, all(-1.428606765330187e-6f), r);
  Floats p = all(1.0f / 720);
  for (float c : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = fma(p, r, all(c));
#if defined(__AVX512F__)
  return (Floats)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  const Floats out = p * (Floats)((whole + 127) << 23);
  return x < -87.0f ? Floats{} : out;
#endif
}

// 1 / x to 2 units in the last place.
inline Floats inverse(Floats x) {
#if defined(__AVX512F__)  // a guess of 14 bits and a step of Newton's
  const Floats y = (Floats)_mm512_rcp14_ps((__m512)x);
  return y * (2.0f - x * y);
#else
  return 1.0f / x;
#endif
}

inline Floats silu(Floats x) {
  return x * inverse(1.0f + exponential(greater(all(-80.0f), x) * -1.0f));
}

// LANES rows of LANES, transposed in place.
inline void transpose(Floats (&x)[LANES]) {
#if defined(__AVX512F__)
  __m512i y[16], z[16];
  for (int i = 0; i < 16; i++) z[i] = (__m512i)x[i];
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_epi32(z[i], z[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(z[i], z[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; j++) {
      z[i + 2 * j] = _mm512_unpacklo_epi64(y[i + j], y[i + j + 2]);
      z[i + 2 * j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + j + 2]);
    }
  for (int i = 0; i < 4; i++) {
    y[i] = _mm512_shuffle_i32x4(z[i], z[i + 4], 0x88);
    y[i + 4] = _mm512_shuffle_i32x4(z[i], z[i + 4], 0xdd);
    y[i + 8] = _mm512_shuffle_i32x4(z[i + 8], z[i + 12], 0x88);
    y[i + 12] = _mm512_shuffle_i32x4(z[i + 8], z[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; i++) {
    x[i] = (Floats)_mm512_shuffle_i32x4(y[i], y[i + 8], 0x88);
    x[i + 8] = (Floats)_mm512_shuffle_i32x4(y[i], y[i + 8], 0xdd);
  }
#elif defined(__AVX2__)
  __m256 y[8], z[8];
  for (int i = 0; i < 8; i += 2) {
    y[i] = _mm256_unpacklo_ps((__m256)x[i], (__m256)x[i + 1]);
    y[i + 1] = _mm256_unpackhi_ps((__m256)x[i], (__m256)x[i + 1]);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; j++) {
      z[i + 2 * j] = _mm256_shuffle_ps(y[i + j], y[i + j + 2], 0x44);
      z[i + 2 * j + 1] = _mm256_shuffle_ps(y[i + j], y[i + j + 2], 0xee);
    }
  for (int i = 0; i < 4; i++) {
    x[i] = (Floats)_mm256_permute2f128_ps(z[i], z[i + 4], 0x20);
    x[i + 4] = (Floats)_mm256_permute2f128_ps(z[i], z[i + 4], 0x31);
  }
#else
  float rows[LANES][LANES];
  for (int i = 0; i < LANES; i++)
    for (int j = 0; j < LANES; j++) rows[j][i] = x[i][j];
  for (int i = 0; i < LANES; i++) x[i] = load(rows[i]);
#endif
}

// Where the lane's flag is set (any bit of its word) `x`, else `y`.
inline Floats select(Ints flags, Floats x, Floats y) {
  return flags != 0 ? x : y;
}

inline void prefetch(const void* x) {
  __builtin_prefetch(x);
}

// The part of `count` that thread `number` of `threads` takes.
struct Share {
  int64_t first, last;
  Share(int64_t from, int64_t to) : first(from), last(to) {}
  Share(int64_t count, int number, int threads)
      : first(count * number / threads), last(count * (number + 1) / threads) {}
};
