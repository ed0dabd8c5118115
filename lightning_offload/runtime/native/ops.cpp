// Ops: which one comes now, what is asked for around it, and what it made.

#include "step.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <ATen/ops/clone.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <limits>

namespace torch::autograd {
TORCH_API int get_current_graph_task_id();  // of graph_task.h, which takes longer to compile than all of this
}

namespace offload {

namespace {

// A key that torch reserves and does not use by default: below autograd and a program's own dispatch modes, above the
// backends. What is below it is what a dispatch mode sees.
constexpr auto KEY = c10::DispatchKey::Fake;
const c10::DispatchKeySet BELOW(c10::DispatchKeySet::FULL_AFTER, KEY);

thread_local Sight sight;
thread_local int num_hidden = 0;

void set_key() {
  const bool is_on = num_hidden == 0 && (sight.step != nullptr || sight.watch != nullptr);
  c10::impl::tls_set_dispatch_key_included(KEY, is_on);
}

template <class Function>
void for_tensors_in(const c10::IValue& item, const Function& function) {
  if (item.isTensor()) {
    if (item.toTensor().defined()) {
      function(item.toTensor(), -1);
    }
  } else if (item.isTensorList()) {
    const auto list = item.toTensorList();
    for (size_t i = 0; i < list.size(); ++i) {
      const at::Tensor tensor = list.get(i);
      if (tensor.defined()) {
        function(tensor, static_cast<int>(i));
      }
    }
  } else if (item.isOptionalTensorList()) {
    const auto list = item.toOptionalTensorList();
    for (size_t i = 0; i < list.size(); ++i) {
      const std::optional<at::Tensor> tensor = list.get(i);
      if (tensor && tensor->defined()) {
        function(*tensor, static_cast<int>(i));
      }
    }
  }
}

template <class Function>
void for_written(const OpFacts& facts, c10::ArrayRef<c10::IValue> arguments, const Function& function) {
  const auto one = [&](const at::Tensor& tensor, int) { function(tensor); };
  if (facts.writes_all) {
    for (const auto& item : arguments) {
      for_tensors_in(item, one);
    }
  }
  for (const int position : facts.writes) {
    for_tensors_in(arguments[position], one);
  }
  if (!facts.running_stats.empty() && arguments[facts.running_stats.back()].toBool()) {
    for (size_t i = 0; i + 1 < facts.running_stats.size(); ++i) {
      for_tensors_in(arguments[facts.running_stats[i]], one);
    }
  }
}

// Whether each byte of the storage belongs to one element.
bool covers_storage(const at::Tensor& tensor) {
  c10::SmallVector<std::pair<int64_t, int64_t>, 5> dims;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    dims.emplace_back(tensor.stride(i), tensor.size(i));
  }
  std::sort(dims.begin(), dims.end());
  int64_t step = 1;
  for (const auto& [stride, size] : dims) {
    if (size != 1 && stride != step) {
      return false;
    }
    step *= size;
  }
  return step * static_cast<int64_t>(tensor.element_size()) == static_cast<int64_t>(tensor.storage().nbytes());
}

// What arguments a call makes anew: the first one, where it writes all of its storage without reading any of it.
bool makes_anew(const OpFacts& facts, c10::ArrayRef<c10::IValue> arguments) {
  if (!facts.overwrites || arguments.empty() || !arguments[0].isTensor()) {
    return false;
  }
  const auto& tensor = arguments[0].toTensor();
  return tensor.defined() && is_plain(tensor) && covers_storage(tensor);
}

bool flushes_denormals() {
  volatile double tiny = std::numeric_limits<double>::min();
  return tiny * 0.5 == 0.0;
}

template <class Context>
int64_t precision_of(Context& context, at::Float32Backend backend, at::Float32Op op) {
  return static_cast<int64_t>(context.float32Precision(backend, op));
}

}  // namespace

std::atomic<int> num_minding{0};

int backward_id() {
  return torch::autograd::get_current_graph_task_id();
}

bool in_backward() {
  return backward_id() != -1;
}

