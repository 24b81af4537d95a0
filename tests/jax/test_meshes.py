"""psum_q on every mesh: axes, orders and subsets of eight devices, in one process or several.

1. values, bit for bit as the oracle
2. sums in 32 bits, against lax.psum
3. several meshes in one program, and in one process
4. properties shared by all processes: the program, and trained weights
"""

import hashlib
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import PartitionSpec as P
from support.jax_cases import (
    PROCESSES,
    SRA,
    Values,
    expected,
    fetch,
    has_part_in,
    mesh_of,
    normal,
    on_mesh,
    same_bits,
    spread,
    use_cpu_devices,
)
from support.jax_mesh_cases import MESHES, MeshCase, carriers_and_modes

from cgx_ops.jax import all_gather_q, pmean_q, psum_q, psum_scatter_q, value_and_grad

use_cpu_devices(8)

pytestmark = [pytest.mark.timeout(120), pytest.mark.mpirun]
both_modes = pytest.mark.parametrize("check_vma", [True, False])
each_mesh = pytest.mark.parametrize("case", MESHES, ids=lambda case: case.name)

BF16 = ml_dtypes.bfloat16


# ---- 1. values -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """A reduction. `keys`: whether devices have no keys, equal keys or different ones."""

    dtype: Any = np.float32
    bits: int = 4
    op: Literal["sum", "avg"] = "sum"
    keys: Literal["none", "equal", "different"] = "none"

    def key(self, device: Any) -> jax.Array:
        return jax.random.key(7 + device * (self.keys == "different"))

    def on_device(self, v: jax.Array, device: jax.Array, axes: Any, carrier: Any) -> jax.Array:
        key = None if self.keys == "none" else self.key(device)
        reduce = {"sum": psum_q, "avg": pmean_q}[self.op]
        return reduce(
            v.astype(self.dtype), axes, config=SRA, bits=self.bits, key=key, carrier=carrier
        )

    def expected(
        self, case: MeshCase, check_vma: bool, x: Values, places: list[int], devices: list[int]
    ) -> Values:
        seeds = None
        if self.keys != "none":
            seeds = [case.seed(self.key(place), place, check_vma) for place in places]
        rows = x[places].astype(self.dtype)
        return expected(rows, bits=self.bits, op=self.op, at=devices, seeds=seeds)


CALLS = [
    *(Call(dtype, bits) for dtype in (np.float32, np.float16, BF16) for bits in (1, 4, 8, 32)),
    *(Call(op="sum", keys=keys) for keys in ("equal", "different")),
    *(Call(op="avg", keys=keys) for keys in ("none", "equal", "different")),
    *(Call(dtype, 2, "avg", "different") for dtype in (np.float16, BF16)),
]


@pytest.mark.parametrize(
    "one_of", [3, pytest.param(1, marks=pytest.mark.exhaustive)], ids=["a_third", "all"]
)
@carriers_and_modes
@each_mesh
def test_dtypes_bits_operators_and_keys(
    case: MeshCase, carrier: Any, check_vma: bool, one_of: int
) -> None:
    """Test a third of the calls on a mesh in daily runs, with all dtypes and both carriers."""
    calls = CALLS[(MESHES.index(case) + (carrier == "xla")) % one_of :: one_of]
    x = normal(1, len(case.devices), 1500)

    def body(v: jax.Array, device: jax.Array) -> list[jax.Array]:
        return [call.on_device(v, device, case.axes, carrier) for call in calls]

    program = on_mesh(case.mesh, body, check_vma)
    operands = x, np.arange(len(x), dtype=np.int32)
    if carrier == "xla" and not case.is_even:
        with pytest.raises(NotImplementedError, match="evenly"):
            program(*operands)
        return
    for call, rows in zip(calls, program(*operands), strict=True):
        case.check(rows, partial(call.expected, case, check_vma, x))


# ---- 2. sums in 32 bits --------------------------------------------------------------------------


def sum_bound(terms: Values) -> Values:
    """Return a bound for the difference of two fp32 sums of these terms in any order.

    A sum of n terms has n - 1 additions, each off by a factor of at most 1 + u with u = 2**-24. It
    is off by at most ((1 + u)**(n - 1) - 1) sum |x| in any order, as no term passes more additions.
    That is less than 1.001 (n - 1) u sum |x| for n <= 8. Two sums: twice.
    """
    return 2 * 1.001 * (len(terms) - 1) * 2.0**-24 * np.abs(terms.astype(np.float64)).sum(0)


@carriers_and_modes
@each_mesh
def test_sums_in_32_bits_are_those_of_lax(case: MeshCase, carrier: Any, check_vma: bool) -> None:
    """Compare bit for bit if no addition rounds, as with integers; otherwise up to the bound."""
    if carrier == "xla" and not case.is_even:
        pytest.skip("carrier='xla' refuses uneven groups; shown above")
    x = normal(2, len(case.devices), 1500)
    integers = np.round(100 * x)

    def body(v: jax.Array) -> Any:
        return psum_q(v, case.axes, bits=32, carrier=carrier), lax.psum(v, case.axes)

    program = on_mesh(case.mesh, body, check_vma)
    ours, theirs = program(integers)
    assert same_bits(ours, theirs)
    ours, theirs = program(x)
    for group in case.groups:
        error = np.abs(ours[group].astype(np.float64) - theirs[group])
        assert (error <= sum_bound(x[group])).all()


