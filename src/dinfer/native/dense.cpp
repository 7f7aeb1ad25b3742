// The dense pre-norm stack (nn/transformer.py) as one call a step, for x86 CPUs with AVX-512 and
// its bfloat16 instructions, and with AMX where there is. Sums and the residual stream are float32.
#include <omp.h>

#include <atomic>
#include <memory>
#include <vector>

#include "attention.h"
#include "head.h"

namespace {

struct Layer {
  Linear qkv, out, gate_up, down;
  const float *attention_norm, *q_norm, *k_norm, *mlp_norm;  // q_norm and k_norm may be null
  bf16 *keys, *values;                                       // [kv_heads, slots, d]
};

struct Model {
  const Layer* layers;
  const float* norm;
  const bf16* embedding;  // [vocabulary, hidden]
  int64_t count, hidden, heads, kv_heads, size, rotary, intermediate, slots;
  double eps;

  int64_t mixed() const { return heads * size; }
  int64_t qkv() const { return (heads + 2 * kv_heads) * size; }
};

struct Step {
  const bf16* x;  // [rows, hidden], or null: the tokens' embeddings
  const int64_t *tokens, *positions, *slots;
  const float *cos, *sin;  // [positions, rotary / 2]
  const Span* spans;
  const int64_t* listed;
  bf16* out;  // [rows, hidden], normed
  int64_t rows, spans_count;
};

int64_t most(int64_t a, int64_t b) {
  return a > b ? a : b;
}

// Memory that stays, so that no step waits for fresh pages.
char* memory(int which, int64_t bytes) {
  struct Block {
    std::unique_ptr<char, decltype(&free)> start{nullptr, free};
    int64_t bytes = 0;
  };
  static thread_local Block blocks[2];
  Block& block = blocks[which];
  if (block.bytes < bytes) {
    bytes = (bytes + (2 << 20) - 1) >> 21 << 21;
    block.start.reset();
    block.start.reset(static_cast<char*>(aligned_alloc(2 << 20, bytes)));
    block.bytes = bytes;
  }
  return block.start.get();
}

struct Crew {  // one of some threads; turn: the next phase whose items are dealt out
  int thread, threads, turn = 0;
};

template <bool INT8>
class Body {
 public:
  Body(const Model& model, const Step& step, int threads)
      : m(model), s(step), turns(5 * model.count) {
    const int64_t room = (s.rows + BAND - 1) / BAND * BAND, cell = INT8 ? 1 : 2;
    const int64_t inputs = most(most(m.hidden, m.mixed()), m.intermediate);
    const int64_t sizes[] = {4 * room * m.hidden,
                             INT8 ? 4 * room * most(m.mixed(), m.intermediate) : 0,
                             2 * room * m.mixed(),
                             room * inputs * cell,
                             INT8 ? 0 : 2 * room * m.intermediate,
                             4 * room,
                             threads * Desk::bytes(m.size)};
    int64_t all = 0;
    for (int64_t size : sizes) all += (size + 127) / 64 * 64;
    char* place = memory(0, all);
    char* parts[7];
    for (int i = 0; i < 7; i++) {
      parts[i] = place;
      place += (sizes[i] + 127) / 64 * 64;
    }
    x = reinterpret_cast<float*>(parts[0]);
    wide = reinterpret_cast<float*>(parts[1]);
    q = reinterpret_cast<bf16*>(parts[2]);
    input = parts[3];
    gated = parts[4];
    scales = reinterpret_cast<float*>(parts[5]);
    desks = parts[6];
    plan();
  }

  void run(int thread, int threads) {
    Crew crew{thread, threads};
    const Share rows(s.rows, thread, threads);
    for (int64_t r = rows.first; r < rows.last; r++) {
      const bf16* row = s.x ? s.x + r * m.hidden : m.embedding + s.tokens[r] * m.hidden;
      for (int64_t i = 0; i < m.hidden; i += 16)
        _mm512_storeu_ps(x + r * m.hidden + i, widen(row + i));
    }
    for (int64_t l = 0; l < m.count; l++) {
      const Layer& layer = m.layers[l];
      norm(layer.attention_norm, rows);
      qkv(layer, crew);
      mix(layer, crew);
      if (INT8) inputs(m.mixed(), rows);
      add(layer.out, rows_of(m.mixed()), crew);
      norm(layer.mlp_norm, rows);
      gate(layer.gate_up, crew);
      if (INT8) inputs(m.intermediate, rows);
      add(layer.down, INT8 ? rows_of(m.intermediate) : gated_rows(), crew);
    }
    for (int64_t r = rows.first; r < rows.last; r++) {
      const float* row = x + r * m.hidden;
      const float by = factor(row, m.hidden);
      for (int64_t i = 0; i < m.hidden; i += 16)
        narrow(s.out + r * m.hidden + i, scaled(row, by, m.norm, i));
    }
  }