std::optional<c10::Stream> stream_of(c10::Device device) {
  if (device.is_cpu()) {
    return std::nullopt;
  }
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

void come_after(const c10::Stream& stream) {
  const auto now = c10::impl::VirtualGuardImpl(stream.device_type()).getStream(stream.device());
  if (now != stream) {
    c10::Event asked_for(stream.device_type());
    asked_for.record(stream);
    asked_for.block(now);
  }
}

void note_use(const c10::StorageImpl& storage, const c10::Stream& stream) {
  c10::impl::VirtualGuardImpl(stream.device_type()).recordDataPtrOnStream(storage.data_ptr(), stream);
}

bool is_plain(const at::Tensor& tensor) {
  using c10::DispatchKey;
  static const c10::DispatchKeySet strange = c10::DispatchKeySet(
      {DispatchKey::Python, DispatchKey::ZeroTensor, DispatchKey::Functionalize, DispatchKey::Batched,
       DispatchKey::FuncTorchBatched, DispatchKey::BatchedNestedTensor, DispatchKey::FuncTorchGradWrapper,
       DispatchKey::Sparse, DispatchKey::SparseCsr, DispatchKey::MkldnnCPU, DispatchKey::Quantized,
       DispatchKey::NestedTensor, DispatchKey::Fake});
  const auto* impl = tensor.unsafeGetTensorImpl();
  return tensor.defined() && impl->has_storage() && impl->layout() == c10::kStrided &&
      (impl->key_set() & strange).empty() && !impl->has_symbolic_sizes_strides() && impl->storage();
}

bool has_no_graph(const at::Tensor& tensor) {
  if (!tensor.requires_grad()) {
    return true;
  }
  try {
    return tensor.is_leaf();
  } catch (const std::exception&) {
    return false;  // one of several views that a function returned, whose base was written in place, does not tell
  }
}

at::Tensor beside(const at::Tensor& tensor) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  return at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/true));
}

// ---- following

int64_t Follower::resynchronise(int name_id) {
  // Skips planned ops for which there is nothing to do, or takes this one for a stray. Where a few strays in a row are
  // consecutive ops further on, those before them are missing in this step.
  const auto& names = program_.op_names;
  const int64_t end = std::min<int64_t>(next_ + MOST_STRAY, static_cast<int64_t>(names.size()));
  for (int64_t index = next_; index < end; ++index) {
    if (names[index] == name_id) {
      next_ = index + 1;
      return index;
    }
    if (program_.op_flags[index] & Program::BUSY) {
      break;
    }
  }
  if (num_in_row_ == NUM_SURE) {
    std::copy(row_ + 1, row_ + NUM_SURE, row_);
    --num_in_row_;
  }
  row_[num_in_row_++] = name_id;
  if (num_in_row_ == NUM_SURE) {
    for (int64_t index = next_ + NUM_SURE; index < end; ++index) {
      if (std::equal(row_, row_ + NUM_SURE, names.begin() + (index + 1 - NUM_SURE))) {
        next_ = index + 1;
        num_in_row_ = 0;
        return index;
      }
    }
  }
  return ++num_stray_ <= MOST_STRAY ? NOTHING : LEFT;
}

// ---- settings

