#include "state.h"

#include <c10/core/DispatchKey.h>
#include <c10/core/TensorOptions.h>

#include <cstring>

namespace offload {

bool PyRef::can_drop() noexcept {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsInitialized() && !Py_IsFinalizing();
#else
  return Py_IsInitialized() && !_Py_IsFinalizing();
#endif
}

void PyRef::reset() noexcept {
  PyObject* object = std::exchange(object_, nullptr);
  if (object != nullptr && can_drop()) {  // else nobody frees anything any more
    WithGil gil;
    Py_DECREF(object);
  }
}

// ---- geometry

Geometry Geometry::of(const at::Tensor& tensor) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  const auto size = impl->sizes(), stride = impl->strides();
  return Geometry{
      {size.begin(), size.end()}, {stride.begin(), stride.end()}, impl->storage_offset(),
      c10::typeMetaToScalarType(impl->dtype()), impl->device(), impl->is_conj(), impl->is_neg()};
}

at::Tensor Geometry::on(const StoragePtr& storage) const {
  const auto key = c10::computeDispatchKey(dtype, c10::kStrided, device);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(key), c10::scalarTypeToTypeMeta(dtype));
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(size, stride, offset);
  if (conj) {
    impl->_set_conj(true);
  }
  if (neg) {
    impl->_set_neg(true);
  }
  return tensor;
}

bool are_one(const c10::VariableVersion& a, const c10::VariableVersion& b) {
  static_assert(sizeof(c10::VariableVersion) == sizeof(void*), "a version counter is one pointer");
  return a.enabled() && std::memcmp(&a, &b, sizeof(void*)) == 0;
}

// ---- what dies

namespace {

// Chains of calls are as long as a model is deep: each call owns values, which own the calls that make them. Letting go
// of one within the destructor of the next would overflow the stack, so the outermost destructor works them off.
class Undertaker {
 public:
  template <class Item>
  void bury(Item&& item) {
    take(std::forward<Item>(item));
    if (is_busy_) {
      return;
    }
    is_busy_ = true;
    while (!values_.empty() || !calls_.empty()) {
      if (!values_.empty()) {
        ValuePtr last = std::move(values_.back());
        values_.pop_back();
      } else {
        CallPtr last = std::move(calls_.back());
        calls_.pop_back();
      }
    }
    is_busy_ = false;
  }

 private:
  void take(CallPtr&& call) {
    calls_.push_back(std::move(call));
  }
  void take(c10::SmallVector<ValuePtr, 3>&& inputs) {
    for (auto& value : inputs) {
      values_.push_back(std::move(value));
    }
    inputs.clear();
  }
  bool is_busy_ = false;
  std::vector<ValuePtr> values_;
  std::vector<CallPtr> calls_;
};

Undertaker& undertaker() {
  static thread_local Undertaker* undertaker = new Undertaker;  // outlives what thread-local destructors let go of
  return *undertaker;
}

}  // namespace

Value::Value(int64_t index, int64_t num_bytes) : index(index), num_bytes(num_bytes) {}

Call::Call(c10::OperatorHandle op, const OpFacts* facts) : op(op), facts(facts) {}

void Value::release_resources() {
  storage.reset();
  memory.reset();
  origin.reset();
  made_as.reset();
  readers.clear();
  handles.clear();
  guards.clear();
  py_stream.reset();
  block.reset();
  copy.reset();
  if (call) {
    undertaker().bury(std::move(call));
  }
}

Value::~Value() {
  release_resources();
}

void Call::release_resources() {
  arguments.clear();
  refs.clear();  // each value of these is among the inputs as well
  results.clear();
  if (!inputs.empty()) {
    undertaker().bury(std::move(inputs));
  }
}

Call::~Call() {
  release_resources();
}

void Handle::release_resources() {
  kept.reset();
  shown.reset();
  value.reset();
  geometry.reset();
  borrowed.reset();
  if (const auto count = std::exchange(counted, nullptr)) {
    *count -= counted_bytes;
  }
  own.reset();
  object = nullptr;
}

// ---- values

bool Value::is_stale() const {
  for (const auto& guard : guards) {
    if (guard.is_stale()) {
      return true;
    }
  }
  return false;
}

bool Value::holds_no_longer(const at::Tensor& tensor) const {
  const auto& counter = tensor.unsafeGetTensorImpl()->version_counter();
  if (is_stale() || fresh_version < 0 || !counter.enabled()) {
    return is_stale();
  }
  const int64_t version = counter.current_version();  // a part may have a counter of its own, which begins at 0
  return version != 0 && version != fresh_version;
}

bool Value::is_as_saved(const Handle& handle) const {
  // Parts of a storage may have counters of their own (`unsafe_chunk`, as cells of LSTMs and GRUs do), and may be
  // written after others were saved. One that is still at its first version was not.
  for (const auto& guard : guards) {
    if (guard.is_stale() || guard.version != handle.saved.version ||
        (guard.version != 0 && !are_one(guard.counter, handle.saved.counter))) {
      return false;
    }
  }
  return true;
}

bool Value::has_handle() const {
  for (const auto& handle : handles) {
    if (!handle.expired()) {
      return true;
    }
  }
  return false;
}

bool Value::has_reader() const {
  for (const auto& reader : readers) {
    if (!reader.expired()) {
      return true;
    }
  }
  return false;
}

