// What the native core knows of one step's tensors: values, the calls that made them, and autograd's handles on them.
//
// The same three ideas as in values.py, under the same names. Ownership is reference counting, and it points one way:
//
//   autograd -> Handle -> Value -> device memory | host block | Call -> the Values that the call read -> ...
//
// Nothing here refers to a tensor with a grad_fn: what is kept of a tensor is its storage, how it lies there, and its
// version counter. So no cycle goes through autograd's graph, which no garbage collector could see.
//
// Identity: a storage is known by its StorageImpl. A weak pointer to it keeps the address from being used again.
//
// Threads: the state of all steps is guarded by one mutex (Note [Locks] in step.h). Reference counts are atomic, and what
// dies with a count touches its own fields alone, so finalizers take no lock.
#pragma once

#include <Python.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

namespace offload {

using Stack = torch::jit::Stack;
using Tensors = c10::SmallVector<at::Tensor, 2>;  // of one call: most make one
using StoragePtr = c10::intrusive_ptr<c10::StorageImpl>;
using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;
using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

struct Value;
struct Call;
struct Handle;
using ValuePtr = c10::intrusive_ptr<Value>;
using CallPtr = c10::intrusive_ptr<Call>;
using WeakValue = c10::weak_intrusive_ptr<Value>;
using WeakCall = c10::weak_intrusive_ptr<Call>;
using WeakHandle = c10::weak_intrusive_ptr<Handle>;

// An owned reference to a Python object, which may be dropped by a thread that does not hold the GIL.
class PyRef {
 public:
  PyRef() = default;
  static PyRef borrowed(PyObject* object) {
    Py_XINCREF(object);
    return PyRef(object);
  }
  static PyRef stolen(PyObject* object) {
    return PyRef(object);
  }
  PyRef(PyRef&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  PyRef& operator=(PyRef&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  PyRef(const PyRef&) = delete;
  PyRef& operator=(const PyRef&) = delete;
  ~PyRef() {
    reset();
  }
  void reset() noexcept;
  // Whether there is an interpreter that frees anything.
  static bool can_drop() noexcept;
  PyObject* get() const {
    return object_;
  }
  explicit operator bool() const {
    return object_ != nullptr;
  }

 private:
  explicit PyRef(PyObject* object) : object_(object) {}
  PyObject* object_ = nullptr;
};

// Holds the GIL, whatever this thread held before.
class WithGil {
 public:
  WithGil() : state_(PyGILState_Ensure()) {}
  ~WithGil() {
    PyGILState_Release(state_);
  }
  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;

 private:
  PyGILState_STATE state_;
};

// Lets other threads have the GIL; for a thread that holds it.
class WithoutGil {
 public:
  WithoutGil() : thread_(PyEval_SaveThread()) {}
  ~WithoutGil() {
    PyEval_RestoreThread(thread_);
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* thread_;
};

// How a tensor lies on its storage; offsets and strides in elements.
struct Geometry {
  c10::SmallVector<int64_t, 5> size, stride;
  int64_t offset = 0;
  c10::ScalarType dtype = c10::ScalarType::Float;
  c10::Device device = c10::kCPU;
  bool conj = false, neg = false;

  static Geometry of(const at::Tensor& tensor);
  // The tensor that lies so on a storage: it belongs to no graph, and no op of the dispatcher made it.
  at::Tensor on(const StoragePtr& storage) const;
};

// A version counter, and the version at which its memory held a value: how a write is noticed that was not seen.
struct Guard {
  c10::VariableVersion counter;
  uint32_t version = 0;

  bool is_stale() const {
    return counter.enabled() && counter.current_version() != version;
  }
};

// Whether two counters are one; torch does not tell. One that counts for nobody is no other.
bool are_one(const c10::VariableVersion& a, const c10::VariableVersion& b);

// What autograd holds in place of a saved tensor. See Handle in values.py.
struct Handle final : c10::intrusive_ptr_target {
  void release_resources() override;

  static constexpr int64_t NOWHERE = -1, ASKS = -2;

  int64_t index = 0;        // ordinal of its pack
  int64_t place = NOWHERE;  // of its pack in the program; ASKS where Python finds it
  at::Tensor kept;    // the tensor itself, or one beside it without a graph, where it is kept
  bool is_borrowed = false;  // it is the program's own tensor
  PyRef borrowed;            // a weak reference to Python's object for that, for `torch.utils.swap_tensors` to see a user
  ValuePtr value;
  std::optional<Geometry> geometry;
  Guard saved;  // the saved tensor's counter and version
  bool is_out = false;
  std::optional<c10::Stream> stream;  // that of its pack, on a device with streams
  at::Tensor shown;  // what a node of the program's own was given in its place
  std::shared_ptr<std::atomic<int64_t>> counted;  // what stays, as long as it does; see Ledger
  int64_t counted_bytes = 0;

  // Autograd holds a handle bare, or Python's object for it: either made by a hook of Python's, or once Python asks for
  // it. What is below is guarded by the GIL, which a bare one does not need to die.
  enum Form : uint8_t { BARE, WRAPPED, DEAD };
  std::atomic<Form> form{BARE};
  PyObject* object = nullptr;  // borrowed: Python's object for it, while there is one
  PyRef own;                   // the same, held for autograd where that holds the handle

  bool is_held() const {
    return form.load() != DEAD;
  }
};

// What is known of an op, as op_facts.py tells it.
struct OpFacts {
  std::string name;  // qualified overload
  c10::OperatorName op{"", ""};
  int name_id = -1;
  bool replayable = false, replayable_on_accelerators = false;
  bool is_convolution = false, is_random = false, mutates = false, writes_all = false;
  bool overwrites = false, may_multiply = true;
  bool is_alias = false;  // the tensor itself once more: `detach` and `alias`
  c10::SmallVector<int, 2> writes;         // positions of the arguments it writes
  c10::SmallVector<int, 3> running_stats;  // positions of batch norm's statistics, and of its training flag
  c10::SmallVector<int, 3> read_stats;     // those that are only read, unless the flag at the last one is set
  size_t num_arguments = 0, num_returns = 0;
};

// Where a generator is in its sequence.
struct GeneratorState {
  struct OnCpu {
    at::mt19937 engine;
    std::optional<float> next_float;
    std::optional<double> next_double;
  };
  std::unique_ptr<OnCpu> on_cpu;
  at::Tensor elsewhere;

  static GeneratorState of(const at::Generator& generator);
  void put(at::Generator& generator) const;
};

// Stands for a tensor in the arguments of a recorded call.
struct Ref {
  int argument;
  int item;  // in a list, or -1
  ValuePtr value;
  Geometry geometry;
};

// One dispatched call with its own arguments, ready to be replayed. See Call in values.py.
struct Call final : c10::intrusive_ptr_target {
  Call(c10::OperatorHandle op, const OpFacts* facts);
  void release_resources() override;
  ~Call() override;

  c10::OperatorHandle op;
  const OpFacts* facts;
  Stack arguments;  // None where a Ref stands, or the blank
  c10::SmallVector<Ref, 3> refs;
  c10::SmallVector<ValuePtr, 3> inputs;                // the values it reads, each once
  std::optional<std::pair<int64_t, Geometry>> blank;  // first argument: memory that it writes without reading it
  PyObject* environment = nullptr;                    // borrowed from its step: the settings that it ran under
  uint64_t replay = 0;                                // number of the last replay that came by
  std::optional<at::Generator> generator;             // that it drew from
  GeneratorState drawn_from;                          // its state before
  std::vector<std::pair<int, WeakValue>> results;
};

// The contents of a storage between two writes, and where they can be had from. See LiveValue in values.py.
struct Value final : c10::intrusive_ptr_target {
  Value(int64_t index, int64_t num_bytes);
  void release_resources() override;
  ~Value() override;

  int64_t index;  // of the storage in the step graph, -1 outside a plan
  int64_t num_bytes;
  std::optional<WeakStorage> origin;  // the storage it was made on, while that still holds it
  StoragePtr storage;                 // device memory that holds it and that it owns
  CallPtr call;                       // what makes it again
  c10::SmallVector<WeakCall, 2> readers;
  c10::SmallVector<WeakHandle, 2> handles;
  c10::SmallVector<Guard, 1> guards;
  std::optional<WeakTensor> made_as;  // the tensor that an op made it as
  std::optional<c10::Stream> stream;  // that `storage` was allocated on, where we allocated it
  PyRef block, copy, py_stream;       // Python's own: a block of a lower tier, a copy under way, `stream`
  int64_t address = 0;                // of the block, where the core's lanes lead there
  bool is_external = false, is_ours = false, is_handed_out = false;
  int64_t fresh_version = -1;  // of what a recorded call made on memory of its own, as it made it
  PyObject* wrapper = nullptr;  // borrowed: Python's object for it, while there is one

  // Scratch of a replay, valid where `replay` is that replay's number.
  uint64_t replay = 0;
  int num_readers = 0;
  bool is_made = false;
  StoragePtr memory;

  StoragePtr live() const {
    return storage ? storage : origin ? origin->lock() : StoragePtr();
  }
  bool is_on(const c10::StorageImpl* impl) const {
    return origin && origin->_unsafe_get_target() == impl;
  }
  bool is_stale() const;
  // Whether its memory was written since, out of our sight, by what a tensor on it tells as well.
  bool holds_no_longer(const at::Tensor& tensor) const;
  // Whether nothing was written between the copy that a version was noted at and a save of the same storage.
  bool is_as_saved(const Handle& handle) const;
  bool has_handle() const;
  bool has_reader() const;
  // From now on writes may go unseen: be able to notice them, or do not rely on memory that may be written.
  void keep_watch();
  // Rely on the host copy or the call alone.
  void leave_origin();
  // Hold memory that the runtime allocated for it, which nobody else knows yet.
  void owns(StoragePtr memory, std::optional<c10::Stream> stream);
};

// Values by live storage, and by index in the step graph. See ValueTable in values.py.
class ValueTable {
 public:
  ValuePtr find(const c10::StorageImpl* storage) const;
  bool may_hold(const c10::StorageImpl* storage) const {
    return entries_.count(storage) != 0;
  }
  ValuePtr indexed(int64_t index) const;
  std::vector<ValuePtr> all_indexed() const;
  // Know a value by its storage for as long as that lives. One that owns no memory is held by the table meanwhile.
  void follow(const ValuePtr& value, const StoragePtr& storage);
  void name(const ValuePtr& value, int64_t index);
  // Let a value hold its memory; from then on it lives by who needs it.
  void own(const ValuePtr& value, const StoragePtr& storage);
  // Autograd reads a value's memory: what happens to that from now on happens to the value.
  void hand_out(const ValuePtr& value, const StoragePtr& storage, const Handle& handle);
  void drop(const c10::StorageImpl* storage);
  // Hold a value no longer that is about to have memory of its own: it lives by who needs it.
  void loosen(const Value& value);
  // From now on writes may go unseen, and values are held by who needs them alone.
  void close();

 private:
  struct Entry {
    ValuePtr held;
    WeakValue value;
  };
  void sweep();
  std::unordered_map<const c10::StorageImpl*, Entry> entries_;
  std::vector<WeakValue> by_index_;
  size_t sweep_at_ = 1024;
};

}  // namespace offload
