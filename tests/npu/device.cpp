// A device "npu" without one, for tests: its memory is the host's and its operators are the CPU's, so the numbers are true.
//
// It is as strict as a device: tensors of the CPU and of another npu are refused by its operators and its collectives. Where a
// CUDA device would have kernels of its own it falls back to the CPU's; autocast, pinned memory, streams, events and the
// backend hccl are real enough for a training to use them.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>

using namespace at;
constexpr auto NPU = c10::DeviceType::PrivateUse1;
constexpr auto KEYS = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);

static c10::DeviceIndex devices() {  // ASCEND_RT_VISIBLE_DEVICES names some of STANDIN_NPUS
  static auto number = [] {
    if (auto names = std::getenv("ASCEND_RT_VISIBLE_DEVICES")) {
      std::string text(names);
      return text.empty() ? 0 : 1 + static_cast<int>(std::count(text.begin(), text.end(), ','));
    }
    auto all = std::getenv("STANDIN_NPUS");
    return all ? std::atoi(all) : 1;
  }();
  return static_cast<c10::DeviceIndex>(number);
}
static thread_local c10::DeviceIndex current = 0;

// --- Memory: counted for each device; what was pinned is remembered ---------------------------------------------------

static std::mutex memory;
static std::map<const char*, size_t> pinned;      // {address: bytes}
static std::map<void*, std::pair<int, size_t>> held;  // {address: (device, bytes)}
static std::map<int, size_t> in_use;

static void release(void* address) {
  {
    std::lock_guard<std::mutex> lock(memory);
    if (auto found = held.find(address); found != held.end()) {
      in_use[found->second.first] -= found->second.second;
      held.erase(found);
    }
  }
  c10::free_cpu(address);
}

static void unpin(void* address) {
  {
    std::lock_guard<std::mutex> lock(memory);
    pinned.erase(static_cast<const char*>(address));
  }
  c10::free_cpu(address);
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* address = bytes ? c10::alloc_cpu(bytes) : nullptr;
    if (address) {
      std::lock_guard<std::mutex> lock(memory);
      held[address] = {current, bytes};
      in_use[current] += bytes;
    }
    return {address, address, &release, c10::Device(NPU, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* address = bytes ? c10::alloc_cpu(bytes) : nullptr;
    if (address) {
      std::lock_guard<std::mutex> lock(memory);
      pinned[static_cast<const char*>(address)] = bytes;
    }
    return {address, address, &unpin, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};

static Memory allocator;
static PinnedMemory pinned_allocator;
REGISTER_ALLOCATOR(NPU, &allocator);

static bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> lock(memory);
  auto address = static_cast<const char*>(data);
  auto after = pinned.upper_bound(address);
  return after != pinned.begin() && address < std::prev(after)->first + std::prev(after)->second;
}

// --- Devices, streams and events: everything is done when the call returns, so an event is only a time ------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  using Flag = c10::EventFlag;
  c10::DeviceType type() const override { return NPU; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = current;
    setDevice(device);
    return {NPU, before};
  }
  c10::Device getDevice() const override { return {NPU, current}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < devices(), "npu: invalid device ordinal ", static_cast<int>(device.index()));
    current = device.index() < 0 ? current : device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index() < 0 ? current : device.index(); }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getNewStream(c10::Device device, int = 0) const override { return c10::Stream(c10::Stream::UNSAFE, device, 1); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return c10::Stream(c10::Stream::DEFAULT, stream.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return devices(); }
  void record(void** event, const c10::Stream&, c10::DeviceIndex, Flag) const override {
    if (!*event) *event = new std::chrono::steady_clock::time_point;
    *static_cast<std::chrono::steady_clock::time_point*>(*event) = std::chrono::steady_clock::now();
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<std::chrono::steady_clock::time_point*>(event);
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    auto time = [](void* event) { return *static_cast<std::chrono::steady_clock::time_point*>(event); };
    return std::chrono::duration<double, std::milli>(time(to) - time(from)).count();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Numbers : CPUGeneratorImpl {
  explicit Numbers(c10::DeviceIndex index) : CPUGeneratorImpl(c10::default_rng_seed_val) {
    device_ = c10::Device(NPU, index);
    key_set_ = KEYS;
  }
};

struct Hooks final : PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return devices() > 0; }
  void init() const override {}
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return devices(); }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex index) const override { Guard().setDevice({NPU, index}); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override { return Guard().exchangeDevice({NPU, index}).index(); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  const Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    static std::vector<Generator> all = [] {
      std::vector<Generator> made;
      for (c10::DeviceIndex number = 0; number < devices(); ++number) made.push_back(make_generator<Numbers>(number));
      return made;
    }();
    return all.at(index < 0 ? current : index);
  }
  Generator getNewGenerator(c10::DeviceIndex index) const override { return make_generator<Numbers>(index < 0 ? current : index); }
  Device getDeviceFromPtr(void*) const override { return {NPU, current}; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override { native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), bytes); }
};
static Hooks hooks;
static bool registered = [] { RegisterPrivateUse1HooksInterface(&hooks); return true; }();