 private:
  const Model& m;
  const Step& s;
  std::vector<std::atomic<int64_t>> turns;  // what of each phase is taken
  std::vector<Task> tasks;
  float *x, *wide, *scales;
  bf16* q;
  char *input, *gated, *desks;

  void plan() {
    const int64_t fan = m.heads / m.kv_heads;
    for (int64_t i = 0; i < s.spans_count; i++) {
      const int64_t queries = (s.spans[i].stop - s.spans[i].start) * fan;
      for (int64_t head = 0; head < m.kv_heads; head++)
        for (int64_t low = 0; low < queries; low += TEAMS * LANES)
          tasks.push_back(
              {i, head, low, low + TEAMS * LANES < queries ? low + TEAMS * LANES : queries});
    }
  }

  Rows rows_of(int64_t size) const { return {input, scales, size * (INT8 ? 1 : 2)}; }
  Rows gated_rows() const { return {gated, nullptr, 2 * m.intermediate}; }

  float factor(const float* row, int64_t size) const {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < size; i += 16) {
      __m512 y = _mm512_loadu_ps(row + i);
      sum = _mm512_fmadd_ps(y, y, sum);
    }
    return 1 / std::sqrt(_mm512_reduce_add_ps(sum) / size + static_cast<float>(m.eps));
  }

  // The phases; each ends when all threads have. What is bfloat16 goes straight where the next
  // product wants it; codes need the greatest number of a whole row first, and so `inputs`.
  void norm(const float* weight, Share rows) {
    for (int64_t r = rows.first; r < rows.last; r++) {
      const float* row = x + r * m.hidden;
      put<INT8>(rows_of(m.hidden), r, row, factor(row, m.hidden), weight, m.hidden);
    }
#pragma omp barrier
  }

  void inputs(int64_t size, Share rows) {
    for (int64_t r = rows.first; r < rows.last; r++)
      put<INT8>(rows_of(size), r, wide + r * size, 1, nullptr, size);
#pragma omp barrier
  }

  // `work(rows, item)` for all items. Few rows: an even share for each thread, which has its own
  // weights near from the step before. More: whoever is ready takes the next one, as a core may be
  // slower than another.
  template <class Work>
  void deal(int64_t items, const Rows& rows, Crew& crew, Work work) {
    if (s.rows <= BAND) {
      const Share own(items, crew.thread, crew.threads);
      for (int64_t i = own.first; i < own.last; i++) work(Share(0, s.rows), i);
      return;
    }
    const int64_t many = near(rows), blocks = (s.rows + many - 1) / many;
    std::atomic<int64_t>& next = turns[crew.turn++];
    for (int64_t i; (i = next++) < items * blocks;) {
      const int64_t low = i / items * many;
      work(Share(low, low + many < s.rows ? low + many : s.rows), i % items);
    }
  }

  // An item is a head, so that it can be turned at once.
  void qkv(const Layer& layer, Crew& crew) {
    const int64_t panels = m.size / COLUMNS;
    const Rows rows = rows_of(m.hidden);
    deal(m.heads + 2 * m.kv_heads, rows, crew, [&](Share some, int64_t h) {
      const int64_t key = h - m.heads, value = key - m.kv_heads;
      product<INT8>(rows, some, layer.qkv, {h * panels, panels}, [&](int64_t r, float* head) {
        if (key < 0)
          turn(head, layer.q_norm, r, q + r * m.mixed() + h * m.size);
        else if (value < 0)
          turn(head, layer.k_norm, r, layer.keys + (key * m.slots + s.slots[r]) * m.size);
        else
          for (int64_t i = 0; i < m.size; i += 16)
            narrow(layer.values + (value * m.slots + s.slots[r]) * m.size + i,
                   _mm512_loadu_ps(head + i));
      });
    });
#pragma omp barrier
  }

