#include "lanes.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/copy_ops.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <cstring>

namespace offload {

static constexpr double EVENT_SECONDS = 3e-6;  // between two events with nothing between them; of stream_lanes.py

// A device is current while events of it are recorded, waited for and freed: they would make device 0 current
// afterwards, which a program that is on another one may not have begun to use, and would begin to.
Copy::~Copy() {
  try {
    const c10::OptionalDeviceGuard on(owner.device());
    event = c10::Event(owner.device_type());
  } catch (...) {  // the device is gone, as at the end of a process
  }
}

void Copy::wait() {
  lanes->let_compute_wait(*this);
  const auto dying = lanes->let_go(*this);
}

void Copy::synchronize() {
  event.synchronize();
  const auto dying = lanes->let_go(*this);
}

StoragePtr new_device_memory(int64_t num_bytes, c10::Device device) {
  // A program may have put its own allocator in the place of CUDA's.
  auto* const allocator =
      device.is_cuda() ? at::detail::getCUDAHooks().getCUDADeviceAllocator() : c10::GetAllocator(device.type());
  const c10::OptionalDeviceGuard guard(device);
  return c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), c10::SymInt(num_bytes), allocator, /*resizable=*/true);
}

Lanes::Lanes(c10::Stream out, c10::Stream in, PyObject* done) : device(out.device()), done_(PyRef::borrowed(done)) {
  out_.stream = out;
  in_.stream = in;
}

Lanes::Lanes(int64_t most_bytes, PyObject* done)
    : device(c10::kCPU), most_bytes_(most_bytes), done_(PyRef::borrowed(done)) {}

// ---- what they share with Python

namespace {

PyObject* interned(const char* name) {
  return PyUnicode_InternFromString(name);
}

PyRef attribute(PyObject* object, PyObject* name) {
  PyRef found = PyRef::stolen(PyObject_GetAttr(object, name));
  if (!found) {
    throw_python_error();
  }
  return found;
}

void set_attribute(PyObject* object, PyObject* name, PyObject* value) {
  if (PyObject_SetAttr(object, name, value) != 0) {
    throw_python_error();
  }
}

PyObject* busy() {
  static PyObject* const name = interned("busy");
  return name;
}

// Let a stream go on only after a copy of a block.
void gate(PyObject* other, const c10::Stream& stream) {
  static PyObject* const settle = interned("settle");
  if (const auto* const copy = copy_of(other)) {
    copy->event.block(stream);
  } else if (other != Py_None) {  // one that Python made: it has ended, or soon will
    const PyRef done = PyRef::stolen(PyObject_CallMethodNoArgs(other, settle));
    if (!done) {
      throw_python_error();
    }
  }
}

}  // namespace

PyRef Lanes::swap_out(const StoragePtr& storage, PyObject* block, int64_t address, int64_t num_bytes) {
  static PyObject* const after = interned("after");
  if (out_.stream) {
    const PyRef others = attribute(block, after);
    const auto num_others = PyTuple_GET_SIZE(others.get());
    for (Py_ssize_t i = 0; i < num_others; ++i) {
      gate(PyTuple_GET_ITEM(others.get(), i), *out_.stream);
    }
    if (num_others > 0) {
      set_attribute(block, after, PyRef::stolen(PyTuple_New(0)).get());
    }
  }
  return copy(out_, block, storage, address, num_bytes);
}

PyRef Lanes::swap_in(PyObject* block, int64_t address, const StoragePtr& storage, int64_t num_bytes) {
  if (in_.stream) {  // compute waited for the copy out, but perhaps on another stream
    gate(attribute(block, busy()).get(), *in_.stream);
  }
  return copy(in_, block, storage, address, num_bytes);
}

bool Lanes::wait(PyObject* copy) const {
  auto* const ours = copy_of(copy);
  if (ours != nullptr) {
    ours->wait();
  }
  return ours != nullptr || is_done(copy);
}

// ---- copies

PyRef Lanes::copy(
    Direction& direction, PyObject* block, const StoragePtr& storage, int64_t address, int64_t num_bytes) {
  TORCH_CHECK_VALUE(
      storage && static_cast<int64_t>(storage->nbytes()) >= num_bytes && num_bytes >= 0, "a storage of ",
      storage ? storage->nbytes() : 0, " bytes has no ", num_bytes, " to copy");
  if (device.is_cpu()) {
    copy_here(direction, storage, address, num_bytes);
    return PyRef::borrowed(done_.get());
  }
  const auto compute = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  const auto copy = c10::make_intrusive<Copy>(shared_from_this(), c10::Event(device.type()), compute, storage);
  PyRef object = wrapped(copy);
  const PyRef before = attribute(block, busy());
  set_attribute(block, busy(), object.get());  // first: once it is under way nothing may fail before the block knows
  try {
    const WithoutGil others_go_on;
    issue(direction, copy, address, num_bytes);
  } catch (...) {
    set_attribute(block, busy(), before.get());  // it waits for its earlier copy
    throw;
  }
  return object;
}

