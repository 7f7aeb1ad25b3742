// Products of some rows with a packed weight, and the packing.
//
// A weight [outputs, inputs] is cut into panels of 32 outputs, a panel into steps of some inputs,
// and a step into two tiles of 16 outputs. A tile holds 4-byte words: word[i][j] has the inputs of
// place i for output j. So both AMX's tiles and vectors of any width read a weight once, in order.
//
//   panel p                step s of the panel          tile: 16 outputs wide
//   +--------+--------+    +-----------+-----------+          j = 0   1   2  ...  15
//   | step 0          |    | tile 0    | tile 1    |   i = 0 [word|word|word| ... |word]
//   | step 1          |    | outputs   | outputs   |       1 [word|word|word| ... |word]
//   |  ...            |    | 0 .. 15   | 16 .. 31  |     ...
//   +-----------------+    +-----------+-----------+      15 [word|word|word| ... |word]
//
//   kind        inputs of a word                   places  inputs of a step
//   float32     1                                    16      16
//   bfloat16    2                                    16      32
//   int8        4                                    16      64
//   int4        4 of place i in the low halves of     8      64
//               its bytes, 4 of place i + 8 in the high ones
//
// Rows are stored by bands of 32. A line is what a row has for one step; of a band's rows the first
// lines lie together, then the second ones, and so on, so that rows a power of two apart do not
// push each other out of the cache.
#pragma once
#include <type_traits>

#include "vectors.h"

// Outputs of a panel; most panels side by side, in outputs; rows of a band.
constexpr int COLUMNS = 32, MOST = 256, BAND = 32;
constexpr int64_t AHEAD = 4096;  // bytes; weights are fetched so far ahead

struct Linear {          // as in products.py
  const char* weights;   // [panels][steps][2 tiles][places][16][4 bytes]
  const void* scales;    // int8: float [outputs]; int4: bf16 [panels][groups][scale, zero][32]
  const int32_t* lifts;  // int8: 128 * sum of an output's codes, where rows are raised by 128
  const float* bias;     // [outputs] or null
  int64_t steps, panels, kind, group;  // int4: steps of a group
};

// Kinds of weights, and in which form (Cell) their rows come.
struct Float32 {
  using Cell = float;
  static constexpr int NUMBER = 0, INPUTS = 16, PLACES = 16;
  static constexpr bool CODES = false;
};

struct BFloat16 {
#if defined(__AVX512BF16__)
  using Cell = bf16;
#else
  using Cell = float;
#endif
  static constexpr int NUMBER = 1, INPUTS = 32, PLACES = 16;
  static constexpr bool CODES = false;
};

// What multiplies four pairs of bytes at once: VNNI takes one side unsigned (rows are raised by
// 128), AMX and NEON take both signed. Without such instructions rows come in 16 bits, and of a
// weight's word the bytes 1 and 2 are exchanged, so that its even bytes belong to neighbours.
#if defined(__AMX_TILE__)
#define INT8_ROWS_SIGNED
#elif defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define INT8_ROWS_RAISED
#elif defined(__ARM_FEATURE_DOTPROD)
#define INT8_ROWS_SIGNED
#else
#define INT8_ROWS_WIDE
#endif

struct Int8 {
#if defined(INT8_ROWS_WIDE)
  using Cell = int16_t;
#else
  using Cell = int8_t;
#endif
  static constexpr int NUMBER = 2, INPUTS = 64, PLACES = 16;
  static constexpr bool CODES = true;
};

struct Int4 {
  using Cell = int8_t;
  static constexpr int NUMBER = 3, INPUTS = 64, PLACES = 8;
  static constexpr bool CODES = true;
};

template <class K>
constexpr int64_t LINE = K::INPUTS * sizeof(typename K::Cell);
template <class K>
constexpr int64_t TILE = K::PLACES * 64;  // bytes
template <class K>
constexpr int64_t STEP = 2 * TILE<K>;

// Inputs of a product, with room for whole bands.
struct Rows {
  char* data;
  float* scales;   // codes: of each row
  float* sums;     // int4: of each row's codes, for each step [rows][steps]
  int64_t stride;  // bytes of a row

  template <class K>
  typename K::Cell* at(int64_t row, int64_t input) const {
    char* line = data + row / BAND * BAND * stride + input / K::INPUTS * LINE<K> * BAND +
                 row % BAND * LINE<K>;
    return reinterpret_cast<typename K::Cell*>(line) + input % K::INPUTS;
  }

  // Bytes for so many rows of `size` inputs. Tiles may read 16 lines behind the last one.
  template <class K>
  static int64_t bytes(int64_t rows, int64_t size) {
    const int64_t room = (rows + BAND - 1) / BAND * BAND;
    const int64_t sums = std::is_same_v<K, Int4> ? 4 * rows * (size / K::INPUTS) : 0;
    return room * size * sizeof(typename K::Cell) + 16 * LINE<K> + 4 * rows + sums + 128;
  }

  template <class K>
  static Rows in(char* memory, int64_t rows, int64_t size) {
    const int64_t room = (rows + BAND - 1) / BAND * BAND;
    const int64_t stride = size * sizeof(typename K::Cell);
    float* scales = reinterpret_cast<float*>(memory + room * stride + 16 * LINE<K>);
    return {memory, scales, scales + rows, stride};
  }
};

// Panels first, first + gap, ...: `count` of them, whose outputs lie side by side.
struct Panels {
  int64_t first, count = 1, gap = 1;
};

// What a panel's product with a part of a band needs: rows first .. first + count.
template <class K>
struct Block {
  const Linear& w;
  const Rows& x;
  int64_t panel, first, count;

