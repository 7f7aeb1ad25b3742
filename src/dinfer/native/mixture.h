// Mixture-of-experts layers (nn/moe.py): which experts a row runs through, and how its rows are
// sorted by expert.
#pragma once
#include <algorithm>
#include <vector>

#include "product.h"

struct Mixture {                 // as in engine/dense.py
  Linear router;                 // float32
  const Linear *gate_up, *down;  // of each expert
  Linear shared_gate_up, shared_down;
  const float* bias;                           // sigmoid: [experts] or null
  int64_t experts, top, intermediate, shared;  // shared: intermediate size of that expert, or 0
  int64_t groups, kept;                        // sigmoid; groups is 0 for a softmax
  int64_t normalised;                          // softmax: the weights are made to sum to 1
  double scale;                                // sigmoid
};

// The `top` greatest of `scores`, the earlier one of equals, in falling order.
inline void choose(const float* scores, int64_t count, int64_t top, int64_t* chosen) {
  for (int64_t k = 0; k < top; k++) {
    int64_t best = -1;
    for (int64_t i = 0; i < count; i++) {
      if (best >= 0 && !(scores[i] > scores[best])) continue;
      if (std::find(chosen, chosen + k, i) == chosen + k) best = i;
    }
    chosen[k] = best < 0 ? 0 : best;
  }
}

// The `top` largest of a softmax over all experts.
inline void route_softmax(const Mixture& m, float* logits, int64_t* chosen, float* weights) {
  choose(logits, m.experts, m.top, chosen);
  const float most = logits[chosen[0]];
  float sum = 0, taken = 0;
  for (int64_t i = 0; i < m.experts; i++) sum += std::exp(logits[i] - most);
  for (int64_t k = 0; k < m.top; k++) {
    weights[k] = std::exp(logits[chosen[k]] - most) / sum;
    taken += weights[k];
  }
  for (int64_t k = 0; m.normalised && k < m.top; k++) weights[k] /= taken;
}

// DeepSeek-V3's rule (arXiv 2412.19437, section 2.1.2): see GroupedSigmoid in nn/moe.py.
inline void route_sigmoid(const Mixture& m, float* logits, int64_t* chosen, float* weights) {
  const int64_t each = m.experts / m.groups;
  std::vector<float> ranked(m.experts), group(m.groups);
  std::vector<int64_t> best(m.kept);
  for (int64_t i = 0; i < m.experts; i++) {
    logits[i] = 1 / (1 + std::exp(-logits[i]));
    ranked[i] = logits[i] + (m.bias ? m.bias[i] : 0);
  }
  for (int64_t g = 0; g < m.groups; g++) {  // as much as its two best experts
    int64_t two[2];
    choose(ranked.data() + g * each, each, each < 2 ? 1 : 2, two);
    group[g] = ranked[g * each + two[0]] + (each < 2 ? 0 : ranked[g * each + two[1]]);
  }
  choose(group.data(), m.groups, m.kept, best.data());
  for (int64_t g = 0; g < m.groups; g++)
    if (std::find(best.begin(), best.end(), g) == best.end())
      std::fill_n(ranked.begin() + g * each, each, -INFINITY);
  choose(ranked.data(), m.experts, m.top, chosen);
  float sum = 1e-20f;
  for (int64_t k = 0; k < m.top; k++) sum += weights[k] = logits[chosen[k]];
  for (int64_t k = 0; k < m.top; k++) weights[k] = weights[k] / sum * static_cast<float>(m.scale);
}

inline void route(const Mixture& m, float* logits, int64_t* chosen, float* weights) {
  m.groups ? route_sigmoid(m, logits, chosen, weights) : route_softmax(m, logits, chosen, weights);
}

// Choices (row, k), numbered row * top + k, sorted by expert.
struct Sorted {
  struct Run {  // of one expert: places first..last in the order
    int64_t expert, first, last;
  };
  std::vector<int64_t> order, place;  // choice at a place, and place of a choice
  std::vector<Run> runs;              // of the experts that have rows

  void sort(const int64_t* chosen, int64_t count, int64_t experts) {
    std::vector<int64_t> next(experts + 1);
    for (int64_t i = 0; i < count; i++) next[chosen[i] + 1]++;
    runs.clear();
    for (int64_t e = 0; e < experts; e++) {
      next[e + 1] += next[e];
      if (next[e + 1] > next[e]) runs.push_back({e, next[e], next[e + 1]});
    }
    order.resize(count);
    place.resize(count);
    for (int64_t i = 0; i < count; i++) {
      place[i] = next[chosen[i]]++;
      order[place[i]] = i;
    }
  }
};
