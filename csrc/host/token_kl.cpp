#include "host/token_kl.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "common/token_kl_call.h"
#include "host/dlpack.h"
#include "host/expect.h"
#include "host/python_objects.h"

namespace py = pybind11;

namespace fusedrl {
namespace {

using dlpack::Dtype;
using dlpack::Tensor;

constexpr Dtype kInt64{0, 64, 1}, kBool{6, 8, 1};

bool equal(const Dtype& one, const Dtype& other) {
  return one.code == other.code && one.bits == other.bits && one.lanes == other.lanes;
}

// The dtype of kernels; nothing for another one.
std::optional<TokenDtype> token_dtype(const Dtype& dtype) {
  constexpr std::pair<Dtype, TokenDtype> kinds[] = {{{2, 32, 1}, TokenDtype::float32},
                                                    {{4, 16, 1}, TokenDtype::bfloat16},
                                                    {{2, 16, 1}, TokenDtype::float16},
                                                    {{2, 64, 1}, TokenDtype::float64}};
  for (const auto& [kind, kernel_dtype] : kinds) {
    if (equal(kind, dtype)) return kernel_dtype;
  }
  return std::nullopt;
}

int64_t bytes_of(TokenDtype dtype) {
  if (dtype == TokenDtype::float32) return 4;
  return dtype == TokenDtype::float64 ? 8 : 2;
}

int64_t elements(const Tensor& tensor) {
  int64_t count = 1;
  for (int32_t d = 0; d < tensor.ndim; ++d) count *= tensor.shape[d];
  return count;
}

bool is_contiguous(const Tensor& tensor) {
  int64_t inside = 1;
  for (int32_t d = tensor.ndim - 1; tensor.strides != nullptr && d >= 0; --d) {
    if (tensor.shape[d] > 1 && tensor.strides[d] != inside) return false;
    inside *= tensor.shape[d];
  }
  return true;
}

void* address(const Tensor& tensor) { return static_cast<char*>(tensor.data) + tensor.byte_offset; }

// Calls the kernels of token_kl with what their op in Python has checked: the coefficient, the
// estimator's number, and whether NaN is missing. None comes back, and nothing is computed, unless
// the columns fit each other and a kernel can read them where they lie.
class TokenKL {
 public:
  TokenKL(py::object tensor, const py::capsule& functions, py::object empty_like, size_t kernel)
      : tensor_(std::move(tensor)),
        functions_(functions.get_pointer<dlpack::ExchangeFunctions>()),
        empty_like_(std::move(empty_like)),
        kernel_(reinterpret_cast<TokenKLFunction*>(kernel)) {}

  // The KL, and the penalised reward or None.
  py::object forward(const py::object& log_probs, const py::object& ref_log_probs,
                     const py::object& mask, const py::object& offsets, const py::object& reward,
                     double coeff, int64_t estimator, bool nan_missing) const {
    auto call = call_over(log_probs, ref_log_probs, mask, reward, py::none());
    if (!call || !(offsets.is_none() || partition(offsets, *call))) return py::none();
    const py::object kl = made_like(log_probs, call->out);
    const py::object penalised =
        reward.is_none() ? py::none() : made_like(log_probs, call->penalised);
    if (!kl || !penalised) return py::none();
    run(*call, coeff, estimator, nan_missing);
    return py::make_tuple(kl, penalised);
  }

