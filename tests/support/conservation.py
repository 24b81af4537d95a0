"""Conservation with error feedback: over many steps, inputs equal results plus residuals.

        FED_BACK     every compressor that supports residuals, with its settings
        served       whether a binding supports the algorithm for a compressor
    BINDINGS     how each of them reduces an array, with its residual
        run          runs the steps of one rank
        check        checks the steps of all ranks together

Bindings are imported when they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from cgx_ops import Communicator, Config

Values = npt.NDArray[Any]
Op = Literal["sum", "avg"]
# (values, residual, seed) -> (result, new residual)
Reduce = Callable[[Values, Values, int], tuple[Values, Values]]

FED_BACK: list[dict[str, Any]] = [
    *({"bits": 2, "rounding": rounding} for rounding in ("nearest", "stochastic", "shift")),
    *({"compressor": "levels", "bits": bits} for bits in (1, 2, 4)),
    {"compressor": "onebit"},
    {"compressor": "ternary", "clip": True},
    *({"compressor": "qsgd", "bits": bits, "bucket_size": 64} for bits in (5, 8)),
    *({"compressor": "half", "rounding": rounding} for rounding in ("nearest", "stochastic")),
    *({"compressor": name} for name in ("mxfp8", "mxfp4")),
    {"compressor": "nvfp4", "rounding": "stochastic"},
    *({"compressor": "topk", "density": 0.05, "value_bits": bits} for bits in (32, 16, 4, 1)),
    {"compressor": "topk", "bucket_size": 5000},
    {"compressor": "randk", "density": 0.2},
    *({"compressor": "entropy", "rate": rate} for rate in (0.5, 4.0)),
    *({"compressor": "levels", "bits": 2, "rotation": size} for size in (4, 32)),
    {"compressor": "onebit", "bucket_size": 64, "skip_incomplete_buckets": True},
    {"bits": 3, "intra_bits": 4},
]
STEPS, NUMEL = 50, 1000


def values(rank: int, step: int, numel: int) -> Values:
    random = np.random.default_rng([rank, step, numel])
    return random.standard_normal(numel).astype(np.float32)


def served(binding: str, knobs: dict[str, Any]) -> bool:
    """Exclude `shift` in JAX, where a key selects the rounding."""
    return not (binding == "jax" and knobs.get("rounding") == "shift")


# ---- the bindings --------------------------------------------------------------------------------


def of_numpy(comm: Communicator, op: Op, config: Config) -> Reduce:
    def reduce(x: Values, residual: Values, seed: int) -> tuple[Values, Values]:
        return comm.allreduce(x, op, config, residual=residual, seed=seed), residual

    return reduce


def of_numpy_scatter(comm: Communicator, op: Op, config: Config) -> Reduce:
    """Scatter the sums, and gather the blocks exactly. The values are padded with zeros."""

    def reduce(x: Values, residual: Values, seed: int) -> tuple[Values, Values]:
        pad = (0, -len(x) % comm.size)
        lost = np.pad(residual, pad)
        y = comm.reduce_scatter(np.pad(x, pad), op, config, residual=lost, seed=seed)
        return comm.all_gather(y, Config(bits=32)).reshape(-1)[: len(x)], lost[: len(x)]

    return reduce


def of_torch(comm: Communicator, op: Op, config: Config, carrier: str = "native") -> Reduce:
    """Use torch's seeds: its generator's, and for randk's indices the call index."""
    import torch

    from support import torch_cases as tc

    options = {"op": op, "carrier": carrier, "config": str(config)}
    if carrier == "native":
        options["group_name"] = comm.name

    def reduce(x: Values, residual: Values, seed: int) -> tuple[Values, Values]:
        y, new = tc.feedback(torch.from_numpy(x), torch.from_numpy(residual), **options)
        return y.numpy(), new.numpy()

    return reduce


def of_torch_c10d(comm: Communicator, op: Op, config: Config) -> Reduce:
    """Use the default process group, which has the ranks of `comm`."""
    return of_torch(comm, op, config, "c10d")


def of_jax(comm: Communicator, op: Op, config: Config) -> Reduce:
    """Run on a device of this rank."""
    import jax

    from cgx_ops.jax import allreduce_q

    @jax.jit
    def call(x: jax.Array, residual: jax.Array, key: jax.Array) -> Any:
        given = key if config.is_random else None
        return allreduce_q(x, comm, op=op, key=given, residual=residual, config=config)

    def reduce(x: Values, residual: Values, seed: int) -> tuple[Values, Values]:
        with jax.default_device(jax.devices()[comm.rank % len(jax.devices())]):
            y, new = call(x, residual, jax.random.key(seed))
            return np.asarray(y), np.asarray(new)

    return reduce


BINDINGS: dict[str, Callable[[Communicator, Op, Config], Reduce]] = {
    "numpy": of_numpy,
    "numpy scatter": of_numpy_scatter,
    "torch": of_torch,
    "torch c10d": of_torch_c10d,
    "jax": of_jax,
}


# ---- the steps -----------------------------------------------------------------------------------


def run(comm: Communicator, op: Op, config: Config, reduce: Reduce, numel: int = NUMEL) -> Values:
    """Return the sum of this rank's results, its last residual, and the largest of both, in fp64.

    Ranks must share the seeds of `randk`'s indices; seeds of noise differ.
    """
    residual, total, largest = np.zeros(numel, np.float32), *np.zeros((2, numel))
    for step in range(STEPS):
        seed = step if config.compressor == "randk" else 4 * step + comm.rank
        y, residual = reduce(values(comm.rank, step, numel), residual, seed)
        total += y.astype(np.float64) * (comm.size if op == "avg" else 1)
        largest = np.maximum(largest, np.abs(y) * np.float64(comm.size) + np.abs(residual))
    return np.stack([total, residual, largest])


def check(ranks: Sequence[Values]) -> None:
    """Require equal results on all ranks, and that inputs equal results plus residuals.

    In a step each rank's value passes at most 2 (size + 3) operations of fp32 (sums, a quotient,
    differences, a product). Each is off by 2^-24 of at most the sum of all ranks' inputs, residuals
    and results.
    """
    size, numel = len(ranks), ranks[0].shape[1]
    total = ranks[0][0]
    assert all(np.array_equal(each[0], total) for each in ranks)
    given = [values(rank, step, numel) for rank in range(size) for step in range(STEPS)]
    missing = np.sum(given, axis=0, dtype=np.float64) - total
    missing -= np.sum([residual for _, residual, _ in ranks], axis=0)
    bound = np.sum([largest for _, _, largest in ranks], axis=0) + 6 * size
    assert (np.abs(missing) <= STEPS * 2 * (size + 3) * 2.0**-24 * bound).all()
