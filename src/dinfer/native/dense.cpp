// The functions that Python calls: a step of the dense or mixture stack, a product, and the search
// for the likeliest tokens. One source for all CPUs: see vectors.h.
#include <vector>

#include "head.h"
#include "stack.h"

namespace {

// Rows as inputs of a product: all, or those in `index`.
template <class T, class K>
Rows inputs_of(const T* x, const int64_t* index, int64_t rows, int64_t size) {
  const int64_t bytes = Rows::bytes<K>(rows, size);
  char* place = memory(1, bytes + 4 * size);
  const Rows out = Rows::in<K>(place, rows, size);
  float* row = reinterpret_cast<float*>(place + bytes);
  for (int64_t r = 0; r < rows; r++) {
    const T* from = x + (index ? index[r] : r) * size;
    for (int64_t i = 0; i < size; i += LANES) store(row + i, load(from + i));
    put<K>(out, r, row, 1, nullptr, size);
  }
  return out;
}

template <class T, class K>
void run_stack(const Model& model, const Step& step, int threads) {
  Stack<T, K> stack(model, step, threads);
  ThreadPool::instance().run(threads, [&](int thread, int all) {
    Tiles tiles;
    stack.run(thread, all);
  });
}

// The first `count` of LANES numbers.
template <class T>
void store_some(T* out, Floats y, int64_t count) {
  if (count >= LANES) return store(out, y);
  T all[LANES];
  store(all, y);
  for (int64_t i = 0; i < count; i++) out[i] = all[i];
}

template <class K, class T, class Out>
void run_product(const Linear& w, const T* x, int64_t rows, int64_t size, int threads,
                 int64_t columns, Out* out) {
  const Rows inputs = inputs_of<T, K>(x, nullptr, rows, size);
  ThreadPool::instance().run(threads, [&](int thread, int all) {
    Tiles tiles;
    const Share share(w.panels, thread, all);
    const int64_t many = near(inputs);
    for (int64_t low = 0; low < rows; low += many)
      for (int64_t p = share.first; p < share.last; p++)
        product<K>(inputs, Share(low, least(low + many, rows)), w, {p},
                   [=](int64_t r, const float* y) {
                     for (int i = 0; i < COLUMNS; i += LANES) {
                       const int64_t column = p * COLUMNS + i;
                       store_some(out + r * columns + column, load(y + i), columns - column);
                     }
                   });
  });
}

template <class T, class K>
void run_search(const Piece* pieces, int64_t count, const T* x, const int64_t* index, int64_t rows,
                int64_t size, int64_t mask, int threads, int64_t* tokens, float* probs) {
  const Rows inputs = inputs_of<T, K>(x, index, rows, size);
  std::vector<Best> best(rows * threads);
  for (Best& each : best) begin(each);
  Barrier barrier;
  ThreadPool::instance().run(threads, [&](int thread, int all) {
    Tiles tiles;
    ThreadTeam team{thread, all, barrier};
    for (int64_t i = 0; i < count; i++) {
      const int64_t runs = (pieces[i].weight.panels + RUN - 1) / RUN;
      search<K>(inputs, rows, pieces[i], Share(runs, thread, all), mask,
                best.data() + thread * rows);
    }
    team.wait();
    const Share share(rows, thread, all);
    for (int64_t r = share.first; r < share.last; r++)
      reduce(best.data() + r, rows, all, tokens + r, probs + r);
  });
}

// `call(T*, K)` with what rows are stored in (`wide`: float32, else bfloat16) and a kind of
// weights.
template <class Call>
void dispatch(int64_t kind, bool wide, Call call) {
  auto with = [&](auto weights) {
    wide ? call(static_cast<float*>(nullptr), weights) : call(static_cast<bf16*>(nullptr), weights);
  };
  if (kind == Float32::NUMBER) with(Float32{});
  if (kind == BFloat16::NUMBER) with(BFloat16{});
  if (kind == Int8::NUMBER) with(Int8{});
  if (kind == Int4::NUMBER) with(Int4{});
}

}  // namespace

extern "C" {

int form() {  // of int8: rows 128 higher (1), bytes 1 and 2 of weights exchanged (2), neither (0)
#if defined(INT8_ROWS_RAISED)
  return 1;
#elif defined(INT8_ROWS_WIDE)
  return 2;
#else
  return 0;
#endif
}

// plan: tokens and positions of the rows, slots of the first `stored`, the spans, slots that lie in
// no run. wide: rows, keys and values are float32, else bfloat16.
void body(const Model* model, const void* x, const int64_t* plan, const uint8_t* masks,
          const float* cos, const float* sin, void* out, int64_t rows, int64_t stored,
          int64_t spans_count, int wide, int threads) {
  const int64_t* slots = plan + 2 * rows;
  const Span* spans = reinterpret_cast<const Span*>(slots + stored);
  const int64_t* listed = reinterpret_cast<const int64_t*>(spans + spans_count);
  const Step step{x,   plan, plan + rows, slots,      cos, sin, spans, {listed, masks},
                  out, rows, stored,      spans_count};
  dispatch(model->layers->qkv.kind, wide, [&](auto* type, auto kind) {
    run_stack<std::remove_pointer_t<decltype(type)>, decltype(kind)>(*model, step, threads);
  });
}

// wide_out: the outputs are float32, else what the rows are.
void product(const Linear* w, const void* x, int64_t rows, int64_t size, int64_t columns, int wide,
             int wide_out, int threads, void* out) {
  dispatch(w->kind, wide, [&](auto* type, auto kind) {
    using T = std::remove_pointer_t<decltype(type)>;
    auto run = [&](auto* to) {
      run_product<decltype(kind)>(*w, static_cast<const T*>(x), rows, size, threads, columns, to);
    };
    wide_out ? run(static_cast<float*>(out)) : run(static_cast<T*>(out));
  });
}

void likeliest(const Piece* pieces, int64_t count, const void* x, const int64_t* index,
               int64_t rows, int64_t size, int64_t mask, int wide, int threads, int64_t* tokens,
               float* probs) {
  dispatch(pieces->weight.kind, wide, [&](auto* type, auto kind) {
    using T = std::remove_pointer_t<decltype(type)>;
    run_search<T, decltype(kind)>(pieces, count, static_cast<const T*>(x), index, rows, size, mask,
                                  threads, tokens, probs);
  });
}
}