# ---- 3. several meshes ---------------------------------------------------------------------------


@both_modes
def test_axes_in_a_list(check_vma: bool) -> None:
    """Pass the axes as jax.lax does."""
    x, mesh = normal(5, 8, 8, 600), mesh_of((4, 2), ("a", "b"))

    def calls(axes: Any, v: jax.Array) -> Any:
        part = psum_scatter_q(v, axes)
        whole = all_gather_q(part, axes)
        return psum_q(v, axes), part, whole, value_and_grad(jnp.sum, axes)(v[0])

    of_list, of_tuple = (
        on_mesh(mesh, partial(calls, axes), check_vma)(x) for axes in (["a", "b"], ("a", "b"))
    )
    assert all(map(same_bits, *map(jax.tree.leaves, (of_list, of_tuple))))


@both_modes
def test_several_meshes_in_one_program(check_vma: bool) -> None:
    """Use meshes that share their devices in one order, as jit requires."""
    x = normal(3, 8, 1500)
    cases = [case for case in MESHES if case.devices == list(range(8))]
    programs = [
        on_mesh(
            case.mesh,
            lambda v, axes=case.axes: psum_q(v, axes, config=SRA),
            check_vma,
        )
        for case in cases
    ]
    first = programs[0]
    together = jax.jit(lambda v: [program.eager(v) for program in programs])
    for case, rows in zip(cases, first.run(together, x), strict=True):
        case.check(rows, lambda places, devices: expected(x[places], at=devices))


def test_independent_meshes() -> None:
    """Use disjoint subsets, then only the process's own devices."""
    x = normal(4, 8, 1500)
    for part in ([6, 1], [4, 5, 0, 2], [7, 3]):
        mesh = mesh_of((len(part),), ("d",), [jax.devices()[device] for device in part])
        if has_part_in(mesh):
            rows = on_mesh(mesh, lambda v: psum_q(v, "d", config=SRA))(x[: len(part)])
            want = expected(x[: len(part)], at=part)
            assert all(same_bits(row, want) for row in rows)
    own = [device.id for device in jax.local_devices()]
    places = [place for place, device in enumerate(jax.devices()) if device.id in own]
    mesh = mesh_of((len(own),), ("d",), jax.local_devices())
    rows = on_mesh(mesh, lambda v: psum_q(v, "d", config=SRA))(x[places])
    want = expected(x[places], at=places) if len(own) > 1 else x[places[0]]
    assert all(same_bits(row, want) for row in rows)


# ---- 4. properties shared by all processes -------------------------------------------------------


def test_one_program_for_all_processes() -> None:
    """Check that the program does not depend on the process, so that it can be cached for all."""
    step = on_mesh(mesh_of((8,), ("d",)), lambda v: psum_q(v, "d") + psum_q(v, "d", bits=8))
    text = step.lower(normal(5, 8, 1500)).as_text()
    assert text.count("@cgx_psum_q") == 2
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
    everybody = np.asarray(process_allgather(digest)).reshape(PROCESSES, -1)
    assert (everybody == digest).all()


def test_training() -> None:
    """Check that weights stay bitwise equal over steps, in one jit with remat and scan."""
    mesh = mesh_of((2, 4), ("a", "b"))
    axes = ("a", "b")
    truth = normal(6, 64, 8)

    def loss(weights: jax.Array, batch: jax.Array) -> jax.Array:
        layer = jax.checkpoint(lambda b: b @ weights)
        return jnp.square(layer(batch) - batch @ truth).mean()

    def step(weights: jax.Array, batches: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        def one(w: jax.Array, operand: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            batch, key = operand
            copy = lax.pcast(w, axes, to="varying")
            value, gradient = jax.value_and_grad(loss)(copy, batch)
            return w - pmean_q(gradient, axes, key=key), value

        keys = jax.random.split(key, batches.shape[1])
        weights, losses = lax.scan(one, weights, (batches[0], keys))
        return weights, lax.pmean(losses, axes)

    compiled = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=(P(), P(axes), P()), out_specs=(P(), P()))
    )
    weights: Any = np.zeros((64, 8), np.float32)
    losses: Any = np.zeros(0)
    for epoch in range(5):
        batches = spread(mesh, normal(100 + epoch, 8, 20, 32, 64), P(axes))
        weights, losses = compiled(weights, batches, jax.random.key(epoch))
    mine = np.asarray(weights.addressable_data(0))
    everybody = np.asarray(process_allgather(mine)).reshape(PROCESSES, *mine.shape)
    assert all(same_bits(other, mine) for other in everybody)
    assert all(same_bits(shard.data, mine) for shard in weights.addressable_shards)
    assert fetch(losses)[-1] < 1e-3, losses  # it began at 64
