// A simulated accelerator on host memory, registered as PyTorch's PrivateUse1 device; see ../__init__.py.
// One translation unit: pages < runtime (streams) < checker < memory < device < tensors < operators < cuda_arithmetic.
#include <ATen/autocast_mode.h>
#include <ATen/native/transformers/attention.h>
#include <c10/util/Backtrace.h>
#include <pybind11/functional.h>
#include <torch/library.h>

#include "cuda_arithmetic.h"

namespace simgpu {
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("as_strided", TORCH_FN(as_strided));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_.source_Storage", TORCH_FN(set_storage));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage_strided));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("set_", TORCH_FN(set_nothing));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("dropout", TORCH_FN(dropout));
  m.impl("_thnn_fused_lstm_cell", TORCH_FN(lstm_cell));
  m.impl("_thnn_fused_gru_cell", TORCH_FN(gru_cell));
}
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("dropout", TORCH_FN(dropout));
  m.impl("_thnn_fused_lstm_cell", TORCH_FN(lstm_cell));
  m.impl("_thnn_fused_gru_cell", TORCH_FN(gru_cell));
}
// Else to resolve a lazy conjugate is to copy it, which is to resolve it.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define SIMGPU_LOW(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SIMGPU_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define SIMGPU_FP32_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define SIMGPU_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(SIMGPU_LOW)
  AT_FORALL_FP32(SIMGPU_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(SIMGPU_FP32_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(SIMGPU_PROMOTE)
  using Cat = Tensor(const ITensorListRef&, int64_t);
  m.impl("cat", TORCH_FN((&at::autocast::WrapFunction<at::autocast::CastPolicy::promote, kSimGPU, Cat, Cat,
                                                      &ADD_NS(cat)>::type::call)));
}

// Operators with a CPU kernel of their own *and* one made of other operators (layer norm, ...): the CPU's, for its
// bits.
void prefer_cpu_kernels() {
  using c10::DispatchKey;
  auto& dispatcher = c10::Dispatcher::singleton();
  static auto& handles = *new std::vector<c10::RegistrationHandleRAII>;
  for (auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || name.name.rfind("aten::", 0) != 0 ||
        op->hasKernelForDispatchKey(DispatchKey::PrivateUse1))
      continue;
    const bool composite = op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) ||
                           op->hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd);
    const bool whole =  // the out variants of the losses size what they are given
        name.overload_name.empty() && (name.name == "aten::convolution" || name.name == "aten::convolution_backward" ||
                                       name.name == "aten::smooth_l1_loss" || name.name == "aten::mse_loss");
    if (whole || (composite && op->hasKernelForDispatchKey(DispatchKey::CPU)))
      handles.push_back(dispatcher.registerImpl(name, DispatchKey::PrivateUse1,
                                                c10::KernelFunction::makeFromBoxedFunction<&fallback>(), std::nullopt,
                                                nullptr, "simgpu"));
  }
}
}  // namespace simgpu

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &simgpu::sdp_choice)
}
namespace c10::impl {
C10_REGISTER_GUARD_IMPL(PrivateUse1, simgpu::Guard)
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace simgpu;
  std::set_terminate([] {  // else nobody knows where
    fprintf(stderr, "terminate called, in\n%s\n", c10::get_backtrace().c_str());
    std::abort();
  });
  RegisterPrivateUse1HooksInterface(new Hooks);
  SetAllocator(kSimGPU, &arena());
  setHostAllocator(kSimGPU, &pinned());
  prefer_cpu_kernels();
  py::class_<Config> c(m, "Config");
#define SIMGPU_FIELD(name) c.def_readwrite(#name, &Config::name)
  SIMGPU_FIELD(capacity);
  SIMGPU_FIELD(check);
  SIMGPU_FIELD(sync);
  SIMGPU_FIELD(poison);
  SIMGPU_FIELD(host);
  SIMGPU_FIELD(h2d_gbps);
  SIMGPU_FIELD(d2h_gbps);
  SIMGPU_FIELD(h2d_us);
  SIMGPU_FIELD(d2h_us);
  SIMGPU_FIELD(compute_us);
  m.def("config", [] { return &config; }, py::return_value_policy::reference);
  m.def("default_generator", [] { return default_generator(); });
  m.def("synchronize", [] {
    py::gil_scoped_release no_gil;
    synchronize_all();
  });
  // Holds a stream up until the returned function is called; not for ever, as the host may be waiting for the stream.
  m.def("hold", [](int64_t stream) {
    auto gate = std::make_shared<Recording>();
    queue(stream).push([gate] {
      Lock l(gate->mutex);
      TORCH_CHECK(gate->cv.wait_for(l, std::chrono::seconds(30), [&] { return gate->done; }),
                  "held for 30 s; did the host wait for it?");
    });
    return std::function<void()>([gate] { gate->finish(); });
  });
  m.def("races", [] {
    std::vector<std::string> told = pages::races();
    Lock l(clocks_mutex);
    for (auto& race : std::exchange(races, {})) told.push_back(std::move(race));
    return told;
  });
  m.def("cuda_arithmetic", [](bool on) { on_cuda::use(on); });
  m.def("note_stacks", [](int signal, int file) {
    pages::stack_file = file;
    pages::stack_signal = signal;
  });
  m.def("begin_system_call", [](py::buffer memory, bool write) {
    const auto b = memory.request();
    const pages::Range touched = pages::begin_system_call(b.ptr, b.size * b.itemsize, write);
    return std::make_pair(touched.begin, touched.end);
  });
  m.def("end_system_call", [](std::pair<uintptr_t, uintptr_t> touched) {
    pages::end_system_call({touched.first, touched.second});
  });
  m.def("pin", [](uintptr_t p, size_t n) {
    at::globalContext().lazyInitDevice(kSimGPU);  // before, nothing counts as pinned
    pinned().add((char*)p, n);
  });
  m.def("unpin", [](uintptr_t p) { pinned().remove((char*)p); });
  m.def("pinned_bytes", [] { return pinned().bytes(); });
  m.def("reset_peak_stats", [] {
    arena().resetPeakStats(0);
    pinned().reset_peak_stats();
  });
}
