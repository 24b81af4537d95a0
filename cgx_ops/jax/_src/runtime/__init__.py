"""What runs collectives: JAX, its processes and the compiled handlers.

compat is the only file with private names of JAX. initialize starts processes, with coordinator;
processes has their communicator; launching orders launches of several threads. handlers registers
the compiled code; export, threads and at_exit are for exported programs, XLA's threads and the end.
"""