Settings Settings::now(bool is_cpu, bool of_products) {
  Settings found;
  auto& context = at::globalContext();
  if (!of_products) {
    int64_t* next = found.few;
    *next++ = static_cast<int64_t>(c10::get_default_dtype_as_scalartype());
    *next++ = c10::GradMode::is_enabled();
    *next++ = context.deterministicAlgorithms();
    *next++ = context.deterministicAlgorithmsWarnOnly();
    *next++ = context.deterministicFillUninitializedMemory();
    if (is_cpu) {
      *next++ = at::get_num_threads();
      *next++ = flushes_denormals();
      *next++ = context.userEnabledMkldnn();
      *next++ = context.deterministicMkldnn();
    } else {
      *next++ = context.userEnabledCuDNN();
      *next++ = context.benchmarkCuDNN();
      *next++ = context.deterministicCuDNN();
      *next++ = context.userEnabledMemEfficientSDP();
      *next++ = context.userEnabledCuDNNSDP();
      *next++ = context.allowFP16BF16ReductionMathSDP();
      *next++ = static_cast<int64_t>(context.allowFP16ReductionCuBLAS());
      *next++ = static_cast<int64_t>(context.allowBF16ReductionCuBLAS());
      *next++ = context.allowFP16AccumulationCuBLAS();
      *next++ = static_cast<int64_t>(context.linalgPreferredBackend());
      *next++ = static_cast<int64_t>(context.blasPreferredBackend());
    }
    return found;
  }
  using at::Float32Backend;
  using at::Float32Op;
  int64_t* next = found.of_products;
  *next++ = context.userEnabledMathSDP();
  *next++ = context.userEnabledFlashSDP();
  *next++ = precision_of(context, Float32Backend::GENERIC, Float32Op::ALL);
  const auto backend = is_cpu ? Float32Backend::MKLDNN : Float32Backend::CUDA;
  for (const auto op : {Float32Op::ALL, Float32Op::MATMUL, Float32Op::CONV, Float32Op::RNN}) {
    *next++ = precision_of(context, backend, op);
  }
  if (is_cpu) {
    *next++ = context.userEnabledNNPACK();
    *next++ = context.allowFP16ReductionCPU();
  }
  return found;
}

static bool are_same(const int64_t (&a)[Settings::MOST], const int64_t (&b)[Settings::MOST]) {
  return std::equal(std::begin(a), std::end(a), std::begin(b));
}

PyObject* Step::environment_now(bool for_product) {
  const auto few = Settings::now(is_cpu_, false);
  bool is_same = !environments_.empty() && are_same(few.few, environments_.back().settings.few);
  if (is_same && for_product) {
    is_same = are_same(Settings::now(is_cpu_, true).of_products, environments_.back().settings.of_products);
  }
  if (!is_same) {
    Environment now{python.environment(), Settings::now(is_cpu_, true), 0};
    std::copy(std::begin(few.few), std::end(few.few), now.settings.few);
    const auto alike = std::find_if(environments_.begin(), environments_.end(), [&](const Environment& one) {
      auto masked = one.settings;
      masked.few[Settings::GRAD_MODE] = few.few[Settings::GRAD_MODE];
      return are_same(masked.few, few.few) && are_same(masked.of_products, now.settings.of_products);
    });
    now.alike = static_cast<size_t>(alike - environments_.begin());
    environments_.push_back(std::move(now));
  }
  return environments_.back().object.get();
}

// ---- generators

GeneratorState GeneratorState::of(const at::Generator& generator) {
  GeneratorState state;
  if (generator.device().is_cpu()) {  // what a tensor of its state holds, without making one
    auto* impl = at::check_generator<at::CPUGeneratorImpl>(generator);
    state.on_cpu = std::make_unique<OnCpu>(
        OnCpu{impl->engine(), impl->next_float_normal_sample(), impl->next_double_normal_sample()});
  } else {
    state.elsewhere = generator.get_state();
  }
  return state;
}

void GeneratorState::put(at::Generator& generator) const {
  if (on_cpu) {
    auto* impl = at::check_generator<at::CPUGeneratorImpl>(generator);
    impl->set_engine(on_cpu->engine);
    impl->set_next_float_normal_sample(on_cpu->next_float);
    impl->set_next_double_normal_sample(on_cpu->next_double);
  } else {
    generator.set_state(elsewhere);
  }
}

// ---- recording

bool Step::may_replay(const OpFacts& facts, c10::ArrayRef<c10::IValue> arguments) const {
  if (is_cpu_) {
    return facts.replayable;
  }
  if (facts.is_convolution) {
    // With its benchmark on, cuDNN chooses an algorithm for each thread: perhaps another one in backward's. A transposed
    // convolution is the gradient of another, which cuDNN sums in any order.
    constexpr int TRANSPOSED = 6;
    return !at::globalContext().benchmarkCuDNN() && !arguments[TRANSPOSED].toBool();
  }
  return facts.replayable_on_accelerators;
}

