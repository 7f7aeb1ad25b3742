// The product of a panel with a part of a band, in AMX's tiles of 16 rows of 64 bytes.
//
//   tiles 0, 1   sums of rows  0 .. 15 with outputs 0 .. 15 and 16 .. 31
//   tiles 2, 3   sums of rows 16 .. 31
//   tiles 4, 5   lines of these rows for one step
//   tiles 6, 7   the step's two tiles of weights
#pragma once
#include "product.h"

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

#define MULTIPLY(sum, rows, weights)          \
  if constexpr (std::is_same_v<K, Int8>)      \
    _tile_dpbssd(sum, rows, weights);         \
  else if constexpr (std::is_same_v<K, Int4>) \
    _tile_dpbsud(sum, rows, weights);         \
  else                                        \
    _tile_dpbf16ps(sum, rows, weights);

template <class K>
inline void add_tiles(const char* x, const char* w, bool two) {
  _tile_loadd(6, w, 64);
  _tile_loadd(4, x, LINE<K>);
  MULTIPLY(0, 4, 6)
  _tile_loadd(7, w + 1024, 64);
  MULTIPLY(1, 4, 7)
  if (two) {
    _tile_loadd(5, x + 16 * LINE<K>, LINE<K>);
    MULTIPLY(2, 5, 6)
    MULTIPLY(3, 5, 7)
  }
}
#undef MULTIPLY

inline void zero_tiles() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

inline void store_tiles(void* out, int64_t stride, bool two) {
  float* place = static_cast<float*>(out);
  _tile_stored(0, place, 4 * stride);
  _tile_stored(1, place + 16, 4 * stride);
  if (two) {
    _tile_stored(2, place + 16 * stride, 4 * stride);
    _tile_stored(3, place + 16 * stride + 16, 4 * stride);
  }
}

// The 8 lines of two tiles of int4 codes as 16 lines of bytes.
inline void unpack(const char* w, char* out) {
  const __m512i low = _mm512_set1_epi8(15);
  for (int tile = 0; tile < 2; tile++, w += TILE<Int4>, out += 1024)
    for (int i = 0; i < 8; i++) {
      const __m512i line = _mm512_loadu_si512(w + 64 * i);
      _mm512_store_si512(out + 64 * i, _mm512_and_si512(line, low));
      _mm512_store_si512(out + 64 * (i + 8), _mm512_and_si512(_mm512_srli_epi16(line, 4), low));
    }
}

inline void add_group(const Block<Int4>& b, int64_t first, const int32_t* sums, float* out,
                      int64_t stride) {
  const bf16* pair = b.scales(first / b.w.group);
  const Floats left = load(pair), right = load(pair + 16);
  const Floats left_zero = fma(all(-8.0f), left, load(pair + 32));
  const Floats right_zero = fma(all(-8.0f), right, load(pair + 48));
  for (int64_t r = 0; r < b.count; r++, sums += COLUMNS, out += stride) {
    const Floats codes = all(b.sum(r, first));
    const Floats x = first ? load(out) : Floats{}, y = first ? load(out + 16) : Floats{};
    store(out, fma(floats(load_ints(sums)), left, fma(codes, left_zero, x)));
    store(out + 16, fma(floats(load_ints(sums + 16)), right, fma(codes, right_zero, y)));
  }
}

// int4: a step is unpacked while the one before is multiplied, and a group's sums are scaled while
// the next group is multiplied, since what was just written cannot be read at once.
inline void multiply_groups(const Block<Int4>& b, bool fetch, float* out, int64_t stride) {
  const bool two = b.count > 16;
  const int64_t steps = b.w.steps, group = b.w.group;
  const char *w = b.weights(), *x = b.line();
  alignas(64) char bytes[2][2048];
  alignas(64) int32_t sums[2][BAND * COLUMNS];
  unpack(w, bytes[0]);
  zero_tiles();
  for (int64_t s = 0; s < steps; s++, w += STEP<Int4>, x += LINE<Int4> * BAND) {
    if (fetch)
      for (int line = 0; line < STEP<Int4>; line += 64) prefetch(w + AHEAD + line);
    if (s + 1 < steps) unpack(w + STEP<Int4>, bytes[(s + 1) % 2]);
    add_tiles<Int4>(x, bytes[s % 2], two);
    if ((s + 1) % group) continue;
    const int64_t number = s / group;
    store_tiles(sums[number % 2], COLUMNS, two);
    zero_tiles();
    if (number) add_group(b, (number - 1) * group, sums[(number - 1) % 2], out, stride);
  }
  add_group(b, steps - group, sums[(steps / group - 1) % 2], out, stride);
}

template <class K>
inline void multiply_tiles(const Block<K>& b, bool fetch, float* out, int64_t stride) {
  if constexpr (std::is_same_v<K, Int4>) {
    multiply_groups(b, fetch, out, stride);
  } else {
    const bool two = b.count > 16;
    const char *w = b.weights(), *x = b.line();
    zero_tiles();
    for (int64_t s = 0; s < b.w.steps; s++, w += STEP<K>, x += LINE<K> * BAND) {
      if (fetch)
        for (int line = 0; line < STEP<K>; line += 64) prefetch(w + AHEAD + line);
      add_tiles<K>(x, w, two);
    }
    store_tiles(out, stride, two);
  }
}
