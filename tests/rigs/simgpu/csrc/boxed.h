// What it takes to run the CPU's kernel of any operator for tensors of another device.
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <optional>
#include <tuple>
#include <vector>

namespace boxed {
using namespace at;
using torch::jit::Stack;

struct BelowAutograd {  // kernels run below autograd and autocast
  AutoDispatchBelowADInplaceOrView autograd;
  c10::impl::ExcludeDispatchKeyGuard autocast{c10::autocast_dispatch_keyset};
};

inline bool writes(const c10::Argument& a) { return a.alias_info() && a.alias_info()->isWrite(); }
template <class F>
IValue map_tensors(const IValue& v, F f) {  // of a tensor or a list of them
  if (v.isTensor()) return f(v.toTensor());
  if (v.isTensorList()) {
    c10::List<Tensor> l;
    for (const Tensor& t : v.toTensorVector()) l.push_back(f(t));
    return l;
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> l;
    for (const auto& t : v.toOptionalTensorVector()) l.push_back(t ? std::optional<Tensor>(f(*t)) : std::nullopt);
    return l;
  }
  return v;
}

// The tensor's bytes, which the host finds there, as a CPU tensor that owns nothing.
inline Tensor cpu_alias(const Tensor& t, void* bytes) {
  Tensor v = at::from_blob(bytes, t.sizes(), t.strides(), t.options().device(kCPU).requires_grad(false));
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) v.unsafeGetTensorImpl()->set_wrapped_number(true);
  if (t.is_conj()) v._set_conj(true);
  if (t.is_neg()) v._set_neg(true);
  return v;
}
// As CUDA: a number on the CPU may join in, and CPU indices may index.
inline void check_may_join_in(const Tensor& t, const c10::FunctionSchema& schema, const c10::Argument& a,
                              Device device) {
  const bool index = schema.name().find("index") != std::string::npos && a.name() == "indices";
  TORCH_CHECK(t.is_cpu() && (t.dim() == 0 || index),
              "Expected all tensors to be on the same device, but found at least two devices, ", device, " and ",
              t.device(), "! (in ", schema.name(), ")");
}
inline std::vector<IValue> mutated(const c10::FunctionSchema& schema, const std::vector<IValue>& args) {
  std::vector<IValue> out;  // the returns that are arguments
  for (auto& r : schema.returns())
    for (size_t i = 0; i < args.size(); ++i)
      if (auto* a = schema.arguments()[i].alias_info();
          a && a->isWrite() && r.alias_info() && a->beforeSets() == r.alias_info()->beforeSets()) {
        out.push_back(args[i]);
        break;
      }
  return out;
}
inline void run_on_cpu(const c10::OperatorHandle& op, Stack& s) {
  const Stack arguments = s;  // what it returns refers to them, and they are dropped before the results are pushed
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &s);
}

// lstm() and gru() call these on any device but the CPU, which has neither; equal to the CPU up to rounding only.
using Bias = const std::optional<Tensor>&;
inline Tensor plus(const Tensor& x, Bias b) { return b && b->defined() ? x + *b : x; }
inline std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input, const Tensor& hidden, const Tensor& cx,
                                                    Bias b_ih, Bias b_hh) {
  Tensor gates = plus(input, b_ih) + plus(hidden, b_hh);
  auto g = gates.chunk(4, 1);
  Tensor cy = g[1].sigmoid() * cx + g[0].sigmoid() * g[2].tanh();
  return {g[3].sigmoid() * cy.tanh(), cy, gates};
}
inline std::tuple<Tensor, Tensor> gru_cell(const Tensor& input, const Tensor& hidden, const Tensor& hx, Bias b_ih,
                                           Bias b_hh) {
  auto i = plus(input, b_ih).chunk(3, 1), h = plus(hidden, b_hh).chunk(3, 1);
  Tensor reset = (i[0] + h[0]).sigmoid(), update = (i[1] + h[1]).sigmoid(), next = (i[2] + h[2] * reset).tanh();
  return {(hx - next) * update + next, reset};
}
}  // namespace boxed
