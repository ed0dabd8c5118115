// One step under a plan: follows the program by its ops, packs and unpacks, and does what it says for each.
//
// What the program did not foresee goes to Python, with the same objects: `Upward` names all of it.
//
// Note [Locks]. Most ops, packs and unpacks come without the GIL, what a function in Python saves with it, perhaps from
// several threads of autograd. The state of all steps is guarded by one mutex: a write in one step may have another one
// replay. It is recursive, since Python may come back. Nobody waits for the mutex while holding the GIL; whoever holds the
// mutex may wait for the GIL. So there is one order, and no deadlock. Kernels run without the mutex in forward; replays
// hold it, one after the other.
#pragma once

#include "lanes.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>

namespace offload {

// What the planned path asks Python for. All but `facts_of` are called with the step's mutex held, without or with the
// GIL, and throw what Python raises.
struct Upward {
  PyRef executor;   // a weak reference
  PyRef capturing;  // tells whether a graph is captured; empty where none can be

  static const OpFacts* facts_of(const c10::OperatorHandle& op);
  void deviate(const std::string& how) const;
  void deviate_at_op(const std::string& name, int64_t place) const;
  void release(const ValuePtr& value) const;
  void bring_back(int64_t first, int64_t last, const ValuePtr& value) const;
  void fetch(const ValuePtr& value) const;
  void late_ones_leave() const;
  void outliving(std::unordered_set<const void*>& storages) const;
  void first_unpack() const;
  bool swap_out(const ValuePtr& value, const StoragePtr& storage) const;
  // A block for a value, as planned, with its address where the core's lanes lead there; none where there is no room.
  std::pair<PyRef, int64_t> allocate(const Value& value) const;
  void start_out(const ValuePtr& value, const StoragePtr& storage, PyObject* block) const;
  bool before_write(const at::Tensor& tensor) const;
  StoragePtr materialize(const ValuePtr& value) const;
  void await(const ValuePtr& value, const StoragePtr& storage) const;
  void dismiss_visitors() const;
  [[noreturn]] void modified(const Handle& handle) const;
  [[noreturn]] void not_there_for_graph() const;
  PyRef environment() const;                                     // the settings as they are
  void put_environment(PyObject* wanted, PyObject* there) const;
  bool is_capturing() const;
  PyRef take_modes_off() const;  // a program's own, for what is made again
  void put_modes_back(PyObject* taken) const;
  [[noreturn]] void replay_failed(const std::string& op, const std::string& why, bool did_run) const;
  PyRef call(const char* method, PyObject* arguments) const;  // steals the arguments, a tuple or null
};

// The plan as flat columns, each by place; see program.py.
struct Program {
  enum Flag : uint8_t { BUSY = 1, RECORD = 2 };
  enum Action : uint8_t { KEEP = 0, SWAP = 1, RECOMPUTE = 2, MEMO = 4, RELEASED_AT_PACK = 8 };
  using Storages = std::vector<int64_t>;

  // What is asked for around an op.
  struct Busy {
    std::vector<int64_t> bytes;                           // sizes of the storages that it makes values on
    std::vector<std::pair<int64_t, int64_t>> registered;  // results to follow: (position, storage)
    Storages releases;                                    // whose device copies go before it
  };

  // What a saved tensor looks like, where steps of other structures follow; see SavedForm and FormRoute.
  struct Form {
    static constexpr int64_t OPEN = -1;
    static constexpr int STRANGE = -1;  // the type of one that is not plain
    int dtype;
    std::vector<int64_t> shape;
    bool admits(const at::Tensor& tensor) const;
  };

  std::vector<int> op_names;
  std::vector<uint8_t> op_flags;
  std::vector<Busy> busy;         // those that are
  std::vector<int32_t> busy_ops;  // by op: its place among them
  std::vector<int64_t> pack_bytes, pack_storages, first_packs;
  std::vector<uint8_t> pack_flags;  // MADE, EXTERNAL
  std::unordered_map<int64_t, Storages> pack_releases;  // by pack; where ops are not seen
  std::vector<uint8_t> busy_unpacks;
  std::unordered_map<int64_t, Storages> unpack_releases, fetches;  // by unpack
  std::vector<uint8_t> actions;  // by storage
  bool is_bound = false, is_recomputing = false, sees_ops = false;
  bool minds_writes = false;  // that are made in other steps
  enum PackFlag : uint8_t { MADE = 1, EXTERNAL = 2 };

