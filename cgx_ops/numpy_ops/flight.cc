#include "flight.h"

#include <vector>

namespace cgx::numpy_ops {
namespace {

constexpr double kLookUpSeconds = 0.1;  // time between two checks for signals

struct Flight {
  PyObject_HEAD cgx_request_t* request;  // null before the start
  PyObject* arrays;                      // null after the end
};

Flight* as_flight(PyObject* self) { return reinterpret_cast<Flight*>(self); }

// ---- deleted flights -------------------------------------------------------------------------

struct Dropped {
  cgx_request_t* request;
  PyObject* arrays;
};

// Never destroyed: flights may be deleted while the interpreter exits. The GIL guards it.
std::vector<Dropped>& dropped() {
  static auto* all = new std::vector<Dropped>;
  return *all;
}

bool has_ended(cgx_request_t* request) {
  int32_t done = 0;
  return cgx_test(request, &done) != CGX_OK || done;
}

void release(cgx_request_t* request, PyObject* arrays) {
  if (!request || has_ended(request)) {
    if (request) cgx_wait(request);  // frees it
    Py_XDECREF(arrays);
  } else {
    dropped().push_back({request, arrays});
  }
}

// ---- waiting --------------------------------------------------------------------------------

// No object with a destructor may exist here while the GIL is acquired again (flight.h).
PyObject* wait(cgx_request_t* request, PyObject** arrays) {
  for (;;) {
    int status;
    int32_t done = 0;
    Py_BEGIN_ALLOW_THREADS;
    status = cgx_wait_for(request, kLookUpSeconds, &done);
    Py_END_ALLOW_THREADS;
    if (done) Py_CLEAR(*arrays);
    if (done || status != CGX_OK) return PyLong_FromLong(status);  // an error in a forked child
    if (PyErr_CheckSignals() != 0) return nullptr;
  }
}

// ---- the type -------------------------------------------------------------------------------

PyObject* make(PyTypeObject* type, PyObject* arguments, PyObject* /*keywords*/) {
  PyObject* arrays;
  if (!PyArg_ParseTuple(arguments, "O:Flight", &arrays)) return nullptr;
  PyObject* self = type->tp_alloc(type, 0);
  if (self) as_flight(self)->arrays = Py_NewRef(arrays);
  return self;
}

void drop(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  release(as_flight(self)->request, as_flight(self)->arrays);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* start(PyObject* self, PyObject* address) {
  const auto* collective = static_cast<const cgx_collective_t*>(PyLong_AsVoidPtr(address));
  if (PyErr_Occurred()) return nullptr;
  collect_dropped();
  int status;
  Py_BEGIN_ALLOW_THREADS;
  status = cgx_start(collective, nullptr, nullptr, &as_flight(self)->request);
  Py_END_ALLOW_THREADS;
  return PyLong_FromLong(status);
}

bool in_flight(PyObject* self) {
  if (!as_flight(self)->request) PyErr_SetString(PyExc_RuntimeError, "the flight has not started");
  return as_flight(self)->request;
}

PyObject* wait_for(PyObject* self, PyObject* /*unused*/) {
  return in_flight(self) ? wait(as_flight(self)->request, &as_flight(self)->arrays) : nullptr;
}

PyObject* done(PyObject* self, PyObject* /*unused*/) {
  return in_flight(self) ? PyBool_FromLong(has_ended(as_flight(self)->request)) : nullptr;
}

}  // namespace

PyObject* flight_type() {
  static PyMethodDef methods[] = {{"start", start, METH_O, nullptr},
                                  {"wait", wait_for, METH_NOARGS, nullptr},
                                  {"done", done, METH_NOARGS, nullptr},
                                  {}};
  static PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(make)},
                                {Py_tp_dealloc, reinterpret_cast<void*>(drop)},
                                {Py_tp_methods, methods},
                                {}};
  static PyType_Spec spec = {"cgx_ops._numpy_ops.Flight", sizeof(Flight), 0, Py_TPFLAGS_DEFAULT,
                             slots};
  return PyType_FromSpec(&spec);
}

PyObject* run(const cgx_collective_t& collective, PyObject* arrays) {
  collect_dropped();
  cgx_request_t* request = nullptr;
  Py_INCREF(arrays);
  int status;
  Py_BEGIN_ALLOW_THREADS;
  status = cgx_run_for(&collective, kLookUpSeconds, &request);
  Py_END_ALLOW_THREADS;
  PyObject* result = request ? wait(request, &arrays) : PyLong_FromLong(status);
  release(request, arrays);
  return result;
}

void collect_dropped() {
  if (dropped().empty()) return;
  std::vector<Dropped> ended;
  std::erase_if(dropped(), [&](const Dropped& each) {
    const bool gone = has_ended(each.request);
    if (gone) ended.push_back(each);
    return gone;
  });
  for (const Dropped& each : ended) release(each.request, each.arrays);  // may run any Python code
}

}  // namespace cgx::numpy_ops
