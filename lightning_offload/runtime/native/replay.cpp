// Values that leave for a lower tier and come back, and replays, the exact way to have one again that was dropped. See
// materialize.py and replay.py.

#include "step.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>

namespace offload {

Step::Step(
    std::shared_ptr<const Program> program, c10::Device device, PyObject* executor, PyObject* lease, PyObject* capturing,
    std::shared_ptr<Lanes> lanes)
    : program(std::move(program)),
      device(device),
      lease(std::make_shared<PyRef>(PyRef::borrowed(lease))),
      lanes(std::move(lanes)),
      follower(*this->program),
      is_cpu_(device.is_cpu()) {
  route.end = this->program->first_border;
  if (capturing != Py_None) {
    python.capturing = PyRef::borrowed(capturing);
  }
  python.executor = PyRef::stolen(PyWeakref_NewRef(executor, nullptr));
}

static std::recursive_mutex& mutex() {
  static auto* mutex = new std::recursive_mutex;
  return *mutex;
}

void Lock::take() {
  if (mutex().try_lock()) {
    return;
  }
  if (PyGILState_Check()) {
    WithoutGil others_go_on;
    mutex().lock();
  } else {
    mutex().lock();
  }
}

void Lock::give_back() {
  mutex().unlock();
}

Lock::Lock() {
  take();
}

Lock::~Lock() {
  give_back();
}

// ---- to a lower tier and back

// Start copying a value to a lower tier; false where there is no room, and it stays.
bool Step::swap_out(const ValuePtr& value, const StoragePtr& storage) {
  const WithGil gil;
  auto [block, address] = python.allocate(*value);
  table.own(value, storage);
  if (!block) {
    return false;
  }
  // A block that no copy fills is nobody's, whatever is raised.
  if (lanes && address != 0 && lanes->takes(value->num_bytes)) {
    value->copy = lanes->swap_out(storage, block.get(), address, value->num_bytes);
    value->block = std::move(block);
    value->address = address;
  } else {
    python.start_out(value, storage, block.get());
  }
  if (program->action(value->index) & Program::RELEASED_AT_PACK) {
    release(value);
  }
  return true;
}

void Step::release(const Program::Storages& storages) {
  for (const int64_t index : storages) {
    if (const auto value = table.indexed(index)) {
      release(value);
    }
  }
}

// Let compute wait for a value's copy out, and drop its device memory; nothing if there is no such copy.
void Step::release(const ValuePtr& value) {
  if (!value->block || !value->copy || !value->origin) {
    return;
  }
  if (!lanes || !lanes->wait(value->copy.get())) {
    python.release(value);
    return;
  }
  value->copy.reset();
  if (const auto live = value->live()) {
    lanes->note_use(*live);
  }
  const auto dying = std::move(value->storage);
}

void Step::release_at_pack(int64_t place) {
  const auto planned = program->pack_releases.find(place);
  if (planned != program->pack_releases.end() && !captures()) {  // a graph must not wait for copies
    release(planned->second);
  }
}

// Begin to bring back what is read now, and what the plan has come back next. See StepExecutor._bring_back.
void Step::bring_back(int64_t first, int64_t last, const ValuePtr& value) {
  if (program->is_routed) {
    python.bring_back(first, last, value);
    return;
  }
  const auto planned = [&](const auto& column, const auto& act) {
    for (int64_t ordinal = first; ordinal < last; ++ordinal) {
      const auto found = column.find(ordinal);
      if (found != column.end()) {
        act(found->second);
      }
    }
  };
  planned(program->unpack_releases, [&](const auto& storages) { release(storages); });
  // What is needed now is first in the lane; what is next overlaps with the wait or replay for it.
  if (value) {
    fetch(value);
  }
  planned(program->fetches, [&](const auto& storages) {
    for (const int64_t index : storages) {
      if (const auto next = table.indexed(index)) {
        fetch(next);
      }
    }
  });
}

// Start bringing a value back if a lower tier has it and the device has not.
void Step::fetch(const ValuePtr& value) {
  if (!value->block || value->live()) {
    return;
  }
  if (can_fetch(*value)) {
    swap_in(value);
  } else {
    python.fetch(value);
  }
}

// Whether what a value's block holds comes back by the core's lanes.
bool Step::can_fetch(const Value& value) const {
  if (!lanes || value.address == 0 || !lanes->takes(value.num_bytes)) {
    return false;
  }
  if (device.is_cpu() && c10::impl::TorchDispatchModeTLS::stack_len() > 0) {  // perhaps one of fake tensors
    return false;
  }
  PyObject* const copy = value.copy.get();
  return copy == nullptr || lanes->is_done(copy) || copy_of(copy) != nullptr;
}

void Step::swap_in(const ValuePtr& value) {
  wait(*value);
  auto storage = new_device_memory(value->num_bytes, device);
  const WithGil gil;
  PyRef copy = lanes->swap_in(value->block.get(), value->address, storage, value->num_bytes);
  value->owns(std::move(storage), stream_of(device));
  if (!lanes->is_done(copy.get())) {
    value->copy = std::move(copy);
  }
}

// Let compute go on only after a value's copy, if one of the core's lanes is under way.
void Step::wait(Value& value) {
  if (value.copy && lanes->wait(value.copy.get())) {
    value.copy.reset();
  }
}

// What came back only for a replay leaves again; the host copies stayed.
void Step::dismiss_visitors() {
  const auto visitors = std::exchange(visitors_, {});
  for (const auto& value : visitors) {
    const auto dying = std::move(value->storage);
  }
  if (std::exchange(has_visitors_, false)) {
    python.dismiss_visitors();
  }
}

// ---- where a value is

// Device memory that holds a value; it stays for as long as anybody needs the value.
StoragePtr Step::materialize(const ValuePtr& value) {
  if (value->is_stale()) {
    if (!value->block && !value->call) {
      return python.materialize(value);  // which raises
    }
    value->leave_origin();
  }
  if (auto live = value->live()) {
    if (value->is_ours) {
      await(value, live);
    }
    return live;
  }
  if (!value->block && value->call) {
    const auto began = std::chrono::steady_clock::now();
    auto made = make(value);
    replay_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
    value->call.reset();
    table.loosen(*value);
    value->owns(std::move(made), stream_of(device));
    dismiss_visitors();
    return value->storage;
  }
  if (value->block && can_fetch(*value)) {
    swap_in(value);
    wait(*value);
    if (value->has_handle()) {
      value->block.reset();
      value->address = 0;
    } else {
      visitors_.push_back(value);
    }
    return value->storage;
  }
  has_visitors_ = true;
  return python.materialize(value);
}

// Have memory ready that we allocated, perhaps on another compute stream than the one that reads it now.
void Step::await(const ValuePtr& value, const StoragePtr& storage) {
  if (lanes) {
    wait(*value);
  }
  if (value->copy || (value->py_stream && !value->stream)) {
    python.await(value, storage);
  } else if (value->stream) {
    const auto reader = stream_of(device);
    if (reader && *reader != *value->stream) {
      if (!captures()) {  // a graph must not wait for what is outside of it
        come_after(*value->stream);
      }
      note_use(*storage, *reader);
    }
  }
}

// ---- replays

namespace {

std::atomic<uint64_t> last_replay{0};

bool is_gone(const Value& value) {
  return !value.block && (value.is_stale() || !value.live());
}

// Puts settings in force, and the former ones back: by `end`, or, where something was raised, as well as can be.
class Environments {
 public:
  Environments(const Upward& python, const std::vector<Environment>& known, PyObject* there)
      : python_(python), known_(known), before_(there), there_(there) {}
  ~Environments() {
    try {
      end();
    } catch (...) {  // what was raised first is what is told
    }
  }
  void end() {
    put(before_);
  }
  void put(PyObject* wanted) {
    if (wanted != there_) {
      PyObject* const there = std::exchange(there_, wanted);
      const auto& to = of(wanted);
      if (to.alike == of(there).alike) {
        c10::GradMode::set_enabled(to.settings.few[Settings::GRAD_MODE] != 0);
      } else {
        python_.put_environment(wanted, there);
      }
    }
  }