CallPtr Step::record(const c10::OperatorHandle& op, const OpFacts& facts, const Stack& stack, size_t first) {
  const c10::ArrayRef<c10::IValue> arguments(stack.data() + first, facts.num_arguments);
  if (!may_replay(facts, arguments) || c10::InferenceMode::is_enabled()) {
    return {};
  }
  const bool is_blank = makes_anew(facts, arguments);
  bool can_have_again = true;
  if (!facts.writes.empty() && !is_blank) {
    for_written(facts, arguments, [&](const at::Tensor& tensor) {
      const auto value = is_plain(tensor) ? table.find(tensor.storage().unsafeGetStorageImpl()) : ValuePtr();
      can_have_again = can_have_again && value && (value->call || value->block);
    });
  }
  if (!can_have_again) {
    return {};
  }
  auto call = c10::make_intrusive<Call>(op, &facts);
  call->environment = environment_now(facts.may_multiply);
  call->arguments.assign(arguments.begin(), arguments.end());
  if (!facts.running_stats.empty() && arguments[facts.running_stats.back()].toBool()) {
    for (size_t i = 0; i + 1 < facts.running_stats.size(); ++i) {
      call->arguments[facts.running_stats[i]] = c10::IValue();  // a replay must not update them again
    }
  } else if (!facts.read_stats.empty() && (facts.read_stats.back() < 0 || !arguments[facts.read_stats.back()].toBool())) {
    // Statistics that are only read are updated past their version counters, perhaps out of sight: so copies of them.
    c10::impl::ExcludeDispatchKeyGuard unseen{c10::DispatchKeySet(KEY)};
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    for (size_t i = 0; i + 1 < facts.read_stats.size(); ++i) {
      auto& item = call->arguments[facts.read_stats[i]];
      if (item.isTensor() && item.toTensor().defined() && is_plain(item.toTensor())) {
        item = at::clone(item.toTensor());
      }
    }
  }
  if (facts.is_random) {
    std::optional<c10::Device> of_tensors, asked_for;
    for (const auto& item : arguments) {
      if (item.isGenerator()) {
        call->generator = item.toGenerator();
      } else if (item.isDevice()) {  // of a factory, which has no tensors
        asked_for = item.toDevice();
      }
      for_tensors_in(item, [&](const at::Tensor& tensor, int) {
        of_tensors = of_tensors ? of_tensors : tensor.device();
      });
    }
    if (!call->generator) {
      const auto on = of_tensors ? *of_tensors : asked_for.value_or(c10::kCPU);
      call->generator = at::globalContext().defaultGenerator(on);
    }
    std::lock_guard<std::mutex> lock(call->generator->mutex());
    call->drawn_from = GeneratorState::of(*call->generator);
  }
  for (size_t i = 0; i < call->arguments.size(); ++i) {
    if (i == 0 && is_blank) {
      const auto& tensor = call->arguments[0].toTensor();
      call->blank.emplace(static_cast<int64_t>(tensor.storage().nbytes()), Geometry::of(tensor));
      call->arguments[0] = c10::IValue();
      continue;
    }
    auto& item = call->arguments[i];
    bool can_refer = true;
    bool has_refs = false;
    for_tensors_in(item, [&](const at::Tensor& tensor, int place) {
      if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
        return;  // a Python number: nobody else has it
      }
      has_refs = true;
      can_refer = can_refer && refer(*call, static_cast<int>(i), place, tensor);
    });
    if (!can_refer) {
      return {};
    }
    if (!has_refs) {
      continue;
    }
    if (item.isTensor()) {
      item = c10::IValue();
    } else if (item.isTensorList()) {  // lists are shared with whoever made them: lists of our own
      c10::List<at::Tensor> list;
      list.resize(item.toTensorList().size());
      item = std::move(list);
    } else {
      c10::List<std::optional<at::Tensor>> list;
      list.resize(item.toOptionalTensorList().size());
      item = std::move(list);
    }
  }
  for (const auto& value : call->inputs) {
    value->readers.push_back(WeakCall(call));
    if (!value->call && !value->storage && !value->block) {
      table.own(value, value->live());
    }
  }
  return call;
}

