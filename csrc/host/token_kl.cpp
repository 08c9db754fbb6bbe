#include "host/token_kl.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "common/token_kl_call.h"
#include "host/dlpack.h"
#include "host/python_objects.h"

namespace py = pybind11;

namespace fusedrl {
namespace {

using dlpack::Dtype;
using dlpack::Tensor;

bool equal(const Dtype& one, const Dtype& other) {
  return one.code == other.code && one.bits == other.bits && one.lanes == other.lanes;
}

// The kernels' dtype, if they support this one.
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

// Calls the kernels of token_kl on each sample of a batch, without packing the inputs.
class TokenKL {
 public:
  TokenKL(py::object tensor, const py::capsule& functions, size_t kernel)
      : tensor_(std::move(tensor)),
        functions_(functions.get_pointer<dlpack::ExchangeFunctions>()),
        kernel_(reinterpret_cast<TokenKLFunction*>(kernel)) {}

  // The packed k1, where NaN means missing, the packed penalised reward or None, and the lengths.
  // Log-probs are [T], rewards [T, 1] or None; the coefficient has been checked. Returns None,
  // without computing, if the samples do not fit each other, a kernel cannot read them in place, or
  // `is_recorded` is set and one of them requires a gradient.
  py::object forward_samples(const py::list& log_probs, const py::list& ref_log_probs,
                             const py::object& reward, double coeff, bool is_recorded) const {
    const size_t count = log_probs.size();
    const bool has_rewards = !reward.is_none();
    const py::list rewards = has_rewards ? py::list(reward) : py::list();
    if (count == 0 || ref_log_probs.size() != count || (has_rewards && rewards.size() != count)) {
      return py::none();
    }
    std::vector<TokenKLCall> calls;
    py::list lengths(count);
    int64_t tokens = 0;
    for (size_t s = 0; s < count; ++s) {
      const py::object p = log_probs[s], q = ref_log_probs[s];
      const py::object r = has_rewards ? py::object(rewards[s]) : py::none();
      const auto call = call_over(p, q, r);
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
      call.coeff = coeff;
      run(call);
      packed.out = static_cast<char*>(packed.out) + call.tokens * size;
      if (has_rewards) packed.penalised = static_cast<char*>(packed.penalised) + call.tokens * size;
    }
    return py::make_tuple(kl, penalised, lengths);
  }

 private:
  // The call for one sample, with the estimator k1.
  std::optional<TokenKLCall> call_over(const py::object& log_probs, const py::object& ref_log_probs,
                                       const py::object& reward) const {
    const auto policy = read(log_probs), reference = read(ref_log_probs);
    if (!policy || !reference || !token_dtype(policy->dtype)) return std::nullopt;
    const auto fits = [&](const Tensor& column, int32_t ndim) {
      return equal(column.dtype, policy->dtype) && column.ndim == ndim &&
             column.shape[0] == policy->shape[0];
    };
    if (!fits(*policy, 1) || !fits(*reference, 1)) return std::nullopt;
    TokenKLCall call{};
    call.log_probs = address(*policy);
    call.ref_log_probs = address(*reference);
    call.tokens = policy->shape[0];
    call.dtype = *token_dtype(policy->dtype);
    call.nan_missing = true;
    if (reward.is_none()) return call;
    const auto before = read(reward);
    if (!before || !fits(*before, 2) || before->shape[1] != 1) return std::nullopt;
    call.reward = address(*before);
    return call;
  }

  // A contiguous CPU tensor; nothing for other classes, lazy negation or missing memory.
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

  // A new tensor and its memory; null if a mode has made something else.
  py::object plain(py::object made, void*& memory) const {
    Tensor facts;
    if (!is_exactly(made, tensor_) || !describe(made, facts)) return py::object();
    memory = address(facts);
    return made;
  }

  bool requires_grad(const py::object& tensor) const { return is_true(tensor, requires_grad_); }

  // Releases the GIL, unless the kernel is faster than other threads could start.
  void run(const TokenKLCall& call) const {
    constexpr int64_t kSoon = 8192;
    std::optional<py::gil_scoped_release> released;
    if (call.tokens >= kSoon) released.emplace();
    kernel_(call);
  }

  py::object tensor_;
  const dlpack::ExchangeFunctions* functions_;
  TokenKLFunction* kernel_;
  py::object is_neg_ = interned("is_neg"), requires_grad_ = interned("requires_grad");
};

}  // namespace

void bind_token_kl(py::module_& m) {
  py::class_<TokenKL>(m, "TokenKL", "token_kl of samples where they lie on the CPU.")
      .def(py::init<py::object, const py::capsule&, size_t>(), py::arg("tensor"),
           py::arg("functions"), py::arg("kernel"))
      .def("forward_samples", &TokenKL::forward_samples, py::arg("log_probs"),
           py::arg("ref_log_probs"), py::arg("reward"), py::arg("coeff"), py::arg("is_recorded"),
           "The packed KL and penalised reward, and the lengths; None where no kernel can read.");
}

}  // namespace fusedrl
