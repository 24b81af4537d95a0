// A collective in flight, as Python holds it: the type Flight.
//
// The core reads and writes a collective's arrays until its end, and a signal handler may raise in
// any wait before (Ctrl-C does). So the arrays belong to a Flight, and those of one that is dropped
// before its end are kept until the core says that it has ended.
//
// It is written against Python's own C interface: a daemon thread that waits when Python ends is
// unwound from there by pthread_exit(), which would end the process in the C++ of a wrapper.
#pragma once

#include <Python.h>

#include "cgx/cgx.h"

namespace cgx::numpy_ops {

// A new reference, or null with an exception set.
PyObject* flight_type();

// Starts a collective, whose arrays are kept until its end, and waits for that. Returns a status as
// a number, or null with what a signal's handler has raised: the collective goes on then.
PyObject* run(const cgx_collective_t& collective, PyObject* arrays);

// Lets go of what was dropped in flight and has ended since, as every start does.
void collect_dropped();

}  // namespace cgx::numpy_ops
