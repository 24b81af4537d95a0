"""Independent noise for errors that may add up, and equal random indices on all ranks.

1. numpy: groups, communicators, segments, blocks; call counters
2. torch: the checks of the rank program
3. JAX: groups of a mesh with either carrier, successive axes, examples of a vmap
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax import lax
from jax.sharding import PartitionSpec as P
from support import launch
from support import torch_cases as tc
from support.jax_cases import SRA, mesh_of, use_cpu_devices
from support.noise_cases import NUMEL, check_independent, errors, values
from support.rank_checks import Launch, RankCheck, rank_checks

from cgx_ops import Communicator, Config, InvalidArgument, Segment
from cgx_ops._core import call
from cgx_ops.jax import all_gather_q, all_to_all_q, allreduce_q, psum_q, psum_scatter_q

use_cpu_devices(8)

pytestmark = pytest.mark.timeout(120)

# ---- 1. numpy ------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["sra", "one_shot", "ring"])
def test_groups_with_equal_seeds(algorithm: Any) -> None:
    """Test groups from a split, from a list, and from a split of that."""
    x, config = values(), Config(algorithm=algorithm)

    def run(rank: int, comm: Communicator) -> list[Any]:
        split = comm.split(rank // 2, name=f"split {algorithm}")
        assert split is not None
        group = comm.group([0, 1] if rank < 2 else [3, 2], name=f"group {algorithm}")
        again = group.group([1, 0], name=f"again {algorithm} {rank // 2}")
        return [errors(c.allreduce(x, config=config, seed=5), 2 * x) for c in (split, group, again)]

    first, _, last, _ = launch.threads(4, run)
    for a, b in zip(first, last, strict=True):
        check_independent(a, b)


def test_noise_depends_on_the_bootstrap_rank() -> None:
    """Check that equal rank numbers, seeds and values give equal results."""
    x = values()

    def run(rank: int, comm: Communicator) -> list[Any]:
        def gather(mine: bytes) -> list[bytes]:
            blob = comm.all_gather(np.frombuffer(mine, np.uint8).astype(np.float32), bits=32)
            return [part.astype(np.uint8).tobytes() for part in np.split(blob, 2)]

        results = []
        for name, number in (("a", None), ("b", rank), ("c", 3 + rank)):
            made = Communicator.create(rank, 2, gather, f"{name}/{rank}", noise_rank=number)
            results.append(made.allreduce(x * (rank + 1), config=SRA, seed=5))
            made.close()
        return results

    results = launch.threads(2, run)
    for a, b, c in results:
        assert a.tobytes() == b.tobytes() != c.tobytes()
        want = reference.allreduce(
            [x, 2 * x], [reference.Segment(0, NUMEL)], algorithm="sra", rounding="stochastic",
            seeds=[5, 5], noise_ranks=[3, 4],
        )  # fmt: skip
        assert c.tobytes() == want.tobytes()


def test_communicators_of_the_same_ranks() -> None:
    """Check that without a seed the noise depends on the communicator."""
    x = values()

    def run(rank: int, comm: Communicator) -> list[Any]:
        both = [comm.split(0, name=name) for name in ("one", "other")]
        return [errors(c.allreduce(x, config=SRA), 2 * x) for c in both if c is not None]

    for a, b in launch.threads(2, run):
        check_independent(a, b)


def test_noise_beside_random_indices() -> None:
    """Check that communicators draw the same indices but different noise."""
    x = np.tile(values(), 2)
    segments = [
        Segment(0, NUMEL, SRA.with_own(compressor="randk", density=0.5)),
        Segment(NUMEL, NUMEL),
    ]

    def run(rank: int, comm: Communicator) -> list[Any]:
        both = [comm.split(0, name=name) for name in ("beside", "and beside")]
        return [c.allreduce(x, config=SRA, segments=segments) for c in both if c is not None]

    one, other = launch.threads(2, run)[0]
    assert one[:NUMEL].tobytes() == other[:NUMEL].tobytes()
    check_independent(*(errors(each[NUMEL:], 2 * x[NUMEL:]) for each in (one, other)))


@pytest.mark.parametrize("algorithm", ["sra", "one_shot"])
def test_segments_of_a_call(algorithm: Any) -> None:
    x, config = np.tile(values(), 2), Config(algorithm=algorithm)
    segments = [Segment(0, NUMEL), Segment(NUMEL, NUMEL)]

    def run(rank: int, comm: Communicator) -> list[Any]:
        one = comm.allreduce(x, config=config, segments=segments, seed=5)
        equal = comm.allreduce(x, config=config, segments=segments, seed=[5, 5])
        with pytest.raises(InvalidArgument, match=r"seed is a list of 1 for 2 segments"):
            comm.allreduce(x, config=config, segments=segments, seed=[5])
        assert np.array_equal(one[:NUMEL], equal[:NUMEL])  # the first segment uses the call's seed
        if algorithm == "one_shot":  # in sra the owners differ
            assert equal[:NUMEL].tobytes() == equal[NUMEL:].tobytes()
        return [errors(*parts) for parts in zip(np.split(one, 2), np.split(2 * x, 2), strict=True)]

    check_independent(*launch.threads(2, run)[0])


def test_blocks_of_a_reduce_scatter() -> None:
    """Use three ranks: the third one sends to the same positions of the others' blocks."""
    x = values()

    def run(rank: int, comm: Communicator) -> Any:
        return errors(comm.reduce_scatter(np.tile(x, 3), config=Config(), seed=5), 3 * x)

    for a, b in itertools.combinations(launch.threads(3, run), 2):
        check_independent(a, b)


