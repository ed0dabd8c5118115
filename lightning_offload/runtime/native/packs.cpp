// Saved tensors: what becomes of each, and how it is given back. See executor.py, and fallback.py for steps that follow
// the plan for another structure.

#include "step.h"

#include <ATen/SequenceNumber.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <tuple>
#include <utility>

namespace offload {

static constexpr int64_t TINY_BYTES = 1024;  // of follow.py

// ---- packs

std::string Step::mismatch(int64_t index, const StoragePtr& storage) {
  const auto& planned = program->pack_bytes;
  const auto num_bytes = static_cast<int64_t>(storage->nbytes());
  const bool is_there = index < static_cast<int64_t>(planned.size());
  if (is_there && (planned[index] == num_bytes || planned[index] == 0 || (program->is_bound && num_bytes < planned[index]))) {
    if (!program->is_bound) {
      return "";
    }
    // At some lengths an op copies what it takes as it is at others.
    const auto first = program->first_packs[index];
    pack_keys_[index] = storage.get();
    const auto found = pack_keys_.find(first);
    if (first == index || found == pack_keys_.end() || found->second == storage.get()) {
      return "";
    }
    return "a copy was saved where a tensor was to be saved again";
  }
  const auto was = is_there ? std::to_string(planned[index]) + " were" : std::string("nothing was");
  return "one of " + std::to_string(num_bytes) + " bytes was saved where " + was + " expected";
}

// Let a saved value leave the device as the plan says; whether it need not be kept as it is.
bool Step::leave(const ValuePtr& value, const StoragePtr& storage) {
  if (value->is_external || storage->nbytes() == 0 || storage->device() != device) {
    return false;
  }
  if (value->block) {
    return true;
  }
  if (has_deviated) {
    return python.swap_out(value, storage);
  }
  switch (program->action(value->index) & 3) {
    case Program::RECOMPUTE:
      return static_cast<bool>(value->call);
    case Program::SWAP:
      return swap_out(value, storage);
    default:
      table.own(value, storage);
      return false;
  }
}

// The value that a pack is about where ops are not seen, by what the program says of it; none where it stays.
ValuePtr Step::by_ordinal(int64_t index, const at::Tensor& tensor, const StoragePtr& storage, Handle& handle) {
  auto value = table.find(storage.get());
  if (value && value->is_external) {  // what exposed it may have come before
    took_data = took_data || index >= 0;
    return {};
  }
  if (value) {
    return value->is_as_saved(handle) ? value : ValuePtr();
  }
  if (index < 0) {
    return {};
  }
  value = c10::make_intrusive<Value>(index, static_cast<int64_t>(storage->nbytes()));
  table.follow(value, storage);
  if (!leave(value, storage)) {
    table.drop(storage.get());
    return {};
  }
  value->guards.clear();
  value->guards.push_back(handle.saved);
  return value;
}

Kept Step::pack(const at::Tensor& tensor, bool is_parameter, bool is_ordinary, const c10::intrusive_ptr<Handle>& handle) {
  const int64_t index = num_packs++;
  handle->index = index;
  const bool is_there = is_ordinary && is_plain(tensor);
  if (captures()) {
    return is_there ? Kept::AS_IT_IS : Kept::STRANGE;
  }
  if (program->is_routed && ledger.is_due()) {
    python.late_ones_leave();
  }
  if (!is_there) {
    handle->place = program->is_routed ? Handle::ASKS : index;
    return Kept::STRANGE;
  }
  const StoragePtr storage = tensor.storage().getWeakStorageImpl().lock();
  if (!is_cpu_ && tensor.device() == device) {  // Note [streams and memory] in stream_lanes.py
    handle->stream = stream_of(device);
    note_use(*storage, *handle->stream);
  }
  if (program->is_routed) {
    return pack_by_form(tensor, is_parameter, storage, handle);
  }
  if (!has_deviated) {
    const auto why = mismatch(index, storage);
    if (!why.empty()) {
      python.deviate(why);
    }
  }
  const int64_t place = handle->place = has_deviated ? Handle::NOWHERE : index;
  ValuePtr value;
  if (is_parameter) {
    // The program's memory, which may lie elsewhere any time.
  } else if (has_deviated && !program->sees_ops) {
    return Kept::LEAVES_LATE;
  } else if (program->sees_ops) {
    value = table.find(storage.get());
    if (!value && place >= 0 && program->action(program->pack_storages[place]) != Program::KEEP) {
      value = by_ordinal(program->pack_storages[place], tensor, storage, *handle);  // made out of sight
    }
    if (value && value->holds_no_longer(tensor)) {
      value.reset();  // a backward in the midst of the step has written it, or another thread
    }
  } else {
    value = by_ordinal(place >= 0 ? program->pack_storages[place] : -1, tensor, storage, *handle);
  }
  if (value && leave(value, storage)) {
    handle->value = value;
    handle->geometry = Geometry::of(tensor);
    value->handles.push_back(WeakHandle(handle));
    return Kept::NOT;
  }
  handle->value = value;  // held for calls that read it
  if (!is_parameter && place >= 0 && (program->pack_flags[place] & Program::MADE)) {
    kept.push_back(WeakHandle(handle));
    return Kept::APART;
  }
  return Kept::AS_IT_IS;
}

// ---- packs of a step along the plan for another structure

bool Program::Form::admits(const at::Tensor& tensor) const {
  const auto sizes = tensor.sizes();
  return dtype == static_cast<int>(tensor.scalar_type()) && shape.size() == sizes.size() &&
      std::equal(shape.begin(), shape.end(), sizes.begin(), [](int64_t planned, int64_t size) {
        return planned == size || planned == OPEN;
      });
}

// Whether a storage was there before the step, and will be after it.
bool Step::outlives(const c10::StorageImpl* storage) {
  if (!outliving_) {
    python.outliving(outliving_.emplace());
  }
  return outliving_->count(storage) != 0;
}

// See SupersetRule in fallback.py, which decides about what does not go on along the plan.
Kept Step::pack_by_form(
    const at::Tensor& tensor, bool is_parameter, const StoragePtr& storage, const c10::intrusive_ptr<Handle>& handle) {
  const int64_t place = route.place;
  const bool goes_on = !route.is_astray && num_unpacks == route.num_behind && place < route.end;
  if (!goes_on || !program->forms[place].admits(tensor)) {
    handle->place = Handle::ASKS;
    return Kept::AS_IT_IS;
  }
  handle->place = place;
  ++route.place;
  ledger.note(place, tensor, true);
  if (is_parameter) {  // whose memory is the program's
    return Kept::AS_IT_IS;
  }
  const auto value = table.find(storage.get());
  const int64_t index = program->pack_storages[place];
  const bool is_planned = program->action(index) != Program::KEEP;
  const auto num_bytes = static_cast<int64_t>(storage->nbytes());
  if (value && value->is_external) {  // what exposed it may have come before
    took_data = took_data || is_planned;
  } else if (value && value->block) {
    if (value->is_as_saved(*handle)) {
      handle->value = value;
      handle->geometry = Geometry::of(tensor);
      value->handles.push_back(WeakHandle(handle));
      return Kept::NOT;
    }
  } else if ((program->pack_flags[place] & Program::EXTERNAL) || outlives(storage.get())) {
    // It stays in any case.
  } else if (ledger.is_staying(storage.get())) {
    ledger.stays_too(handle);
  } else if (ledger.is_late(storage.get())) {  // for another save by the same op
    ledger.add_late(handle, -1);
  } else if (is_planned && num_bytes) {
    ledger.add_late(handle, index);  // the step may have another op there, which writes what it has saved
  } else if (num_bytes > TINY_BYTES && num_bytes > program->kept_bytes[place] - ledger.alive_bytes()) {
    ledger.astray_bytes += num_bytes;
    ledger.add_late(handle, -1);
  } else {
    ledger.stays(handle, *storage);
  }
  return Kept::AS_IT_IS;
}

// The planned unpacks that are behind with this one, and were not before: from the first one to before the last.
std::pair<int64_t, int64_t> Step::passed_unpacks(const Handle& handle) {
  if (!program->is_routed) {
    return {num_unpacks, num_unpacks + 1};
  }
  const int64_t first = route.next_unpack;
  if (handle.place >= 0) {
    for (const int64_t planned : program->unpacks[handle.place]) {
      if (planned >= first) {
        route.next_unpack = planned + 1;
        break;
      }
    }
  }
  return {first, route.next_unpack};
}

bool Ledger::is_due() const {
  return !late_.empty() && at::sequence_number::peek() != late_node_;
}

void Ledger::add_late(const HandlePtr& handle, int64_t index) {
  late_.emplace_back(WeakHandle(handle), index);
  late_node_ = at::sequence_number::peek();
}

static bool keeps(const WeakHandle& weak, const c10::StorageImpl* storage) {
  const auto handle = weak.lock();
  return handle && handle->kept.defined() && handle->kept.storage().unsafeGetStorageImpl() == storage;
}

bool Ledger::is_late(const c10::StorageImpl* storage) const {
  return std::any_of(late_.begin(), late_.end(), [&](const auto& late) { return keeps(late.first, storage); });
}

std::vector<std::pair<Ledger::HandlePtr, int64_t>> Ledger::take_late() {
  std::vector<std::pair<HandlePtr, int64_t>> found;
  for (const auto& [weak, index] : std::exchange(late_, {})) {
    auto handle = weak.lock();
    if (handle && handle->is_held() && handle->kept.defined() && !handle->is_out) {
      found.emplace_back(std::move(handle), index);
    }
  }
  return found;
}

void Ledger::stays(const HandlePtr& handle, const c10::StorageImpl& storage) {
  const auto num_bytes = static_cast<int64_t>(storage.nbytes());
  kept_bytes += num_bytes;
  *alive_ += num_bytes;
  handle->counted = alive_;
  handle->counted_bytes = num_bytes;
  stays_.insert_or_assign(&storage, WeakHandle(handle));
}

bool Ledger::is_staying(const c10::StorageImpl* storage) const {
  const auto found = stays_.find(storage);
  return found != stays_.end() && keeps(found->second, storage);
}

void Ledger::stays_too(const HandlePtr& handle) {
  stays_too_.emplace_back(handle);
}

void Ledger::let_all_go() {
  std::vector<HandlePtr> going;
  const auto goes = [&](const WeakHandle& weak) {
    if (auto handle = weak.lock()) {
      going.push_back(std::move(handle));
    }
  };
  for (const auto& [storage, weak] : std::exchange(stays_, {})) {
    goes(weak);
  }
  for (const auto& weak : std::exchange(stays_too_, {})) {
    goes(weak);
  }
  alive_ = std::make_shared<std::atomic<int64_t>>(0);
  std::sort(going.begin(), going.end(), [](const auto& one, const auto& other) { return one->index < other->index; });
  for (const auto& handle : going) {
    add_late(handle, -1);
  }
}

void Ledger::note(int64_t place, const at::Tensor& tensor, bool is_plain) {
  const auto mix = [](uint64_t& print, int64_t number) { print = c10::hash_combine(print, static_cast<size_t>(number)); };
  const int64_t dtype = is_plain ? static_cast<int64_t>(tensor.scalar_type()) : Program::Form::STRANGE;
  for (uint64_t* const print : {&fingerprint, &places_fingerprint}) {
    mix(*print, place);
    mix(*print, dtype);
    mix(*print, is_plain ? tensor.dim() : 0);
  }
  if (is_plain) {
    for (const int64_t size : tensor.sizes()) {
      mix(fingerprint, size);
    }
  }
}

// ---- unpacks

at::Tensor Step::unpack(Handle& handle) {
  const bool is_sound = !handle.saved.is_stale();
  const bool is_backward = in_backward();  // else somebody reads grad_fn._saved_...
  const int64_t ordinal = num_unpacks;
  int64_t first = 0, last = 0;
  if (is_backward) {
    std::tie(first, last) = passed_unpacks(handle);
  }
  const auto& asked = program->busy_unpacks;
  const auto num_asked = static_cast<int64_t>(asked.size());
  const bool is_busy =
      std::find(asked.begin() + std::min(first, num_asked), asked.begin() + std::min(last, num_asked), 1) !=
      asked.begin() + std::min(last, num_asked);
  if (handle.kept.defined() && !handle.geometry && is_sound && ordinal != 0 && is_backward && !is_busy) {
    num_unpacks = ordinal + 1;
    handle.is_out = true;
    show(handle.kept, handle, 1 + (handle.value && handle.value->storage ? 1 : 0));
    return handle.kept;
  }
  if (is_backward) {
    if (ordinal == 0) {
      python.first_unpack();
    }
    if (const int task = backward_id(); task != last_backward_) {
      last_backward_ = task;
      table.close();  // from here on values live by who needs them: forward has read and saved what it wanted
    }
    num_unpacks = ordinal + 1;
  }
  if (!is_sound) {
    python.modified(handle);
  }
  if (captures()) {
    if (handle.value && handle.geometry) {
      const auto live = handle.value->live();
      if (!live || (handle.value->is_ours && handle.value->copy)) {
        python.not_there_for_graph();
      }
    }
  } else if (is_backward && !has_deviated && (is_busy || (handle.value && handle.value->block && handle.value->index < 0))) {
    bring_back(first, last, ValuePtr(handle.value));  // what was saved before one that was unmatched comes back next
  }
  if (!handle.value || !handle.geometry) {
    handle.is_out = true;
    show(handle.kept, handle, 1 + (handle.value && handle.value->storage ? 1 : 0));
    return handle.kept;
  }
  const ValuePtr value = handle.value;
  StoragePtr storage = value->is_handed_out ? value->live() : StoragePtr();
  if (storage) {  // as it is now, whoever wrote it: plain autograd reads the same memory
    if (value->is_ours) {
      await(value, storage);
    }
  } else {
    storage = materialize(value);
  }
  if (program->is_recomputing) {
    table.hand_out(value, storage, handle);
  }
  auto tensor = handle.geometry->on(storage);
  if (handle.saved.counter.enabled()) {
    tensor.unsafeGetTensorImpl()->set_version_counter(handle.saved.counter);
  }
  show(tensor, handle, 2 + (value->storage ? 1 : 0));
  return tensor;
}

// Give a tensor in place of the one that was saved to a node; Note [gradients that are stolen] in executor.py.
void Step::show(const at::Tensor& tensor, Handle& handle, size_t num_own) {
  const void* const node = own_node();
  if (node != shown_to_) {
    backward_ends();
    shown_to_ = node;
  }
  if (node == nullptr || handle.is_borrowed) {  // the program's own tensor
    return;
  }
  if (is_plain(tensor) && tensor.storage().use_count() > num_own) {
    shown_.push_back(tensor);
  }
  if (!handle.kept.defined()) {
    handle.shown = tensor;
  }
}

void Step::backward_ends() {
  shown_to_ = nullptr;
  const auto dying = std::exchange(shown_, {});
}

}  // namespace offload