void Value::keep_watch() {
  if (!guards.empty() || !live()) {
    return;
  }
  // A counter of a tensor that is gone counts for nobody: what still reaches the memory may have another one.
  if (made_as) {
    const auto tensor = made_as->lock();
    if (tensor && tensor->version_counter().enabled()) {
      const auto& counter = tensor->version_counter();
      guards.push_back({counter, fresh_version < 0 ? counter.current_version() : static_cast<uint32_t>(fresh_version)});
      return;
    }
  }
  for (const auto& weak : handles) {
    if (const auto handle = weak.lock()) {
      guards.push_back(handle->saved);
      return;
    }
  }
  if (block || call) {
    leave_origin();
  }
}

void Value::leave_origin() {
  if (origin) {
    if (storage && storage.get() == origin->_unsafe_get_target()) {
      storage.reset();
    }
    origin.reset();
  }
  guards.clear();
}

void Value::owns(StoragePtr memory, std::optional<c10::Stream> on) {
  storage = std::move(memory);
  stream = on;
  py_stream.reset();
  is_ours = true;
  is_handed_out = false;
  origin.reset();
  guards.clear();
}

// ---- the table

ValuePtr ValueTable::find(const c10::StorageImpl* storage) const {
  const auto found = entries_.find(storage);
  if (found == entries_.end()) {
    return {};
  }
  auto value = found->second.held ? found->second.held : found->second.value.lock();
  return value && value->is_on(storage) ? value : ValuePtr();
}

ValuePtr ValueTable::indexed(int64_t index) const {
  const bool is_known = index >= 0 && index < static_cast<int64_t>(by_index_.size());
  return is_known ? by_index_[index].lock() : ValuePtr();
}

std::vector<ValuePtr> ValueTable::all_indexed() const {
  std::vector<ValuePtr> found;
  for (const auto& weak : by_index_) {
    if (auto value = weak.lock()) {
      found.push_back(std::move(value));
    }
  }
  return found;
}

void ValueTable::follow(const ValuePtr& value, const StoragePtr& storage) {
  value->origin = WeakStorage(storage);
  auto entry = entries_.find(storage.get());
  if (entry == entries_.end()) {
    entry = entries_.emplace(storage.get(), Entry{ValuePtr(), WeakValue(value)}).first;
  }
  // What goes may run finalizers of Python's, which may come back: not in the midst of a change.
  Entry before = std::exchange(entry->second, Entry{value->storage ? ValuePtr() : value, WeakValue(value)});
  if (value->index >= 0) {
    name(value, value->index);
  }
  if (entries_.size() > sweep_at_) {
    sweep();
  }
}

void ValueTable::name(const ValuePtr& value, int64_t index) {
  value->index = index;
  while (index >= static_cast<int64_t>(by_index_.size())) {
    by_index_.emplace_back(ValuePtr());
  }
  by_index_[index] = WeakValue(value);
}

void ValueTable::own(const ValuePtr& value, const StoragePtr& storage) {
  if (!storage) {
    return;
  }
  value->storage = storage;
  if (value->origin) {
    const auto found = entries_.find(storage.get());
    if (found != entries_.end()) {
      const Entry before = std::exchange(found->second, Entry{ValuePtr(), WeakValue(value)});
    } else {
      entries_.emplace(storage.get(), Entry{ValuePtr(), WeakValue(value)});
    }
  }
}

void ValueTable::hand_out(const ValuePtr& value, const StoragePtr& storage, const Handle& handle) {
  if (!value->is_on(storage.get())) {
    follow(value, storage);
    own(value, storage);
  }
  value->is_handed_out = true;
  for (const auto& guard : value->guards) {
    if (guard.version == handle.saved.version && are_one(guard.counter, handle.saved.counter)) {
      return;
    }
  }
  value->guards.push_back(handle.saved);
}

void ValueTable::drop(const c10::StorageImpl* storage) {
  const auto found = entries_.find(storage);
  if (found != entries_.end()) {
    const Entry dying = std::move(found->second);
    entries_.erase(found);
  }
}

void ValueTable::loosen(const Value& value) {
  if (value.origin) {
    const auto found = entries_.find(value.origin->_unsafe_get_target());
    if (found != entries_.end() && found->second.held.get() == &value) {
      const ValuePtr held = std::move(found->second.held);
      found->second.held.reset();
    }
  }
}

void ValueTable::close() {
  std::vector<ValuePtr> dying;  // perhaps the last reference to one: not while the table is walked
  for (auto& [key, entry] : entries_) {
    auto value = entry.held ? entry.held : entry.value.lock();
    if (value && (value->has_reader() || value->has_handle())) {
      value->keep_watch();
    }
    if (entry.held) {
      dying.push_back(std::move(entry.held));
      entry.held.reset();
    }
  }
}

// Entries of storages that died: in Python their weak references tell at once, here somebody has to look.
void ValueTable::sweep() {
  std::vector<ValuePtr> dying;
  for (auto entry = entries_.begin(); entry != entries_.end();) {
    auto value = entry->second.held ? entry->second.held : entry->second.value.lock();
    if (value && value->origin && !value->origin->expired()) {
      ++entry;
      continue;
    }
    dying.push_back(std::move(value));
    entry = entries_.erase(entry);
  }
  sweep_at_ = std::max<size_t>(1024, 2 * entries_.size());
}

}  // namespace offload
