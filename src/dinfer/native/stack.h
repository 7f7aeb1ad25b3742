// The pre-norm stack of nn/transformer.py as one pass of some threads through its phases. Sums and
// the residual stream are float32; T: what keys, values and hidden rows are stored in; K: the kind
// of the weights.
#pragma once
#include "attention.h"
#include "mixture.h"
#include "team.h"

struct Layer {
  Linear qkv, out, gate_up, down;
  const float *attention_norm, *q_norm, *k_norm, *mlp_norm;  // q_norm and k_norm may be null
  void *keys, *values;                                       // [kv_heads, slots, d]
  const Mixture* mixture;  // in place of gate_up and down, or null
};

struct Model {
  const Layer* layers;
  const float* norm;
  const void* embedding;  // [vocabulary, hidden]
  // intermediate: of the widest dense MLP or shared expert. Of mixtures (else 0): experts, those of
  // a row, and the intermediate size of one.
  int64_t count, hidden, heads, kv_heads, size, rotary, intermediate, slots, experts, top, expert;
  double eps;

  int64_t mixed() const { return heads * size; }
};

struct Step {
  const void* x;  // [rows, hidden], or null: the tokens' embeddings
  const int64_t *tokens, *positions, *slots;
  const float *cos, *sin;  // [positions, rotary / 2]
  const Span* spans;
  Seen seen;
  void* out;                          // [rows, hidden], normed
  int64_t rows, stored, spans_count;  // rows from `stored` on are shadow rows
};

inline int64_t most(int64_t a, int64_t b) {
  return a > b ? a : b;
}
inline int64_t least(int64_t a, int64_t b) {
  return a < b ? a : b;
}

template <class T, class K>
class Stack {
 public:
  using Attention = typename AttentionOf<T>::Type;
  using Query = typename Attention::Query;

  Stack(const Model& model, const Step& step, int threads)
      : m(model),
        s(step),
        // Few rows: each thread makes all inputs for itself, which costs less than to wait for the
        // others and to fetch what they wrote. Codes cost more to make.
        own_inputs(step.rows <= BAND && step.rows * model.hidden <= (K::CODES ? 1024 : 8192)),
        dealt(8 * model.count) {
    allocate(threads);
    for (int64_t i = 0; i < s.spans_count; i++) {
      const int64_t queries = (s.spans[i].stop - s.spans[i].start) * (m.heads / m.kv_heads);
      for (int64_t head = 0; head < m.kv_heads; head++)
        for (int64_t low = 0; low < queries; low += TEAMS * LANES)
          tasks.push_back({i, head, low, least(low + TEAMS * LANES, queries)});
    }
  }

  void run(int thread, int threads) {
    ThreadTeam team{thread, threads, barrier};
    const Share rows(s.rows, thread, threads);
    Sorted sorted;
    embed(rows);
    if (own_inputs) team.wait();
    for (int64_t l = 0; l < m.count; l++) {
      const Layer& layer = m.layers[l];
      norm(layer.attention_norm, team);
      qkv(layer, team);
      attention(layer, team);
      if (K::CODES) quantize(m.mixed(), team);
      add(layer.out, K::CODES ? inputs(m.mixed(), team) : attended(), team);
      norm(layer.mlp_norm, team);
      if (layer.mixture)
        mixture(layer, sorted, team);
      else
        mlp(layer.gate_up, layer.down, m.intermediate, team);
    }
    for (int64_t r = rows.first; r < rows.last; r++) {
      const float *row = x + r * m.hidden, by = factor(row, m.hidden);
      T* out = static_cast<T*>(s.out) + r * m.hidden;
      for (int64_t i = 0; i < m.hidden; i += LANES) store(out + i, scaled(row, by, m.norm, i));
    }
  }

 private:
  const Model& m;
  const Step& s;
  const bool own_inputs;
  Barrier barrier;
  std::vector<std::atomic<int64_t>> dealt;  // how much of each phase is dealt out
  std::vector<Task> tasks;
  float *x, *wide;  // [rows, hidden]; codes: what is still to be quantized
  Query* q;
  T *own_keys, *own_values;
  char *inputs_at, *attended_at, *gated_at, *workspaces;
  int64_t inputs_bytes, workspace_bytes;
  // Mixtures: the router's inputs and logits, what was chosen, sorted rows and what comes of them.
  char *routed_at, *sorted_at, *expert_at;
  float *logits, *weights, *expert_rows;
  int64_t* chosen;