  // The same of samples: both packed, and the lengths. Their log-probs are [T] and their rewards,
  // unless they are None, [T, 1]. With `is_recorded`, none of them may require a gradient.
  py::object forward_samples(const py::list& log_probs, const py::list& ref_log_probs,
                             const py::object& reward, double coeff, int64_t estimator,
                             bool nan_missing, bool is_recorded) const {
    const size_t count = log_probs.size();
    const bool has_rewards = !reward.is_none();
    const py::list rewards = has_rewards ? py::list(reward) : py::list();
    if (count == 0 || ref_log_probs.size() != count || (has_rewards && rewards.size() != count)) {
      return py::none();
    }
    for (const py::list* column : {&log_probs, &ref_log_probs, &rewards}) {
      for (const py::handle value : *column) {
        if (is_exactly(value, tensor_)) expect_tensor(value.ptr());
      }
    }
    std::vector<TokenKLCall> calls;
    py::list lengths(count);
    int64_t tokens = 0;
    for (size_t s = 0; s < count; ++s) {
      const py::object p = log_probs[s], q = ref_log_probs[s];
      const py::object r = has_rewards ? py::object(rewards[s]) : py::none();
      const auto call = call_over(p, q, py::none(), r, py::none(), true);
      if (!call || (s > 0 && call->dtype != calls[0].dtype)) return py::none();
      if (is_recorded &&
          (requires_grad(p) || requires_grad(q) || (has_rewards && requires_grad(r)))) {
        return py::none();
      }
      calls.push_back(*call);
      lengths[s] = py::int_(call->tokens);
      tokens += call->tokens;
    }
    const py::object make = log_probs[0].attr("new_empty");
    TokenKLCall packed = calls[0];
    const py::object kl = plain(make(tokens), packed.out);
    const py::object penalised = has_rewards ? plain(make(tokens), packed.penalised) : py::none();
    if (!kl || !penalised) return py::none();
    const int64_t size = bytes_of(packed.dtype);
    for (TokenKLCall& call : calls) {
      call.out = packed.out;
      call.penalised = packed.penalised;
      run(call, coeff, estimator, nan_missing);
      packed.out = static_cast<char*>(packed.out) + call.tokens * size;
      if (has_rewards) packed.penalised = static_cast<char*>(packed.penalised) + call.tokens * size;
    }
    return py::make_tuple(kl, penalised, lengths);
  }

  // The gradient of the log-probs, by those of the KL and of the penalised reward, either of which
  // may be None.
  py::object backward(const py::object& grad_kl, const py::object& grad_reward,
                      const py::object& log_probs, const py::object& ref_log_probs,
                      const py::object& mask, double coeff, int64_t estimator,
                      bool nan_missing) const {
    auto call = call_over(log_probs, ref_log_probs, mask, grad_reward, grad_kl);
    if (!call) return py::none();
    call->is_backward = true;
    py::object grad = made_like(log_probs, call->out);
    if (!grad) return py::none();
    run(*call, coeff, estimator, nan_missing);
    return grad;
  }

 private:
  std::optional<TokenKLCall> call_over(const py::object& log_probs, const py::object& ref_log_probs,
                                       const py::object& mask, const py::object& reward,
                                       const py::object& grad_kl, bool of_sample = false) const {
    const auto like = read(log_probs);
    const auto dtype = like ? token_dtype(like->dtype) : std::nullopt;
    if (!dtype || ref_log_probs.is_none() || (of_sample && like->ndim != 1)) return std::nullopt;
    TokenKLCall call{};
    call.log_probs = address(*like);
    call.tokens = elements(*like);
    call.dtype = *dtype;
    const auto add = [&](const py::object& column, const Dtype& expected, const void*& memory,
                         bool is_trailing_one = false) {
      if (column.is_none()) return true;
      const auto facts = read(column);
      if (!facts || !equal(facts->dtype, expected)) return false;
      if (facts->ndim != like->ndim + is_trailing_one) return false;
      if (is_trailing_one && facts->shape[like->ndim] != 1) return false;
      memory = address(*facts);
      return std::equal(like->shape, like->shape + like->ndim, facts->shape);
    };
    const bool fit =
        add(ref_log_probs, like->dtype, call.ref_log_probs) && add(mask, kBool, call.mask) &&
        add(reward, like->dtype, call.reward, of_sample) && add(grad_kl, like->dtype, call.grad_kl);
    return fit ? std::optional(call) : std::nullopt;
  }

