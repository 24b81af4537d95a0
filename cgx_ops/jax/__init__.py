"""Quantized collectives for JAX: inside jit and shard_map, on CPUs and NVIDIA GPUs.

Under mpirun call `cgx_ops.jax.initialize()` first; then, in a shard_map over the mesh axis "d",

    grads = jax.grad(loss)(jax.lax.pcast(weights, "d", to="varying"), batch)
    grads = cgx_ops.jax.pmean_q(grads, "d", bits=4, key=key)

averages gradients at 4 bits an element. Without a mesh, in programs of one process a rank,
`allreduce_q(grads, op="avg", key=key)` does.
"""

from cgx_ops import _versions

# Before what follows, which uses parts of JAX that differ between versions.
_versions.require_framework("jax")

from cgx_ops.jax import _at_exit, _threads  # noqa: E402
from cgx_ops.jax._deep_gradient import deep_gradient  # noqa: E402
from cgx_ops.jax._diloco import diloco, sparse_loco  # noqa: E402
from cgx_ops.jax._initialize import initialize  # noqa: E402
from cgx_ops.jax._launching import launching  # noqa: E402
from cgx_ops.jax._power_sgd import power_sgd  # noqa: E402
from cgx_ops.jax._statistics import statistics  # noqa: E402
from cgx_ops.jax.allreduce import allreduce_q  # noqa: E402
from cgx_ops.jax.diloco_loop import DiLoCo  # noqa: E402
from cgx_ops.jax.diloco_state import DiLoCoState, Flight, consolidate_copies  # noqa: E402
from cgx_ops.jax.exporting import register  # noqa: E402
from cgx_ops.jax.gradients import compress_grads, value_and_grad  # noqa: E402
from cgx_ops.jax.one_bit import one_bit_adam, signum  # noqa: E402
from cgx_ops.jax.optimizer import average_gradients  # noqa: E402
from cgx_ops.jax.optimizer_state import (  # noqa: E402
    AverageGradientsState,
    DeepGradientState,
    OneBitAdamState,
    PowerSGDState,
    SignumState,
    consolidate,
    state_specs,
)
from cgx_ops.jax.plans import estimated_ready, numels_of  # noqa: E402
from cgx_ops.jax.psum import pmean_q, psum_q  # noqa: E402
from cgx_ops.jax.scatter_gather import all_gather_q, psum_scatter_q  # noqa: E402

_at_exit.register()
_threads.provide()

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
