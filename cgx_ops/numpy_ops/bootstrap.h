// Creates a communicator with an allgather function in Python.
//
// If C calls a Python function through ctypes, an exception before its first line is lost, such as
// that of a signal handler (Ctrl-C), and the call returns 0. Here the caller gets all exceptions.
#pragma once

#include <Python.h>

#include "cgx/cgx.h"

namespace cgx::numpy_ops {

// Calls cgx_comm_create with `given`, but with this allgather function: it takes this rank's bytes
// and returns those of all ranks as one bytes object. Returns a status as a number, or null with
// the exception of the function.
PyObject* create(const cgx_bootstrap_t& given, PyObject* allgather, int32_t* comm);

}  // namespace cgx::numpy_ops
