"""JAX itself, its processes, and the compiled handlers.

compat is the only file with private names of JAX. initialize connects processes, with coordinator.
processes holds their communicator. launching orders program launches of several threads. handlers
registers the compiled code. export, threads and at_exit handle exported programs, XLA's threads and
the end of the process.
"""