 private:
  const Environment& of(PyObject* object) const {
    return *std::find_if(known_.begin(), known_.end(), [&](const auto& one) { return one.object.get() == object; });
  }

  const Upward& python_;
  const std::vector<Environment>& known_;
  PyObject *before_, *there_;
};

// Takes a program's dispatch modes off: calls were recorded below them.
class WithoutModes {
 public:
  explicit WithoutModes(const Upward& python) : python_(python) {
    if (c10::impl::TorchDispatchModeTLS::stack_len() > 0) {
      taken_ = python.take_modes_off();
    }
  }
  ~WithoutModes() {
    if (taken_) {
      try {
        python_.put_modes_back(taken_.get());
      } catch (...) {  // what was raised first is what is told
      }
    }
  }
  WithoutModes(const WithoutModes&) = delete;
  WithoutModes& operator=(const WithoutModes&) = delete;

 private:
  const Upward& python_;
  PyRef taken_;
};

// Puts a generator at a state, and back where it was.
class Drawing {
 public:
  explicit Drawing(const Call& call) {
    if (call.generator) {
      generator_ = call.generator;
      std::lock_guard<std::mutex> lock(generator_->mutex());
      state_ = GeneratorState::of(*generator_);
      call.drawn_from.put(*generator_);
    }
  }
  ~Drawing() {
    try {
      end();
    } catch (...) {  // what was raised first is what is told
    }
  }
  void end() {
    if (auto generator = std::exchange(generator_, std::nullopt)) {
      std::lock_guard<std::mutex> lock(generator->mutex());
      state_.put(*generator);
    }
  }
  Drawing(const Drawing&) = delete;
  Drawing& operator=(const Drawing&) = delete;

