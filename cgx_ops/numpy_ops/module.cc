// The Python module cgx_ops._numpy_ops: run collectives on numpy arrays, create communicators.
// Python code checks the arguments of calls (cgx_ops/_core/call.py).
//
// After a millisecond of other work, Python's code and data have left the processor's caches, and
// each line costs ten times as much as in a loop: more than the collective. So repeat() is in C++.
#include <cstddef>
#include <cstdlib>

#include "bootstrap.h"
#include "cgx/call_seeds.h"
#include "flight.h"

namespace cgx::numpy_ops {
namespace {

constexpr int kMustBeChecked = -1;

// Returns the memory of an array; null unless it is C-contiguous, not empty and, by flags,
// writable.
std::byte* memory_of(PyObject* array, int flags, Py_ssize_t* bytes) {
  Py_buffer view;
  if (PyObject_GetBuffer(array, &view, flags) != 0) {
    PyErr_Clear();
    return nullptr;
  }
  auto* const memory = view.len > 0 ? static_cast<std::byte*>(view.buf) : nullptr;
  *bytes = view.len;
  PyBuffer_Release(&view);  // the caller holds the array
  return memory;
}

// run() of the stub; the address is that of a ctypes structure.
PyObject* run_once(PyObject* /*module*/, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2) return PyErr_Format(PyExc_TypeError, "run() takes 2 arguments, not %zd", count);
  const auto* collective = static_cast<const cgx_collective_t*>(PyLong_AsVoidPtr(arguments[0]));
  return PyErr_Occurred() ? nullptr : run(*collective, arguments[1]);
}

// Runs `pattern` on other arrays of the same dtype and shape, with the n-th seed of the stream; n
// is the result of count(). Returns kMustBeChecked, and does nothing, if the arrays may be invalid.
PyObject* repeat(PyObject* /*module*/, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 5)
    return PyErr_Format(PyExc_TypeError, "repeat() takes 5 arguments, not %zd", count);
  PyObject *source = arguments[1], *result = arguments[2];
  const auto* pattern = static_cast<const cgx_collective_t*>(PyLong_AsVoidPtr(arguments[0]));
  const int64_t stream = PyLong_AsLongLong(arguments[3]);
  if (PyErr_Occurred()) return nullptr;
  Py_ssize_t bytes = 0;
  std::byte* const from = memory_of(source, PyBUF_SIMPLE, &bytes);
  std::byte* const to = memory_of(result, PyBUF_WRITABLE, &bytes);
  if (!from || !to || (from != to && std::abs(from - to) < bytes))
    return PyLong_FromLong(kMustBeChecked);

  PyObject* number = PyObject_CallNoArgs(arguments[4]);
  if (!number) return nullptr;
  cgx_collective_t collective = *pattern;
  collective.input = from;
  collective.output = to;
  collective.seed = cgx::nth_seed(stream, PyLong_AsLongLong(number));
  Py_DECREF(number);
  PyObject* arrays = PyErr_Occurred() ? nullptr : PyTuple_Pack(2, source, result);
  if (!arrays) return nullptr;
  PyObject* status = run(collective, arrays);
  Py_DECREF(arrays);
  return status;
}

// create() of the stub; the addresses are those of ctypes structures.
PyObject* create_communicator(PyObject* /*module*/, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 3)
    return PyErr_Format(PyExc_TypeError, "create() takes 3 arguments, not %zd", count);
  const auto* bootstrap = static_cast<const cgx_bootstrap_t*>(PyLong_AsVoidPtr(arguments[0]));
  auto* const comm = static_cast<int32_t*>(PyLong_AsVoidPtr(arguments[2]));
  return PyErr_Occurred() ? nullptr : create(*bootstrap, arguments[1], comm);
}

PyObject* collect(PyObject* /*module*/, PyObject* /*unused*/) {
  collect_dropped();
  Py_RETURN_NONE;
}

PyCFunction fast(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

}  // namespace
}  // namespace cgx::numpy_ops

PyMODINIT_FUNC PyInit__numpy_ops() {
  using namespace cgx::numpy_ops;
  static PyMethodDef functions[] = {{"run", fast(run_once), METH_FASTCALL, nullptr},
                                    {"repeat", fast(repeat), METH_FASTCALL, nullptr},
                                    {"create", fast(create_communicator), METH_FASTCALL, nullptr},
                                    {"collect_dropped", collect, METH_NOARGS, nullptr},
                                    {}};
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_numpy_ops", nullptr, -1, functions};
  PyObject* module = PyModule_Create(&definition);
  PyObject* type = module ? flight_type() : nullptr;
  if (!type || PyModule_AddObjectRef(module, "Flight", type) != 0 ||
      PyModule_AddIntConstant(module, "MUST_BE_CHECKED", kMustBeChecked) != 0)
    Py_CLEAR(module);
  Py_XDECREF(type);
  return module;
}