  // Whether steps of other structures follow; and by pack, what they are followed by.
  bool is_routed = false;
  std::vector<Form> forms;
  std::vector<int64_t> kept_bytes;
  std::vector<std::vector<int64_t>> unpacks;
  int64_t first_border = 0;

  // What becomes of a storage; KEEP of what has no place in the plan, too.
  uint8_t action(int64_t storage) const {
    return storage >= 0 && storage < static_cast<int64_t>(actions.size()) ? actions[storage] : static_cast<uint8_t>(KEEP);
  }
};

// Where a step is in its program, by the names of its ops; see ProgramCursor in program.py, which this mirrors.
class Follower {
 public:
  static constexpr int64_t NOTHING = -1, LEFT = -2;
  static constexpr int64_t MOST_STRAY = 64, NUM_SURE = 3;

  explicit Follower(const Program& program) : program_(program) {}
  // The place of the op that is about to run; NOTHING for a stray one, LEFT where the step has left the program.
  int64_t next(int name_id) {
    if (next_ < static_cast<int64_t>(program_.op_names.size()) && program_.op_names[next_] == name_id) {
      num_in_row_ = 0;
      return next_++;
    }
    return resynchronise(name_id);
  }
  int64_t place() const {
    return next_;
  }
  int64_t num_stray() const {
    return num_stray_;
  }

 private:
  int64_t resynchronise(int name_id);
  const Program& program_;
  int64_t next_ = 0, num_stray_ = 0;
  int row_[NUM_SURE] = {0, 0, 0};
  int num_in_row_ = 0;
};

// Where a step is among the packs of a plan for another structure, for as long as it goes on along it: where it does not,
// Python finds the place. See ByForm in follow.py.
struct Route {
  int64_t place = 0, end = 0;  // packs that are behind, and the next border
  bool is_astray = false;
  int64_t num_behind = 0;   // unpacks before the last pack
  int64_t next_unpack = 0;  // planned unpacks that are behind
};

// What a step keeps of what it saved under such a plan, and what of it leaves once the op that saves it is done. See
// Ledger in ledger.py.
class Ledger {
 public:
  using HandlePtr = c10::intrusive_ptr<Handle>;

  bool is_due() const;
  void add_late(const HandlePtr& handle, int64_t index);
  bool is_late(const c10::StorageImpl* storage) const;
  std::vector<std::pair<HandlePtr, int64_t>> take_late();
  void stays(const HandlePtr& handle, const c10::StorageImpl& storage);
  bool is_staying(const c10::StorageImpl* storage) const;
  void stays_too(const HandlePtr& handle);
  void let_all_go();
  void note(int64_t place, const at::Tensor& tensor, bool is_plain);
  int64_t alive_bytes() const {
    return *alive_;
  }

  int64_t kept_bytes = 0, astray_bytes = 0;
  uint64_t fingerprint = 0, places_fingerprint = 0;

 private:
  std::vector<std::pair<WeakHandle, int64_t>> late_;
  uint64_t late_node_ = 0;
  std::shared_ptr<std::atomic<int64_t>> alive_ = std::make_shared<std::atomic<int64_t>>(0);
  std::unordered_map<const c10::StorageImpl*, WeakHandle> stays_;
  std::vector<WeakHandle> stays_too_;
};

// The settings of torch that kernels read, as numbers: whether any has changed. What they are, environment.py tells.
struct Settings {
  static constexpr int MOST = 32, GRAD_MODE = 1;  // its place among the few
  int64_t few[MOST] = {}, of_products[MOST] = {};
  static Settings now(bool is_cpu, bool of_products);
};

// The same as Python knows them.
struct Environment {
  PyRef object;
  Settings settings;
  size_t alike;  // the first one that differs in nothing but the grad mode, in which backward replays what forward recorded
};

// What becomes of a saved tensor.
enum class Kept {
  NOT,          // its handle has a value to read
  AS_IT_IS,     // it stays on the device
  APART,        // it stays, but perhaps leaves later: on a tensor of our own
  STRANGE,      // it stays, and Python knows how: a subclass, a wrapper of torch.func, no block of memory
  LEAVES_LATE,  // it leaves once the op that saves it has run, where the step has left its program unseen
};

// Holds the mutex: Note [Locks].
class Lock {
 public:
  Lock();
  ~Lock();
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

