#include "host/token_columns.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "host/tensor_reader.h"
#include "token_kl/sample_memory.h"

namespace fusedrl {
namespace {

using dlpack::Tensor;

// Offsets that partition so many tokens.
struct Bounds {
  const int64_t* first;
  int64_t sequences;

  static std::optional<Bounds> of(const Tensor& offsets, int64_t tokens) {
    const bool is_int64 = offsets.dtype.code == 0 && offsets.dtype.bits == 64;
    if (!is_int64 || offsets.dtype.lanes != 1 || offsets.ndim != 1 || offsets.shape[0] < 1) {
      return std::nullopt;
    }
    const auto* first = static_cast<const int64_t*>(TensorReader::address(offsets));
    const int64_t count = offsets.shape[0];
    if (first[0] != 0 || first[count - 1] != tokens) return std::nullopt;
    if (!std::is_sorted(first, first + count)) return std::nullopt;
    return Bounds{first, count - 1};
  }
};

int64_t bytes_of(SampleDtype dtype) {
  switch (dtype) {
    case SampleDtype::float32:
      return 4;
    case SampleDtype::float64:
      return 8;
    default:
      return 2;
  }
}

const void* behind(const void* memory, int64_t bytes) {
  return memory == nullptr ? nullptr : static_cast<const char*>(memory) + bytes;
}

// The sequences of columns, each with one reward of those at the columns'.
std::vector<SampleMemory> one_a_sequence(const SampleMemory& columns, const Bounds& bounds,
                                         SampleDtype dtype) {
  const int64_t size = bytes_of(dtype);
  std::vector<SampleMemory> sequences;
  sequences.reserve(bounds.sequences);
  for (int64_t s = 0; s < bounds.sequences; ++s) {
    const int64_t first = bounds.first[s];
    sequences.push_back({behind(columns.log_probs, first * size),
                         behind(columns.ref_log_probs, first * size), behind(columns.mask, first),
                         behind(columns.reward, s * size), bounds.first[s + 1] - first, 1});
  }
  return sequences;
}

// Calls a kernel while other threads of Python may run, unless it ends sooner than they could
// start.
template <typename F>
bool without_gil(int64_t tokens, const F& kernel) {
  constexpr int64_t kSoon = 8192;
  if (tokens < kSoon) return kernel();
  PyThreadState* const state = PyEval_SaveThread();
  const bool done = kernel();
  PyEval_RestoreThread(state);
  return done;
}

// The kernels of token_kl, which are called with what their op in Python has checked: the
// coefficient, the estimator's number, and whether NaN is missing.
class TokenColumns {
 public:
  TokenColumns(py::object tensor, const py::capsule& functions, py::object empty_like,
               size_t forward, size_t backward)
      : reader_(std::move(tensor), functions, true),
        empty_like_(std::move(empty_like)),
        forward_(reinterpret_cast<TokenKLKernel*>(forward)),
        backward_(reinterpret_cast<TokenKLGradientKernel*>(backward)) {}

  // The KL, and the penalised reward or None. None alone unless the columns fit each other and a
  // kernel can read them where they lie.
  py::object forward(const py::object& log_probs, const py::object& ref_log_probs,
                     const py::object& mask, const py::object& offsets, const py::object& reward,
                     double coeff, int64_t estimator, bool nan_missing) const {
    const auto policy = reader_.read(log_probs);
    if (!policy) return py::none();
    const auto dtype = dtype_of(*policy);
    auto columns = pairs(*policy, dtype, ref_log_probs, mask);
    if (!columns) return py::none();
    std::optional<Bounds> bounds;
    if (!offsets.is_none()) {
      const auto given = reader_.read(offsets);
      if (given && policy->ndim == 1) bounds = Bounds::of(*given, columns->tokens);
      if (!bounds) return py::none();
    }
    std::vector<SampleMemory> sequences;
    if (!reward.is_none()) {
      const auto values = reader_.read(reward);
      if (!values || dtype_of(*values) != dtype) return py::none();
      columns->reward = TensorReader::address(*values);
      columns->rewards = columns->tokens;
      if (!same_shape(*values, *policy)) {
        if (!bounds || values->ndim != 1 || values->shape[0] != bounds->sequences) {
          return py::none();
        }
        sequences = one_a_sequence(*columns, *bounds, *dtype);
      } else if (bounds && bounds->sequences == columns->tokens) {
        return py::none();  // as many sequences as tokens: the op sees which of them it is of
      }
    }
    const py::object kl = empty_like(log_probs);
    const py::object penalised = reward.is_none() ? py::none() : empty_like(log_probs);
    void *out, *after = nullptr;
    if (!reader_.is_made(kl, out)) return py::none();
    if (!reward.is_none() && !reader_.is_made(penalised, after)) return py::none();
    const bool is_one = sequences.empty();
    const bool done = without_gil(columns->tokens, [&] {
      return forward_(is_one ? &*columns : sequences.data(),
                      is_one ? 1 : static_cast<int64_t>(sequences.size()),
                      static_cast<int64_t>(*dtype), coeff, estimator, nan_missing, out, after);
    });
    return done ? py::object(py::make_tuple(kl, penalised)) : py::none();
  }

