// The arithmetic of torch's optimizers and gradient norms on CUDA, as an option: `simgpu.cuda_arithmetic()`.
//
// Read in torch's sources (aten/src/ATen/native):
// * cuda/MultiTensorApply.cuh: chunks of 65,536 elements, blocks of 512 threads, 4 elements a thread and turn, which are
//   neighbours where the tensor's rest has a multiple of 4 elements and begins at a multiple of 4 elements' bytes.
// * cuda/ForeachReduceOp.cu, cuda/block_reduce.cuh: sums of a thread's 4 places in turn, of a warp by halves, of the 16
//   warps likewise; then of the chunks' sums, dealt out to 512 threads, in the same way; then the root.
// * cuda/DeviceAddCmulCdiv.cuh: addcmul and addcdiv are fma(value, product or quotient, input), with value 1 another way.
// * Lerp.h: which of two forms; ufunc/add.h: a + alpha * b. cuda/BinaryDivTrueKernel.cu: division by a number is a
//   product with its inverse; that of lists (_foreach_div) is a division.
// Read in the machine code of torch 2.14.1 for sm_90 (nvdisasm):
// * a + alpha * b and both forms of lerp contract to one fma, alone and on lists; roots and quotients round correctly.
// * _foreach_norm: squares are added by fma. The tree of the sums is as above.
// * Fused Adam, AdamW and SGD: options become FP32 first; averages are lerps of the form fma(b, m, fma(-b, g, g)); the
//   decay of AdamW is fma(-(lr * decay), p, p); p - (m * size) / (root / correction + eps) rounds at each sign. SGD's
//   buffer is fma(1 - dampening, g, momentum * buffer).
// * beta ** step there is CUDA's powf, with a logarithm of two FP32 numbers: see `power`. It misses the correctly rounded
//   power in 6 % of all steps. Its one approximate instruction (MUFU.RCP) is a correctly rounded inverse here; an inverse
//   that is one bit off gave the same `1 - beta ** step` for all of 0.8, 0.9, 0.95, 0.98, 0.99, 0.999 and 20,000 steps.
// Only a GPU can confirm:
// * MUFU.RCP; and that other architectures and versions of torch contract alike;
// * types other than FP32, which are widened, computed so, and rounded once; FP64 by the same formulas.
// Not here: norms by linalg.vector_norm, `capturable` steps' powers, FP32 weights with gradients of another type.
#pragma once
#include <ATen/ExpandUtils.h>

#include <cmath>
#include <map>

#include "operators.h"