void Lanes::issue(Direction& direction, const CopyPtr& copy, int64_t address, int64_t num_bytes) {
  const c10::OptionalDeviceGuard on_its_device(device);
  Geometry flat;
  flat.size.push_back(num_bytes);
  flat.stride.push_back(1);
  flat.dtype = c10::ScalarType::Byte;
  flat.device = device;
  auto on_device = flat.on(copy->storage);
  flat.device = c10::kCPU;
  auto on_host = flat.on(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), c10::SymInt(num_bytes),
      c10::DataPtr(reinterpret_cast<void*>(address), c10::kCPU), nullptr, /*resizable=*/false));
  const auto dying = forget_done();
  const auto& side = *direction.stream;
  c10::Event mark(device.type());
  mark.record(copy->owner);
  mark.block(side);
  auto before = timestamp(side);
  {
    // Straight to the backend: the runtime's own copies are nobody's business, whatever modes or transforms are on.
    const c10::StreamGuard on(side);
    const c10::DispatchKeySet backend(c10::computeDispatchKey(flat.dtype, c10::kStrided, device));
    const bool is_out = &direction == &out_;
    at::_ops::copy_::redispatch(backend, is_out ? on_host : on_device, is_out ? on_device : on_host, true);
  }
  copy->event.record(side);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    direction.under_way.push_back(copy);
  }
  auto after = before ? timestamp(side) : std::nullopt;
  if (after) {
    const std::lock_guard<std::mutex> lock(mutex_);
    direction.timed.push_back({std::move(*before), std::move(*after), num_bytes});
  }
}

void Lanes::copy_here(Direction& direction, const StoragePtr& storage, int64_t address, int64_t num_bytes) {
  if (num_bytes == 0) {  // there may be no memory to point to
    return;
  }
  const auto began = std::chrono::steady_clock::now();
  auto* const on_host = reinterpret_cast<void*>(address);
  if (&direction == &out_) {
    std::memcpy(on_host, storage->data(), num_bytes);
  } else {
    std::memcpy(storage->mutable_data(), on_host, num_bytes);
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  const std::lock_guard<std::mutex> lock(mutex_);
  direction.num_bytes += num_bytes;
  direction.seconds += seconds;
}

void Lanes::note_use(const c10::StorageImpl& storage) const {
  if (!device.is_cpu()) {
    const c10::impl::VirtualGuardImpl impl(device.type());
    impl.recordDataPtrOnStream(storage.data_ptr(), impl.getStream(device));
  }
}

void Lanes::let_compute_wait(const Copy& copy) {
  const c10::OptionalDeviceGuard on_its_device(device);
  const auto compute = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  if (copy.owner != compute) {
    copy.event.block(copy.owner);
  }
  auto before = timestamp(compute);
  copy.event.block(compute);
  auto after = before ? timestamp(compute) : std::nullopt;
  if (after) {
    const std::lock_guard<std::mutex> lock(mutex_);
    stalls_.emplace_back(std::move(*before), std::move(*after));
  }
}

StoragePtr Lanes::held_by(const Copy& copy) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return copy.storage;
}

StoragePtr Lanes::let_go(Copy& copy) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::move(copy.storage);
}

// ---- what is under way

std::vector<CopyPtr> Lanes::all_under_way(bool is_taken) {
  std::vector<CopyPtr> found;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto* const direction : {&out_, &in_}) {
    found.insert(found.end(), direction->under_way.begin(), direction->under_way.end());
    if (is_taken) {
      direction->under_way.clear();
    }
  }
  return found;
}

std::vector<Lanes::Done> Lanes::forget_done() {
  std::vector<Done> dying;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto* const direction : {&out_, &in_}) {
    auto& under_way = direction->under_way;
    while (!under_way.empty() && under_way.front()->event.query()) {
      dying.push_back({std::move(under_way.front()->storage), under_way.front()});
      under_way.pop_front();
    }
  }
  return dying;
}

void Lanes::tidy() {
  const auto dying = forget_done();
}

void Lanes::settle() {
  for (const auto& copy : all_under_way(false)) {
    if (held_by(*copy)) {
      copy->synchronize();
    }
  }
}

void Lanes::drain() {
  for (const auto& copy : all_under_way(true)) {
    copy->synchronize();
  }
}

// ---- times

std::optional<c10::Event> Lanes::timestamp(const c10::Stream& stream) const {
  if (!is_measuring_) {
    return std::nullopt;
  }
  c10::Event event(device.type(), c10::EventFlag::BACKEND_DEFAULT);
  event.record(stream);
  return event;
}

void Lanes::measure(bool is_on) {
  is_measuring_ = is_on;
}

LaneTimes Lanes::take_times() {
  drain();
  LaneTimes times;
  decltype(stalls_) stalls;
  std::vector<Direction::Timed> timed_out, timed_in;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    times = {
        std::exchange(out_.num_bytes, 0), std::exchange(out_.seconds, 0), std::exchange(in_.num_bytes, 0),
        std::exchange(in_.seconds, 0), 0};
    std::swap(stalls, stalls_);
    std::swap(timed_out, out_.timed);
    std::swap(timed_in, in_.timed);
  }
  const auto add = [](const std::vector<Direction::Timed>& timed, int64_t& num_bytes, double& seconds) {
    for (const auto& copy : timed) {
      copy.after.synchronize();
      num_bytes += copy.num_bytes;
      seconds += copy.before.elapsedTime(copy.after) / 1000;
    }
  };
  add(timed_out, times.out_bytes, times.out_seconds);
  add(timed_in, times.in_bytes, times.in_seconds);
  for (const auto& [before, after] : stalls) {  // perhaps on several streams
    after.synchronize();
    times.stall_seconds += std::max(0.0, before.elapsedTime(after) / 1000 - EVENT_SECONDS);
  }
  return times;
}

}  // namespace offload
