// Numbers for the null CUDA: each operator that has a kernel of CUDA's runs the CPU's instead, on the same bytes.
//
// 1. What makes, describes or shares tensors stays torch's own, and so does a copy that is no kernel: those are what
//    is looked at. What the CPU has no kernel for raises.
// 2. A kernel runs when it is launched, after all that its stream is to run before it, and tells the runtime what it
//    reads and writes.
// 3. Random numbers are made from the seed and the offset of CUDA's generator, and move its offset.
// 4. As CUDA's, a kernel takes no host tensor but single numbers and indices.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/copy_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <mutex>
#include <optional>
#include <set>

#include "../../simgpu/csrc/boxed.h"
#include "../../simgpu/csrc/order.h"

extern "C" void* nullcuda_bytes(const void*);
extern "C" const char* nullcuda_kernel(void* stream, const char* name, const order::Access* accesses, size_t count);

namespace nullcuda {
using namespace at;
using boxed::Stack;
using c10::DispatchKey;

Tensor host_view(const Tensor& t) { return boxed::cpu_alias(t, nullcuda_bytes(t.const_data_ptr())); }

order::Access access(const Tensor& t, bool write) {
  return {(const char*)t.const_data_ptr(),
          t.numel() ? at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.itemsize()) : 0, write};
}

c10::impl::VirtualGuardImpl cuda() { return {kCUDA}; }

void launch(const std::string& name, const std::vector<order::Access>& accesses) {  // Rule 2
  void* stream = cuda().getStream(cuda().getDevice()).native_handle();
  const char* race = nullcuda_kernel(stream, name.c_str(), accesses.data(), accesses.size());
  TORCH_CHECK(!race, race);
}

// ---- random numbers

class Drawn {  // for as long as it lives, the CPU's default generator is one that CUDA's decides (Rule 3)
 public:
  explicit Drawn(Generator of) : before_(cpu_.get_state()) {
    const uint64_t seed = of.current_seed(), offset = of.get_offset();
    of.set_offset(offset + 4);
    cpu_.set_current_seed(seed * 0x9E3779B97F4A7C15 + offset);
  }
  ~Drawn() { cpu_.set_state(before_); }

 private:
  static inline std::recursive_mutex mutex_;
  std::lock_guard<std::recursive_mutex> alone_{mutex_};
  Generator cpu_ = at::detail::getDefaultCPUGenerator();
  Tensor before_;
};

// ---- any operator

class Call {
 public:
  Call(const c10::OperatorHandle& op, const Stack& stack) : op_(op), schema_(op.schema()) {
    auto last = torch::jit::last(stack, schema_.arguments().size());
    args_.assign(last.begin(), last.end());
    find_device();
    for (size_t i = 0; i < args_.size(); ++i) cpu_.push_back(to_cpu(args_[i], schema_.arguments()[i]));
    if (op.hasTag(at::Tag::nondeterministic_seeded) && !generator_.defined())
      generator_ = globalContext().defaultGenerator(device_);
  }

  std::vector<IValue> run() {
    c10::DeviceGuard guard(device_);
    launch(schema_.name(), accesses_);
    without_mixed_types();
    {
      std::optional<Drawn> drawn;
      if (generator_.defined()) drawn.emplace(generator_);
      boxed::run_on_cpu(op_, cpu_);
    }
    for (auto& [given, sized] : sized_) given.resize_(sized.sizes()), written(given).copy_(sized);
    return results();
  }
  size_t arguments() const { return args_.size(); }

 private:
  const c10::OperatorHandle op_;
  const c10::FunctionSchema& schema_;
  Device device_ = cuda().getDevice();
  std::vector<IValue> args_;  // the caller's
  Stack cpu_;                 // the same on the CPU
  std::vector<order::Access> accesses_;
  std::vector<std::pair<Tensor, Tensor>> sized_;  // empty out= tensors, and what gets their sizes
  Generator generator_;
  std::optional<ScalarType> result_;  // where it is not what the CPU gives