// Be able to notice a write through a tensor's version counter to what was there before the step. A storage may have
// several: that of `x.data` is its own, and counts no write to `x`.
static void guard_external(Value& value, const at::Tensor& tensor) {
  if (tensor.is_inference()) {
    return;
  }
  const auto& counter = tensor.unsafeGetTensorImpl()->version_counter();
  const auto is_its = [&](const Guard& guard) { return are_one(guard.counter, counter); };
  if (std::none_of(value.guards.begin(), value.guards.end(), is_its)) {
    value.guards.push_back({counter, counter.current_version()});
  }
}

void Step::know(const at::Tensor& tensor) {
  if (is_plain(tensor) && tensor.device() == device) {
    read_by(tensor, tensor.storage().getWeakStorageImpl().lock());
  }
}

// The value that is read by a tensor, followed from now on: one that nobody follows was there before the step.
ValuePtr Step::read_by(const at::Tensor& tensor, const StoragePtr& storage) {
  auto value = table.find(storage.get());
  if (!value) {
    value = c10::make_intrusive<Value>(-1, static_cast<int64_t>(storage->nbytes()));
    value->is_external = true;
    table.follow(value, storage);
  }
  if (value->is_external) {
    guard_external(*value, tensor);
  }
  return value;
}

// Have a call refer to what a tensor holds now; one from before the step is taken as it is, and owned.
bool Step::refer(Call& call, int argument, int item, const at::Tensor& tensor) {
  if (!is_plain(tensor) || (tensor.device() != device && tensor.numel() > 1)) {
    return false;  // what a loader may fill anew meanwhile, say
  }
  if (tensor.is_inference()) {
    return false;  // nothing tells of what is written there
  }
  const StoragePtr storage = tensor.storage().getWeakStorageImpl().lock();
  const auto value = read_by(tensor, storage);
  if (!value->is_external && value->holds_no_longer(tensor)) {
    return false;  // another thread has written it
  }
  if (value->is_external && !value->storage) {
    table.own(value, storage);  // a copy of statistics belongs to nobody else
  }
  if (std::find(call.inputs.begin(), call.inputs.end(), value) == call.inputs.end()) {
    call.inputs.push_back(value);
  }
  call.refs.push_back(Ref{argument, item, value, Geometry::of(tensor)});
  return true;
}

// ---- what ops made

// One tensor for each storage that a call made a value on: first those on fresh storages, of which no argument lies on
// one, then those written in place. As `effects` of op_facts.py lists them.
size_t made_by(
    c10::ArrayRef<c10::IValue> results,
    const c10::SmallVectorImpl<const c10::StorageImpl*>& given,
    const Tensors& written,
    c10::Device device,
    Tensors& made) {
  c10::SmallVector<const c10::StorageImpl*, 4> seen;
  const auto make = [&](const at::Tensor& tensor, const c10::SmallVectorImpl<const c10::StorageImpl*>& others) {
    if (!is_plain(tensor)) {
      return;
    }
    const auto* storage = tensor.storage().unsafeGetStorageImpl();
    if (std::find(others.begin(), others.end(), storage) != others.end() ||
        std::find(seen.begin(), seen.end(), storage) != seen.end()) {
      return;
    }
    seen.push_back(storage);
    if (tensor.device() == device) {  // attention gives CPU seeds on CUDA
      made.push_back(tensor);
    }
  };
  for (const auto& item : results) {
    for_tensors_in(item, [&](const at::Tensor& tensor, int) { make(tensor, given); });
  }
  const size_t num_fresh = made.size();
  seen.clear();
  const c10::SmallVector<const c10::StorageImpl*, 1> nobody;
  for (const auto& tensor : written) {
    make(tensor, nobody);
  }
  return num_fresh;
}

void written_by(const OpFacts& facts, c10::ArrayRef<c10::IValue> arguments, Tensors& written) {
  for_written(facts, arguments, [&](const at::Tensor& tensor) { written.push_back(tensor); });
}

static void storages_of(c10::ArrayRef<c10::IValue> arguments, c10::SmallVectorImpl<const c10::StorageImpl*>& found) {
  for (const auto& item : arguments) {
    for_tensors_in(item, [&](const at::Tensor& tensor, int) {
      if (is_plain(tensor)) {
        found.push_back(tensor.storage().unsafeGetStorageImpl());
      }
    });
  }
}