  // Whether offsets partition the tokens; not where there are as many sequences as tokens, as the
  // op has to see which of them a reward is of.
  bool partition(const py::object& offsets, const TokenKLCall& call) const {
    const auto facts = read(offsets);
    if (!facts || !equal(facts->dtype, kInt64) || facts->ndim != 1) return false;
    const auto* bounds = static_cast<const int64_t*>(address(*facts));
    const int64_t count = facts->shape[0];
    if (count < 1 || count - 1 == call.tokens) return false;
    return bounds[0] == 0 && bounds[count - 1] == call.tokens &&
           std::is_sorted(bounds, bounds + count);
  }

  // Contiguous memory of the CPU; nothing for a tensor that is more than that: of another class,
  // negated lazily, without memory.
  std::optional<Tensor> read(const py::object& value) const {
    Tensor facts;
    if (!is_exactly(value, tensor_) || is_negated(value) || !describe(value, facts)) {
      return std::nullopt;
    }
    if (facts.device.type != dlpack::kCpu || !is_contiguous(facts)) return std::nullopt;
    if (facts.data == nullptr && elements(facts) != 0) return std::nullopt;
    return facts;
  }

  bool is_negated(const py::object& value) const {
    return checked(PyObject_CallMethodNoArgs(value.ptr(), is_neg_.ptr())).ptr() != Py_False;
  }

  bool describe(const py::object& value, Tensor& facts) const {
    if (functions_->major != 1) return false;
    if (functions_->tensor_of(value.ptr(), &facts) == 0) return true;
    PyErr_Clear();
    return false;
  }

  // What torch has made, and its memory; null where a mode made something else.
  py::object plain(py::object made, void*& memory) const {
    Tensor facts;
    if (!is_exactly(made, tensor_) || !describe(made, facts)) return py::object();
    memory = address(facts);
    return made;
  }

  py::object made_like(const py::object& tensor, void*& memory) const {
    PyObject* const argument = tensor.ptr();
    return plain(checked(PyObject_Vectorcall(empty_like_.ptr(), &argument, 1, nullptr)), memory);
  }

  bool requires_grad(const py::object& tensor) const { return is_true(tensor, requires_grad_); }

  // Other threads of Python may run meanwhile, unless it ends sooner than they could start.
  void run(TokenKLCall& call, double coeff, int64_t estimator, bool nan_missing) const {
    constexpr int64_t kSoon = 8192;
    call.coeff = coeff;
    call.estimator = estimator;
    call.nan_missing = nan_missing;
    std::optional<py::gil_scoped_release> released;
    if (call.tokens >= kSoon) released.emplace();
    kernel_(call);
  }

  py::object tensor_;
  const dlpack::ExchangeFunctions* functions_;
  py::object empty_like_;
  TokenKLFunction* kernel_;
  py::object is_neg_ = interned("is_neg"), requires_grad_ = interned("requires_grad");
};

}  // namespace

void bind_token_kl(py::module_& m) {
  py::class_<TokenKL>(m, "TokenKL", "token_kl of columns where they lie on the CPU.")
      .def(py::init<py::object, const py::capsule&, py::object, size_t>(), py::arg("tensor"),
           py::arg("functions"), py::arg("empty_like"), py::arg("kernel"))
      .def("forward", &TokenKL::forward, py::arg("log_probs"), py::arg("ref_log_probs"),
           py::arg("mask"), py::arg("offsets"), py::arg("reward"), py::arg("coeff"),
           py::arg("estimator"), py::arg("nan_missing"),
           "The KL, and the penalised reward or None; None where a kernel cannot read the columns.")
      .def("forward_samples", &TokenKL::forward_samples, py::arg("log_probs"),
           py::arg("ref_log_probs"), py::arg("reward"), py::arg("coeff"), py::arg("estimator"),
           py::arg("nan_missing"), py::arg("is_recorded"),
           "The packed KL and penalised reward of samples, and their lengths; None as above.")
      .def("backward", &TokenKL::backward, py::arg("grad_kl"), py::arg("grad_reward"),
           py::arg("log_probs"), py::arg("ref_log_probs"), py::arg("mask"), py::arg("coeff"),
           py::arg("estimator"), py::arg("nan_missing"),
           "The gradient of the log-probs; None where a kernel cannot read the columns.");
}

}  // namespace fusedrl