  void allocate(int threads) {
    const int64_t most_inputs = most(most(m.hidden, m.mixed()), m.intermediate);
    const int64_t sorted = s.rows * m.top, shadows = s.rows - s.stored;
    inputs_bytes = (Rows::bytes<K>(s.rows, most_inputs) + 127) / 64 * 64;
    workspace_bytes = (Attention::bytes(m.size) + 127) / 64 * 64;
    const int64_t codes = K::CODES ? 4 : 0, plain = K::CODES ? 0 : 1;
    struct Part {
      char** start;
      int64_t bytes;
    };
    char* start[8];
    const Part parts[] = {
        {&start[0], 4 * s.rows * m.hidden},
        {&start[1], codes * most(s.rows * most(m.mixed(), m.intermediate), sorted * m.expert)},
        {&start[2], static_cast<int64_t>(sizeof(Query)) * s.rows * m.mixed()},
        {&start[3], 2 * static_cast<int64_t>(sizeof(T)) * shadows * m.kv_heads * m.size},
        {&inputs_at, (own_inputs ? threads : 1) * inputs_bytes},
        {&attended_at, plain * Rows::bytes<K>(s.rows, m.mixed())},
        {&gated_at, plain * Rows::bytes<K>(s.rows, m.intermediate)},
        {&workspaces, threads * workspace_bytes},
        {&routed_at, m.top ? Rows::bytes<Float32>(s.rows, m.hidden) : 0},
        {&sorted_at, m.top ? Rows::bytes<K>(sorted, m.hidden) : 0},
        {&expert_at, m.top ? Rows::bytes<K>(sorted, m.expert) : 0},
        {&start[4], 4 * s.rows * m.experts},
        {&start[5], 4 * sorted},
        {&start[6], 4 * sorted * m.hidden},
        {&start[7], 8 * sorted},
    };
    int64_t all = 0;
    for (const Part& part : parts) all += (part.bytes + 127) / 64 * 64;
    char* place = memory(0, all);
    for (const Part& part : parts) {
      *part.start = place;
      place += (part.bytes + 127) / 64 * 64;
    }
    x = reinterpret_cast<float*>(start[0]);
    wide = reinterpret_cast<float*>(start[1]);
    q = reinterpret_cast<Query*>(start[2]);
    own_keys = reinterpret_cast<T*>(start[3]);
    own_values = own_keys + shadows * m.kv_heads * m.size;
    logits = reinterpret_cast<float*>(start[4]);
    weights = reinterpret_cast<float*>(start[5]);
    expert_rows = reinterpret_cast<float*>(start[6]);
    chosen = reinterpret_cast<int64_t*>(start[7]);
  }

  Rows inputs(int64_t size, const ThreadTeam& team) const {
    char* place = inputs_at + (own_inputs ? team.thread * inputs_bytes : 0);
    return Rows::in<K>(place, s.rows, size);
  }
  Rows attended() const { return Rows::in<K>(attended_at, s.rows, m.mixed()); }
  Rows sorted_inputs(char* place, int64_t size) const {
    return Rows::in<K>(place, s.rows * m.top, size);
  }

  float factor(const float* row, int64_t size) const {
    Floats sum{};
    for (int64_t i = 0; i < size; i += LANES) {
      const Floats y = load(row + i);
      sum = fma(y, y, sum);
    }
    return 1 / std::sqrt(sum_of(sum) / size + static_cast<float>(m.eps));
  }

  void embed(Share rows) {
    for (int64_t r = rows.first; r < rows.last; r++) {
      const T* row = s.x ? static_cast<const T*>(s.x) + r * m.hidden
                         : static_cast<const T*>(m.embedding) + s.tokens[r] * m.hidden;
      for (int64_t i = 0; i < m.hidden; i += LANES) store(x + r * m.hidden + i, load(row + i));
    }
  }

  // The phases; each ends when all threads have. Plain inputs go straight where the next product
  // wants them; codes need the greatest number of a whole row first, and so `quantize`.
  void norm(const float* weight, ThreadTeam& team) {
    const Share rows = own_inputs ? Share(0, s.rows) : Share(s.rows, team.thread, team.threads);
    const Rows out = inputs(m.hidden, team);
    for (int64_t r = rows.first; r < rows.last; r++) {
      const float* row = x + r * m.hidden;
      put<K>(out, r, row, factor(row, m.hidden), weight, m.hidden);
    }
    if (!own_inputs) team.wait();
  }

  void quantize(int64_t size, ThreadTeam& team) {
    const Share rows = own_inputs ? Share(0, s.rows) : Share(s.rows, team.thread, team.threads);
    const Rows out = inputs(size, team);
    for (int64_t r = rows.first; r < rows.last; r++)
      put<K>(out, r, wide + r * size, 1, nullptr, size);
    if (!own_inputs) team.wait();
  }

  // `work(item)` for all items. Few rows: an even share for each thread, which has its own weights
  // near from the step before. More: whoever is ready takes the next one, as a core may be slower
  // than another.
  template <class Work>
  void parallel_for(int64_t items, ThreadTeam& team, Work work) {
    if (s.rows <= BAND) {
      const Share own(items, team.thread, team.threads);
      for (int64_t i = own.first; i < own.last; i++) work(i);
      return;
    }
    std::atomic<int64_t>& next = dealt[team.phase++];
    for (int64_t i; (i = next++) < items;) work(i);
  }

