"""Quantized collectives and optimizers for JAX, on CPUs and NVIDIA GPUs.

Inside `jax.shard_map`, `pmean_q(gradients, "data", bits=4, key=key)` averages each device's
gradients at 4 bits per value. With several processes, call `initialize` before any other JAX code.
Without a mesh, `allreduce_q` reduces among processes. In plain `jax.jit` over sharded arrays, use
`value_and_grad` with `in_specs`.
"""

from cgx_ops.jax._src.collectives.all_to_all import all_to_all_q
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
from cgx_ops.jax._src.transforms.compressed_adamw import (
    CompressedAdamWState,
    compressed_adamw,
)
from cgx_ops.jax._src.transforms.deep_gradient import DeepGradientState, deep_gradient
from cgx_ops.jax._src.transforms.power_sgd import PowerSGDState, power_sgd
from cgx_ops.jax._src.transforms.signum import SignumState, signum

at_exit.register()
threads.provide()

__all__ = [
    "AverageGradientsState",
    "CompressedAdamWState",
    "DeepGradientState",
    "DiLoCo",
    "DiLoCoState",
    "Flight",
    "PowerSGDState",
    "SignumState",
    "all_gather_q",
    "all_to_all_q",
    "allreduce_q",
    "average_gradients",
    "compress_grads",
    "compressed_adamw",
    "consolidate",
    "consolidate_copies",
    "deep_gradient",
    "diloco",
    "estimated_ready",
    "initialize",
    "launching",
    "numels_of",
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
