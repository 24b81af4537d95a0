// The Python type Flight: a collective in flight.
//
// The core reads and writes the arrays of a collective until it ends. Before that, a signal handler
// may raise an exception in a wait (Ctrl-C does). So the arrays belong to a Flight. If a Flight is
// deleted before its collective ends, its arrays stay alive until the core reports the end.
//
// This file uses Python's C API directly. If a daemon thread waits while Python exits,
// pthread_exit() unwinds its stack; in the C++ code of a wrapper library this would abort the
// process.
#pragma once

#include <Python.h>

#include "cgx/cgx.h"

namespace cgx::numpy_ops {

// Returns a new reference, or null with an exception set.
PyObject* flight_type();

// Starts a collective and waits for its end; the arrays stay alive until then. Returns a status as
// a number, or null with the exception of a signal handler; then the collective continues.
PyObject* run(const cgx_collective_t& collective, PyObject* arrays);

// Releases the arrays of deleted flights whose collectives have ended. Every start does so, too.
void collect_dropped();

}  // namespace cgx::numpy_ops