// --- Operators ------------------------------------------------------------------------------------------------------------

static Tensor on_host(const Tensor& tensor) {  // the same memory, as a tensor of the CPU
  if (!tensor.defined() || tensor.device().type() != NPU) return tensor;
  auto data = const_cast<void*>(tensor.storage().data());
  auto options = tensor.options().device(kCPU);
  return from_blob(data, tensor.sizes(), tensor.strides(), tensor.storage_offset(), [tensor](void*) {}, options, std::nullopt);
}
static std::optional<Tensor> on_host(const std::optional<Tensor>& tensor) {
  return tensor && tensor->defined() ? std::optional<Tensor>(on_host(*tensor)) : std::nullopt;
}

static void no_channels_last(std::optional<MemoryFormat> format) {
  TORCH_CHECK(format != MemoryFormat::ChannelsLast, "npu: channels_last is not supported, use contiguous");
}
static Tensor make_empty(IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device> device, std::optional<bool>, std::optional<MemoryFormat> format) {
  no_channels_last(format);
  c10::DeviceGuard guard(device && device->has_index() ? *device : Device(NPU, current));
  return at::detail::empty_generic(size, &allocator, KEYS, dtype_or_default(dtype), format);
}
static Tensor make_strided(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device && device->has_index() ? *device : Device(NPU, current));
  return at::detail::empty_strided_generic(size, stride, &allocator, KEYS, dtype_or_default(dtype));
}
static Tensor copy_from(const Tensor& from, const Tensor& to, bool) { on_host(to).copy_(on_host(from)); return to; }
static Tensor copy_and_resize(const Tensor& from, const Tensor& to) { to.resize_(from.sizes()); return copy_from(from, to, false); }
static Scalar item(const Tensor& tensor) { return on_host(tensor).item(); }
static Tensor view_strided(const Tensor& tensor, IntArrayRef size, IntArrayRef stride, std::optional<int64_t> offset) { return native::as_strided_tensorimpl(tensor, size, stride, offset); }
static const Tensor& resize_in_place(const Tensor& tensor, c10::SymIntArrayRef size, std::optional<MemoryFormat> format) { return native::resize_(tensor, C10_AS_INTARRAYREF_SLOW(size), format); }
static Tensor& set_storage(Tensor& tensor, Storage storage, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  return tensor;
}
static void ignore_stream(Tensor&, c10::Stream) {}

static Tensor convolve(const Tensor& images, const Tensor& weight, const std::optional<Tensor>& bias, IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, bool transposed, IntArrayRef output_padding, int64_t groups) {
  return at::convolution(on_host(images), on_host(weight), on_host(bias), stride, padding, dilation, transposed, output_padding, groups).to(images.device());
}
static std::tuple<Tensor, Tensor, Tensor> convolve_backward(const Tensor& gradient, const Tensor& images, const Tensor& weight, IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, bool transposed, IntArrayRef output_padding, int64_t groups, std::array<bool, 3> wanted) {
  std::vector<int64_t> bias{weight.size(transposed ? 1 : 0)};
  auto [of_images, of_weight, of_bias] = at::convolution_backward(on_host(gradient), on_host(images), on_host(weight), bias, stride, padding, dilation, transposed, output_padding, groups, wanted);
  auto back = [&](const Tensor& tensor) { return tensor.defined() ? tensor.to(images.device()) : tensor; };
  return {back(of_images), back(of_weight), back(of_bias)};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &make_empty);
  m.impl("empty_strided", &make_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_and_resize);
  m.impl("_local_scalar_dense", &item);
  m.impl("as_strided", &view_strided);
  m.impl("view", static_cast<Tensor (*)(const Tensor&, IntArrayRef)>(&native::view));
  m.impl("_reshape_alias", &native::_reshape_alias);
  m.impl("resize_", &resize_in_place);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("record_stream", &ignore_stream);
  m.impl("convolution_overrideable", &convolve);
  m.impl("convolution_backward_overrideable", &convolve_backward);
}

// Any other operator: the CPU's, on the same memory, so that its strides, its bits and what it changes in place are the CPU's.
struct Lent {
  std::vector<std::pair<Tensor, Tensor>> pairs;  // (on the host, on the device)
  Tensor lend(const c10::OperatorHandle& op, const Tensor& tensor, bool indexes) {
    if (!tensor.defined()) return tensor;
    bool mine = tensor.device().type() == NPU;
    TORCH_CHECK(mine || tensor.dim() == 0 || indexes, op.schema().name(), ": a tensor of ", tensor.device(), " among those of npu");
    if (!mine) return tensor;
    pairs.emplace_back(on_host(tensor), tensor);
    return pairs.back().first;
  }
  Tensor give_back(const Tensor& result) const {
    if (!result.defined() || result.device().type() != kCPU) return result;
    for (const auto& [host, device] : pairs)
      if (result.is_same(host)) return device;
    return result.to(c10::Device(NPU, current));
  }
};

