"""Helpers of the JAX compressor tests: settings, and numpy's results for comparison."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
import reference

from cgx_ops import Communicator, Config, Segment
from support.jax_cases import (
    mesh_of,
    normal,
    on_mesh,
    processes_of,
    ranks_of,
    seed_of,
    sums_of,
    use_cpu_devices,
)
from support.launch import threads

use_cpu_devices(8)

Values = npt.NDArray[Any]

N = 4
# Each process has the same number of devices.
AT = list(range(0, 8, 8 // N))
MESH = mesh_of((N,), ("d",), [jax.devices()[i] for i in AT])
X, OLD = normal(80, N, 3000), normal(81, N, 3000) / 4
KEY = jax.random.key(5)  # the same on all devices
CASES: dict[str, dict[str, Any]] = {
    "uniform": {"bits": 2},
    "levels": {"compressor": "levels", "bits": 2},
    "levels of one bit": {"compressor": "levels", "bits": 1, "gather_bits": 4},
    "levels rotated": {"compressor": "levels", "bits": 2, "rotation": 32},
    "sign": {"compressor": "sign"},
    "onebit": {"compressor": "onebit"},
    "ternary": {"compressor": "ternary"},
    "ternary clipped": {"compressor": "ternary", "clip": True},
    "qsgd": {"compressor": "qsgd", "bits": 4},
    "qsgd of small buckets": {"compressor": "qsgd", "bits": 4, "bucket_size": 32},
    "half": {"compressor": "half"},
    "mxfp8": {"compressor": "mxfp8"},
    "mxfp8_e5m2": {"compressor": "mxfp8_e5m2"},
    "mxfp4": {"compressor": "mxfp4"},
    "nvfp4": {"compressor": "nvfp4", "bucket_size": 256},
    "topk": {"compressor": "topk", "density": 0.05},
    "topk of codes": {"compressor": "topk", "density": 0.05, "value_bits": 4},
    "randk": {"compressor": "randk", "density": 0.05},
    "entropy": {"compressor": "entropy", "rate": 2.0},
    "entropy shifted": {"compressor": "entropy", "rate": 2.0, "rounding": "shift"},
    "lossless": {"compressor": "lossless"},
}
# Compressors for which error feedback converges.
KEPT = [
    name for name in CASES if name not in ("sign", "ternary", "qsgd", "entropy shifted", "lossless")
]


def run(body: Callable[..., Any], *operands: Any, mesh: Any = MESH) -> Any:
    return jax.tree.map(np.asarray, on_mesh(mesh, body)(*operands))


def config_of(case: str, *, key: Any = KEY, **knobs: Any) -> Config:
    """Return the Config of a case, as psum_q rounds with the key or without."""
    config = Config(**{**CASES[case], **knobs})
    wanted = "nearest" if key is None else "stochastic"
    try:
        return Config(**{**CASES[case], **knobs, "rounding": wanted})
    except ValueError:
        return config


def numpy_result(
    verb: str, rows: Values, config: Config, *, op: Any = "sum", key: Any = KEY, leaf: int = 0,
    call: str | Sequence[str] = "allreduce over d: ", residuals: Sequence[Values] | None = None,
    at: Sequence[int] | None = None,
) -> list[Values]:  # fmt: skip
    """Return each rank's result of the numpy collective, with rows[r] on device r.

    call: verb, axes and name, of all ranks or of each. residuals[r]: for allreduce; flat, updated
    in place. at: indices of jax.devices() for the rows. A process with several devices of a group
    is one rank, as in jax_cases.expected(), but each device has a vote.
    """
    ranks = ranks_of(processes_of(range(len(rows)) if at is None else at))
    if config.compressor == "sign" and config.bits != 32:
        ranks = [[row] for row in range(len(rows))]
    texts = [call] * len(ranks) if isinstance(call, str) else call
    seeds = [0 if key is None else seed_of(key, leaf, call=text) for text in texts]
    values = sums_of([row.reshape(-1) for row in rows], ranks)
    lost = None if residuals is None else [row.copy() for row in sums_of(residuals, ranks)]
    numel = values[0].size // (len(rows) if verb == "reduce_scatter" else 1)
    segments = [Segment(0, numel, config)]
    if lost is not None and config.bits == 32:  # raises for a whole call, but not for a part of one
        config = replace(config, bits=4)

    def run(rank: int, comm: Communicator) -> Values:
        if verb == "all_to_all":
            blocks = values[rank].reshape(len(ranks), -1)
            return comm.all_to_all(blocks, config, seed=seeds[rank]).reshape(rows[0].shape)
        given: dict[str, Any] = {} if verb == "all_gather" else {"op": op}
        if lost is not None:
            given["residual"] = lost[rank]
        collective = getattr(comm, verb)
        return collective(
            values[rank], config=config, segments=segments, seed=[seeds[rank]], **given
        )

    results = threads(len(ranks), run)
    if residuals is not None and lost is not None:
        for residual in residuals:
            residual[:] = 0
        for members, new in zip(ranks, lost, strict=True):
            residuals[members[0]][:] = reference.round_to(reference.widen(new), rows[0].dtype)
    if verb == "allreduce":  # every rank has the same result
        assert len({result.tobytes() for result in results}) == 1
        wide = reference.widen(results[0])
        return [reference.round_to(wide, rows.dtype).reshape(rows[0].shape)] * len(rows)
    return results


def check_conservation(name: str, x: Any, last: Any, sums: Any, residuals: Any) -> None:
    """Check the steps' sums and residuals of each device, and the last residuals."""
    ranks, _, numel = x.shape
    assert np.array_equal(last, residuals[:, -1]), name
    before = np.concatenate([np.zeros((ranks, 1, numel)), residuals[:, :-1]], 1)
    given = np.float64(x) + before
    largest = (np.abs(given).sum(0) + np.abs(residuals).sum(0) + np.abs(sums[0])).max(1)
    operations = 4 * ranks + 10 * (ranks + 1) * ("rotation" in CASES[name])
    bound = operations * 2.0**-24 * largest  # for each step
    missing = given.sum(0) - sums[0] - residuals.sum(0)
    assert (np.abs(missing).max(1) <= bound).all(), name
    whole = np.float64(x).sum((0, 1)) - sums[0].sum(0) - last.sum(0)
    assert np.abs(whole).max() <= bound.sum(), name
    assert (np.abs(last).max() > 0) == (ranks > 1), name
