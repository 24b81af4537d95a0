"""Votes (compressor="sign") in every call of JAX, bit for bit as the numpy collectives."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from support.jax_cases import PROCESSES, has_part_in, mesh_of, normal, same_bits
from support.jax_compressor_cases import (
    AT,
    CASES,
    MESH,
    OLD,
    N,
    X,
    config_of,
    numpy_result,
    run,
)

from cgx_ops import Config, Rules
from cgx_ops.jax import pmean_q, psum_q, psum_scatter_q
from cgx_ops.jax._src.collectives import votes

one_process = pytest.mark.skipif(PROCESSES > 1, reason="is about one process")
both_carriers = pytest.mark.parametrize("carrier", ["native", "xla"])
pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.mpirun,
    pytest.mark.skipif(not has_part_in(MESH), reason="other processes' devices"),
]


@one_process
@both_carriers
def test_single_voter(carrier: Any) -> None:
    """Check that a single device votes too, without sending anything."""
    mesh = mesh_of((N, 1), ("d", "one"), MESH.devices.flat)
    x = {"long": X, "short": X[:, :3]}
    for reduce in (psum_q, pmean_q):
        got = run(lambda v, f=reduce: f(v, "one", compressor="sign", carrier=carrier), x, mesh=mesh)
        for name in x:
            assert same_bits(got[name], np.where(x[name] < 0, -1, 1).astype(np.float32))
    alone = run(lambda v: psum_scatter_q(v, "one", compressor="sign", tiled=True), X, mesh=mesh)
    assert same_bits(alone, np.where(X < 0, -1, 1).astype(np.float32))


def voters(dtype: Any, *shape: int) -> Any:
    """Return special cases of votes: ties, both zeros, the smallest values, buckets of NaN."""
    x = normal(86, N, *shape).astype(dtype)
    tiny = np.finfo(dtype).smallest_subnormal
    x[..., :8] = np.array([0, -0.0, tiny, -tiny, 1, -1, 1, -1])
    x[::2, ..., 4:6] *= -1
    x[1, ..., 600], x[2, ..., 1800] = np.nan, -np.inf  # in the second bucket and in the fourth
    return x


@both_carriers
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("most_in_half", [256, 1])
def test_every_device_votes(
    carrier: Any, dtype: Any, most_in_half: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use several devices per process, too: counts are sent in 16 bits, or exactly."""
    monkeypatch.setattr(votes, "_MOST_IN_HALF", most_in_half)
    x = voters(dtype, 3, 2100)
    for op, reduce in (("sum", psum_q), ("avg", pmean_q)):
        vote = functools.partial(reduce, axis_name="d", compressor="sign", carrier=carrier)
        got = run(lambda rows, f=vote: {"tree": f(rows), "vmap": jax.vmap(f)(rows)}, x)
        config = config_of("sign", key=None)
        flat = numpy_result("allreduce", x.reshape(N, -1), config, op=op, at=AT)
        assert all(map(same_bits, got["tree"].reshape(N, -1), flat)), op
        for example in range(3):
            want = numpy_result("allreduce", x[:, example], config, op=op, at=AT)
            assert np.isnan(want[0]).sum() == 2 * 512
            assert all(map(same_bits, got["vmap"][:, example], want)), (op, example)


@both_carriers
def test_votes_beside_other_leaves(carrier: Any) -> None:
    """Use a tree with a different compressor for each leaf, and residuals where needed."""
    x, old = {"vote": voters(np.float32, 2100), "other": X}, {"vote": None, "other": OLD}
    rules = Rules([("vote", {"compressor": "sign"})], exact_vectors=False)

    def reduce(rows: Any, lost: Any) -> Any:
        config = Config(algorithm="sra", **CASES["levels"])
        return psum_q(rows, "d", residual=lost, config=config, carrier=carrier, rules=rules)

    sums, lost = run(reduce, x, old)
    residuals = OLD.copy()
    config = config_of("levels", key=None, algorithm="sra")
    want = numpy_result("allreduce", X, config, residuals=list(residuals), at=AT)
    assert all(map(same_bits, sums["other"], want))
    assert all(map(same_bits, lost["other"], residuals))
    won = numpy_result("allreduce", x["vote"], config_of("sign", key=None), at=AT)
    assert all(map(same_bits, sums["vote"], won))


def test_scattered_votes() -> None:
    blocks = voters(np.float32, N, 2100)
    got = run(lambda v: psum_scatter_q(v, "d", compressor="sign"), blocks)
    won = np.stack(
        [
            numpy_result("allreduce", blocks[:, rank], config_of("sign", key=None), at=AT)[0]
            for rank in range(N)
        ]
    )
    assert same_bits(got.reshape(won.shape), won)
