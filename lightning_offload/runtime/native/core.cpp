#include <Python.h>

#include <ATen/core/Tensor.h>

namespace {

PyObject* abi(PyObject*, PyObject*) { return PyLong_FromLong(1); }

PyMethodDef methods[] = {
    {"abi", abi, METH_NOARGS, "The version of what Python and this module expect of each other."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_core", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__core() { return PyModule_Create(&module); }