  // `work(rows, part)` for all parts of a weight, as many rows at a time as stay near.
  template <class Work>
  void over_rows(int64_t parts, const Rows& rows, ThreadTeam& team, Work work) {
    const int64_t many = s.rows <= BAND ? BAND : near(rows);
    parallel_for(parts * ((s.rows + many - 1) / many), team, [&](int64_t i) {
      const int64_t low = i / parts * many;
      work(Share(low, least(low + many, s.rows)), i % parts);
    });
  }

  // An item is a head, so that it can be turned at once.
  void qkv(const Layer& layer, ThreadTeam& team) {
    const int64_t panels = m.size / COLUMNS;
    const Rows rows = inputs(m.hidden, team);
    over_rows(m.heads + 2 * m.kv_heads, rows, team, [&](Share some, int64_t h) {
      const int64_t key = h - m.heads, value = key - m.kv_heads;
      product<K>(rows, some, layer.qkv, {h * panels, panels}, [&](int64_t r, float* head) {
        if (key < 0) {
          apply_rope(head, layer.q_norm, r, q + r * m.mixed() + h * m.size);
        } else if (value < 0) {
          apply_rope(head, layer.k_norm, r, kv_row(layer.keys, own_keys, key, r));
        } else {
          T* out = kv_row(layer.values, own_values, value, r);
          for (int64_t i = 0; i < m.size; i += LANES) store(out + i, load(head + i));
        }
      });
    });
    team.wait();
  }

  // Where a row's key or value goes; those of shadow rows are forgotten after the layer.
  T* kv_row(void* cache, T* own, int64_t head, int64_t row) const {
    if (row >= s.stored) return own + (head * (s.rows - s.stored) + row - s.stored) * m.size;
    return static_cast<T*>(cache) + (head * m.slots + s.slots[row]) * m.size;
  }

  // One head: normed where there is a weight, and turned by the row's position.
  template <class Out>
  void apply_rope(float* head, const float* weight, int64_t row, Out* out) const {
    if (weight) {
      const float by = factor(head, m.size);
      for (int64_t i = 0; i < m.size; i += LANES) store(head + i, scaled(head, by, weight, i));
    }
    const int64_t half = m.rotary / 2;
    const float *cos = s.cos + s.positions[row] * half, *sin = s.sin + s.positions[row] * half;
    for (int64_t i = 0; i < half; i += LANES) {
      const Floats left = load(head + i), right = load(head + half + i);
      const Floats c = load(cos + i), n = load(sin + i);
      store(out + i, left * c - right * n);
      store(out + half + i, right * c + left * n);
    }
    for (int64_t i = m.rotary; i < m.size; i += LANES) store(out + i, load(head + i));
  }

  void attention(const Layer& layer, ThreadTeam& team) {
    const Heads<T, Query> heads{q,
                                static_cast<const T*>(layer.keys),
                                static_cast<const T*>(layer.values),
                                own_keys,
                                own_values,
                                m.slots,
                                m.heads,
                                m.kv_heads,
                                m.size,
                                s.stored,
                                s.rows - s.stored};
    Attention a(workspaces + team.thread * workspace_bytes, m.size);
    const Rows out = attended();
    std::atomic<int64_t>& next = dealt[team.phase++];
    for (int64_t t; (t = next++) < static_cast<int64_t>(tasks.size());)
      attend(a, heads, s.spans[tasks[t].span], s.seen, tasks[t],
             [&](int64_t row, int64_t channel, Floats y) {
               if constexpr (K::CODES)
                 store(wide + row * m.mixed() + channel, y);
               else
                 store(out.at<K>(row, channel), y);
             });
    team.wait();
  }

  void add(const Linear& w, const Rows& rows, ThreadTeam& team) {
    over_rows(w.panels, rows, team, [&](Share some, int64_t p) {
      product<K>(rows, some, w, {p}, [&](int64_t r, const float* y) {
        float* place = x + r * m.hidden + p * COLUMNS;
        const int64_t stop = least(COLUMNS, m.hidden - p * COLUMNS);
        for (int64_t i = 0; i < stop; i += LANES) store(place + i, load(place + i) + load(y + i));
      });
    });
    team.wait();
  }

  // silu(gate) * up, LANES numbers to `write(channel, ...)`.
  template <class Write>
  static void silu_and_mul(const float* y, int64_t panel, Write write) {
    for (int i = 0; i < COLUMNS; i += LANES)
      write(panel * COLUMNS + i, silu(load(y + i)) * load(y + COLUMNS + i));
  }