  // The gradient of the log-probs, by those of the KL and of the penalised reward, either of which
  // may be None; None as above.
  py::object backward(const py::object& grad_kl, const py::object& grad_reward,
                      const py::object& log_probs, const py::object& ref_log_probs,
                      const py::object& mask, double coeff, int64_t estimator,
                      bool nan_missing) const {
    const auto policy = reader_.read(log_probs);
    if (!policy) return py::none();
    const auto dtype = dtype_of(*policy);
    const auto columns = pairs(*policy, dtype, ref_log_probs, mask);
    if (!columns) return py::none();
    TokenKLUpstream upstream{};
    const auto read = [&](const py::object& given, const void*& memory) {
      if (given.is_none()) return true;
      const auto values = reader_.read(given);
      if (!values || dtype_of(*values) != dtype || !same_shape(*values, *policy)) return false;
      memory = TensorReader::address(*values);
      return true;
    };
    if (!read(grad_kl, upstream.kl) || !read(grad_reward, upstream.reward)) return py::none();
    const py::object grad = empty_like(log_probs);
    void* out;
    if (!reader_.is_made(grad, out)) return py::none();
    const bool done = without_gil(columns->tokens, [&] {
      return backward_(&*columns, upstream, static_cast<int64_t>(*dtype), coeff, estimator,
                       nan_missing, out);
    });
    return done ? grad : py::none();
  }

 private:
  // Both log-probs and the mask, without rewards.
  std::optional<SampleMemory> pairs(const Tensor& policy, std::optional<SampleDtype> dtype,
                                    const py::object& ref_log_probs, const py::object& mask) const {
    const auto reference = reader_.read(ref_log_probs);
    if (!dtype || !reference || dtype_of(*reference) != dtype) return std::nullopt;
    if (!same_shape(policy, *reference)) return std::nullopt;
    SampleMemory found{};
    found.log_probs = TensorReader::address(policy);
    found.ref_log_probs = TensorReader::address(*reference);
    found.tokens = elements(policy);
    if (!mask.is_none()) {
      const auto kept = reader_.read(mask);
      if (!kept || !is_bool(*kept) || !same_shape(*kept, policy)) return std::nullopt;
      found.mask = TensorReader::address(*kept);
    }
    return found;
  }

  py::object empty_like(const py::object& tensor) const {
    PyObject* const argument = tensor.ptr();
    return checked(PyObject_Vectorcall(empty_like_.ptr(), &argument, 1, nullptr));
  }

  TensorReader reader_;
  py::object empty_like_;
  TokenKLKernel* forward_;
  TokenKLGradientKernel* backward_;
};

}  // namespace

void bind_token_columns(py::module_& m) {
  py::class_<TokenColumns>(m, "TokenColumns", "token_kl of columns where they lie on the CPU.")
      .def(py::init<py::object, const py::capsule&, py::object, size_t, size_t>(),
           py::arg("tensor"), py::arg("functions"), py::arg("empty_like"), py::arg("forward"),
           py::arg("backward"))
      .def("forward", &TokenColumns::forward, py::arg("log_probs"), py::arg("ref_log_probs"),
           py::arg("mask"), py::arg("offsets"), py::arg("reward"), py::arg("coeff"),
           py::arg("estimator"), py::arg("nan_missing"),
           "The KL, and the penalised reward or None; None where a kernel cannot read the columns.")
      .def("backward", &TokenColumns::backward, py::arg("grad_kl"), py::arg("grad_reward"),
           py::arg("log_probs"), py::arg("ref_log_probs"), py::arg("mask"), py::arg("coeff"),
           py::arg("estimator"), py::arg("nan_missing"),
           "The gradient of the log-probs; None where a kernel cannot read the columns.");
}

}  // namespace fusedrl
