"""Helpers of the allreduce_q tests: threads with one device each, values, comparisons."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from cgx_ops import Communicator
from cgx_ops.jax import allreduce_q
from support.jax_cases import SRA, expected, normal, same_bits, seed_of, use_cpu_devices
from support.launch import threads

use_cpu_devices(8)

AUTO: dict[str, Any] = {"algorithm": "auto"}  # also used for the oracle


def on_ranks(
    n: int, body: Callable[[int, Communicator], Any], name: str | None = None
) -> list[Any]:
    """Call body(rank, communicator) on threads with one device each; return the results."""

    def run(rank: int, comm: Communicator) -> Any:
        with jax.default_device(jax.devices()[rank]):
            return jax.block_until_ready(body(rank, comm))

    return threads(n, run, name=name)


def seed_on(rank: int, key: jax.Array, leaf: int = 0) -> int:
    """Return a rank's seed of one leaf on the communicator "noise"."""
    return seed_of(key, leaf, call=f"allreduce_q on noise/{rank}: ")


def check(results: list[Any], wanted: Any) -> None:
    """Require the expected tree, bit for bit, on every rank."""
    for rank, result in enumerate(results):
        result = jax.tree.map(np.asarray, result)
        assert jax.tree.structure(result) == jax.tree.structure(wanted)
        for got, want in zip(jax.tree.leaves(result), jax.tree.leaves(wanted), strict=True):
            assert same_bits(got, want), rank


X = normal(3, 3, 4, 1000)
STEPS = [expected(X[:, step]) for step in range(4)]


def reduce(comm: Communicator) -> Callable[[jax.Array], jax.Array]:
    return lambda v: allreduce_q(v, comm, config=SRA)
