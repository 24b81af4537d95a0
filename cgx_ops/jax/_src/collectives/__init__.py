"""Collectives on trees of arrays, and their primitive.

psum, scatter_gather, all_to_all and allreduce have the public functions; blocks serves the second
and third. trees groups the leaves of a call into messages, using options (a config for each leaf),
keys (seeds), plans and overlap. primitive defines one collective. mesh_groups and allreduce lower
it, over a mesh and over a communicator. votes and carrier are special lowerings of an allreduce
over a mesh.
"""
