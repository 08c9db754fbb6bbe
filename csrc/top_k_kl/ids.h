// The classes of each token that are looked at one by one.
#pragma once

#include <algorithm>
#include <vector>

#include "common/check.h"
#include "common/tensor.h"

namespace fusedrl {

// [..., k] integers; those below 0 are no classes.
struct Ids {
  const int64_t* all;
  int64_t k, columns;  // ids of a token; tokens of a padded row, 0 of packed ones

  explicit Ids(const Tensor& ids)
      : all(data<int64_t>(ids)),
        k(ids.size(ids.dim() - 1)),
        columns(ids.dim() == 3 ? ids.size(1) : 0) {}

  const int64_t* of(int64_t token) const { return all + token * k; }

  // Calls f(j, place) for every id of a token that is one of `count` classes from `first` on.
  template <typename F>
  void for_each_in(int64_t token, int64_t first, int64_t count, F&& f) const {
    const int64_t* ids = of(token);
    for (int64_t j = 0; j < k; ++j) {
      const int64_t place = ids[j] - first;
      if (ids[j] >= 0 && place >= 0 && place < count) f(j, place);
    }
  }

  void check_of(const std::vector<int64_t>& tokens, int64_t classes) const {
    std::vector<bool> seen(classes, false);
    for (const int64_t n : tokens) {
      const int64_t* ids = of(n);
      for (int64_t j = 0; j < k; ++j) {
        if (ids[j] < 0) continue;
        if (ids[j] >= classes) {
          check(false, "ids: expected values below ", classes, ", got ", ids[j], " at ",
                place_of(n, columns), "; mask the token, or set the id to -1");
        }
        if (seen[ids[j]]) {
          check(false, "ids: expected every class at most once a token, got ", ids[j], " twice at ",
                place_of(n, columns), "; set one of them to -1");
        }
        seen[ids[j]] = true;
      }
      for_each_in(n, 0, classes, [&](int64_t, int64_t v) { seen[v] = false; });
    }
  }
};

// The ids of one token in the order of their classes, for a row that is seen in many parts: each
// finds its own without a look at all k.
class OrderedIds {
 public:
  OrderedIds(const Ids& ids, int64_t token, int64_t classes) {
    in_order_.reserve(ids.k);
    ids.for_each_in(token, 0, classes,
                    [&](int64_t j, int64_t id) { in_order_.push_back({id, j}); });
    std::sort(in_order_.begin(), in_order_.end(), [](Id x, Id y) { return x.id < y.id; });
  }

  // Calls f(j, place) for every id that is one of `count` classes from `first` on.
  template <typename F>
  void for_each_in(int64_t first, int64_t count, F&& f) const {
    auto next = std::lower_bound(in_order_.begin(), in_order_.end(), first,
                                 [](Id x, int64_t id) { return x.id < id; });
    for (; next != in_order_.end() && next->id < first + count; ++next) {
      f(next->j, next->id - first);
    }
  }

 private:
  struct Id {
    int64_t id, j;
  };
  std::vector<Id> in_order_;
};

}  // namespace fusedrl