namespace simgpu::on_cuda {
// ---- one element
template <class T>
T add(T alpha, T a, T b) { return std::fma(alpha, b, a); }
template <class T>
T lerp(T weight, T a, T b) {
  return std::abs(weight) < T(0.5) ? std::fma(weight, b - a, a) : std::fma(-(b - a), 1 - weight, b);
}
template <class T>
T addcmul(T value, T a, T b, T c) { return value == 1 ? std::fma(b, c, a) : std::fma(value, b * c, a); }
template <class T>
T addcdiv(T value, T a, T b, T c) { return value == 1 ? a + b / c : std::fma(value, b / c, a); }

inline double power(double base, double exponent) { return std::pow(base, exponent); }
inline float power(float base, float exponent) {
  if (!(base > 1e-30f) || base >= 1 || exponent < 1) return std::pow(base, exponent);
  auto fma = [](float a, float b, float c) { return std::fma(a, b, c); };
  int32_t bits;
  memcpy(&bits, &base, 4);
  const int32_t scale = (bits - 0x3f3504f3) & 0xff800000;  // base = 2 ** scale * (1 + x), and 1 + x is near 1
  bits -= scale;
  float near;
  memcpy(&near, &bits, 4);
  const float x = near - 1, inverse = 1 / (near + 1), u = inverse * (x + x);
  const float rest = inverse * fma(x, -u, (x - u) + (x - u)), t = u * u, log2e = 1.4426950216293335f;
  const float whole = float(scale) * 0x1p-23f, first = fma(u, log2e, whole);
  float low = fma(rest, log2e, fma(u, log2e, whole - first));
  low = fma(u, 1.9251366722983221e-08f, low);
  float series = 0.0006568862590938807f;
  for (float c : {0.0032181653659790754f, 0.018033718690276146f, 0.12022458761930466f}) series = fma(t, series, c);
  series *= t;
  low = fma(u, series, fma(rest, series * 3, low));
  const float high = first + low;  // the logarithm is high + low
  low -= high - first;
  const float product = exponent * high, turns = std::nearbyint(product);
  const float part = fma(exponent, low, fma(exponent, high, -product)) + (product - turns);
  float result = 0.00015239251661114395f;
  for (float c : {0.0013391353422775865f, 0.0096188392490148545f, 0.055503588169813156f, 0.24022644758224487f,
                  0.6931471824645996f, 1.f})
    result = fma(result, part, c);
  return float(std::ldexp(double(result), int(turns)));
}

template <class T>
struct Adam {  // of one parameter and step
  T beta1, beta2, decay, eps, rate, size, root_correction;
  bool decoupled, maximize;
  Adam(double lr, double b1, double b2, double decay, double eps, bool decoupled, bool maximize, float step)
      : beta1(b1), beta2(b2), decay(decay), eps(eps), rate(lr), decoupled(decoupled), maximize(maximize) {
    size = rate / (1 - power(beta1, T(step)));
    root_correction = std::sqrt(1 - power(beta2, T(step)));
  }
  void step(T& p, T g, T& m, T& v, T* largest) const {
    if (maximize) g = -g;
    if (decay != 0 && decoupled) p = std::fma(p, -(rate * decay), p);
    if (decay != 0 && !decoupled) g = std::fma(p, decay, g);
    const T square = g * g;
    m = std::fma(m, beta1, std::fma(g, -beta1, g));
    v = std::fma(v, beta2, std::fma(square, -beta2, square));
    if (largest) *largest = *largest < v ? v : *largest;
    const T denominator = std::sqrt(largest ? *largest : v) / root_correction + eps;
    p = p - m * size / denominator;
  }
};

template <class T>
struct Sgd {
  T decay, momentum, rate, dampening;
  bool nesterov, maximize, first;
  void step(T& p, T g, T* buffer) const {
    if (maximize) g = -g;
    if (decay != 0) g = std::fma(p, decay, g);
    if (buffer) {
      *buffer = first ? g : std::fma(1 - dampening, g, momentum * *buffer);
      g = nesterov ? std::fma(*buffer, momentum, g) : *buffer;
    }
    p = std::fma(g, -rate, p);
  }
};

// ---- norms
constexpr int64_t kChunk = 65536, kThreads = 512, kPlaces = 4, kWarp = 32;
enum class Norm { one, two, largest };

template <class T>
T join(Norm kind, T a, T b) {
  if (kind != Norm::largest) return a + b;
  return a != a || a > b ? a : b;
}
template <class T>
T of_block(Norm kind, std::vector<T> threads) {
  auto halves = [&](T* x) {
    for (int n = kWarp / 2; n > 0; n /= 2)
      for (int i = 0; i < n; ++i) x[i] = join(kind, x[i], x[i + n]);
    return x[0];
  };
  std::vector<T> warps(kWarp);
  for (int w = 0; w < kThreads / kWarp; ++w) warps[w] = halves(&threads[w * kWarp]);
  return halves(warps.data());
}
template <class T>
T of_chunk(Norm kind, const T* x, int64_t rest, bool aligned) {
  std::vector<T> places(kThreads * kPlaces);
  for (int64_t i = 0; i < std::min(rest, kChunk); ++i) {
    const int64_t thread = aligned ? i / kPlaces % kThreads : i % kThreads;
    const int64_t place = aligned ? i % kPlaces : i / kThreads % kPlaces;
    T& sum = places[thread * kPlaces + place];
    sum = kind == Norm::two ? std::fma(x[i], x[i], sum) : join(kind, sum, std::abs(x[i]));
  }
  std::vector<T> threads(kThreads);
  for (int64_t t = 0; t < kThreads; ++t)
    for (int64_t p = 0; p < kPlaces; ++p) threads[t] = join(kind, threads[t], places[t * kPlaces + p]);
  return of_block(kind, std::move(threads));
}
template <class T>
T norm(Norm kind, const T* x, int64_t numel, bool aligned) {
  std::vector<T> threads(kThreads);
  for (int64_t at = 0; at < numel; at += kChunk) {
    T& sum = threads[at / kChunk % kThreads];
    sum = join(kind, sum, of_chunk(kind, x + at, numel - at, aligned));
  }
  const T sum = of_block(kind, std::move(threads));
  return kind == Norm::two ? std::sqrt(sum) : sum;
}

// ---- tensors, as the host finds their bytes
inline bool in_double(const Tensor& t) { return t.scalar_type() == kDouble; }
template <class F>
void in_type_of(const Tensor& t, F f) {  // what its elements are computed in
  if (in_double(t)) f(double());
  else f(float());
}
template <class T>
Tensor widened(const Tensor& t, IntArrayRef size) {
  return t.expand(size).to(c10::CppTypeToScalarType<T>::value).contiguous();
}
template <class F>
void elementwise(Tensor out, const std::vector<Tensor>& in, F f) {  // f of the elements of up to three tensors
  in_type_of(out, [&](auto zero) {
    using T = decltype(zero);
    std::vector<Tensor> wide;
    const T* from[3] = {};
    for (size_t i = 0; i < in.size(); ++i) {
      wide.push_back(widened<T>(in[i], out.sizes()));
      from[i] = wide.back().const_data_ptr<T>();
    }
    Tensor made = at::empty(out.sizes(), out.options().dtype(c10::CppTypeToScalarType<T>::value));
    T* to = made.mutable_data_ptr<T>();
    auto at = [&](int k, int64_t i) { return from[k] ? from[k][i] : T(0); };
    for (int64_t i = 0; i < made.numel(); ++i) to[i] = f(at(0, i), at(1, i), at(2, i));
    out.copy_(made);
  });
}
inline Tensor in_memory_order(const Tensor& t) { return t.as_strided({t.numel()}, {1}); }

// ---- operators
inline void run_elsewhere(const c10::OperatorHandle& op, Stack* stack) {  // as without this option
  if (op.schema().name().rfind("aten::_foreach", 0) == 0) op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  else fallback(op, stack);
}
inline bool is_dense(const Tensor& t, ScalarType dtype) {
  return t.is_privateuseone() && t.scalar_type() == dtype && t.is_non_overlapping_and_dense();
}
inline std::string plain_name(const std::string& name) {  // "aten::_foreach_addcmul_": "addcmul"
  std::string plain = name.substr(name.rfind("aten::_foreach_", 0) == 0 ? 15 : 6);
  if (plain.back() == '_') plain.pop_back();
  return plain;
}
enum class Element { add, sub, lerp, addcmul, addcdiv, sqrt, div, times_inverse };
const std::map<std::string, Element> kElements = {
    {"add", Element::add},         {"sub", Element::sub},   {"lerp", Element::lerp}, {"addcmul", Element::addcmul},
    {"addcdiv", Element::addcdiv}, {"sqrt", Element::sqrt}, {"div", Element::div}};
template <class T>
T compute(Element what, T number, T a, T b, T c) {
  switch (what) {
    case Element::add: return add(number, a, b);
    case Element::sub: return add(-number, a, b);
    case Element::lerp: return lerp(number, a, b);
    case Element::addcmul: return addcmul(number, a, b, c);
    case Element::addcdiv: return addcdiv(number, a, b, c);
    case Element::sqrt: return std::sqrt(a);
    case Element::div: return a / number;
    default: return a * (1 / number);
  }
}

// Any of `kElementwise`: of tensors or lists of them, and a number or a list of them.
inline void call_elementwise(const c10::OperatorHandle& op, Stack* stack) {
  BelowAutograd guard;
  const auto& schema = op.schema();
  auto args = torch::jit::last(*stack, schema.arguments().size()).vec();
  std::vector<std::vector<Tensor>> operands;
  std::vector<double> numbers;
  Element what = kElements.at(plain_name(schema.name()));
  bool known = true;
  for (auto& arg : args) {
    if (arg.isTensor() && operands.size() == 1 && arg.toTensor().is_cpu() && !arg.toTensor().dim()) {
      known &= what == Element::div && !arg.toTensor().is_complex();
      what = Element::times_inverse;
      if (known) numbers.push_back(arg.toTensor().item().toDouble());
    } else if (arg.isTensor()) operands.push_back({arg.toTensor()});
    else if (arg.isTensorList()) operands.push_back(arg.toTensorVector());
    else if (arg.isScalar() && !arg.toScalar().isComplex()) numbers.push_back(arg.toScalar().toDouble());
    else if (arg.isList())
      for (const IValue& number : arg.toListRef())
        if (number.isScalar() && !number.toScalar().isComplex()) numbers.push_back(number.toScalar().toDouble());
        else known = false;
    else known = false;
  }
  const bool is_list = schema.name().rfind("aten::_foreach_", 0) == 0, in_place = boxed::writes(schema.arguments()[0]);
  const size_t count = operands.empty() ? 0 : operands[0].size();
  known &= count && at::isFloatingType(operands[0][0].scalar_type());
  for (auto& list : operands) {
    known &= list.size() == count;
    for (auto& t : list) known &= t.is_privateuseone() && t.scalar_type() == operands[0][0].scalar_type();
  }
  const bool is_unary = what == Element::sqrt || what == Element::div || what == Element::times_inverse;
  const size_t tensors = is_unary ? 1 : what == Element::addcmul || what == Element::addcdiv ? 3 : 2;
  known &= operands.size() == tensors && (what == Element::sqrt || numbers.size() == 1 || numbers.size() == count);
  if (!known) return run_elsewhere(op, stack);
  std::vector<Tensor> outs;
  for (size_t i = 0; i < count; ++i) {
    std::vector<Tensor> in;
    auto size = operands[0][i].sizes().vec();
    for (auto& list : operands) size = at::infer_size(size, list[i].sizes());
    const Tensor& self = operands[0][i];
    Tensor out = in_place ? self : self.sizes().vec() == size ? at::empty_like(self) : at::empty(size, self.options());
    Work work{schema.name(), {access(out, true)}};
    for (auto& list : operands) {
      work.accesses.push_back(access(list[i], false));
      in.push_back(host_view(list[i]));
    }
    const double number = numbers.empty() ? 0 : numbers[numbers.size() == 1 ? 0 : i];
    enqueue(current_queue(), work, [=, out = host_view(out)] {
      elementwise(out, in, [&](auto a, auto b, auto c) { return compute(what, decltype(a)(number), a, b, c); });
    });
    outs.push_back(out);
  }
  torch::jit::drop(*stack, args.size());
  if (is_list && !in_place) stack->emplace_back(outs);
  else if (!is_list) stack->emplace_back(outs[0]);
}

inline void call_norm(const c10::OperatorHandle& op, Stack* stack) {
  BelowAutograd guard;
  auto args = torch::jit::last(*stack, op.schema().arguments().size()).vec();
  const auto tensors = args[0].toTensorVector();
  const double order = args[1].toScalar().toDouble();
  const auto dtype = tensors.empty() ? kFloat : tensors[0].scalar_type();
  const auto out_dtype = args[2].isNone() ? dtype : args[2].toScalarType();
  bool known = !tensors.empty() && at::isFloatingType(dtype) && at::isFloatingType(out_dtype) &&
               (order == 1 || order == 2 || (std::isinf(order) && order > 0));
  for (auto& t : tensors) known &= is_dense(t, dtype) && t.numel();
  if (!known) return run_elsewhere(op, stack);
  const Norm kind = order == 1 ? Norm::one : order == 2 ? Norm::two : Norm::largest;
  std::vector<Tensor> outs;
  for (auto& t : tensors) {
    Tensor out = at::empty({}, t.options().dtype(out_dtype));
    const bool aligned = t.numel() % kPlaces == 0 && (uintptr_t)t.const_data_ptr() % (kPlaces * t.itemsize()) == 0;
    enqueue(current_queue(), {op.schema().name(), {access(t, false), access(out, true)}},
            [=, from = host_view(t), out = host_view(out)]() mutable {
              in_type_of(out, [&](auto zero) {
                using T = decltype(zero);
                const Tensor x = in_memory_order(from).to(c10::CppTypeToScalarType<T>::value);
                out.fill_(norm(kind, x.template const_data_ptr<T>(), x.numel(), aligned));
              });
            });
    outs.push_back(out);
  }
  torch::jit::drop(*stack, args.size());
  stack->emplace_back(outs);
}

// A step of parameters one by one: `step` gets them widened, and whether it happened; what it changed is rounded.
struct Lists {
  std::vector<std::vector<Tensor>> lists;  // parameters, gradients and state, of one type
  std::vector<Tensor> steps, numbers;      // read: step counts; the rate, the scale and whether a gradient is infinite
};
inline std::optional<Lists> fused_lists(const std::vector<IValue>& args, size_t count, bool steps) {
  Lists l;
  for (size_t i = 0; i < count; ++i)
    if (auto list = args[i].toTensorVector(); !list.empty()) l.lists.push_back(std::move(list));
  if (steps) l.steps = args[count].toTensorVector();
  if (l.lists.empty()) return {};
  for (auto& list : l.lists)
    for (size_t i = 0; i < list.size(); ++i)
      if (list.size() != l.lists[0].size() || !is_dense(list[i], l.lists[0][i].scalar_type()) ||
          list[i].strides() != l.lists[0][i].strides())
        return {};
  for (auto& step : l.steps)
    if (!is_dense(step, kFloat)) return {};
  return l;
}
inline double number(const Tensor& t) { return t.item().toDouble(); }

template <class Make>
void enqueue_fused(const std::string& name, const Lists& l, const std::optional<Tensor>& rate,
                   const std::optional<Tensor>& scale, const std::optional<Tensor>& infinite, Make make) {
  for (size_t i = 0; i < l.lists[0].size(); ++i) {
    Work work{name, {}};
    std::vector<Tensor> views;
    for (size_t k = 0; k < l.lists.size(); ++k) {
      work.accesses.push_back(access(l.lists[k][i], k != 1 || scale));
      views.push_back(host_view(l.lists[k][i]));
    }
    auto read = [&](const std::optional<Tensor>& t) -> std::optional<Tensor> {
      if (!t || !t->defined()) return {};
      if (t->is_cpu()) return t->clone();
      work.accesses.push_back(access(*t, false));
      return host_view(*t);
    };
    auto rate_there = read(rate), scale_there = read(scale), infinite_there = read(infinite);
    auto step_there = read(l.steps.empty() ? std::optional<Tensor>() : l.steps[i]);
    enqueue(current_queue(), work, [=] {
      if (infinite_there && number(*infinite_there) == 1) return;
      in_type_of(views[0], [&](auto zero) {
        using T = decltype(zero);
        std::vector<Tensor> wide;
        std::vector<T*> at;
        for (auto& view : views) {
          wide.push_back(in_memory_order(view).to(c10::CppTypeToScalarType<T>::value, false, true));
          at.push_back(wide.back().template mutable_data_ptr<T>());
        }
        auto step = make(zero, step_there ? (float)number(*step_there) : 0.f, rate_there);
        const T scale = scale_there ? T(number(*scale_there)) : T(1);
        for (int64_t e = 0; e < wide[0].numel(); ++e) {
          if (scale_there) at[1][e] = at[1][e] / scale;
          step(at, e);
        }
        for (size_t k = 0; k < views.size(); ++k)
          if (k != 1 || scale_there) in_memory_order(views[k]).copy_(wide[k]);
      });
    });
  }
}
inline std::optional<Tensor> tensor_or_none(const IValue& v) {
  return v.isTensor() && v.toTensor().defined() ? std::optional<Tensor>(v.toTensor()) : std::nullopt;
}

inline void call_adam(const c10::OperatorHandle& op, Stack* stack) {
  BelowAutograd guard;
  // self, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, lr, beta1, beta2, weight_decay, eps, amsgrad,
  // maximize, grad_scale, found_inf
  const auto args = torch::jit::last(*stack, op.schema().arguments().size()).vec();
  const auto lists = fused_lists(args, 5, true);
  if (!lists) return run_elsewhere(op, stack);
  const auto rate = tensor_or_none(args[6]);
  const double lr = rate ? 0 : args[6].toDouble(), beta1 = args[7].toDouble(), beta2 = args[8].toDouble();
  const double decay = args[9].toDouble(), eps = args[10].toDouble();
  const bool amsgrad = args[11].toBool(), maximize = args[12].toBool();
  const bool decoupled = op.schema().name() == "aten::_fused_adamw_";
  enqueue_fused(op.schema().name(), *lists, rate, tensor_or_none(args[13]), tensor_or_none(args[14]),
                [=](auto zero, float step, const std::optional<Tensor>& there) {
                  using T = decltype(zero);
                  Adam<T> adam(there ? number(*there) : lr, beta1, beta2, decay, eps, decoupled, maximize, step);
                  return [=](const std::vector<T*>& at, int64_t e) {
                    adam.step(at[0][e], at[1][e], at[2][e], at[3][e], amsgrad ? &at[4][e] : nullptr);
                  };
                });
  torch::jit::drop(*stack, args.size());
}
inline void call_sgd(const c10::OperatorHandle& op, Stack* stack) {
  BelowAutograd guard;
  // self, grads, momentum_buffer_list, weight_decay, momentum, lr, dampening, nesterov, maximize, is_first_step,
  // grad_scale, found_inf
  const auto args = torch::jit::last(*stack, op.schema().arguments().size()).vec();
  const auto lists = fused_lists(args, 3, false);
  if (!lists) return run_elsewhere(op, stack);
  const auto rate = tensor_or_none(args[5]);
  const double decay = args[3].toDouble(), momentum = args[4].toDouble(), lr = rate ? 0 : args[5].toDouble();
  const double dampening = args[6].toDouble();
  const bool nesterov = args[7].toBool(), maximize = args[8].toBool(), first = args[9].toBool();
  enqueue_fused(op.schema().name(), *lists, rate, tensor_or_none(args[10]), tensor_or_none(args[11]),
                [=](auto zero, float, const std::optional<Tensor>& there) {
                  using T = decltype(zero);
                  Sgd<T> sgd{T(decay),     T(momentum), T(there ? number(*there) : lr), T(dampening), nesterov,
                             maximize, first};
                  return [=](const std::vector<T*>& at, int64_t e) {
                    sgd.step(at[0][e], at[1][e], at.size() > 2 ? &at[2][e] : nullptr);
                  };
                });
  torch::jit::drop(*stack, args.size());
}

inline const char* const kElementwise[] = {
    "add.Tensor", "add_.Tensor", "sub.Tensor", "sub_.Tensor", "lerp.Scalar", "lerp_.Scalar", "addcmul", "addcmul_",
    "addcdiv", "addcdiv_", "div.Tensor", "div_.Tensor", "sqrt", "sqrt_", "_foreach_add.List", "_foreach_add_.List",
    "_foreach_sub.List", "_foreach_sub_.List", "_foreach_lerp.Scalar", "_foreach_lerp_.Scalar",
    "_foreach_addcmul.Scalar", "_foreach_addcmul_.Scalar", "_foreach_addcmul.ScalarList",
    "_foreach_addcmul_.ScalarList", "_foreach_addcdiv.Scalar", "_foreach_addcdiv_.Scalar",
    "_foreach_addcdiv.ScalarList", "_foreach_addcdiv_.ScalarList", "_foreach_div.Scalar", "_foreach_div_.Scalar",
    "_foreach_div.ScalarList", "_foreach_div_.ScalarList", "_foreach_sqrt", "_foreach_sqrt_"};

inline void use(bool on) {
  static auto& handles = *new std::vector<c10::RegistrationHandleRAII>;
  handles.clear();
  if (!on) return;
  auto replace = [&](const std::string& full, auto kernel) {
    const size_t dot = full.find('.');
    const c10::OperatorName name("aten::" + full.substr(0, dot), dot == std::string::npos ? "" : full.substr(dot + 1));
    handles.push_back(c10::Dispatcher::singleton().registerImpl(name, c10::DispatchKey::PrivateUse1, std::move(kernel),
                                                                std::nullopt, nullptr, "simgpu"));
  };
  for (auto* name : kElementwise) replace(name, c10::KernelFunction::makeFromBoxedFunction<&call_elementwise>());
  replace("_foreach_norm.Scalar", c10::KernelFunction::makeFromBoxedFunction<&call_norm>());
  for (auto* name : {"_fused_adam_", "_fused_adam_.tensor_lr", "_fused_adamw_", "_fused_adamw_.tensor_lr"})
    replace(name, c10::KernelFunction::makeFromBoxedFunction<&call_adam>());
  for (auto* name : {"_fused_sgd_", "_fused_sgd_.tensor_lr"})
    replace(name, c10::KernelFunction::makeFromBoxedFunction<&call_sgd>());
}
}  // namespace simgpu::on_cuda
