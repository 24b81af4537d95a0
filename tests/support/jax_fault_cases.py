"""Helpers of the JAX error tests: captured errors, and computations that must work afterwards."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from cgx_ops.jax import psum_q
from support.jax_cases import SRA, expected, mesh_of, normal, same_bits, spread


def error_of(call: Callable[[], Any]) -> str:
    """Return and print the type and text of the exception of `call`."""
    try:
        jax.block_until_ready(call())
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        print(text, flush=True)
        return text
    raise AssertionError("no error")


def check_backend() -> None:
    """Require a computation and a sum over the local devices to work, without other processes."""
    assert float(jax.jit(lambda v: jnp.sin(v).sum())(np.zeros(4, np.float32))) == 0
    devices = jax.local_devices()
    mesh, x = mesh_of((len(devices),), ("d",), devices), normal(2, len(devices), 3000)
    step = jax.jit(
        jax.shard_map(
            lambda v: psum_q(v[0], "d", config=SRA),
            mesh=mesh,
            in_specs=P("d"),
            out_specs=P(),
        )
    )
    assert same_bits(step(spread(mesh, x, P("d"))), expected(x))