  static void take();
  static void give_back();
};

class Step {
 public:
  Step(
      std::shared_ptr<const Program> program, c10::Device device, PyObject* executor, PyObject* lease, PyObject* capturing,
      std::shared_ptr<Lanes> lanes);

  // ---- ops, in the thread that has entered
  void op(const c10::OperatorHandle& op, const OpFacts& facts, c10::DispatchKeySet keys, Stack* stack);

  // ---- saved tensors, with the lock
  // What becomes of a saved tensor, which `handle` stands for from then on.
  Kept pack(
      const at::Tensor& tensor, bool is_parameter, bool is_ordinary, const c10::intrusive_ptr<Handle>& handle);
  // The saved tensor.
  at::Tensor unpack(Handle& handle);
  // Let go of what the last node was given.
  void backward_ends();
  // Device copies that are planned to go after a pack.
  void release_at_pack(int64_t place);

  // ---- for Python
  StoragePtr replay(const ValuePtr& value);
  // Be able to notice a write through a tensor's own version counter: its memory gets behind another one.
  void know(const at::Tensor& tensor);
  // Follow the value that a tensor holds, of which no plan knows.
  void track(const at::Tensor& tensor);
  // Before a storage is written: what needs its old contents has them. Whether the step made it.
  bool before_write(const at::Tensor& tensor, bool may_ask_others);

  Upward python;
  ValueTable table;
  std::shared_ptr<const Program> program;
  c10::Device device;
  std::shared_ptr<PyRef> lease;  // keeps the step from being over
  std::shared_ptr<Lanes> lanes;  // to host memory; null where those are Python's
  Follower follower;
  Route route;
  Ledger ledger;
  bool has_deviated = false;
  int64_t num_packs = 0, num_unpacks = 0;
  bool took_data = false;
  double replay_seconds = 0;
  std::vector<WeakHandle> kept;  // what leaves the device if the step leaves its program

 private:
  CallPtr record(const c10::OperatorHandle& op, const OpFacts& facts, const Stack& stack, size_t first);
  ValuePtr read_by(const at::Tensor& tensor, const StoragePtr& storage);
  bool refer(Call& call, int argument, int item, const at::Tensor& tensor);
  bool may_replay(const OpFacts& facts, c10::ArrayRef<c10::IValue> arguments) const;
  PyObject* environment_now(bool for_product);
  std::string follow_results(
      const Program::Busy& planned, const OpFacts& facts, const Tensors& made, size_t num_fresh, const CallPtr& call);
  Kept pack_by_form(
      const at::Tensor& tensor, bool is_parameter, const StoragePtr& storage, const c10::intrusive_ptr<Handle>& handle);
  bool outlives(const c10::StorageImpl* storage);
  std::pair<int64_t, int64_t> passed_unpacks(const Handle& handle);
  ValuePtr by_ordinal(int64_t index, const at::Tensor& tensor, const StoragePtr& storage, Handle& handle);
  bool leave(const ValuePtr& value, const StoragePtr& storage);
  // Moves, where the core has lanes; see materialize.py.
  bool swap_out(const ValuePtr& value, const StoragePtr& storage);
  void release(const Program::Storages& storages);
  void release(const ValuePtr& value);
  void bring_back(int64_t first, int64_t last, const ValuePtr& value);
  void fetch(const ValuePtr& value);
  bool can_fetch(const Value& value) const;
  void swap_in(const ValuePtr& value);
  void wait(Value& value);
  void dismiss_visitors();
  std::string mismatch(int64_t index, const StoragePtr& storage);
  StoragePtr materialize(const ValuePtr& value);
  void await(const ValuePtr& value, const StoragePtr& storage);
  StoragePtr make(const ValuePtr& value);
  void run_again(Call& call, uint64_t number);
  bool captures();
  void show(const at::Tensor& tensor, Handle& handle, size_t num_own);