  void mlp(const Linear& gate_up, const Linear& down, int64_t size, ThreadTeam& team) {
    const Rows rows = inputs(m.hidden, team), gated = Rows::in<K>(gated_at, s.rows, size);
    const int64_t panels = gate_up.panels / 2;
    over_rows(panels, rows, team, [&](Share some, int64_t p) {
      product<K>(rows, some, gate_up, {p, 2, panels}, [&](int64_t r, const float* y) {
        silu_and_mul(y, p, [&](int64_t channel, Floats both) {
          if constexpr (K::CODES)
            store(wide + r * size + channel, both);
          else
            store(gated.at<K>(r, channel), both);
        });
      });
    });
    team.wait();
    if (K::CODES) quantize(size, team);
    add(down, K::CODES ? inputs(size, team) : gated, team);
  }

  // The rows of this thread through the router.
  void choose_experts(const Layer& layer, Share rows) {
    const Mixture& mix = *layer.mixture;
    const Rows routed = Rows::in<Float32>(routed_at, s.rows, m.hidden);
    for (int64_t r = rows.first; r < rows.last; r++) {
      const float* row = x + r * m.hidden;
      put<Float32>(routed, r, row, factor(row, m.hidden), layer.mlp_norm, m.hidden);
    }
    for (int64_t p = 0; p < mix.router.panels; p++)
      product<Float32>(routed, rows, mix.router, {p}, [&](int64_t r, const float* y) {
        const int64_t count = least(COLUMNS, mix.experts - p * COLUMNS);
        memcpy(logits + r * mix.experts + p * COLUMNS, y, 4 * count);
      });
    for (int64_t r = rows.first; r < rows.last; r++)
      route(mix, logits + r * mix.experts, chosen + r * mix.top, weights + r * mix.top);
  }

  // Sorted rows of one expert after the other times a part of its weight; then all wait.
  template <class Write>
  void expert_product(const Sorted& sorted, const Rows& rows, const Linear* w, int64_t parts,
                      int64_t side_by_side, ThreadTeam& team, Write write) {
    const int64_t runs = sorted.runs.size();
    parallel_for(runs * parts, team, [&](int64_t i) {
      const Sorted::Run& run = sorted.runs[i / parts];
      const int64_t p = i % parts;
      product<K>(rows, Share(run.first, run.last), w[run.expert], {p, side_by_side, parts},
                 [&](int64_t place, const float* y) { write(place, p, y); });
    });
    team.wait();
  }

  void mixture(const Layer& layer, Sorted& sorted, ThreadTeam& team) {
    const Mixture& mix = *layer.mixture;
    const Share rows(s.rows, team.thread, team.threads);
    choose_experts(layer, rows);
    team.wait();
    sorted.sort(chosen, s.rows * mix.top, mix.experts);
    const Rows from = inputs(m.hidden, team), in = sorted_inputs(sorted_at, m.hidden);
    const Rows gated = sorted_inputs(expert_at, mix.intermediate);
    const Share places(s.rows * mix.top, team.thread, team.threads);
    for (int64_t i = places.first; i < places.last; i++)
      copy_row<K>(from, sorted.order[i] / mix.top, in, i, m.hidden);
    team.wait();
    // The sorted rows are a copy: the shared expert may overwrite the inputs.
    if (mix.shared) mlp(mix.shared_gate_up, mix.shared_down, mix.shared, team);
    const int64_t size = mix.intermediate;
    auto store_gated = [&](int64_t place, int64_t p, const float* y) {
      silu_and_mul(y, p, [&](int64_t channel, Floats both) {
        if constexpr (K::CODES)
          store(wide + place * size + channel, both);
        else
          store(gated.at<K>(place, channel), both);
      });
    };
    expert_product(sorted, in, mix.gate_up, size / COLUMNS, 2, team, store_gated);
    if (K::CODES) {
      for (int64_t i = places.first; i < places.last; i++)
        put<K>(gated, i, wide + i * size, 1, nullptr, size);
      team.wait();
    }
    expert_product(sorted, gated, mix.down, mix.down->panels, 1, team,
                   [&](int64_t place, int64_t p, const float* y) {
                     memcpy(expert_rows + place * m.hidden + p * COLUMNS, y, 4 * COLUMNS);
                   });
    for (int64_t r = rows.first; r < rows.last; r++)
      for (int64_t k = 0; k < mix.top; k++) {
        const float* row = expert_rows + sorted.place[r * mix.top + k] * m.hidden;
        const Floats weight = all(weights[r * mix.top + k]);
        for (int64_t i = 0; i < m.hidden; i += LANES)
          store(x + r * m.hidden + i, fma(weight, load(row + i), load(x + r * m.hidden + i)));
      }
    if (own_inputs) team.wait();
  }
};
