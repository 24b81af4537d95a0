// Makes a communicator by an allgather in Python.
//
// ctypes drops what a Python function that C calls raises before its first line, as the handler of
// a signal may (Ctrl-C's does), and returns 0 for it. Here whatever it raises is raised to the
// caller.
#pragma once

#include <Python.h>

#include "cgx/cgx.h"

namespace cgx::numpy_ops {

// cgx_comm_create by `given`, whose allgather is the function: it takes this rank's bytes and
// returns those of all ranks, as one bytes object. Returns a status as a number, or null with what
// the function has raised.
PyObject* create(const cgx_bootstrap_t& given, PyObject* allgather, int32_t* comm);

}  // namespace cgx::numpy_ops