  bool is_cpu_;
  std::vector<Environment> environments_;  // the last one is in force
  std::unordered_map<int64_t, const c10::StorageImpl*> pack_keys_;
  std::optional<std::unordered_set<const void*>> outliving_;
  bool has_visitors_ = false;        // in Python
  std::vector<ValuePtr> visitors_;  // that came back for a replay alone, their host copies staying
  std::vector<at::Tensor> shown_;
  const void* shown_to_ = nullptr;
  int last_backward_ = -1;
};

// Save a tensor, with the lock: `object` is Python's for it, null where there is none.
void save(Step& step, const at::Tensor& tensor, PyObject* object, const c10::intrusive_ptr<Handle>& handle);
// With the GIL: Python's object for a handle; null where autograd holds that no more.
PyRef object_of(const c10::intrusive_ptr<Handle>& handle);

// The hooks of a step that this thread has pushed; see hooks.cpp.
struct Hooked;
// Be asked for them in Python's stead, as long as what is given back lives, or any tensor that was saved.
std::shared_ptr<Hooked> hook(PyObject* executor, Step& step);
void stand_in_for_engine();

// How many barriers of steps there are that mind writes of other steps; kept by write_barrier.py.
extern std::atomic<int> num_minding;

// One tensor for each storage on `device` that a call made a value on, the fresh ones first; how many those are.
size_t made_by(
    c10::ArrayRef<c10::IValue> results,
    const c10::SmallVectorImpl<const c10::StorageImpl*>& given,
    const Tensors& written,
    c10::Device device,
    Tensors& made);
// The tensors among the arguments that a call writes.
void written_by(const OpFacts& facts, c10::ArrayRef<c10::IValue> arguments, Tensors& written);

bool is_plain(const at::Tensor& tensor);
bool has_no_graph(const at::Tensor& tensor);
// A tensor beside another one: its memory and version counter, without its graph.
at::Tensor beside(const at::Tensor& tensor);
int backward_id();  // -1 outside of one
bool in_backward();
// The node of autograd's graph that runs now, where that is the program's own; null where it is torch's.
const void* own_node();
std::optional<c10::Stream> stream_of(c10::Device device);
// Let what computes now come after what a stream was asked for so far.
void come_after(const c10::Stream& stream);
// Tell the allocator that a stream uses memory, which may be another one's.
void note_use(const c10::StorageImpl& storage, const c10::Stream& stream);
int intern(const std::string& name);

// Hands every op to a dispatch mode of Python's, which is on for that op alone: so no kernel and no formula of autograd
// computes otherwise because a mode is on. For steps that Python executes.
struct Watch;
void show_to(const Watch& watch, const c10::OperatorHandle& op, Stack* stack);
// That of the thread which called backward, in autograd's threads; null for none.
const Watch* inherited_watch();

// Who sees the ops of this thread: a step, or a watch, or nobody.
struct Sight {
  Step* step = nullptr;
  const Watch* watch = nullptr;
  PyObject* owner = nullptr;  // borrowed: Python's object for it
};
Sight look_through(Sight sight);  // the former one
Sight looked_through();
void hide();                      // until as many calls of `show`, nobody sees
void show();
int hidden(int count);            // so many calls of `hide` are in force from now on; how many were

// The dispatch key that sees ops; checked once that nobody else uses it.
bool install(std::string& why_not);

// Whether what a kernel raised is no failure of its replay: an interrupt, or an error of this package.
bool is_not_for_replays(const std::exception& error);

}  // namespace offload
