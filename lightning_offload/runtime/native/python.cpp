// The module `_core`: Python's types for values, handles, programs and steps, and what the core asks Python for.
//
// The one file that includes torch's Python bindings, which take longer to compile than all else.

#include "step.h"

#include <ATen/ThreadLocalPythonObjects.h>
#include <ATen/core/PythonFallbackKernel.h>
#include <ATen/ops/empty.h>
#include <c10/core/SafePyObject.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>

#include <structmember.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <memory>

namespace offload {

[[noreturn]] void throw_python_error() {
  python_error error;
  error.persist();
  throw std::move(error);
}

static std::atomic<uint64_t> facts_generation{0};  // counts how often facts have changed
static PyObject* tell_facts = nullptr;  // facts of an op by its qualified name: a tuple
static PyObject* own_error = nullptr;   // the base of this package's errors

const void* own_node() {
  const auto node = torch::autograd::get_current_node();
  return dynamic_cast<const torch::autograd::TraceableFunction*>(node.get()) == nullptr ? node.get() : nullptr;
}

bool is_not_for_replays(const std::exception& error) {
  const auto* raised = dynamic_cast<const python_error*>(&error);
  if (raised == nullptr) {
    return false;
  }
  WithGil gil;
  return !PyErr_GivenExceptionMatches(raised->type, PyExc_Exception) ||
      PyErr_GivenExceptionMatches(raised->type, own_error);
}

namespace {

PyObject* checked(PyObject* object) {
  if (object == nullptr) {
    throw_python_error();
  }
  return object;
}

PyObject* wrap(const StoragePtr& storage) {
  if (!storage) {
    Py_RETURN_NONE;
  }
  return THPStorage_Wrap(c10::Storage(storage));
}

StoragePtr storage_of(PyObject* object) {
  if (object == Py_None) {
    return {};
  }
  TORCH_CHECK_TYPE(THPStorage_Check(object), "expected a torch.UntypedStorage, got ", Py_TYPE(object)->tp_name);
  return THPStorage_Unpack(object).getWeakStorageImpl().lock();
}

std::vector<int64_t> integers(PyObject* sequence) {
  PyRef items = PyRef::stolen(checked(PySequence_Fast(sequence, "expected a sequence of integers")));
  std::vector<int64_t> found(PySequence_Fast_GET_SIZE(items.get()));
  for (size_t i = 0; i < found.size(); ++i) {
    found[i] = PyLong_AsLongLong(PySequence_Fast_GET_ITEM(items.get(), i));
    if (found[i] == -1 && PyErr_Occurred()) {
      throw_python_error();
    }
  }
  return found;
}

std::vector<uint8_t> bytes(PyObject* object) {
  char* data = nullptr;
  Py_ssize_t size = 0;
  if (PyBytes_AsStringAndSize(object, &data, &size) != 0) {
    throw_python_error();
  }
  return {data, data + size};
}

std::string text(PyObject* object) {
  const char* found = PyUnicode_AsUTF8(object);
  if (found == nullptr) {
    throw_python_error();
  }
  return found;
}

PyObject* tuple_of(c10::ArrayRef<int64_t> numbers) {
  PyObject* tuple = checked(PyTuple_New(static_cast<Py_ssize_t>(numbers.size())));
  for (size_t i = 0; i < numbers.size(); ++i) {
    PyTuple_SET_ITEM(tuple, i, checked(PyLong_FromLongLong(numbers[i])));
  }
  return tuple;
}

template <class Function>
void for_items(PyObject* dict, const Function& function) {
  Py_ssize_t position = 0;
  PyObject *key = nullptr, *item = nullptr;
  while (PyDict_Next(dict, &position, &key, &item)) {
    function(PyLong_AsLongLong(key), item);
  }
}


// From geometry.py's: (size, stride, offset, dtype, device, conj, neg).
Geometry geometry_of(PyObject* object) {
  TORCH_CHECK_TYPE(PyTuple_Check(object) && PyTuple_GET_SIZE(object) == 7, "expected a Geometry");
  const auto item = [&](Py_ssize_t i) { return PyTuple_GET_ITEM(object, i); };
  TORCH_CHECK_TYPE(THPDtype_Check(item(3)) && THPDevice_Check(item(4)), "expected a Geometry");
  Geometry found;
  const auto size = integers(item(0)), stride = integers(item(1));
  found.size.assign(size.begin(), size.end());
  found.stride.assign(stride.begin(), stride.end());
  found.offset = PyLong_AsLongLong(item(2));
  found.dtype = reinterpret_cast<THPDtype*>(item(3))->scalar_type;
  found.device = reinterpret_cast<THPDevice*>(item(4))->device;
  found.conj = PyObject_IsTrue(item(5)) == 1;
  found.neg = PyObject_IsTrue(item(6)) == 1;
  return found;
}

// ---- Value

struct PyValue {
  PyObject_HEAD
  ValuePtr value;
};

PyTypeObject* value_type = nullptr;

PyObject* wrap(const ValuePtr& value) {
  if (!value) {
    Py_RETURN_NONE;
  }
  if (value->wrapper != nullptr) {
    Py_INCREF(value->wrapper);
    return value->wrapper;
  }
  auto* object = reinterpret_cast<PyValue*>(checked(value_type->tp_alloc(value_type, 0)));
  new (&object->value) ValuePtr(value);
  value->wrapper = reinterpret_cast<PyObject*>(object);
  return value->wrapper;
}

const ValuePtr& value_of(PyObject* object) {
  TORCH_CHECK_TYPE(Py_TYPE(object) == value_type, "expected a value of the native core, got ", Py_TYPE(object)->tp_name);
  return reinterpret_cast<PyValue*>(object)->value;
}

void drop_type_and_free(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

void value_dealloc(PyObject* self) {
  auto* object = reinterpret_cast<PyValue*>(self);
  object->value->wrapper = nullptr;
  ValuePtr last = std::move(object->value);
  object->value.~ValuePtr();
  drop_type_and_free(self);
}

std::optional<c10::Stream> stream_from(PyObject* object) {
  if (object == Py_None || !PyObject_HasAttrString(object, "stream_id")) {
    return std::nullopt;
  }
  const auto number = [&](const char* name) {
    PyRef item = PyRef::stolen(checked(PyObject_GetAttrString(object, name)));
    return PyLong_AsLongLong(item.get());
  };
  return c10::Stream::unpack3(
      number("stream_id"), static_cast<c10::DeviceIndex>(number("device_index")),
      static_cast<c10::DeviceType>(number("device_type")));
}

#define VALUE(self) (*value_of(self))
// All of them read or change what the mutex guards: Note [Locks].
#define GETTER(name, ...)                          \
  PyObject* name(PyObject* self, void*) {          \
    HANDLE_TH_ERRORS                               \
    Lock lock;                                     \
    __VA_ARGS__;                                   \
    END_HANDLE_TH_ERRORS                           \
  }
#define SETTER(name, ...)                                                          \
  int name(PyObject* self, PyObject* given, void*) {                               \
    HANDLE_TH_ERRORS                                                               \
    Lock lock;                                                                     \
    TORCH_CHECK_TYPE(given != nullptr, "attributes of values cannot be deleted");  \
    __VA_ARGS__;                                                                   \
    return 0;                                                                      \
    END_HANDLE_TH_ERRORS_RET(-1)                                                   \
  }
#define METHOD(name, ...)                            \
  PyObject* name(PyObject* self, PyObject* given) {  \
    HANDLE_TH_ERRORS                                 \
    Lock lock;                                       \
    (void)given;                                     \
    __VA_ARGS__;                                     \
    END_HANDLE_TH_ERRORS                             \
  }

PyObject* incref_or_none(PyObject* object) {
  object = object != nullptr ? object : Py_None;
  Py_INCREF(object);
  return object;
}

PyRef kept_unless_none(PyObject* object) {
  return object == Py_None ? PyRef() : PyRef::borrowed(object);
}

GETTER(value_index, return PyLong_FromLongLong(VALUE(self).index))
GETTER(value_num_bytes, return PyLong_FromLongLong(VALUE(self).num_bytes))
GETTER(value_storage, return wrap(VALUE(self).storage))
SETTER(set_value_storage, VALUE(self).storage = storage_of(given))
GETTER(value_block, return incref_or_none(VALUE(self).block.get()))
SETTER(set_value_block, VALUE(self).block = kept_unless_none(given); VALUE(self).address = 0)
GETTER(value_copy, return incref_or_none(VALUE(self).copy.get()))
SETTER(set_value_copy, VALUE(self).copy = kept_unless_none(given))
GETTER(value_stream, return incref_or_none(VALUE(self).py_stream.get()))
GETTER(value_call, return incref_or_none(VALUE(self).call ? Py_True : nullptr))
SETTER(set_value_call, TORCH_CHECK_VALUE(given == Py_None, "a call is recorded by the core alone"); VALUE(self).call.reset())
GETTER(value_original, Py_RETURN_NONE)
GETTER(value_is_external, return PyBool_FromLong(VALUE(self).is_external))
SETTER(set_value_is_external, VALUE(self).is_external = PyObject_IsTrue(given))
GETTER(value_is_ours, return PyBool_FromLong(VALUE(self).is_ours))
GETTER(value_is_handed_out, return PyBool_FromLong(VALUE(self).is_handed_out))
GETTER(value_has_origin, return PyBool_FromLong(VALUE(self).origin.has_value()))
GETTER(value_is_stale, return PyBool_FromLong(VALUE(self).is_stale()))
METHOD(value_live, return wrap(VALUE(self).live()))
METHOD(value_leave_origin, VALUE(self).leave_origin(); Py_RETURN_NONE)
GETTER(value_has_handle, return PyBool_FromLong(VALUE(self).has_handle()))
METHOD(value_overwritten, {
  auto& value = VALUE(self);
  value.origin.reset();
  value.storage.reset();
  value.guards.clear();
  Py_RETURN_NONE;
})
METHOD(value_wanted_of_readers, {
  // What the calls that read it made, as far as those still make it.
  PyRef found = PyRef::stolen(checked(PyList_New(0)));
  for (const auto& weak : VALUE(self).readers) {
    const auto reader = weak.lock();
    for (const auto& [position, result] : reader ? reader->results : decltype(reader->results)()) {
      const auto made = result.lock();
      if (made && made->call == reader) {
        PyRef item = PyRef::stolen(wrap(made));
        PyList_Append(found.get(), item.get());
      }
    }
  }
  Py_INCREF(found.get());
  return found.get();
})
METHOD(value_hand_over, {
  // What saved it follows the storage from now on; the ordinals of those packs.
  const auto storage = storage_of(given);
  auto& value = VALUE(self);
  PyRef found = PyRef::stolen(checked(PyList_New(0)));
  for (const auto& weak : value.handles) {
    const auto handle = weak.lock();
    if (handle && handle->geometry && handle->value.get() == &value) {
      handle->kept = handle->geometry->on(storage);
      handle->value.reset();
      PyRef index = PyRef::stolen(PyLong_FromLongLong(handle->index));
      PyList_Append(found.get(), index.get());
    }
  }
  Py_INCREF(found.get());
  return found.get();
})
METHOD(value_owns, {
  PyObject *storage = nullptr, *stream = nullptr;
  if (!PyArg_ParseTuple(given, "OO", &storage, &stream)) {
    return nullptr;
  }
  VALUE(self).owns(storage_of(storage), stream_from(stream));
  VALUE(self).py_stream = kept_unless_none(stream);
  Py_RETURN_NONE;
})

PyGetSetDef value_attributes[] = {
    {"index", value_index, nullptr, nullptr, nullptr},
    {"num_bytes", value_num_bytes, nullptr, nullptr, nullptr},
    {"storage", value_storage, set_value_storage, nullptr, nullptr},
    {"block", value_block, set_value_block, nullptr, nullptr},
    {"copy", value_copy, set_value_copy, nullptr, nullptr},
    {"stream", value_stream, nullptr, nullptr, nullptr},
    {"call", value_call, set_value_call, nullptr, nullptr},
    {"original", value_original, nullptr, nullptr, nullptr},
    {"is_external", value_is_external, set_value_is_external, nullptr, nullptr},
    {"is_ours", value_is_ours, nullptr, nullptr, nullptr},
    {"is_handed_out", value_is_handed_out, nullptr, nullptr, nullptr},
    {"has_handle", value_has_handle, nullptr, nullptr, nullptr},
    {"has_origin", value_has_origin, nullptr, nullptr, nullptr},
    {"is_stale", value_is_stale, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyObject* value_is_as_saved(PyObject* self, PyObject* given);

PyMethodDef value_methods[] = {
    {"is_as_saved", value_is_as_saved, METH_O, nullptr},
    {"live", value_live, METH_NOARGS, nullptr},
    {"leave_origin", value_leave_origin, METH_NOARGS, nullptr},
    {"overwritten", value_overwritten, METH_NOARGS, nullptr},
    {"wanted_of_readers", value_wanted_of_readers, METH_NOARGS, nullptr},
    {"hand_over", value_hand_over, METH_O, nullptr},
    {"owns", value_owns, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};

// ---- Copy

struct PyCopy {
  PyObject_HEAD
  CopyPtr copy;
};

PyTypeObject* copy_type = nullptr;

void copy_dealloc(PyObject* self) {
  CopyPtr last = std::move(reinterpret_cast<PyCopy*>(self)->copy);
  reinterpret_cast<PyCopy*>(self)->copy.~CopyPtr();
  drop_type_and_free(self);
  WithoutGil others_go_on;
  last.reset();  // a device may take its time over the end of an event
}

PyObject* copy_is_done(PyObject* self, void*) {
  HANDLE_TH_ERRORS
  return PyBool_FromLong(copy_of(self)->event.query());
  END_HANDLE_TH_ERRORS
}

PyObject* copy_storage(PyObject* self, void*) {
  HANDLE_TH_ERRORS
  return wrap(copy_of(self)->lanes->held_by(*copy_of(self)));
  END_HANDLE_TH_ERRORS
}

PyObject* copy_wait(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  copy_of(self)->wait();
  return PyFloat_FromDouble(0);
  END_HANDLE_TH_ERRORS
}

PyObject* copy_synchronize(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  const CopyPtr copy = reinterpret_cast<PyCopy*>(self)->copy;
  WithoutGil others_go_on;
  copy->synchronize();
  END_HANDLE_TH_ERRORS_RET(nullptr)
  Py_RETURN_NONE;
}

PyGetSetDef copy_attributes[] = {
    {"is_done", copy_is_done, nullptr, nullptr, nullptr},
    {"storage", copy_storage, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyMethodDef copy_methods[] = {
    {"wait", copy_wait, METH_NOARGS, nullptr},
    {"synchronize", copy_synchronize, METH_NOARGS, nullptr},
    {"settle", copy_synchronize, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};

// ---- Lanes

struct PyLanes {
  PyObject_HEAD
  std::shared_ptr<Lanes> lanes;
};

PyTypeObject* lanes_type = nullptr;

// Lanes(done, most_bytes) for those of a CPU, Lanes(done, out_stream, in_stream) for others.
PyObject* lanes_make(PyTypeObject* type, PyObject* given, PyObject*) {
  HANDLE_TH_ERRORS
  PyObject *done = nullptr, *first = nullptr, *second = nullptr;
  if (!PyArg_ParseTuple(given, "OO|O", &done, &first, &second)) {
    return nullptr;
  }
  auto lanes = second != nullptr ? std::make_shared<Lanes>(stream_from(first).value(), stream_from(second).value(), done)
                                 : std::make_shared<Lanes>(PyLong_AsLongLong(first), done);
  auto* object = reinterpret_cast<PyLanes*>(checked(type->tp_alloc(type, 0)));
  new (&object->lanes) std::shared_ptr<Lanes>(std::move(lanes));
  return reinterpret_cast<PyObject*>(object);
  END_HANDLE_TH_ERRORS
}

const std::shared_ptr<Lanes>& lanes_of(PyObject* object) {
  TORCH_CHECK_TYPE(Py_TYPE(object) == lanes_type, "expected lanes of the native core, got ", Py_TYPE(object)->tp_name);
  return reinterpret_cast<PyLanes*>(object)->lanes;
}

void lanes_dealloc(PyObject* self) {
  auto last = std::move(reinterpret_cast<PyLanes*>(self)->lanes);
  reinterpret_cast<PyLanes*>(self)->lanes.~shared_ptr<Lanes>();
  drop_type_and_free(self);
  WithoutGil others_go_on;
  try {
    last->drain();  // lanes and the copies under way on them hold each other
  } catch (const std::exception&) {  // the process ends, and the device has gone
  }
  last.reset();
}

int64_t number(PyObject* object, const char* name) {
  const PyRef item = PyRef::stolen(checked(PyObject_GetAttrString(object, name)));
  return PyLong_AsLongLong(item.get());
}

PyObject* lanes_takes(PyObject* self, PyObject* num_bytes) {
  return PyBool_FromLong(lanes_of(self)->takes(PyLong_AsLongLong(num_bytes)));
}

PyObject* lanes_swap_out(PyObject* self, PyObject* given) {
  HANDLE_TH_ERRORS
  PyObject *storage = nullptr, *block = nullptr;
  if (!PyArg_ParseTuple(given, "OO", &storage, &block)) {
    return nullptr;
  }
  const PyRef copy = lanes_of(self)->swap_out(
      storage_of(storage), block, number(block, "address"), number(block, "num_bytes"));
  Py_INCREF(copy.get());
  return copy.get();
  END_HANDLE_TH_ERRORS
}

PyObject* lanes_swap_in(PyObject* self, PyObject* given) {
  HANDLE_TH_ERRORS
  PyObject *storage = nullptr, *block = nullptr;
  if (!PyArg_ParseTuple(given, "OO", &block, &storage)) {
    return nullptr;
  }
  const PyRef copy = lanes_of(self)->swap_in(
      block, number(block, "address"), storage_of(storage), number(block, "num_bytes"));
  Py_INCREF(copy.get());
  return copy.get();
  END_HANDLE_TH_ERRORS
}

PyObject* lanes_measure(PyObject* self, PyObject* is_on) {
  lanes_of(self)->measure(PyObject_IsTrue(is_on) == 1);
  Py_RETURN_NONE;
}

template <void (Lanes::*method)()>
PyObject* lanes_do(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  const auto lanes = lanes_of(self);
  WithoutGil others_go_on;
  (lanes.get()->*method)();
  END_HANDLE_TH_ERRORS_RET(nullptr)
  Py_RETURN_NONE;
}

PyObject* lanes_take_times(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  const auto lanes = lanes_of(self);
  LaneTimes times;
  {
    WithoutGil others_go_on;
    times = lanes->take_times();
  }
  return Py_BuildValue(
      "(LdLdd)", static_cast<long long>(times.out_bytes), times.out_seconds, static_cast<long long>(times.in_bytes),
      times.in_seconds, times.stall_seconds);
  END_HANDLE_TH_ERRORS
}

PyMethodDef lanes_methods[] = {
    {"takes", lanes_takes, METH_O, nullptr},
    {"swap_out", lanes_swap_out, METH_VARARGS, nullptr},
    {"swap_in", lanes_swap_in, METH_VARARGS, nullptr},
    {"measure", lanes_measure, METH_O, nullptr},
    {"tidy", lanes_do<&Lanes::tidy>, METH_NOARGS, nullptr},
    {"settle", lanes_do<&Lanes::settle>, METH_NOARGS, nullptr},
    {"drain", lanes_do<&Lanes::drain>, METH_NOARGS, nullptr},
    {"take_times", lanes_take_times, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};

// ---- Handle

struct PyHandle {
  PyObject_HEAD
  c10::intrusive_ptr<Handle> handle;
  std::shared_ptr<PyRef> lease;
  PyObject* weak_references;
};

PyTypeObject* handle_type = nullptr;

const c10::intrusive_ptr<Handle>& handle_of(PyObject* object) {
  TORCH_CHECK_TYPE(Py_TYPE(object) == handle_type, "expected a handle of the native core");
  return reinterpret_cast<PyHandle*>(object)->handle;
}

void handle_dealloc(PyObject* self) {
  auto* object = reinterpret_cast<PyHandle*>(self);
  if (object->weak_references != nullptr) {
    PyObject_ClearWeakRefs(self);
  }
  object->handle->object = nullptr;
  object->handle->form = Handle::DEAD;
  object->handle.~intrusive_ptr<Handle>();
  const auto lease = std::move(object->lease);
  object->lease.~shared_ptr<PyRef>();
  drop_type_and_free(self);
}

}  // namespace

PyRef object_of(const c10::intrusive_ptr<Handle>& handle) {
  if (handle->object != nullptr) {
    return PyRef::borrowed(handle->object);
  }
  auto bare = Handle::BARE;
  if (!handle->form.compare_exchange_strong(bare, Handle::WRAPPED)) {
    return {};
  }
  auto* object = reinterpret_cast<PyHandle*>(checked(handle_type->tp_alloc(handle_type, 0)));
  new (&object->handle) c10::intrusive_ptr<Handle>(handle);
  new (&object->lease) std::shared_ptr<PyRef>();  // autograd has one
  PyRef whole = PyRef::stolen(reinterpret_cast<PyObject*>(object));
  handle->object = whole.get();
  handle->own = PyRef::borrowed(whole.get());
  return whole;
}

namespace {

#define HANDLE(self) (*handle_of(self))

// What is kept of it is given up: it reads a value from now on.
METHOD(handle_let_go, {
  PyObject *value = nullptr, *geometry = nullptr;
  if (!PyArg_ParseTuple(given, "OO", &value, &geometry)) {
    return nullptr;
  }
  auto& handle = HANDLE(self);
  handle.value = value_of(value);
  handle.geometry = geometry_of(geometry);
  handle.kept.reset();
  handle.borrowed.reset();
  handle.is_borrowed = false;
  handle.value->handles.push_back(WeakHandle(handle_of(self)));
  Py_RETURN_NONE;
})
METHOD(value_is_as_saved, return PyBool_FromLong(VALUE(self).is_as_saved(HANDLE(given))))
METHOD(handle_come_after, {
  if (const auto& stream = HANDLE(self).stream) {
    come_after(*stream);
  }
  Py_RETURN_NONE;
})
METHOD(handle_watch, {
  // A value that it guards, by what was saved.
  auto& guards = VALUE(given).guards;
  guards.clear();
  guards.push_back(HANDLE(self).saved);
  Py_RETURN_NONE;
})
GETTER(handle_kept, {
  const auto& kept = HANDLE(self).kept;
  if (!kept.defined()) {
    Py_RETURN_NONE;
  }
  return THPVariable_Wrap(kept);
})
GETTER(handle_index, return PyLong_FromLongLong(HANDLE(self).index))
GETTER(handle_was_written, return PyBool_FromLong(HANDLE(self).saved.is_stale()))
GETTER(handle_is_out, return PyBool_FromLong(HANDLE(self).is_out))
GETTER(handle_value, return wrap(HANDLE(self).value))

PyGetSetDef handle_attributes[] = {
    {"kept", handle_kept, nullptr, nullptr, nullptr},
    {"index", handle_index, nullptr, nullptr, nullptr},
    {"is_out", handle_is_out, nullptr, nullptr, nullptr},
    {"was_written", handle_was_written, nullptr, nullptr, nullptr},
    {"value", handle_value, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyMemberDef handle_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(PyHandle, weak_references), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

PyMethodDef handle_methods[] = {
    {"let_go", handle_let_go, METH_VARARGS, nullptr},
    {"come_after", handle_come_after, METH_O, nullptr},
    {"watch", handle_watch, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr}};

// ---- Program

struct PyProgram {
  PyObject_HEAD
  std::shared_ptr<const Program> program;
};

PyTypeObject* program_type = nullptr;

std::unordered_map<std::string, int>& names() {
  static auto* names = new std::unordered_map<std::string, int>;
  return *names;
}

PyObject* program_new(PyTypeObject* type, PyObject*, PyObject* columns) {
  HANDLE_TH_ERRORS
  const auto column = [&](const char* name) {
    PyObject* found = columns != nullptr ? PyDict_GetItemString(columns, name) : nullptr;
    TORCH_CHECK_VALUE(found != nullptr, "a program has a column ", name);
    return found;
  };
  auto program = std::make_shared<Program>();
  PyRef op_names = PyRef::stolen(checked(PySequence_Fast(column("op_names"), "op_names is a sequence")));
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(op_names.get()); ++i) {
    program->op_names.push_back(intern(text(PySequence_Fast_GET_ITEM(op_names.get(), i))));
  }
  program->op_flags = bytes(column("op_flags"));
  TORCH_CHECK_VALUE(program->op_flags.size() == program->op_names.size(), "op_flags has another length than op_names");
  program->busy_ops.assign(program->op_names.size(), -1);
  for (size_t place = 0; place < program->op_names.size(); ++place) {
    if (program->op_flags[place] & Program::BUSY) {
      program->busy_ops[place] = static_cast<int32_t>(program->busy.size());
      program->busy.emplace_back();
    }
  }
  const auto busy = [&](int64_t place) -> Program::Busy& {
    TORCH_CHECK_VALUE(
        place >= 0 && place < static_cast<int64_t>(program->busy_ops.size()) && program->busy_ops[place] >= 0,
        "nothing is asked for at op ", place);
    return program->busy[program->busy_ops[place]];
  };
  for_items(column("op_bytes"), [&](int64_t place, PyObject* item) { busy(place).bytes = integers(item); });
  for_items(column("op_releases"), [&](int64_t place, PyObject* item) { busy(place).releases = integers(item); });
  for_items(column("op_registers"), [&](int64_t place, PyObject* item) {
    const auto flat = integers(item);
    auto& planned = busy(place);
    for (size_t i = 0; i + 1 < flat.size(); i += 2) {
      TORCH_CHECK_VALUE(flat[i] >= 0 && flat[i] < static_cast<int64_t>(planned.bytes.size()), "no such result: ", flat[i]);
      planned.registered.emplace_back(flat[i], flat[i + 1]);
    }
  });
  program->pack_bytes = integers(column("pack_bytes"));
  program->pack_storages = integers(column("pack_storages"));
  program->first_packs = integers(column("first_packs"));
  program->pack_flags = bytes(column("pack_flags"));
  const auto num_packs = program->pack_bytes.size();
  TORCH_CHECK_VALUE(
      program->pack_storages.size() == num_packs && program->first_packs.size() == num_packs &&
          program->pack_flags.size() == num_packs,
      "the columns of packs differ in length");
  const auto by_place = [&](const char* name, auto& found) {
    for_items(column(name), [&](int64_t place, PyObject* item) { found[place] = integers(item); });
  };
  by_place("pack_releases", program->pack_releases);
  by_place("unpack_releases", program->unpack_releases);
  by_place("fetches", program->fetches);
  program->is_routed = PyObject_IsTrue(column("is_routed"));
  PyRef forms = PyRef::stolen(checked(PySequence_Fast(column("forms"), "forms is a sequence")));
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(forms.get()); ++i) {
    PyObject *dtype = nullptr, *shape = nullptr, *form = PySequence_Fast_GET_ITEM(forms.get(), i);
    if (!PyArg_ParseTuple(form, "OO", &dtype, &shape)) {
      return nullptr;
    }
    program->forms.push_back(
        {THPDtype_Check(dtype) ? static_cast<int>(reinterpret_cast<THPDtype*>(dtype)->scalar_type) : Program::Form::STRANGE,
         integers(shape)});
  }
  program->kept_bytes = integers(column("kept_bytes"));
  PyRef unpacks = PyRef::stolen(checked(PySequence_Fast(column("unpacks"), "unpacks is a sequence")));
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(unpacks.get()); ++i) {
    program->unpacks.push_back(integers(PySequence_Fast_GET_ITEM(unpacks.get(), i)));
  }
  TORCH_CHECK_VALUE(
      !program->is_routed ||
          (program->forms.size() == num_packs && program->kept_bytes.size() == num_packs &&
           program->unpacks.size() == num_packs),
      "the columns of packs differ in length");
  program->first_border = PyLong_AsLongLong(column("first_border"));
  program->busy_unpacks = bytes(column("busy_unpacks"));
  program->actions = bytes(column("actions"));
  program->is_bound = PyObject_IsTrue(column("is_bound"));
  program->is_recomputing = PyObject_IsTrue(column("is_recomputing"));
  program->sees_ops = PyObject_IsTrue(column("sees_ops"));
  program->minds_writes = PyObject_IsTrue(column("minds_writes"));
  auto* object = reinterpret_cast<PyProgram*>(checked(type->tp_alloc(type, 0)));
  new (&object->program) std::shared_ptr<const Program>(std::move(program));
  return reinterpret_cast<PyObject*>(object);
  END_HANDLE_TH_ERRORS
}

void program_dealloc(PyObject* self) {
  using Pointer = std::shared_ptr<const Program>;
  reinterpret_cast<PyProgram*>(self)->program.~Pointer();
  drop_type_and_free(self);
}

// ---- Step

// Who sees a thread's ops, until it leaves; scopes that are left in another order than they were entered, as those of
// generators are, make way as soon as they are on top.
struct Scope {
  Sight before;
  PyObject* owner_before = nullptr;  // an own reference
  bool is_in = false;
};

Scope& scope_of(PyObject* owner);

void enter(PyObject* self, Sight sight) {
  auto& scope = scope_of(self);
  TORCH_CHECK(!scope.is_in, "the ops of a step come by already");
  scope.is_in = true;
  sight.owner = self;
  Py_INCREF(self);
  scope.before = look_through(sight);
  scope.owner_before = scope.before.owner;
}

void leave(PyObject* self) {
  scope_of(self).is_in = false;
  while (PyObject* top = looked_through().owner) {
    auto& scope = scope_of(top);
    if (scope.is_in) {
      break;
    }
    look_through(std::exchange(scope.before, Sight()));
    Py_DECREF(top);  // that was on top: what is now holds a reference of its own
  }
}

struct PyStep {
  PyObject_HEAD
  std::unique_ptr<Step> step;
  Scope scope;
  std::shared_ptr<Hooked> hooked;
};

PyTypeObject* step_type = nullptr;

Step& step_of(PyObject* self) {
  return *reinterpret_cast<PyStep*>(self)->step;
}

PyObject* step_make(PyTypeObject* type, PyObject* given, PyObject*) {
  HANDLE_TH_ERRORS
  PyObject *program = nullptr, *executor = nullptr, *lease = nullptr, *capturing = nullptr, *lanes = nullptr;
  const char* device = nullptr;
  if (!PyArg_ParseTuple(given, "O!sOOOO", program_type, &program, &device, &executor, &lease, &capturing, &lanes)) {
    return nullptr;
  }
  auto step = std::make_unique<Step>(
      reinterpret_cast<PyProgram*>(program)->program, c10::Device(device), executor, lease, capturing,
      lanes != Py_None ? lanes_of(lanes) : nullptr);
  auto* object = reinterpret_cast<PyStep*>(checked(type->tp_alloc(type, 0)));
  new (&object->step) std::unique_ptr<Step>(std::move(step));
  new (&object->scope) Scope();
  new (&object->hooked) std::shared_ptr<Hooked>();
  return reinterpret_cast<PyObject*>(object);
  END_HANDLE_TH_ERRORS
}

void step_dealloc(PyObject* self) {
  reinterpret_cast<PyStep*>(self)->hooked.~shared_ptr<Hooked>();
  reinterpret_cast<PyStep*>(self)->step.~unique_ptr<Step>();
  drop_type_and_free(self);
}

bool is_wrapped(PyObject* tensor) {
  return Py_TYPE(tensor) != reinterpret_cast<PyTypeObject*>(THPVariableClass) &&
      Py_TYPE(tensor) != reinterpret_cast<PyTypeObject*>(ParameterClass);
}

// Ops of the runtime's own, in Python or here: nobody sees them.
using Unseen = c10::impl::ExcludeDispatchKeyGuard;
const c10::DispatchKeySet SEEN_BY(c10::DispatchKey::Fake);

}  // namespace

void save(Step& step, const at::Tensor& tensor, PyObject* object, const c10::intrusive_ptr<Handle>& handle) {
  const bool is_parameter = object != nullptr && Py_TYPE(object) == reinterpret_cast<PyTypeObject*>(ParameterClass);
  const bool is_ordinary = object == nullptr || !is_wrapped(object);
  const auto* impl = tensor.unsafeGetTensorImpl();
  if (impl->version_counter().enabled()) {
    handle->saved = Guard{impl->version_counter(), impl->version_counter().current_version()};
  }
  const auto becomes = step.pack(tensor, is_parameter, is_ordinary, handle);
  // Where a step goes on along the plan for another structure no more, Python finds its place, and decides.
  const bool asks = handle->place == Handle::ASKS;
  switch (becomes) {
    case Kept::NOT:
      break;
    case Kept::STRANGE: {
      WithGil gil;
      PyRef given = PyRef::stolen(checked(THPVariable_Wrap(tensor)));
      PyRef kept = step.python.call("_strangely_saved", PyTuple_Pack(1, given.get()));
      handle->kept = THPVariable_Unpack(kept.get());
      break;
    }
    case Kept::AS_IT_IS:
      if (has_no_graph(tensor)) {
        handle->kept = tensor;
        handle->is_borrowed = true;
        if (object != nullptr) {
          WithGil gil;
          handle->borrowed = PyRef::stolen(checked(PyWeakref_NewRef(object, nullptr)));
        }
        break;
      }
      [[fallthrough]];
    case Kept::APART:
    case Kept::LEAVES_LATE:
      handle->kept = beside(tensor);
      if (becomes == Kept::LEAVES_LATE) {
        WithGil gil;
        PyRef given = PyRef::stolen(checked(THPVariable_Wrap(tensor)));
        step.python.call("_leave_late", PyTuple_Pack(2, object_of(handle).get(), given.get()));
      }
      break;
  }
  if (asks) {
    const bool is_there = becomes != Kept::STRANGE;
    WithGil gil;
    PyRef found = step.python.call(
        "_save_by_rule", checked(Py_BuildValue("(OO)", object_of(handle).get(), is_there ? Py_True : Py_False)));
    const auto numbers = integers(found.get());
    TORCH_CHECK(numbers.size() == 4, "a rule tells four numbers");
    handle->place = numbers[0];
    step.route.place = numbers[1];
    step.route.end = numbers[2];
    step.route.is_astray = numbers[3] != 0;
    step.route.num_behind = step.num_unpacks;
    step.ledger.note(handle->place, tensor, is_there);
  } else if (!step.program->sees_ops && !step.has_deviated && handle->place >= 0) {
    step.release_at_pack(handle->place);
  }
}

namespace {

PyObject* step_pack(PyObject* self, PyObject* given) {
  HANDLE_TH_ERRORS
  Step& step = step_of(self);
  Lock lock;
  Unseen unseen{SEEN_BY};
  auto* object = reinterpret_cast<PyHandle*>(checked(handle_type->tp_alloc(handle_type, 0)));
  new (&object->handle) c10::intrusive_ptr<Handle>(c10::make_intrusive<Handle>());
  new (&object->lease) std::shared_ptr<PyRef>(step.lease);
  PyRef whole = PyRef::stolen(reinterpret_cast<PyObject*>(object));
  object->handle->object = whole.get();
  object->handle->form = Handle::WRAPPED;
  save(step, THPVariable_Unpack(given), given, object->handle);
  Py_INCREF(whole.get());
  return whole.get();
  END_HANDLE_TH_ERRORS
}

PyObject* step_unpack(PyObject* self, PyObject* given) {
  HANDLE_TH_ERRORS
  Step& step = step_of(self);
  Lock lock;
  Unseen unseen{SEEN_BY};
  return THPVariable_Wrap(step.unpack(HANDLE(given)));
  END_HANDLE_TH_ERRORS
}

// Hooks of this thread that Python pushes for a step's executor are the core's own until it takes them off.
METHOD(step_hook, reinterpret_cast<PyStep*>(self)->hooked = hook(given, step_of(self)); Py_RETURN_NONE)
METHOD(step_unhook, {
  const auto dying = std::move(reinterpret_cast<PyStep*>(self)->hooked);
  Py_RETURN_NONE;
})

METHOD(step_enter, enter(self, Sight{&step_of(self), nullptr}); Py_RETURN_NONE)
METHOD(step_leave, leave(self); Py_RETURN_NONE)
METHOD(step_find, return wrap(step_of(self).table.find(storage_of(given).get())))
METHOD(step_may_hold, return PyBool_FromLong(step_of(self).table.may_hold(storage_of(given).get())))
METHOD(step_indexed, return wrap(step_of(self).table.indexed(PyLong_AsLongLong(given))))
METHOD(step_all_indexed, {
  PyRef found = PyRef::stolen(checked(PyList_New(0)));
  for (const auto& value : step_of(self).table.all_indexed()) {
    PyRef item = PyRef::stolen(wrap(value));
    PyList_Append(found.get(), item.get());
  }
  Py_INCREF(found.get());
  return found.get();
})
METHOD(step_new, {
  PyObject* storage = nullptr;
  long long index = 0;
  if (!PyArg_ParseTuple(given, "LO", &index, &storage)) {
    return nullptr;
  }
  const auto memory = storage_of(storage);
  auto value = c10::make_intrusive<Value>(index, static_cast<int64_t>(memory->nbytes()));
  PyRef object = PyRef::stolen(wrap(value));
  step_of(self).table.follow(value, memory);
  Py_INCREF(object.get());
  return object.get();
})
METHOD(step_own, {
  PyObject *value = nullptr, *storage = nullptr;
  if (!PyArg_ParseTuple(given, "OO", &value, &storage)) {
    return nullptr;
  }
  step_of(self).table.own(value_of(value), storage_of(storage));
  Py_RETURN_NONE;
})
METHOD(step_drop, step_of(self).table.drop(storage_of(given).get()); Py_RETURN_NONE)
METHOD(step_close_table, {
  step_of(self).table.close();
  Py_RETURN_NONE;
})
METHOD(step_backward_ends, {
  step_of(self).backward_ends();
  Py_RETURN_NONE;
})
METHOD(step_replay, {
  Unseen unseen{SEEN_BY};
  return wrap(step_of(self).replay(value_of(given)));
})
METHOD(step_track, {
  const auto& tensor = THPVariable_Unpack(given);
  if (is_plain(tensor) && tensor.device() == step_of(self).device) {
    step_of(self).track(tensor);
  }
  Py_RETURN_NONE;
})
METHOD(step_know, step_of(self).know(THPVariable_Unpack(given)); Py_RETURN_NONE)
METHOD(step_take_kept, {
  PyRef found = PyRef::stolen(checked(PyList_New(0)));
  for (const auto& weak : std::exchange(step_of(self).kept, {})) {
    const auto handle = weak.lock();
    if (const auto object = handle ? object_of(handle) : PyRef()) {
      PyList_Append(found.get(), object.get());
    }
  }
  Py_INCREF(found.get());
  return found.get();
})
METHOD(step_name, {
  PyObject* value = nullptr;
  long long index = 0;
  if (!PyArg_ParseTuple(given, "OL", &value, &index)) {
    return nullptr;
  }
  step_of(self).table.name(value_of(value), index);
  Py_RETURN_NONE;
})

// ---- its ledger

METHOD(step_add_late, {
  PyObject* handle = nullptr;
  long long index = -1;
  if (!PyArg_ParseTuple(given, "O|L", &handle, &index)) {
    return nullptr;
  }
  step_of(self).ledger.add_late(handle_of(handle), index);
  Py_RETURN_NONE;
})
METHOD(step_is_late, return PyBool_FromLong(step_of(self).ledger.is_late(storage_of(given).get())))
METHOD(step_take_late, {
  PyRef found = PyRef::stolen(checked(PyList_New(0)));
  for (const auto& [handle, index] : step_of(self).ledger.take_late()) {
    if (const auto object = object_of(handle)) {
      PyRef item = PyRef::stolen(checked(Py_BuildValue("(OL)", object.get(), static_cast<long long>(index))));
      PyList_Append(found.get(), item.get());
    }
  }
  Py_INCREF(found.get());
  return found.get();
})
METHOD(step_stays, {
  PyObject *handle = nullptr, *storage = nullptr;
  if (!PyArg_ParseTuple(given, "OO", &handle, &storage)) {
    return nullptr;
  }
  step_of(self).ledger.stays(handle_of(handle), *storage_of(storage));
  Py_RETURN_NONE;
})
METHOD(step_is_staying, return PyBool_FromLong(step_of(self).ledger.is_staying(storage_of(given).get())))
METHOD(step_stays_too, step_of(self).ledger.stays_too(handle_of(given)); Py_RETURN_NONE)
METHOD(step_let_all_go, step_of(self).ledger.let_all_go(); Py_RETURN_NONE)
GETTER(step_is_due, return PyBool_FromLong(step_of(self).ledger.is_due()))
GETTER(step_alive_bytes, return PyLong_FromLongLong(step_of(self).ledger.alive_bytes()))
GETTER(step_kept_bytes, return PyLong_FromLongLong(step_of(self).ledger.kept_bytes))
GETTER(step_astray_bytes, return PyLong_FromLongLong(step_of(self).ledger.astray_bytes))
SETTER(set_step_astray_bytes, step_of(self).ledger.astray_bytes = PyLong_AsLongLong(given))
GETTER(step_fingerprint, return PyLong_FromUnsignedLongLong(step_of(self).ledger.fingerprint))
GETTER(step_places_fingerprint, return PyLong_FromUnsignedLongLong(step_of(self).ledger.places_fingerprint))
GETTER(step_route_place, return PyLong_FromLongLong(step_of(self).route.place))

// ---- what it tells

GETTER(step_place, return PyLong_FromLongLong(step_of(self).follower.place()))
GETTER(step_num_stray_ops, return PyLong_FromLongLong(step_of(self).follower.num_stray()))
GETTER(step_num_packs, return PyLong_FromLongLong(step_of(self).num_packs))
GETTER(step_num_unpacks, return PyLong_FromLongLong(step_of(self).num_unpacks))
GETTER(step_took_data, return PyBool_FromLong(step_of(self).took_data))
SETTER(set_step_took_data, step_of(self).took_data = PyObject_IsTrue(given))
GETTER(step_has_deviated, return PyBool_FromLong(step_of(self).has_deviated))
SETTER(set_step_has_deviated, step_of(self).has_deviated = PyObject_IsTrue(given))
GETTER(step_replay_seconds, return PyFloat_FromDouble(step_of(self).replay_seconds))
METHOD(step_end, step_of(self).lease.reset(); Py_RETURN_NONE)
METHOD(step_go_on, step_of(self).lease = std::make_shared<PyRef>(PyRef::borrowed(given)); Py_RETURN_NONE)

PyGetSetDef step_attributes[] = {
    {"place", step_place, nullptr, nullptr, nullptr},
    {"route_place", step_route_place, nullptr, nullptr, nullptr},
    {"is_due", step_is_due, nullptr, nullptr, nullptr},
    {"alive_bytes", step_alive_bytes, nullptr, nullptr, nullptr},
    {"kept_bytes", step_kept_bytes, nullptr, nullptr, nullptr},
    {"astray_bytes", step_astray_bytes, set_step_astray_bytes, nullptr, nullptr},
    {"fingerprint", step_fingerprint, nullptr, nullptr, nullptr},
    {"places_fingerprint", step_places_fingerprint, nullptr, nullptr, nullptr},
    {"num_stray_ops", step_num_stray_ops, nullptr, nullptr, nullptr},
    {"num_packs", step_num_packs, nullptr, nullptr, nullptr},
    {"num_unpacks", step_num_unpacks, nullptr, nullptr, nullptr},
    {"took_data", step_took_data, set_step_took_data, nullptr, nullptr},
    {"has_deviated", step_has_deviated, set_step_has_deviated, nullptr, nullptr},
    {"replay_seconds", step_replay_seconds, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyMethodDef step_methods[] = {
    {"pack", step_pack, METH_O, nullptr},
    {"unpack", step_unpack, METH_O, nullptr},
    {"hook", step_hook, METH_O, nullptr},
    {"unhook", step_unhook, METH_NOARGS, nullptr},
    {"enter", step_enter, METH_NOARGS, nullptr},
    {"leave", step_leave, METH_NOARGS, nullptr},
    {"end", step_end, METH_NOARGS, nullptr},
    {"go_on", step_go_on, METH_O, nullptr},
    {"find", step_find, METH_O, nullptr},
    {"may_hold", step_may_hold, METH_O, nullptr},
    {"indexed", step_indexed, METH_O, nullptr},
    {"all_indexed", step_all_indexed, METH_NOARGS, nullptr},
    {"new", step_new, METH_VARARGS, nullptr},
    {"own", step_own, METH_VARARGS, nullptr},
    {"drop", step_drop, METH_O, nullptr},
    {"keep_watch", step_close_table, METH_NOARGS, nullptr},
    {"close", step_close_table, METH_NOARGS, nullptr},
    {"backward_ends", step_backward_ends, METH_NOARGS, nullptr},
    {"replay", step_replay, METH_O, nullptr},
    {"track", step_track, METH_O, nullptr},
    {"know", step_know, METH_O, nullptr},
    {"take_kept", step_take_kept, METH_NOARGS, nullptr},
    {"name", step_name, METH_VARARGS, nullptr},
    {"add_late", step_add_late, METH_VARARGS, nullptr},
    {"is_late", step_is_late, METH_O, nullptr},
    {"take_late", step_take_late, METH_NOARGS, nullptr},
    {"stays", step_stays, METH_VARARGS, nullptr},
    {"is_staying", step_is_staying, METH_O, nullptr},
    {"stays_too", step_stays_too, METH_O, nullptr},
    {"let_all_go", step_let_all_go, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};

// ---- Watch

}  // namespace

struct Watch {
  std::shared_ptr<c10::impl::PyObject_TorchDispatchMode> mode;
};

void show_to(const Watch& watch, const c10::OperatorHandle& op, Stack* stack) {
  struct On {  // for this op alone
    explicit On(const Watch& watch) {
      c10::impl::TorchDispatchModeTLS::push_non_infra_mode_onto_stack(watch.mode);
    }
    ~On() {
      c10::impl::TorchDispatchModeTLS::pop_stack();
    }
  };
  at::impl::MaybeSetTLSOnEntryGuard as_on_entry;
  On on(watch);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Python), stack);
}

namespace {

constexpr auto INHERITED = "lightning_offload.watch";  // autograd's threads get what lies there

struct PyWatch {
  PyObject_HEAD
  Watch watch;
  Scope scope;
  int hidden_before;
  std::shared_ptr<c10::SafePyObject> inherited_before;
};

PyTypeObject* watch_type = nullptr;

PyObject* watch_make(PyTypeObject* type, PyObject* given, PyObject*) {
  HANDLE_TH_ERRORS
  PyObject* mode = nullptr;
  if (!PyArg_ParseTuple(given, "O", &mode)) {
    return nullptr;
  }
  auto* object = reinterpret_cast<PyWatch*>(checked(type->tp_alloc(type, 0)));
  Py_INCREF(mode);
  new (&object->watch) Watch{std::make_shared<c10::impl::PyObject_TorchDispatchMode>(mode, getPyInterpreter())};
  new (&object->scope) Scope();
  new (&object->inherited_before) std::shared_ptr<c10::SafePyObject>();
  return reinterpret_cast<PyObject*>(object);
  END_HANDLE_TH_ERRORS
}

void watch_dealloc(PyObject* self) {
  auto* object = reinterpret_cast<PyWatch*>(self);
  object->watch.~Watch();
  object->inherited_before.~shared_ptr<c10::SafePyObject>();
  drop_type_and_free(self);
}

std::shared_ptr<c10::SafePyObject> nobody() {
  Py_INCREF(Py_None);
  return std::make_shared<c10::SafePyObject>(Py_None, getPyInterpreter());
}

METHOD(watch_enter, {
  auto* object = reinterpret_cast<PyWatch*>(self);
  enter(self, Sight{nullptr, &object->watch});
  object->hidden_before = hidden(0);  // also within a backward whose own ops nobody sees
  if (at::impl::ThreadLocalPythonObjects::contains(INHERITED)) {
    object->inherited_before = at::impl::ThreadLocalPythonObjects::get(INHERITED);
  }
  Py_INCREF(self);
  at::impl::ThreadLocalPythonObjects::set(INHERITED, std::make_shared<c10::SafePyObject>(self, getPyInterpreter()));
  Py_RETURN_NONE;
})
METHOD(watch_leave, {
  auto* object = reinterpret_cast<PyWatch*>(self);
  leave(self);
  hidden(object->hidden_before);
  auto former = std::exchange(object->inherited_before, nullptr);
  at::impl::ThreadLocalPythonObjects::set(INHERITED, former ? std::move(former) : nobody());
  Py_RETURN_NONE;
})

PyMethodDef watch_methods[] = {
    {"enter", watch_enter, METH_NOARGS, nullptr},
    {"leave", watch_leave, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};

Scope& scope_of(PyObject* owner) {
  return Py_TYPE(owner) == step_type ? reinterpret_cast<PyStep*>(owner)->scope
                                     : reinterpret_cast<PyWatch*>(owner)->scope;
}

}  // namespace

const Watch* inherited_watch() {
  if (!at::impl::ThreadLocalPythonObjects::contains(INHERITED)) {
    return nullptr;
  }
  PyObject* object = at::impl::ThreadLocalPythonObjects::get(INHERITED)->ptr(getPyInterpreter());
  return Py_TYPE(object) == watch_type ? &reinterpret_cast<PyWatch*>(object)->watch : nullptr;
}

int intern(const std::string& name) {
  return names().emplace(name, static_cast<int>(names().size())).first->second;
}

Copy* copy_of(PyObject* object) {
  return object != nullptr && Py_TYPE(object) == copy_type ? reinterpret_cast<PyCopy*>(object)->copy.get() : nullptr;
}

PyRef wrapped(CopyPtr copy) {
  auto* object = reinterpret_cast<PyCopy*>(checked(copy_type->tp_alloc(copy_type, 0)));
  new (&object->copy) CopyPtr(std::move(copy));
  return PyRef::stolen(reinterpret_cast<PyObject*>(object));
}

// ---- upward

PyRef Upward::call(const char* method, PyObject* arguments) const {
  // With the GIL, as every caller here has it.
  PyRef given = arguments != nullptr ? PyRef::stolen(arguments) : PyRef::stolen(checked(PyTuple_New(0)));
  PyObject* object = PyWeakref_GetObject(executor.get());
  TORCH_CHECK(object != Py_None, "a step of the native core has outlived its executor");
  PyRef alive = PyRef::borrowed(object);
  PyRef function = PyRef::stolen(checked(PyObject_GetAttrString(object, method)));
  Unseen unseen{SEEN_BY};
  return PyRef::stolen(checked(PyObject_Call(function.get(), given.get(), nullptr)));
}

const OpFacts* Upward::facts_of(const c10::OperatorHandle& op) {
  // Names live in their entries, so their addresses tell ops apart; an op that is registered anew is another one.
  static thread_local auto* known = new std::unordered_map<const c10::OperatorName*, const OpFacts*>;
  static thread_local uint64_t generation = 0;
  if (const uint64_t now = facts_generation.load(std::memory_order_acquire); now != generation) {
    generation = now;
    known->clear();
  }
  const auto& name = op.operator_name();
  const auto found = known->find(&name);
  const auto fits = [&](const OpFacts& facts) {
    return facts.op == name && facts.num_arguments == op.schema().arguments().size() &&
        facts.num_returns == op.schema().returns().size();
  };
  if (found != known->end() && fits(*found->second)) {
    return found->second;
  }
  WithGil gil;
  Unseen unseen{SEEN_BY};
  // Never freed: a call refers to them. Python may let another thread ask meanwhile, who then has some of its own.
  {
    PyRef told = PyRef::stolen(checked(PyObject_CallFunction(tell_facts, "ss", name.name.c_str(), name.overload_name.c_str())));
    auto* made = new OpFacts;
    const auto item = [&](Py_ssize_t i) { return PyTuple_GetItem(told.get(), i); };
    const auto flag = [&](Py_ssize_t i) { return PyObject_IsTrue(item(i)) == 1; };
    const auto assign = [](auto& column, const std::vector<int64_t>& numbers) { column.assign(numbers.begin(), numbers.end()); };
    made->name = text(item(0));
    made->op = name;
    made->name_id = intern(made->name);
    made->replayable = flag(1);
    made->replayable_on_accelerators = flag(2);
    made->is_convolution = flag(3);
    made->is_random = flag(4);
    made->mutates = flag(5);
    made->writes_all = flag(6);
    made->overwrites = flag(7);
    made->may_multiply = flag(8);
    assign(made->writes, integers(item(9)));
    assign(made->running_stats, integers(item(10)));
    assign(made->read_stats, integers(item(11)));
    made->is_alias = name.name == "aten::detach" || name.name == "aten::alias";
    made->num_arguments = op.schema().arguments().size();
    made->num_returns = op.schema().returns().size();
    (*known)[&name] = made;
    return made;
  }
}

void Upward::deviate(const std::string& how) const {
  WithGil gil;
  call("deviate", checked(Py_BuildValue("(s)", how.c_str())));
}

void Upward::deviate_at_op(const std::string& name, int64_t place) const {
  WithGil gil;
  call("_leave_at_op", checked(Py_BuildValue("(sL)", name.c_str(), static_cast<long long>(place))));
}

void Upward::release(const ValuePtr& value) const {
  WithGil gil;
  call("_release", checked(Py_BuildValue("(N)", wrap(value))));
}

void Upward::fetch(const ValuePtr& value) const {
  WithGil gil;
  call("_fetch", checked(Py_BuildValue("(N)", wrap(value))));
}

void Upward::bring_back(int64_t first, int64_t last, const ValuePtr& value) const {
  WithGil gil;
  call("_bring_back_at", checked(Py_BuildValue(
      "(LLN)", static_cast<long long>(first), static_cast<long long>(last), wrap(value))));
}

void Upward::late_ones_leave() const {
  WithGil gil;
  call("_late_ones_leave", nullptr);
}

void Upward::outliving(std::unordered_set<const void*>& storages) const {
  WithGil gil;
  PyRef found = call("_outliving", nullptr);
  PyRef each = PyRef::stolen(checked(PyObject_GetIter(found.get())));
  while (PyRef key = PyRef::stolen(PyIter_Next(each.get()))) {
    storages.insert(PyLong_AsVoidPtr(key.get()));
  }
  if (PyErr_Occurred()) {
    throw_python_error();
  }
}

void Upward::first_unpack() const {
  WithGil gil;
  call("_first_unpack", nullptr);
}

bool Upward::swap_out(const ValuePtr& value, const StoragePtr& storage) const {
  WithGil gil;
  return PyObject_IsTrue(call("_swap_out", checked(Py_BuildValue("(NN)", wrap(value), wrap(storage)))).get()) == 1;
}

std::pair<PyRef, int64_t> Upward::allocate(const Value& value) const {
  WithGil gil;
  PyRef found = call("_allocate", checked(Py_BuildValue(
      "(LL)", static_cast<long long>(value.index), static_cast<long long>(value.num_bytes))));
  if (found.get() == Py_None) {
    return {};
  }
  TORCH_CHECK(PyTuple_Check(found.get()) && PyTuple_GET_SIZE(found.get()) == 2, "a block comes with its address");
  return {PyRef::borrowed(PyTuple_GET_ITEM(found.get(), 0)), PyLong_AsLongLong(PyTuple_GET_ITEM(found.get(), 1))};
}

void Upward::start_out(const ValuePtr& value, const StoragePtr& storage, PyObject* block) const {
  WithGil gil;
  call("_start_out", checked(Py_BuildValue("(NNO)", wrap(value), wrap(storage), block)));
}

bool Upward::before_write(const at::Tensor& tensor) const {
  WithGil gil;
  return PyObject_IsTrue(call("_before_write", checked(Py_BuildValue("(N)", THPVariable_Wrap(tensor)))).get()) == 1;
}

StoragePtr Upward::materialize(const ValuePtr& value) const {
  WithGil gil;
  return storage_of(call("_materialize", checked(Py_BuildValue("(N)", wrap(value)))).get());
}

void Upward::await(const ValuePtr& value, const StoragePtr& storage) const {
  WithGil gil;
  call("_await", checked(Py_BuildValue("(NN)", wrap(value), wrap(storage))));
}

void Upward::dismiss_visitors() const {
  WithGil gil;
  call("_dismiss_visitors", nullptr);
}

void Upward::modified(const Handle& handle) const {
  WithGil gil;
  // A tensor for the message: its type, its size and both versions.
  at::Tensor shown = handle.kept;
  if (!shown.defined() && handle.geometry) {
    shown = at::empty({0}, at::TensorOptions().dtype(handle.geometry->dtype).device(handle.geometry->device));
  }
  PyRef tensor = PyRef::stolen(THPVariable_Wrap(shown));
  const auto size = handle.geometry ? tuple_of(handle.geometry->size) : tuple_of(handle.kept.sizes());
  call("_modified", checked(Py_BuildValue(
      "(ONLL)", tensor.get(), size, static_cast<long long>(handle.saved.counter.current_version()),
      static_cast<long long>(handle.saved.version))));
  TORCH_CHECK(false, "a saved tensor was modified in place");
}

void Upward::not_there_for_graph() const {
  WithGil gil;
  call("_not_there_for_graph", nullptr);
  TORCH_CHECK(false, "a saved tensor is not on the device");
}

PyRef Upward::environment() const {
  WithGil gil;
  return call("_environment_now", nullptr);
}

void Upward::put_environment(PyObject* wanted, PyObject* there) const {
  WithGil gil;
  PyObject* given = checked(PyTuple_Pack(1, there));
  PyRef put = PyRef::stolen(checked(PyObject_GetAttrString(wanted, "put")));
  PyRef done = PyRef::stolen(checked(PyObject_CallObject(put.get(), given)));
  Py_DECREF(given);
}

bool Upward::is_capturing() const {
  WithGil gil;
  PyRef told = PyRef::stolen(checked(PyObject_CallNoArgs(capturing.get())));  // at each pack: a function of torch's in C
  return PyObject_IsTrue(told.get()) == 1;
}

PyRef Upward::take_modes_off() const {
  WithGil gil;
  return call("_take_modes_off", nullptr);
}

void Upward::put_modes_back(PyObject* taken) const {
  WithGil gil;
  call("_put_modes_back", checked(PyTuple_Pack(1, taken)));
}

void Upward::replay_failed(const std::string& op, const std::string& why, bool did_run) const {
  WithGil gil;
  call("_replay_failed", checked(Py_BuildValue("(ssO)", op.c_str(), why.c_str(), did_run ? Py_True : Py_False)));
  TORCH_CHECK(false, op, " could not be run again: ", why);
}

// ---- the module

namespace {

PyObject* core_abi(PyObject*, PyObject*) {
  return PyLong_FromLong(1);
}

// Tell the core what it asks Python for; why ops cannot be seen, or "".
PyObject* core_install(PyObject*, PyObject* given) {
  HANDLE_TH_ERRORS
  PyObject *facts = nullptr, *error = nullptr;
  if (!PyArg_ParseTuple(given, "OO", &facts, &error)) {
    return nullptr;
  }
  Py_INCREF(facts);
  Py_INCREF(error);
  tell_facts = facts;
  own_error = error;
  std::string why_not;
  install(why_not);
  stand_in_for_engine();
  return PyUnicode_FromString(why_not.c_str());
  END_HANDLE_TH_ERRORS
}

PyObject* core_count_minding(PyObject*, PyObject* given) {
  HANDLE_TH_ERRORS
  num_minding += static_cast<int>(PyLong_AsLong(given));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* core_forget_facts(PyObject*, PyObject*) {
  facts_generation.fetch_add(1, std::memory_order_release);
  Py_RETURN_NONE;
}

PyObject* core_settings(PyObject*, PyObject* given) {
  HANDLE_TH_ERRORS
  const bool is_cpu = PyObject_IsTrue(given) == 1;
  const auto few = Settings::now(is_cpu, false), products = Settings::now(is_cpu, true);
  return Py_BuildValue("(NN)", tuple_of(few.few), tuple_of(products.of_products));
  END_HANDLE_TH_ERRORS
}

PyObject* core_hide(PyObject*, PyObject*) {
  hide();
  Py_RETURN_NONE;
}

PyObject* core_show(PyObject*, PyObject*) {
  show();
  Py_RETURN_NONE;
}

// Take the mutex, for a `with` of Python's: Note [Locks].
PyObject* core_take(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  Lock::take();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* core_give_back(PyObject*, PyObject*) {
  Lock::give_back();
  Py_RETURN_NONE;
}

PyMethodDef functions[] = {
    {"take_lock", core_take, METH_NOARGS, "Wait for the mutex that guards the state of all steps."},
    {"give_lock_back", core_give_back, METH_NOARGS, "Let others have it."},
    {"hide", core_hide, METH_NOARGS, "Let nobody see the ops of this thread, until as many calls of show."},
    {"show", core_show, METH_NOARGS, "See them again."},
    {"abi", core_abi, METH_NOARGS, "The version of the interface between this library and the package."},
    {"install", core_install, METH_VARARGS, "Begin to see ops; why that cannot be, or an empty string."},
    {"count_minding", core_count_minding, METH_O, "Count barriers of steps that mind writes of other steps."},
    {"forget_facts", core_forget_facts, METH_NOARGS, "Ask anew for what is known of ops: it has changed."},
    {"settings", core_settings, METH_O, "The settings of torch that kernels read, as numbers."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_core", "The native core of the runtime.", -1, functions,
                          nullptr, nullptr, nullptr, nullptr};

PyTypeObject* add_type(PyObject* module, const char* name, size_t size, std::vector<PyType_Slot> slots) {
  slots.push_back({0, nullptr});
  const bool can_be_made = std::any_of(slots.begin(), slots.end(), [](const auto& slot) { return slot.slot == Py_tp_new; });
  const unsigned flags = Py_TPFLAGS_DEFAULT | (can_be_made ? 0 : Py_TPFLAGS_DISALLOW_INSTANTIATION);
  PyType_Spec spec = {name, static_cast<int>(size), 0, flags, slots.data()};
  PyObject* type = PyType_FromSpec(&spec);
  if (type == nullptr || PyModule_AddObjectRef(module, std::strrchr(name, '.') + 1, type) != 0) {
    return nullptr;
  }
  return reinterpret_cast<PyTypeObject*>(type);
}

}  // namespace
}  // namespace offload

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__core() {
  using namespace offload;
  PyObject* module = PyModule_Create(&definition);
  if (module == nullptr) {
    return nullptr;
  }
  value_type = add_type(module, "_core.Value", sizeof(PyValue), {
      {Py_tp_dealloc, reinterpret_cast<void*>(value_dealloc)},
      {Py_tp_getset, value_attributes},
      {Py_tp_methods, value_methods}});
  handle_type = add_type(module, "_core.Handle", sizeof(PyHandle), {
      {Py_tp_dealloc, reinterpret_cast<void*>(handle_dealloc)},
      {Py_tp_members, handle_members},
      {Py_tp_getset, handle_attributes},
      {Py_tp_methods, handle_methods}});
  program_type = add_type(module, "_core.Program", sizeof(PyProgram), {
      {Py_tp_new, reinterpret_cast<void*>(program_new)},
      {Py_tp_dealloc, reinterpret_cast<void*>(program_dealloc)}});
  step_type = add_type(module, "_core.Step", sizeof(PyStep), {
      {Py_tp_new, reinterpret_cast<void*>(step_make)},
      {Py_tp_dealloc, reinterpret_cast<void*>(step_dealloc)},
      {Py_tp_getset, step_attributes},
      {Py_tp_methods, step_methods}});
  watch_type = add_type(module, "_core.Watch", sizeof(PyWatch), {
      {Py_tp_new, reinterpret_cast<void*>(watch_make)},
      {Py_tp_dealloc, reinterpret_cast<void*>(watch_dealloc)},
      {Py_tp_methods, watch_methods}});
  copy_type = add_type(module, "_core.Copy", sizeof(PyCopy), {
      {Py_tp_dealloc, reinterpret_cast<void*>(copy_dealloc)},
      {Py_tp_getset, copy_attributes},
      {Py_tp_methods, copy_methods}});
  lanes_type = add_type(module, "_core.Lanes", sizeof(PyLanes), {
      {Py_tp_new, reinterpret_cast<void*>(lanes_make)},
      {Py_tp_dealloc, reinterpret_cast<void*>(lanes_dealloc)},
      {Py_tp_methods, lanes_methods}});
  if (copy_type == nullptr || lanes_type == nullptr || watch_type == nullptr || value_type == nullptr || handle_type == nullptr || program_type == nullptr || step_type == nullptr) {
    return nullptr;
  }
  return module;
}
