"""Quantized collectives for JAX: inside jit and shard_map, on CPUs and NVIDIA GPUs.

Under mpirun call `cgx_ops.jax.initialize()` first; then, in a shard_map over the mesh axis "d",

    grads = jax.grad(loss)(jax.lax.pcast(weights, "d", to="varying"), batch)
    grads = cgx_ops.jax.pmean_q(grads, "d", bits=4, key=key)

averages gradients at 4 bits an element. Without a mesh, in programs of one process a rank,
`allreduce_q(grads, op="avg", key=key)` does.
"""

from cgx_ops.jax._src.collectives.allreduce import allreduce_q
from cgx_ops.jax._src.collectives.plans import estimated_ready, numels_of
from cgx_ops.jax._src.collectives.psum import pmean_q, psum_q
from cgx_ops.jax._src.collectives.scatter_gather import all_gather_q, psum_scatter_q
from cgx_ops.jax._src.diloco.loop import DiLoCo
from cgx_ops.jax._src.diloco.state import DiLoCoState, Flight, consolidate_copies
from cgx_ops.jax._src.diloco.transform import diloco, sparse_loco
from cgx_ops.jax._src.gradients.statistics import statistics
from cgx_ops.jax._src.gradients.value_and_grad import compress_grads, value_and_grad
from cgx_ops.jax._src.runtime import at_exit, threads
from cgx_ops.jax._src.runtime.export import register
from cgx_ops.jax._src.runtime.initialize import initialize
from cgx_ops.jax._src.runtime.launching import launching
from cgx_ops.jax._src.transforms.average_gradients import (
    AverageGradientsState,
    average_gradients,
)
from cgx_ops.jax._src.transforms.base import consolidate, state_specs
from cgx_ops.jax._src.transforms.deep_gradient import DeepGradientState, deep_gradient
from cgx_ops.jax._src.transforms.one_bit_adam import OneBitAdamState, one_bit_adam
from cgx_ops.jax._src.transforms.power_sgd import PowerSGDState, power_sgd
from cgx_ops.jax._src.transforms.signum import SignumState, signum

at_exit.register()
threads.provide()

__all__ = [
    "AverageGradientsState",
    "DeepGradientState",
    "DiLoCo",
    "DiLoCoState",
    "Flight",
    "OneBitAdamState",
    "PowerSGDState",
    "SignumState",
    "all_gather_q",
    "allreduce_q",
    "average_gradients",
    "compress_grads",
    "consolidate",
    "consolidate_copies",
    "deep_gradient",
    "diloco",
    "estimated_ready",
    "initialize",
    "launching",
    "numels_of",
    "one_bit_adam",
    "pmean_q",
    "power_sgd",
    "psum_q",
    "psum_scatter_q",
    "register",
    "signum",
    "sparse_loco",
    "state_specs",
    "statistics",
    "value_and_grad",
]