std::string Step::follow_results(
    const Program::Busy& planned, const OpFacts& facts, const Tensors& made, size_t num_fresh, const CallPtr& call) {
  if (made.size() != planned.bytes.size()) {
    return "made " + std::to_string(made.size()) + " tensors in place of " + std::to_string(planned.bytes.size());
  }
  for (const auto& [position, index] : planned.registered) {
    const StoragePtr storage = made[position].storage().getWeakStorageImpl().lock();
    const auto num_bytes = static_cast<int64_t>(storage->nbytes());
    const auto planned_bytes = planned.bytes[position];
    if (num_bytes != planned_bytes && !(program->is_bound && num_bytes < planned_bytes)) {
      return "made " + std::to_string(num_bytes) + " bytes in place of " + std::to_string(planned_bytes);
    }
    auto value = c10::make_intrusive<Value>(index, num_bytes);
    value->made_as = WeakTensor(made[position].getIntrusivePtr());
    const auto& counter = made[position].unsafeGetTensorImpl()->version_counter();
    if (call && static_cast<size_t>(position) < num_fresh && counter.enabled()) {
      value->fresh_version = counter.current_version();
    }
    if (call && (facts.running_stats.empty() || static_cast<size_t>(position) < num_fresh)) {
      value->call = call;
      call->results.emplace_back(static_cast<int>(position), WeakValue(value));
    }
    table.follow(value, storage);
  }
  return "";
}

void Step::track(const at::Tensor& tensor) {
  const StoragePtr storage = tensor.storage().getWeakStorageImpl().lock();
  auto value = c10::make_intrusive<Value>(-1, static_cast<int64_t>(storage->nbytes()));
  value->made_as = WeakTensor(tensor.getIntrusivePtr());
  table.follow(value, storage);
}

// ---- writes

bool Step::before_write(const at::Tensor& tensor, bool may_ask_others) {
  if (!is_plain(tensor)) {
    return false;
  }
  if (may_ask_others && num_minding.load(std::memory_order_relaxed) > static_cast<int>(program->minds_writes)) {
    return python.before_write(tensor);
  }
  const auto* storage = tensor.storage().unsafeGetStorageImpl();
  const auto value = table.find(storage);
  if (!value) {
    return false;
  }
  bool must_materialize = static_cast<bool>(value->copy);
  if (!value->call && !value->block) {
    for (const auto& weak : value->readers) {
      const auto reader = weak.lock();
      for (const auto& [position, result] : reader ? reader->results : decltype(reader->results)()) {
        const auto made = result.lock();
        must_materialize = must_materialize || (made && made->call == reader);
      }
    }
  }
  if (must_materialize) {
    return python.before_write(tensor);
  }
  const StoragePtr own = tensor.storage().getWeakStorageImpl().lock();
  for (const auto& weak : value->handles) {
    const auto handle = weak.lock();
    if (handle && handle->geometry && handle->value == value) {
      handle->kept = handle->geometry->on(own);  // it follows the storage from now on, as in plain autograd
      handle->value.reset();
    }
  }
  value->origin.reset();
  value->storage.reset();
  value->guards.clear();
  table.drop(storage);
  return !value->is_external;
}

// ---- one op

bool Step::captures() {
  return python.capturing && python.is_capturing();
}