 private:
  std::optional<at::Generator> generator_;
  GeneratorState state_;
};

StoragePtr new_memory(int64_t num_bytes, c10::Device device) {
  auto bytes = at::empty({num_bytes}, at::TensorOptions().dtype(at::kByte).device(device));
  return bytes.storage().getWeakStorageImpl().lock();
}

at::Tensor bytes_on(const StoragePtr& storage, c10::Device device) {
  Geometry flat;
  flat.size.push_back(static_cast<int64_t>(storage->nbytes()));
  flat.stride.push_back(1);
  flat.dtype = c10::ScalarType::Byte;
  flat.device = device;
  return flat.on(storage);
}

// What an outer replay noted of a value that an inner one comes by: that of a value whose memory died meanwhile.
struct Noted {
  ValuePtr value;
  uint64_t replay;
  int num_readers;
  bool is_made;
  StoragePtr memory;
};

void come_by(const ValuePtr& value, uint64_t number, std::vector<Noted>* outer) {
  if (value->replay == number) {
    return;
  }
  if (outer != nullptr) {
    outer->push_back({value, value->replay, value->num_readers, value->is_made, std::move(value->memory)});
  }
  value->replay = number;
  value->num_readers = 0;
  value->is_made = false;
  value->memory.reset();
}

using Calls = c10::SmallVector<CallPtr, 4>;

int num_replays_under_way = 0;  // by nested calls: the mutex lets no other thread replay meanwhile

}  // namespace

StoragePtr Step::replay(const ValuePtr& value) {
  return make(value);
}

StoragePtr Step::make(const ValuePtr& value) {
  const uint64_t number = ++last_replay;
  // Depth first, from what is at hand.
  Calls order;
  c10::SmallVector<std::pair<CallPtr, bool>, 4> stack;
  stack.emplace_back(value->call, false);
  while (!stack.empty()) {
    auto [call, is_expanded] = stack.pop_back_val();
    if (!call || (!is_expanded && call->replay == number)) {
      continue;
    }
    if (is_expanded) {
      order.push_back(std::move(call));
      continue;
    }
    call->replay = number;
    stack.emplace_back(call, true);
    for (auto input = call->inputs.rbegin(); input != call->inputs.rend(); ++input) {
      const auto& maker = (*input)->call;
      if (maker && maker->replay != number && is_gone(**input)) {
        stack.emplace_back(maker, false);
      }
    }
  }
  if (order.empty()) {
    python.replay_failed("", "a saved tensor was to be recomputed but its producer was not recorded in this step", false);
  }
  std::vector<Noted> noted;
  std::vector<Noted>* const outer = num_replays_under_way > 0 ? &noted : nullptr;
  come_by(value, number, outer);
  value->num_readers = 1;
  for (const auto& call : order) {
    for (const auto& input : call->inputs) {
      come_by(input, number, outer);
      ++input->num_readers;
    }
  }
  struct Cleared {  // whatever happens, no value holds memory for a replay that is over
    const Calls& order;
    Value& wanted;
    std::vector<Noted>& noted;
    uint64_t number;
    ~Cleared() {
      --num_replays_under_way;
      wanted.memory.reset();
      for (const auto& call : order) {
        for (const auto& input : call->inputs) {
          input->memory.reset();
        }
        for (const auto& [position, weak] : call->results) {
          const auto result = weak.lock();
          if (result && result->replay == number) {
            result->memory.reset();
          }
        }
      }
      for (auto& before : noted) {
        before.value->replay = before.replay;
        before.value->num_readers = before.num_readers;
        before.value->is_made = before.is_made;
        before.value->memory = std::move(before.memory);
      }
    }
  } cleared{order, *value, noted, number};
  ++num_replays_under_way;
  {
    const WithoutModes recorded_below(python);
    std::optional<WithoutGil> others_go_on;  // a replay within another has let them already
    if (PyGILState_Check()) {
      others_go_on.emplace();
    }
    PyObject* const there = environment_now(true);
    Environments environments(python, environments_, there);
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    c10::impl::ExcludeDispatchKeyGuard unseen(c10::DispatchKeySet(c10::DispatchKey::Fake));
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    for (const auto& call : order) {
      environments.put(call->environment);
      run_again(*call, number);
    }
    environments.end();
  }
  auto made = value->memory ? value->memory : value->storage;
  if (!made) {
    python.replay_failed(order.back()->facts->name, "did not give on replay what it gave at first", false);
  }
  return made;
}

// Run a call again. What no later call reads is held by its arguments alone meanwhile, and then by nobody.
void Step::run_again(Call& call, uint64_t number) {
  for (const auto& input : call.inputs) {
    --input->num_readers;
  }
  const auto memory_of = [&](const ValuePtr& value) {
    if (!value->memory) {
      auto found = materialize(value);
      if (!is_cpu_) {
        note_use(*found, *stream_of(device));  // of whose reading nobody else knows
      }
      if (value->num_readers == 0) {
        return found;
      }
      value->memory = std::move(found);
    }
    return value->memory;
  };
  // A copy for the call alone of each storage that it writes and that is not the replay's own to write.
  c10::SmallVector<std::pair<const Value*, StoragePtr>, 1> copies;
  const auto copy_of = [&](const Value* value) -> StoragePtr* {
    for (auto& [key, copy] : copies) {
      if (key == value) {
        return &copy;
      }
    }
    return nullptr;
  };
  if (!call.facts->writes.empty()) {
    for (const auto& ref : call.refs) {
      const auto& writes = call.facts->writes;
      const bool is_written = std::find(writes.begin(), writes.end(), ref.argument) != writes.end();
      const bool is_spare = ref.value->is_made && ref.value->num_readers == 0 && !ref.value->live();
      if (is_written && !is_spare && copy_of(ref.value.get()) == nullptr) {
        const auto original = memory_of(ref.value);
        auto copy = new_memory(static_cast<int64_t>(original->nbytes()), ref.geometry.device);
        bytes_on(copy, ref.geometry.device).copy_(bytes_on(original, ref.geometry.device));
        copies.emplace_back(ref.value.get(), std::move(copy));
      }
    }
  }
  Stack stack = call.arguments;
  for (auto& item : stack) {  // lists are shared by their holders
    if (item.isTensorList()) {
      item = item.toTensorList().copy();
    } else if (item.isOptionalTensorList()) {
      item = item.toOptionalTensorList().copy();
    }
  }
  if (call.blank) {
    const auto& [num_bytes, geometry] = *call.blank;
    stack[0] = geometry.on(new_memory(num_bytes, geometry.device));
  }
  c10::SmallVector<const c10::StorageImpl*, 8> given;
  Tensors written;
  for (const auto& ref : call.refs) {
    StoragePtr* const copy = copy_of(ref.value.get());
    const StoragePtr storage = copy != nullptr ? *copy : memory_of(ref.value);
    auto tensor = ref.geometry.on(storage);
    given.push_back(storage.get());
    if (ref.item < 0) {
      stack[ref.argument] = std::move(tensor);
    } else if (stack[ref.argument].isTensorList()) {
      stack[ref.argument].toTensorList().set(ref.item, std::move(tensor));
    } else {
      stack[ref.argument].toOptionalTensorList().set(ref.item, std::optional<at::Tensor>(std::move(tensor)));
    }
  }
  for (const auto& item : stack) {  // wrapped numbers, copies of statistics, the blank
    if (item.isTensor() && item.toTensor().defined() && is_plain(item.toTensor())) {
      given.push_back(item.toTensor().storage().unsafeGetStorageImpl());
    }
  }
  written_by(*call.facts, stack, written);
  for (const auto& input : call.inputs) {
    if (input->num_readers == 0) {
      input->memory.reset();
    }
  }
  try {
    std::optional<WithGil> alone;  // between the generator's being put back and the kernel's draw nobody else draws from it
    if (call.generator) {
      alone.emplace();
    }
    Drawing drawing(call);
    call.op.callBoxed(stack);
    drawing.end();
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const std::exception& error) {
    if (is_not_for_replays(error)) {
      throw;
    }
    python.replay_failed(call.facts->name, error.what(), true);
  }
  Tensors made;
  made_by(stack, given, written, device, made);
  for (const auto& [position, weak] : call.results) {
    const auto result = weak.lock();
    if (!result || !(result->is_stale() || !result->live())) {
      continue;
    }
    const bool is_there = position < static_cast<int>(made.size());
    const StoragePtr storage = is_there ? made[position].storage().getWeakStorageImpl().lock() : StoragePtr();
    if (!storage || static_cast<int64_t>(storage->nbytes()) != result->num_bytes) {
      const auto gave = storage ? std::to_string(storage->nbytes()) + " bytes" : std::string("nothing");
      python.replay_failed(
          call.facts->name, "gave " + gave + " on replay in place of " + std::to_string(result->num_bytes) + " bytes", false);
    }
    if (program->action(result->index) == (Program::RECOMPUTE | Program::MEMO) && result->has_handle()) {
      result->call.reset();  // it stays for its own later unpack
      table.loosen(*result);
      result->owns(storage, stream_of(device));
    }
    if (result->replay == number && result->num_readers > 0) {
      result->memory = storage;
      result->is_made = true;
    }
  }
}

}  // namespace offload