  void mix(const Layer& layer, Crew& crew) {
    std::atomic<int64_t>& next = turns[crew.turn++];
    const Heads heads{q, layer.keys, layer.values, m.slots, m.heads, m.kv_heads, m.size};
    const Desk desk(desks + crew.thread * Desk::bytes(m.size), m.size);
    const Rows out = rows_of(m.mixed());
    for (int64_t t; (t = next++) < static_cast<int64_t>(tasks.size());)
      attend(heads, s.spans[tasks[t].span], s.listed, tasks[t], desk,
             [&](int64_t row, int64_t channel, __m512 y) {
               if (INT8)
                 _mm512_storeu_ps(wide + row * m.mixed() + channel, y);
               else
                 narrow(reinterpret_cast<bf16*>(out.at(row, 2 * channel)), y);
             });
#pragma omp barrier
  }

  void add(const Linear& w, const Rows& rows, Crew& crew) {
    deal(w.panels, rows, crew, [&](Share some, int64_t p) {
      product<INT8>(rows, some, w, {p}, [&](int64_t r, const float* y) {
        float* place = x + r * m.hidden + p * COLUMNS;
        for (int i = 0; i < COLUMNS; i += 16)
          _mm512_storeu_ps(place + i,
                           _mm512_add_ps(_mm512_loadu_ps(place + i), _mm512_loadu_ps(y + i)));
      });
    });
#pragma omp barrier
  }

  // silu(gate) * up.
  void gate(const Linear& w, Crew& crew) {
    const Rows rows = rows_of(m.hidden), out = gated_rows();
    deal(w.panels / 2, rows, crew, [&](Share some, int64_t p) {
      product<INT8>(rows, some, w, {p, 2, w.panels / 2}, [&](int64_t r, const float* y) {
        for (int i = 0; i < COLUMNS; i += 16) {
          const int64_t column = p * COLUMNS + i;
          const __m512 both =
              _mm512_mul_ps(silu(_mm512_loadu_ps(y + i)), _mm512_loadu_ps(y + COLUMNS + i));
          if (INT8)
            _mm512_storeu_ps(wide + r * m.intermediate + column, both);
          else
            narrow(reinterpret_cast<bf16*>(out.at(r, 2 * column)), both);
        }
      });
    });
#pragma omp barrier
  }

  // One head: normed where there is a weight, and turned by the row's position.
  void turn(float* head, const float* weight, int64_t row, bf16* out) {
    if (weight) {
      __m512 by = _mm512_set1_ps(factor(head, m.size));
      for (int64_t i = 0; i < m.size; i += 16)
        _mm512_storeu_ps(head + i, _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(head + i), by),
                                                 _mm512_loadu_ps(weight + i)));
    }
    const int64_t half = m.rotary / 2;
    const float *cos = s.cos + s.positions[row] * half, *sin = s.sin + s.positions[row] * half;
    for (int64_t i = 0; i < half; i += 16) {
      __m512 left = _mm512_loadu_ps(head + i), right = _mm512_loadu_ps(head + half + i);
      __m512 c = _mm512_loadu_ps(cos + i), n = _mm512_loadu_ps(sin + i);
      narrow(out + i, _mm512_fmsub_ps(left, c, _mm512_mul_ps(right, n)));
      narrow(out + half + i, _mm512_fmadd_ps(right, c, _mm512_mul_ps(left, n)));
    }
    for (int64_t i = m.rotary; i < m.size; i += 16) narrow(out + i, _mm512_loadu_ps(head + i));
  }
};

// Rows of bfloat16 as inputs of a product: all, or those in `index`.
template <bool INT8>
Rows inputs_of(const bf16* x, const int64_t* index, int64_t rows, int64_t size) {
  const int64_t room = (rows + BAND - 1) / BAND * BAND, stride = size * (INT8 ? 1 : 2);
  char* place = memory(1, room * (stride + 4) + 4 * size);
  Rows out{place, reinterpret_cast<float*>(place + room * stride), stride};
  float* row = out.scales + room;
  for (int64_t r = 0; r < rows; r++) {
    const bf16* from = x + (index ? index[r] : r) * size;
    for (int64_t i = 0; i < size; i += 16) _mm512_storeu_ps(row + i, widen(from + i));
    put<INT8>(out, r, row, 1, nullptr, size);
  }
  return out;
}