  void find_device() {
    for (auto& v : args_) {
      if (v.isDevice() && v.toDevice().is_cuda() && v.toDevice().has_index()) device_ = v.toDevice();
      boxed::map_tensors(v, [&](const Tensor& t) {
        if (t.defined() && t.is_cuda()) device_ = t.device();
        return t;
      });
    }
  }
  // The CPU's softmax has no kernel that takes half numbers and gives FP32, or back.
  void without_mixed_types() {
    for (size_t i = 0; i < cpu_.size(); ++i) {
      const std::string& name = schema_.arguments()[i].name();
      if (name == "half_to_float" && cpu_[i].toBool()) {
        cpu_[0] = cpu_[0].toTensor().to(kFloat);
        cpu_[i] = false;
      }
      if (name == "input_dtype" && cpu_[i].toScalarType() != cpu_[0].toTensor().scalar_type()) {
        result_ = cpu_[i].toScalarType();
        cpu_[i] = cpu_[0].toTensor().scalar_type();
      }
    }
  }
  std::vector<IValue> results() {
    auto mutated = boxed::mutated(schema_, args_);
    std::vector<IValue> out;
    size_t given = 0;
    for (size_t i = 0; i < schema_.returns().size(); ++i)
      out.push_back(schema_.returns()[i].alias_info() ? mutated[given++] : boxed::map_tensors(cpu_[i], [&](auto& t) {
        return to_device(t);
      }));
    return out;
  }
  Tensor to_device(const Tensor& t) {
    if (!t.defined()) return t;
    auto options = t.options().device(device_).dtype(result_.value_or(t.scalar_type()));
    Tensor made = at::empty_strided(t.sizes(), t.strides(), options);
    if (t.numel()) written(made).copy_(t);
    return made;
  }
  Tensor written(const Tensor& made) {
    launch(schema_.name(), {access(made, true)});
    return host_view(made);
  }
  IValue to_cpu(const IValue& v, const c10::Argument& a) {
    if (v.isDevice() && v.toDevice().is_cuda()) return c10::Device(kCPU);
    if (v.isGenerator()) {
      generator_ = v.toGenerator();
      TORCH_CHECK(generator_.device().is_cuda(), "Expected a 'cuda' device type for generator but found 'cpu'");
      return IValue();
    }
    return boxed::map_tensors(v, [&](const Tensor& t) -> Tensor {
      if (!t.defined()) return t;
      if (!t.is_cuda()) {
        boxed::check_may_join_in(t, schema_, a, device_);
        return t;
      }
      TORCH_CHECK(t.device() == device_, "Expected all tensors to be on the same device, but found at least two "
                  "devices, ", device_, " and ", t.device(), "! (in ", schema_.name(), ")");
      accesses_.push_back(access(t, boxed::writes(a)));
      if (!boxed::writes(a) || !a.is_out() || t.numel()) return host_view(t);
      sized_.emplace_back(t, at::empty({0}, t.options().device(kCPU)));
      return sized_.back().second;
    });
  }
};

void kernel(const c10::OperatorHandle& op, Stack* stack) {
  boxed::BelowAutograd guard;
  Call call(op, *stack);
  auto out = call.run();
  torch::jit::drop(*stack, call.arguments());
  for (auto& o : out) stack->push_back(std::move(o));
}

void refused(const c10::OperatorHandle& op, Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "the null CUDA has no numbers for ", op.operator_name());
}

Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  boxed::BelowAutograd below;
  const bool plain = to.scalar_type() == from.scalar_type() && to.is_conj() == from.is_conj() &&
                     to.is_neg() == from.is_neg() && to.sizes() == from.sizes() && to.is_contiguous() &&
                     from.is_contiguous();
  if (!to.numel() || plain || to.device() != from.device()) return at::native::copy_(to, from, non_blocking);
  c10::DeviceGuard guard(to.device());
  launch("aten::copy_", {access(from, false), access(to, true)});
  host_view(to).copy_(host_view(from));
  return to;
}

// ---- which operators (Rule 1)

bool stays(const c10::OperatorHandle& op) {
  static const std::set<std::string> own = {
      "aten::empty", "aten::empty_strided", "aten::resize_", "aten::set_", "aten::is_set_to", "aten::record_stream",
      "aten::is_pinned", "aten::_pin_memory", "aten::_efficientzerotensor", "aten::copy_"};
  auto& returns = op.schema().returns();
  const bool view = !returns.empty() && returns[0].alias_info() && !returns[0].alias_info()->isWrite();
  return view || own.count(op.schema().name());
}

const int served = [] {
  struct : c10::WarningHandler {  // that kernels are replaced
    void process(const c10::Warning&) override {}
  } silent;
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  auto& dispatcher = c10::Dispatcher::singleton();
  auto& handles = *new std::vector<c10::RegistrationHandleRAII>;
  auto serve = [&](const c10::OperatorName& name, DispatchKey key, c10::KernelFunction function) {
    handles.push_back(dispatcher.registerImpl(name, key, std::move(function), std::nullopt, nullptr, "nullcuda"));
  };
  for (auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema()) continue;
    const bool whole = name.overload_name.empty() && name.name == "aten::convolution";  // else CUDA's ways to do it
    if (!whole && (!op->hasKernelForDispatchKey(DispatchKey::CUDA) || stays(*op))) continue;
    const bool has_cpu = op->hasKernelForDispatchKey(DispatchKey::CPU) ||
                         op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) ||
                         op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional) ||
                         op->hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd);
    serve(name, DispatchKey::CUDA, has_cpu ? c10::KernelFunction::makeFromBoxedFunction<&kernel>()
                                           : c10::KernelFunction::makeFromBoxedFunction<&refused>());
  }
#define NULLCUDA_FUNCTION(f) c10::KernelFunction::makeFromUnboxedFunction(TORCH_FN(f))
  for (auto key : {DispatchKey::CUDA, DispatchKey::AutogradCUDA}) {
    serve({"aten::_thnn_fused_lstm_cell", ""}, key, NULLCUDA_FUNCTION(boxed::lstm_cell));
    serve({"aten::_thnn_fused_gru_cell", ""}, key, NULLCUDA_FUNCTION(boxed::gru_cell));
  }
  serve({"aten::copy_", ""}, DispatchKey::CUDA, NULLCUDA_FUNCTION(copy_));
  return 0;
}();
}  // namespace nullcuda
