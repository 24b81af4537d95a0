"""Collectives on trees of arrays, and the primitive under them.

psum, scatter_gather and allreduce are the public calls; trees makes messages of a call's leaves, by
options (a config for each leaf), keys (seeds), plans and overlap. primitive is one collective;
mesh_groups and allreduce lower it, over a mesh and over a communicator; votes and carrier are ways
of lowering an allreduce over a mesh.
"""
