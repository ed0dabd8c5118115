// Saved tensors, as autograd hands them over: hooks that need neither Python nor the GIL, and who makes them.
//
// Hooks of Python's cost a saved tensor two Python objects and four turns of the GIL, as much as many an op takes. Autograd
// asks its engine for the hooks that are in force whenever it saves a tensor: torch lets another engine stand in for its own
// (`set_default_engine_stub`), as its Python bindings do for the one of C++. Ours asks whether the hooks on top are those that
// Python has pushed for a step of this thread, and gives the core's own then; all else it hands on. So whoever looks at torch's
// stack of hooks sees the pair of Python's, and what another thread saves goes through that.

#include "step.h"

#include <ATen/SavedTensorHooks.h>
#include <c10/core/SafePyObject.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace offload {

namespace autograd = torch::autograd;

// What each hook of a step holds: its executor in Python, which holds the step.
struct Hooked {
  PyRef executor;
  Step* step;
};

static thread_local std::vector<std::weak_ptr<Hooked>> hooked;  // whose hooks this thread has pushed, as long as they live

std::shared_ptr<Hooked> hook(PyObject* executor, Step& step) {
  auto found = std::make_shared<Hooked>(Hooked{PyRef::borrowed(executor), &step});
  hooked.erase(std::remove_if(hooked.begin(), hooked.end(), [](const auto& one) { return one.expired(); }), hooked.end());
  hooked.emplace_back(found);
  return found;
}

namespace {

// Ops of the runtime's own: nobody sees them.
using Unseen = c10::impl::ExcludeDispatchKeyGuard;
const c10::DispatchKeySet SEEN_BY(c10::DispatchKey::Fake);

// What a saved tensor has in place of a pair of Python's hooks.
struct Hooks final : autograd::SavedVariableHooks {
  explicit Hooks(std::shared_ptr<Hooked> step) : step_(std::move(step)) {}

  ~Hooks() override {
    auto bare = Handle::BARE;
    if (!handle_->form.compare_exchange_strong(bare, Handle::DEAD)) {
      const PyRef dying = taken();
    }
  }

  void call_pack_hook(const at::Tensor& tensor) override {
    Step& step = *step_->step;
    Lock lock;
    const Unseen unseen(SEEN_BY);
    lease_ = step.lease;
    save(step, tensor, tensor.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj(), handle_);
  }

  at::Tensor call_unpack_hook() override {
    Lock lock;
    const Unseen unseen(SEEN_BY);
    return step_->step->unpack(*handle_);
  }

  std::optional<std::pair<c10::SafePyObject, c10::SafePyObject>> retrieve_unpack_hook_data() const override {
    WithGil gil;
    const PyRef handle = object_of(handle_);
    PyObject* const unpack = PyObject_GetAttrString(step_->executor.get(), "unpack");
    TORCH_CHECK(unpack != nullptr && handle, "an executor unpacks what it has packed");
    Py_INCREF(handle.get());
    return std::make_pair(
        c10::SafePyObject(unpack, getPyInterpreter()), c10::SafePyObject(handle.get(), getPyInterpreter()));
  }

 private:
  PyRef taken() {
    if (!PyRef::can_drop()) {
      return {};
    }
    WithGil gil;
    return std::move(handle_->own);
  }

  std::shared_ptr<Hooked> step_;
  std::shared_ptr<PyRef> lease_;
  c10::intrusive_ptr<Handle> handle_ = c10::make_intrusive<Handle>();
};

using NodePtr = decltype(autograd::Edge::function);  // shared or intrusive, by torch's version

// The engine that was there before, but for who packs what is saved.
struct Engine final : autograd::Engine {
  explicit Engine(autograd::Engine& before) : before_(before) {}

  autograd::variable_list execute(
      const autograd::edge_list& roots, const autograd::variable_list& inputs, bool keep_graph, bool create_graph,
      bool accumulate_grad, const autograd::edge_list& outputs) override {
    return before_.execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }

  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(
      const std::shared_ptr<autograd::GraphTask>& task, NodePtr root, autograd::InputBuffer&& inputs) override {
    return before_.execute_with_graph_task(task, std::move(root), std::move(inputs));
  }

  std::unique_ptr<autograd::AnomalyMetadata> make_anomaly_metadata() override {
    return before_.make_anomaly_metadata();
  }

  std::unique_ptr<autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    if (!hooked.empty()) {
      const auto& state = at::SavedTensorDefaultHooks::get_tls_state();
      if (state.stack.empty() || state.is_tracing) {
        return nullptr;
      }
      if (c10::impl::TorchDispatchModeTLS::get_mode(c10::impl::TorchDispatchModeKey::PROXY)) {
        return nullptr;  // an operator of higher order has a gradient traced: what that saves is its own
      }
      PyObject* const top = state.stack.top().first.ptr(getPyInterpreter());
      if (PyMethod_Check(top)) {
        for (const auto& weak : hooked) {
          if (auto step = weak.lock(); step && PyMethod_GET_SELF(top) == step->executor.get()) {
            return std::make_unique<Hooks>(std::move(step));
          }
        }
      }
    }
    return before_.get_default_saved_variable_hooks();
  }

 private:
  autograd::Engine& before_;
};

autograd::Engine& own_engine() {
  static auto* const engine = new Engine(autograd::Engine::get_default_engine());  // never freed
  return *engine;
}

}  // namespace

void stand_in_for_engine() {
  own_engine();  // which asks for the one that was there
  autograd::set_default_engine_stub(&own_engine);
}

}  // namespace offload