  const char* weights() const { return w.weights + panel * w.steps * STEP<K>; }
  const char* line() const { return reinterpret_cast<const char*>(x.at<K>(first, 0)); }
  const bf16* scales(int64_t group) const {
    const int64_t groups = w.steps / w.group;
    return static_cast<const bf16*>(w.scales) + (panel * groups + group) * 2 * COLUMNS;
  }
  // Of a row's codes in the group that begins with a step.
  float sum(int64_t row, int64_t step) const {
    const float* sums = x.sums + (first + row) * w.steps + step;
    float out = sums[0];
    for (int64_t i = 1; i < w.group; i++) out += sums[i];
    return out;
  }
};

#if defined(__AMX_TILE__)
#include "product_amx.h"
#else
struct Tiles {  // nothing to set up
  Tiles() {}
};
#endif
#include "product_vectors.h"

// Sums of a block as numbers: with scales and bias.
template <class K>
inline void finish(const Block<K>& b, float* out, int64_t stride) {
  const Linear& w = b.w;
  for (int i = 0; i < COLUMNS; i += LANES) {
    const int64_t column = b.panel * COLUMNS + i;
    const Floats bias = w.bias ? load(w.bias + column) : Floats{};
    Floats scale = all(1.0f);
    if constexpr (std::is_same_v<K, Int8>)
      scale = load(static_cast<const float*>(w.scales) + column);
    for (int64_t r = 0; r < b.count; r++) {
      float* place = out + r * stride + i;
      Floats y = load(place);
      if constexpr (std::is_same_v<K, Int8>) {
        Ints sums = (Ints)y;
        if (w.lifts) sums -= load_ints(w.lifts + column);
        y = floats(sums);
      }
      if constexpr (K::CODES) y *= scale * b.x.scales[b.first + r];
      store(place, y + bias);
    }
  }
}

// Some rows of x W^T in some panels: `write(row, numbers)`. A band stays in the first cache while
// all the panels have it.
template <class K, class Write>
inline void product(const Rows& x, Share rows, const Linear& w, Panels panels, Write write) {
  alignas(64) float out[BAND * MOST];
  const int64_t stride = panels.count * COLUMNS;
  int64_t count;
  for (int64_t r = rows.first; r < rows.last; r += count) {
    count = BAND - r % BAND < rows.last - r ? BAND - r % BAND : rows.last - r;
    for (int64_t i = 0; i < panels.count; i++) {
      const Block<K> block{w, x, panels.first + i * panels.gap, r, count};
      multiply(block, r == rows.first, out + i * COLUMNS, stride);
      if (K::CODES || w.bias) finish(block, out + i * COLUMNS, stride);
    }
    for (int64_t i = 0; i < count; i++) write(r + i, out + i * stride);
  }
}

// As many rows as stay in the second cache while the weights come by.
inline int64_t near(const Rows& x) {
  const int64_t many = (int64_t(1) << 20) / x.stride / BAND * BAND;
  return many < 4 * BAND ? 4 * BAND : many;
}

// LANES numbers from i on of `x * factor * weight` (no weight: 1).
inline Floats scaled(const float* x, float factor, const float* weight, int64_t i) {
  const Floats y = load(x + i) * factor;
  return weight ? y * load(weight + i) : y;
}

inline void store_codes(int8_t* out, Ints codes) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8((__m512i)codes));
#else
  const Bytes bytes = __builtin_convertvector(codes, Bytes);
  memcpy(out, &bytes, sizeof bytes);
#endif
}
inline void store_codes(int16_t* out, Ints codes) {
  typedef int16_t Shorts __attribute__((vector_size(2 * LANES)));
  const Shorts shorts = __builtin_convertvector(codes, Shorts);
  memcpy(out, &shorts, sizeof shorts);
}

// One row of `size` such numbers as the input of a product.
template <class K>
inline void put(const Rows& out, int64_t row, const float* x, float factor, const float* weight,
                int64_t size) {
  if constexpr (!K::CODES) {
    for (int64_t i = 0; i < size; i += LANES)
      store(out.at<K>(row, i), scaled(x, factor, weight, i));
  } else {
    // Magnitudes in the order of their bits, in which NaN is the greatest: such a row stays NaN.
    Ints most{};
    for (int64_t i = 0; i < size; i += LANES) {
      const Ints bits = (Ints)magnitude(scaled(x, factor, weight, i));
      most = bits > most ? bits : most;
    }
    float scale = greatest_of(most) / 127;
    scale = scale < 1e-32f ? 1e-32f : scale;
    out.scales[row] = scale;
    for (int64_t i = 0; i < size;) {
      Ints sum{};
      for (const int64_t stop = i + K::INPUTS; i < stop; i += LANES) {
        Ints codes = nearest(scaled(x, factor, weight, i) / scale);
        if (std::is_same_v<K, Int4>) sum += codes;
#if defined(INT8_ROWS_RAISED)
        if (std::is_same_v<K, Int8>) codes += 128;
#endif
        store_codes(out.at<K>(row, i), codes);
      }
      if (std::is_same_v<K, Int4>)
        out.sums[row * (size / K::INPUTS) + i / K::INPUTS - 1] = sum_of(floats(sum));
    }
  }
}

// A row of inputs, to another place.
template <class K>
inline void copy_row(const Rows& from, int64_t row, const Rows& to, int64_t place, int64_t size) {
  for (int64_t i = 0; i < size; i += K::INPUTS)
    memcpy(to.at<K>(place, i), from.at<K>(row, i), LINE<K>);
  if (K::CODES) to.scales[place] = from.scales[row];
  const int64_t steps = size / K::INPUTS;
  if (std::is_same_v<K, Int4>) memcpy(to.sums + place * steps, from.sums + row * steps, 4 * steps);
}