def test_seeds_of_segments_and_blocks_differ() -> None:
    seeds = [reference.seeds_of([7], 1, s, b)[0] for s in range(64) for b in range(64)]
    assert len(set(seeds)) == len(seeds)


def test_calls_are_counted_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the oldest of many names is forgotten, and no count of a name is repeated."""
    monkeypatch.setattr(call.Counter, "MOST", 10)
    counter, seen = call.Counter(), set()
    for turn in range(300):
        for name in (f"new {turn}", "often", f"again {turn % 30}"):
            count = counter.next(name)
            assert (name, count) not in seen
            seen.add((name, count))
        assert len(counter) <= 10
    assert counter.next("often") == 300


# ---- 2. torch ------------------------------------------------------------------------------------


@rank_checks(Launch(4, "run_torch_noise.py", env=tc.ENVIRONMENT, marks=[pytest.mark.slow]))
def test_torch(check: RankCheck) -> None:
    check.passes()


# ---- 3. JAX --------------------------------------------------------------------------------------

KEY = jax.random.key(3)


def on_four(body: Any, out_specs: Any) -> np.ndarray:
    """Run a body on a mesh of 2 replicas of 2 devices, each with the same values."""
    mesh = mesh_of((2, 2), ("replica", "fsdp"), jax.devices()[:4])
    program = jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=out_specs)
    return np.asarray(jax.jit(program)(values()))


def everywhere(x: jax.Array) -> jax.Array:
    """Mark equal values as varying between devices."""
    return lax.pcast(x, ("replica", "fsdp"), to="varying")


def exchanged(x: jax.Array) -> jax.Array:
    """Return the block that the other device sent, of which each device has another half."""
    blocks = all_to_all_q(x.reshape(2, -1), "fsdp", 0, 0, key=KEY)
    return lax.dynamic_index_in_dim(blocks, 1 - lax.axis_index("fsdp"), keepdims=False)[None]


BODIES = {
    "psum_q": lambda x: psum_q(x, "fsdp", key=KEY, config=SRA)[None],
    "carried": lambda x: psum_q(x, "fsdp", key=KEY, config=SRA, carrier="xla")[None],
    "psum_scatter_q": lambda x: psum_scatter_q(x, "fsdp", key=KEY, tiled=True)[None],
    "all_gather_q": lambda x: all_gather_q(x, "fsdp", key=KEY).reshape(1, -1)[:, :NUMEL],
    "all_to_all_q": exchanged,
}


@pytest.mark.parametrize("name", BODIES)
def test_groups_of_a_mesh(name: str) -> None:
    """Check that replicas' errors are independent under one key, so their mean's is smaller."""
    varies = name in ("psum_scatter_q", "all_gather_q", "all_to_all_q")
    axes = ("replica", "fsdp") if varies else "replica"
    got = on_four(lambda x: BODIES[name](everywhere(x)), P(axes))
    exact = values() * (1 if name in ("all_gather_q", "all_to_all_q") else 2)
    if name in ("psum_scatter_q", "all_to_all_q"):
        got = got.reshape(2, -1)
    if name == "all_gather_q":
        got = got[[0, 2]]
    check_independent(*(errors(row, exact) for row in got))


@pytest.mark.parametrize("carrier", ["native", "xla"])
def test_replicas_of_the_same_values_stay_equal(carrier: Any) -> None:
    """Check that values that do not vary over replicas are reduced to the same bits in each."""

    def body(x: jax.Array) -> jax.Array:
        total = psum_q(
            lax.pcast(x, "fsdp", to="varying"),
            "fsdp",
            key=KEY,
            config=SRA,
            carrier=carrier,
        )
        assert not jax.typeof(total).mat.varying
        return lax.pcast(total, "replica", to="varying")[None]

    first, second = on_four(body, P("replica"))
    assert first.tobytes() == second.tobytes()


def test_successive_axes() -> None:
    """Apply psum_q over one axis and then over another, with one key."""

    def one(axis: str) -> np.ndarray:
        other = {"replica": "fsdp", "fsdp": "replica"}[axis]
        sums = lambda x: psum_q(everywhere(x), axis, key=KEY, config=SRA)[None]  # noqa: E731
        return on_four(sums, P(other))[0]

    check_independent(*(errors(one(axis), 2 * values()) for axis in ("replica", "fsdp")))


def test_examples_of_a_vmap_under_one_key() -> None:
    """Also use one vmap inside another."""

    def body(x: jax.Array) -> jax.Array:
        x = jnp.tile(everywhere(x), (2, 2, 1))
        reduce = lambda v: psum_q(v, ("replica", "fsdp"), key=KEY, config=SRA)  # noqa: E731
        return jax.vmap(jax.vmap(reduce))(x)

    rows = on_four(body, P()).reshape(4, -1)
    for a, b in itertools.combinations(rows, 2):
        check_independent(errors(a, 4 * values()), errors(b, 4 * values()))


def test_communicators_outside_of_a_mesh() -> None:
    """Use allreduce_q with one key on two communicators of the same ranks, and under a vmap."""
    x = values()

    def run(rank: int, comm: Communicator) -> list[Any]:
        with jax.default_device(jax.devices()[rank]):
            other = comm.split(0, name="outside")
            assert other is not None
            both = [allreduce_q(x, c, key=KEY) for c in (comm, other)]
            rows = jax.vmap(lambda v: allreduce_q(v, comm, key=KEY))(jnp.tile(x, (2, 1)))
            return [errors(y, 2 * x) for y in (*both, *rows)]

    for a, b in itertools.combinations(launch.threads(2, run)[0], 2):
        check_independent(a, b)