template <bool INT8>
void run_body(const Model& model, const Step& step, int threads) {
  Body<INT8> body(model, step, threads);
#pragma omp parallel num_threads(threads)
  {
    Tiles tiles;
    body.run(omp_get_thread_num(), omp_get_num_threads());
  }
}

template <bool INT8>
void run_product(const Linear& w, const bf16* x, int64_t rows, int64_t size, int threads,
                 int64_t columns, bf16* out) {
  const Rows inputs = inputs_of<INT8>(x, nullptr, rows, size);
#pragma omp parallel num_threads(threads)
  {
    Tiles tiles;
    const Share share(w.panels, omp_get_thread_num(), omp_get_num_threads());
    const int64_t many = near(inputs);
    for (int64_t low = 0; low < rows; low += many)
      for (int64_t p = share.first; p < share.last; p++)
        product<INT8>(
            inputs, Share(low, low + many < rows ? low + many : rows), w, {p},
            [=](int64_t r, const float* y) {
              for (int i = 0; i < COLUMNS; i += 16) {
                const int64_t left = columns - p * COLUMNS - i;
                const __mmask16 there = left >= 16 ? 0xffff : left > 0 ? (1 << left) - 1 : 0;
                _mm256_mask_storeu_epi16(out + r * columns + p * COLUMNS + i, there,
                                         (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(y + i)));
              }
            });
  }
}

template <bool INT8>
void run_search(const Piece* pieces, int64_t count, const bf16* x, const int64_t* index,
                int64_t rows, int64_t size, int64_t mask, int threads, int64_t* tokens,
                float* chances) {
  const Rows inputs = inputs_of<INT8>(x, index, rows, size);
  std::vector<Best> best(rows * threads);
  for (Best& each : best) begin(each);
#pragma omp parallel num_threads(threads)
  {
    Tiles tiles;
    const int thread = omp_get_thread_num(), all = omp_get_num_threads();
    for (int64_t i = 0; i < count; i++) {
      const int64_t runs = (pieces[i].weight.panels + RUN - 1) / RUN;
      search<INT8>(inputs, rows, pieces[i], Share(runs, thread, all), mask,
                   best.data() + thread * rows);
    }
#pragma omp barrier
    const Share share(rows, thread, all);
    for (int64_t r = share.first; r < share.last; r++)
      conclude(best.data() + r, rows, threads, tokens + r, chances + r);
  }
}

}  // namespace

extern "C" {

int raised() {  // whether int8 rows come 128 higher
#ifdef __AMX_TILE__
  return 0;
#else
  return 1;
#endif
}

// plan: tokens, positions and slots of the rows, the spans, the slots that lie in no run.
void body(const Model* model, const bf16* x, const int64_t* plan, const float* cos,
          const float* sin, bf16* out, int64_t rows, int64_t spans_count, int threads) {
  const Span* spans = reinterpret_cast<const Span*>(plan + 3 * rows);
  const int64_t* listed = reinterpret_cast<const int64_t*>(spans + spans_count);
  const Step step{x,      plan, plan + rows, plan + 2 * rows, cos, sin, spans,
                  listed, out,  rows,        spans_count};
  const bool int8 = model->layers->qkv.scales;
  int8 ? run_body<true>(*model, step, threads) : run_body<false>(*model, step, threads);
}

void product(const Linear* w, const bf16* x, int64_t rows, int64_t size, int64_t columns,
             int threads, bf16* out) {
  w->scales ? run_product<true>(*w, x, rows, size, threads, columns, out)
            : run_product<false>(*w, x, rows, size, threads, columns, out);
}

void likeliest(const Piece* pieces, int64_t count, const bf16* x, const int64_t* index,
               int64_t rows, int64_t size, int64_t mask, int threads, int64_t* tokens,
               float* chances) {
  pieces->weight.scales
      ? run_search<true>(pieces, count, x, index, rows, size, mask, threads, tokens, chances)
      : run_search<false>(pieces, count, x, index, rows, size, mask, threads, tokens, chances);
}
}