static void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto count = schema.arguments().size(), first = stack->size() - count;
  bool indexes = schema.name().find("index") != std::string::npos;  // which takes indices of the CPU on every device
  Lent lent;
  for (size_t number = 0; number < count; ++number) {  // a result that is still to get its size
    const auto& value = (*stack)[first + number];
    const auto* alias = schema.arguments()[number].alias_info();
    if (alias && alias->isWrite() && value.isTensor() && value.toTensor().numel() == 0) return native::cpu_fallback(op, stack);
  }
  for (size_t number = 0; number < count; ++number) {
    auto& value = (*stack)[first + number];
    if (value.isTensor()) {
      value = lent.lend(op, value.toTensor(), indexes);
    } else if (value.isTensorList()) {
      c10::List<Tensor> tensors;
      for (const Tensor& tensor : value.toTensorVector()) tensors.push_back(lent.lend(op, tensor, indexes));
      value = tensors;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> tensors;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorList())
        tensors.push_back(tensor ? std::optional<Tensor>(lent.lend(op, *tensor, indexes)) : std::nullopt);
      value = tensors;
    } else if (value.isDevice() && value.toDevice().type() == NPU) {
      value = c10::Device(kCPU);
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (size_t number = stack->size() - schema.returns().size(); number < stack->size(); ++number) {
    auto& value = (*stack)[number];
    if (value.isTensor()) {
      value = lent.give_back(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> tensors;
      for (const Tensor& tensor : value.toTensorVector()) tensors.push_back(lent.give_back(tensor));
      value = tensors;
    }
  }
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define EXACT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define EXACT_IF_UNSET(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at::autocast;
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(EXACT)
  AT_FORALL_FP32_SET_OPT_DTYPE(EXACT_IF_UNSET)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(WIDEST)
}

// --- Collectives: the backend hccl, which is Gloo over the same memory ---------------------------------------------------

class Hccl final : public c10d::Backend {
 public:
  Hccl(c10::intrusive_ptr<c10d::Backend> gloo) : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}
  const std::string getBackendName() const override { return "hccl"; }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<Tensor>& tensors, const c10d::BroadcastOptions& how) override { auto mine = all(tensors); return gloo_->broadcast(mine, how); }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<Tensor>& tensors, const c10d::AllreduceOptions& how) override { auto mine = all(tensors); return gloo_->allreduce(mine, how); }
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(std::vector<Tensor>& tensors, const c10d::AllreduceCoalescedOptions& how) override { auto mine = all(tensors); return gloo_->allreduce_coalesced(mine, how); }
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<Tensor>>& outputs, std::vector<Tensor>& inputs, const c10d::AllgatherOptions& how) override {
    std::vector<std::vector<Tensor>> theirs;
    for (const auto& tensors : outputs) theirs.push_back(all(tensors));
    auto mine = all(inputs);
    return gloo_->allgather(theirs, mine, how);
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& how) override { auto theirs = one(output), mine = one(input); return gloo_->_allgather_base(theirs, mine, how); }
  c10::intrusive_ptr<c10d::Work> alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& taken, std::vector<int64_t>& given, const c10d::AllToAllOptions& how) override { auto theirs = one(output), mine = one(input); return gloo_->alltoall_base(theirs, mine, taken, given, how); }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& how) override { return gloo_->barrier(how); }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }

 private:
  static Tensor one(const Tensor& tensor) {
    TORCH_CHECK(tensor.device().type() == NPU, "hccl: a tensor of ", tensor.device());
    return on_host(tensor);
  }
  static std::vector<Tensor> all(const std::vector<Tensor>& tensors) {
    std::vector<Tensor> made;
    for (const auto& tensor : tensors) made.push_back(one(tensor));
    return made;
  }
  c10::intrusive_ptr<c10d::Backend> gloo_;
};

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("device_count", &devices);
  m.def("current_device", [] { return static_cast<int>(current); });
  m.def("set_device", [](int index) { Guard().setDevice({NPU, static_cast<c10::DeviceIndex>(index)}); });
  m.def("memory_allocated", [](int index) { std::lock_guard<std::mutex> lock(memory); return in_use[index]; });
  m.def("hccl", [](c10::intrusive_ptr<c10d::Backend> gloo) { return c10::static_intrusive_pointer_cast<c10d::Backend>(c10::make_intrusive<Hccl>(gloo)); });
}
