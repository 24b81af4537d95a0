#include "bootstrap.h"

#include <cstring>

namespace cgx::numpy_ops {
namespace {

struct Allgather {
  PyObject* function;
  int32_t ranks;
  PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;  // of its exception
};

// No object with a destructor may exist here while the GIL is acquired (flight.h).
int gather(void* context, const void* mine, size_t bytes, void* all) {
  auto* const self = static_cast<Allgather*>(context);
  const PyGILState_STATE lock = PyGILState_Ensure();
  const size_t wanted = self->ranks * bytes;
  PyObject* const own =
      PyBytes_FromStringAndSize(static_cast<const char*>(mine), static_cast<Py_ssize_t>(bytes));
  PyObject* const blobs = own ? PyObject_CallOneArg(self->function, own) : nullptr;
  if (blobs && (!PyBytes_Check(blobs) || static_cast<size_t>(PyBytes_GET_SIZE(blobs)) != wanted))
    PyErr_Format(PyExc_TypeError, "an allgather must return %zu bytes", wanted);
  const bool raised = PyErr_Occurred();
  if (raised)
    PyErr_Fetch(&self->type, &self->value, &self->traceback);
  else
    std::memcpy(all, PyBytes_AS_STRING(blobs), wanted);
  Py_XDECREF(blobs);
  Py_XDECREF(own);
  PyGILState_Release(lock);
  return raised;
}

}  // namespace

PyObject* create(const cgx_bootstrap_t& given, PyObject* allgather, int32_t* comm) {
  Allgather context{allgather, given.size};
  cgx_bootstrap_t bootstrap = given;
  bootstrap.allgather = gather;
  bootstrap.context = &context;
  int status;
  Py_BEGIN_ALLOW_THREADS;
  status = cgx_comm_create(&bootstrap, comm);
  Py_END_ALLOW_THREADS;
  if (!context.type) return PyLong_FromLong(status);
  PyErr_Restore(context.type, context.value, context.traceback);
  return nullptr;
}

}  // namespace cgx::numpy_ops