void Step::op(const c10::OperatorHandle& op, const OpFacts& facts, c10::DispatchKeySet keys, Stack* stack) {
  const auto run = [&] {
    c10::impl::ExcludeDispatchKeyGuard unseen{c10::DispatchKeySet(KEY)};
    op.redispatchBoxed(keys & BELOW, stack);
  };
  const c10::ArrayRef<c10::IValue> arguments(stack->data() + (stack->size() - facts.num_arguments), facts.num_arguments);
  int64_t place = Follower::NOTHING;
  CallPtr call;
  Tensors written;
  c10::SmallVector<std::pair<at::Tensor, const c10::StorageImpl*>, 1> rewritten;
  c10::SmallVector<const c10::StorageImpl*, 8> given;
  const Program::Busy* busy = nullptr;
  bool is_followed = false;
  {
    Lock lock;
    uint8_t flags = 0;
    if (!has_deviated && !in_backward()) {  // a program that asks for something in backward is Python's
      place = follower.next(facts.name_id);
      if (place >= 0) {
        flags = program->op_flags[place];
      }
    }
    // A graph is captured as without us: its ops are not seen. Asked where it matters, since that takes the GIL.
    if ((place < 0 || flags || facts.mutates) && captures()) {
      run();
      return;
    }
    if (place == Follower::LEFT) {
      python.deviate_at_op(facts.name, follower.place());
    }
    if (has_deviated) {
      is_followed = true;
    } else if (flags & Program::BUSY) {
      busy = &program->busy[program->busy_ops[place]];
      release(busy->releases);
      if (flags & Program::RECORD) {
        call = record(op, facts, *stack, stack->size() - facts.num_arguments);
      }
      is_followed = !busy->registered.empty();
    }
    if (facts.mutates) {
      for_written(facts, arguments, [&](const at::Tensor& tensor) {
        if (is_followed) {
          written.push_back(tensor);
        }
        if (before_write(tensor, true)) {
          rewritten.emplace_back(tensor, tensor.storage().unsafeGetStorageImpl());
        }
      });
    }
    if (is_followed) {
      storages_of(arguments, given);
    }
  }
  run();
  if (!is_followed && rewritten.empty()) {
    return;
  }
  Lock lock;
  if (is_followed) {
    const c10::ArrayRef<c10::IValue> results(stack->data() + (stack->size() - facts.num_returns), facts.num_returns);
    Tensors made;
    const size_t num_fresh = made_by(results, given, written, device, made);
    if (has_deviated || busy == nullptr) {
      for (size_t i = 0; i < num_fresh; ++i) {
        track(made[i]);
      }
    } else {
      const auto how = follow_results(*busy, facts, made, num_fresh, call);
      if (!how.empty()) {
        python.deviate(facts.name + " " + how);
      }
    }
  }
  for (const auto& [tensor, key] : rewritten) {
    const auto* storage = tensor.storage().unsafeGetStorageImpl();
    if (storage == key && tensor.device() == device && !table.find(storage)) {
      track(tensor);
    }
  }
}

// ---- who sees ops

Sight look_through(Sight now) {
  const Sight before = std::exchange(sight, now);
  set_key();
  return before;
}

Sight looked_through() {
  return sight;
}

void hide() {
  ++num_hidden;
  set_key();
}

void show() {
  --num_hidden;
  set_key();
}

int hidden(int count) {
  const int before = std::exchange(num_hidden, count);
  set_key();
  return before;
}

static void see(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  // Where Python's key is off, a mode runs its own ops: those of fake tensors above all, while a compiler traces.
  // An alias is nobody's business either: Python makes objects of its own classes of one, which must not have been
  // Python's before.
  if (num_hidden == 0 && !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Python)) {
    const OpFacts& facts = *Upward::facts_of(op);
    if (sight.step != nullptr && !facts.is_alias) {
      sight.step->op(op, facts, keys, stack);
      return;
    }
    if (const Watch* watch = sight.watch != nullptr ? sight.watch : inherited_watch(); watch != nullptr && !facts.is_alias) {
      c10::impl::ExcludeDispatchKeyGuard unseen{c10::DispatchKeySet(KEY)};
      show_to(*watch, op, stack);
      return;
    }
  }
  c10::impl::ExcludeDispatchKeyGuard unseen{c10::DispatchKeySet(KEY)};
  op.redispatchBoxed(keys & BELOW, stack);
}

bool install(std::string& why_not) {
  auto& dispatcher = c10::Dispatcher::singleton();
  if (dispatcher.hasBackendFallbackForDispatchKey(KEY)) {
    why_not = "this torch has taken the dispatch key that the native core sees ops by";
    return false;
  }
  static auto* registration = new c10::RegistrationHandleRAII(dispatcher.registerFallback(
      KEY, c10::KernelFunction::makeFromBoxedFunction<&see>(), "lightning-offload"));
  (void)registration;
  return true;
}

}  // namespace offload
