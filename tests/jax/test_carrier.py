"""carrier="xla": XLA's own collectives transport the messages, with the native carrier's bits.

1. one process, eight devices: against the oracle and the native carrier
2. processes, simulated and real ones with gloo: without MPI, and under mpirun
3. the exact number of bytes sent
4. transformations
5. what is refused
"""

import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax import lax
from jax.sharding import Mesh
from support import launch
from support.jax_carrier_cases import BF16, CASES, Case
from support.jax_cases import (
    SRA,
    expected,
    mesh_of,
    normal,
    on_mesh,
    same_bits,
    seed_of,
    use_cpu_devices,
    with_config,
)
from support.rank_checks import Launch, RankCheck, rank_checks

from cgx_ops import Communicator, Config, Rules
from cgx_ops._core import library, structs
from cgx_ops._core.exchange import free_address
from cgx_ops.jax import pmean_q, psum_q
from cgx_ops.jax._src.collectives import mesh_groups
from cgx_ops.jax._src.collectives.calls import call_attributes
from cgx_ops.jax._src.runtime import handlers
from cgx_ops.stats import traffic

use_cpu_devices(8)

pytestmark = pytest.mark.timeout(120)

ONE_PROCESS = [0] * 8


def run(case: Case, mesh: Mesh, axes: Any, carrier: Any = "xla") -> tuple[Any, Any]:
    """Return (results, residuals), with a row for each device."""
    program = on_mesh(mesh, lambda x, e, seed: case.call(x, e, seed, axes, carrier))
    return program(*case.operands(mesh.size))


def check(
    case: Case, mesh: Mesh, axes: Any, groups: Sequence[Sequence[int]], processes: Sequence[int]
) -> None:
    """Compare each group's results and residuals with the oracle. groups: mesh positions."""
    results, residuals = map(np.asarray, run(case, mesh, axes))
    for group in groups:
        result, lost = case.expected(group, processes, axes)
        for rank, place in enumerate(group):
            assert same_bits(results[place], result), f"the result at {place} of {group}, {case}"
            what = f"the residual at {place} of {group}, {case}"
            assert same_bits(residuals[place], lost[rank]), what


# ---- 1. one process, eight devices ---------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_oracle_and_the_native_carrier(case: Case) -> None:
    mesh = mesh_of((8,), ("d",))
    check(case, mesh, "d", [range(8)], ONE_PROCESS)
    for ours, native in zip(run(case, mesh, "d"), run(case, mesh, "d", "native"), strict=True):
        assert same_bits(ours, native)


def test_large() -> None:
    """Use many chunks per shard; their number differs between the shards."""
    for case in (Case(2**20 + 7, 3, bucket_size=1000), Case(2**20 + 7, 32, BF16, "avg")):
        check(case, mesh_of((3,), ("d",), jax.devices()[:3]), "d", [range(3)], ONE_PROCESS[:3])


@pytest.mark.parametrize(
    ("axes", "groups"),
    [
        ("a", np.arange(8).reshape(2, 4).T),
        ("b", np.arange(8).reshape(2, 4)),
        (("a", "b"), np.arange(8).reshape(1, 8)),
        (("b", "a"), np.arange(8).reshape(2, 4).T.reshape(1, 8)),
    ],
    ids=str,
)
def test_axes_and_orders(axes: Any, groups: Any) -> None:
    devices = np.array(jax.devices())[[3, 1, 7, 0, 2, 6, 5, 4]]
    mesh = Mesh(devices.reshape(2, 4), ("a", "b"))
    check(Case(3000, keys="different"), mesh, axes, groups.tolist(), ONE_PROCESS)


def test_nan_and_denormals_are_preserved() -> None:
    x = normal(1, 8, 2048) * np.float32(1e-40)
    x[3, 700], x[5, 1900] = np.nan, np.inf
    program = on_mesh(mesh_of((8,), ("d",)), lambda v: psum_q(v, "d", carrier="xla"))
    rows = np.asarray(program(x))
    assert all(same_bits(row, expected(x, algorithm="one_shot")) for row in rows)
    assert np.isnan(rows[:, 512:1024]).all()
    assert np.any(rows[:, :512] != 0)


@pytest.mark.parametrize("fuse", [True, False])
def test_trees(fuse: bool) -> None:
    """Check that leaves of a dtype share a message, but have separate bits and seeds."""
    tree = {"a": normal(2, 8, 700), "bias": normal(3, 8, 90), "c": normal(4, 8, 2, 40, dtype=BF16)}
    key = jax.random.key(5)
    program = on_mesh(
        mesh_of((8,), ("d",)),
        lambda t: psum_q(
            t,
            "d",
            key=key,
            config=SRA,
            rules=Rules([("bias", 32)], exact_vectors=False),
            fuse=fuse,
            carrier="xla",
        ),
    )
    sums = program(tree)
    for leaf, name in enumerate(tree):
        bits = 32 if name == "bias" else 4
        want = expected(tree[name], bits=bits, seeds=[seed_of(key, leaf)] * 8)
        assert all(same_bits(row, want) for row in np.asarray(sums[name])), name
    assert program.lower(tree).as_text().count("call @cgx_carried_encode") == (2 if fuse else 3)


# ---- 2. processes --------------------------------------------------------------------------------


# Daily runs test each case in one of two hierarchies, alternating.
HIERARCHIES = {"2x4": [0, 0, 0, 0, 1, 1, 1, 1], "4x2": [2, 0, 1, 3, 2, 1, 0, 3]}
IN_HIERARCHIES = [
    pytest.param(
        case, HIERARCHIES[name], id=f"{case}-{name}", marks=[] if daily else pytest.mark.exhaustive
    )
    for i, case in enumerate([*CASES, *(Case(5, dtype=d) for d in (np.float16, BF16))])
    for j, name in enumerate(HIERARCHIES)
    for daily in [i % 2 == j]
]


@pytest.mark.parametrize(("case", "processes"), IN_HIERARCHIES)
def test_hierarchy(case: Case, processes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate these processes: the devices of one process form one rank."""
    monkeypatch.setattr(mesh_groups, "processes_of", lambda *_: processes)
    check(case, mesh_of((8,), ("d",)), "d", [range(8)], processes)


def test_sums_in_a_process_preserve_nan_and_denormals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_groups, "processes_of", lambda *_: [0, 1] * 4)
    for dtype, tiny in ((np.float32, 1e-40), (np.float16, 1e-6), (BF16, 1e-40)):
        x = (normal(6, 8, 100) * np.float32(tiny)).astype(dtype)
        program = on_mesh(mesh_of((8,), ("d",)), lambda v: psum_q(v, "d", bits=32, carrier="xla"))
        wide = reference.widen(x)
        sums = [reference.reduce_in_order("sum", list(wide[process::2])) for process in (0, 1)]
        want = reference.round_to(reference.combine("sum", *sums), x.dtype)
        assert np.any(want != 0)
        assert all(same_bits(row, want) for row in np.asarray(program(x))), dtype


PROGRAM = "run_jax_carrier.py"
OF_MESHES = ["one_axis", "two_axes", "permuted_mesh", "many"]
# LLVM's optimizations are disabled because they are slow; the cases above use them.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "XLA_FLAGS": "--xla_backend_optimization_level=0"}


def by_mpirun(processes: int, devices: int, mark: pytest.MarkDecorator) -> Launch:
    return Launch(
        processes, PROGRAM, *OF_MESHES, arguments=[devices, "", processes], env=ENVIRONMENT,
        timeout=140, marks=[mark],
    )  # fmt: skip


def without_mpi(processes: int, devices: int) -> Launch:
    return Launch(
        processes, PROGRAM, by=launch.processes, timeout=140, marks=[pytest.mark.exhaustive],
        arguments=[devices, "{}:{}".format(*free_address([""])), processes], env=ENVIRONMENT,
    )  # fmt: skip


@rank_checks(
    by_mpirun(2, 2, pytest.mark.slow),
    by_mpirun(2, 1, pytest.mark.exhaustive),
    by_mpirun(4, 1, pytest.mark.exhaustive),
    *(without_mpi(processes, devices) for processes, devices in ((2, 2), (2, 1), (4, 1))),
)
def test_among_processes(check: RankCheck) -> None:
    check.passes()


# ---- 3. exact number of bytes sent ---------------------------------------------------------------


def sent(case: Case, mesh: Mesh) -> dict[str, list[list[int]]]:
    """Return the shapes of a device's byte arrays in XLA's collectives, by collective."""
    program = on_mesh(mesh, lambda x: psum_q(x, "d", carrier="xla", **with_config(**case.knobs())))
    text = program.lower(case.inputs(mesh.size)).as_text()
    shapes: dict[str, list[list[int]]] = {}
    for name, shape in re.findall(r'"stablehlo\.(\w+)"\(.*: \(tensor<([0-9x]+)xui8>\)', text):
        shapes.setdefault(name, []).append(list(map(int, shape.split("x"))))
    return shapes


def counted(case: Case) -> int:
    """Return the bytes that the devices count as sent in a call."""
    before = traffic("cgx_carried_traffic").bytes_sent
    run(case, mesh_of((8,), ("d",)), "d")
    return traffic("cgx_carried_traffic").bytes_sent - before


def payload(case: Case, ranks: int) -> int:
    """Return the bytes that all ranks send with the native carrier, from cgx_plan."""
    total = 0
    for comm in Communicator.local(ranks):
        segment = structs.Segment(0, case.numel, case.bucket_size, case.bits)
        somewhere = np.empty(1)
        call = structs.Collective(
            comm=comm.id, config=Config(algorithm=case.algorithm).native, num_segments=1,
            segments=(structs.Segment * 1)(segment),
            input=somewhere.ctypes.data, output=somewhere.ctypes.data,
        )  # fmt: skip
        plan = structs.Plan()
        library.call("cgx_plan", call, plan)
        total += plan.payload_bytes
        comm.close()
    return total


def shard_bytes(case: Case, ranks: int) -> list[int]:
    shards = reference.shards(reference.Segment(0, case.numel), ranks, exact=False)
    sizes = [at.stop - at.start for at in shards]
    return [reference.encoded_bytes(size, case.bits, case.bucket_size) for size in sizes]


@pytest.mark.parametrize("buckets", [16, 17, 23])
def test_bytes_of_sra(buckets: int) -> None:
    """Compare with the native carrier plus the padding of each message to the longest one."""
    case = Case(buckets * 512)
    (exchanged,), (gathered,) = sent(case, mesh_of((8,), ("d",))).values()
    bytes_of = shard_bytes(case, 8)
    longest = max(bytes_of)
    assert (exchanged, gathered) == ([8, longest], [1, longest])
    # Each rank sends 7 rows to the others, and its own result row to 7 ranks.
    padding = 2 * 7 * sum(longest - each for each in bytes_of)
    assert 8 * 2 * 7 * longest == payload(case, 8) + padding
    assert padding == 0 or buckets % 8


def test_bytes_of_one_shot() -> None:
    case = Case(5000, 3, algorithm="one_shot")
    shapes = sent(case, mesh_of((8,), ("d",)))
    assert list(shapes) == ["all_gather"]
    ((rows, length),) = shapes["all_gather"]
    assert 8 * 7 * rows * length == payload(case, 8)


@pytest.mark.parametrize("case", [Case(17 * 512), Case(5000, 3, algorithm="one_shot")], ids=str)
def test_counted_bytes(case: Case) -> None:
    """Check that each device counts all rows that it sends, with their padding."""
    shapes = sent(case, mesh_of((8,), ("d",))).values()
    assert counted(case) == sum(8 * 7 * shape[-1] for (shape,) in shapes)


def test_no_message_crosses_processes_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that each of four devices in two processes sends a quarter, and they share the rest."""
    monkeypatch.setattr(mesh_groups, "processes_of", lambda *_: [0, 0, 0, 0, 1, 1, 1, 1])
    case = Case(16 * 512)
    shapes = sent(case, mesh_of((8,), ("d",)))
    (one,) = set(shard_bytes(case, 2))
    assert shapes["all_to_all"] == [[2, one // 4]]
    assert shapes["all_gather"] == [[1, 2, one // 4], [1, one // 4], [1, 2, one // 4]]
    assert 2 * one * 2 == payload(case, 2)
    assert counted(case) == payload(case, 2)


@pytest.mark.parametrize("step", ["encode", "reduce"])
def test_padding_is_zeros(step: str) -> None:
    """Check that padding, and a rank's own row, contain zeros and not old memory."""
    values = np.ones((1, 4 * 512), np.float32)  # a bucket of 264 bytes for each of four ranks
    config = Config(rounding="nearest", algorithm="sra")
    attributes = {**call_attributes("sum", [config]), "size": np.int64(4), "divisor": np.int64(4)}
    arrived = [np.zeros((4, 300), np.uint8)] if step == "reduce" else []
    operands = [np.uint32(1), np.zeros((1, 2), np.uint32), *arrived, values]
    before = np.full((4, 300) if step == "encode" else (300,), 0xA5, np.uint8)
    call = jax.ffi.ffi_call(
        handlers.target(f"carried_{step}"),
        jax.ShapeDtypeStruct(before.shape, before.dtype),
        input_output_aliases={len(operands): 0},
    )
    messages = call(*operands, before, **attributes)
    want = np.zeros_like(before)
    want[..., :8] = np.array([1, 0], np.float32).view(np.uint8)  # minimum, step; the levels are 0
    if step == "encode":
        want[1] = 0  # the rank itself
    assert same_bits(messages, want)


# ---- 4. transformations --------------------------------------------------------------------------


@pytest.mark.parametrize("check_vma", [True, False])
def test_vmap(check_vma: bool) -> None:
    """Check that each example is reduced as if alone, with the same algorithm."""
    x, keys = normal(7, 8, 6, 3000), jax.random.split(jax.random.key(8), 6)
    case = Case(3000, algorithm="auto")

    def body(rows: jax.Array) -> jax.Array:
        alone = lambda v, key: psum_q(v, "d", key=key, carrier="xla", **with_config(**case.knobs()))  # noqa: E731
        return jax.vmap(alone)(rows, keys)

    got = np.asarray(on_mesh(mesh_of((8,), ("d",)), body, check_vma)(x))
    for example in range(6):
        seeds = [seed_of(keys[example])] * 8
        want = expected(x[:, example], seeds=seeds, algorithm="one_shot")
        assert all(same_bits(row, want) for row in got[:, example])


def _mean(x: jax.Array, bits: int = 4) -> jax.Array:
    return pmean_q(x, "d", bits=bits, config=SRA, carrier="xla")


def _scanned(x: jax.Array) -> jax.Array:
    return lax.scan(lambda c, v: (c, _mean(v)), 0, x)[1]


def _in_cond(x: jax.Array) -> jax.Array:
    equal_everywhere = [lax.pmax(x[i, 0], "d") < 100 for i in range(3)]
    branches = _mean, lambda v: _mean(v, bits=8)
    return jnp.stack([lax.cond(equal_everywhere[i], *branches, x[i]) for i in range(3)])


@pytest.mark.parametrize("body", [_scanned, _in_cond])
@pytest.mark.parametrize("check_vma", [True, False])
def test_control_flow(body: Any, check_vma: bool) -> None:
    x = normal(9, 8, 3, 3000)
    got = np.asarray(on_mesh(mesh_of((8,), ("d",)), body, check_vma)(x))
    for step in range(3):
        want = expected(x[:, step], op="avg")
        assert all(same_bits(row, want) for row in got[:, step])


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradient_equals_that_of_the_exact_sum(check_vma: bool) -> None:
    x = normal(10, 8, 3000)

    def gradient(v: jax.Array, *, exact: bool) -> jax.Array:
        def loss(w: jax.Array) -> jax.Array:
            if exact:
                return (lax.psum(w, "d") * jnp.sin(v)).sum()
            return (jax.checkpoint(lambda u: psum_q(u, "d", carrier="xla"))(w) * jnp.sin(v)).sum()

        return jax.grad(loss)(v)

    mesh = mesh_of((8,), ("d",))
    ours, theirs = (
        on_mesh(mesh, lambda v, e=exact: gradient(v, exact=e), check_vma)(x)
        for exact in (False, True)
    )
    assert same_bits(ours, theirs)


def test_unused_results_are_dropped_everywhere() -> None:
    """Check that XLA may drop and merge the steps, which are pure, on all processes the same."""

    def body(v: jax.Array) -> jax.Array:
        psum_q(v, "d", carrier="xla")
        return psum_q(v, "d", bits=8, carrier="xla") + psum_q(v, "d", bits=8, carrier="xla")

    program = on_mesh(mesh_of((8,), ("d",)), body)
    text = program.lower(normal(11, 8, 20000)).compile().as_text()
    assert text.count('custom_call_target="cgx_carried_encode"') == 1


# ---- 5. errors on all processes ------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["ring", "hierarchical"])
def test_relaying_algorithms_raise(algorithm: Any) -> None:
    program = on_mesh(
        mesh_of((8,), ("d",)),
        lambda v: psum_q(v, "d", config=Config(algorithm=algorithm), carrier="xla"),
    )
    with pytest.raises(ValueError, match="use 'auto', 'one_shot' or 'sra'"):
        program(normal(12, 8, 100))


@pytest.mark.parametrize(
    ("processes", "axes", "text"),
    [
        ([0, 0, 0, 0, 0, 0, 1, 1], ("a", "b"), "hold 6\\+2 of its devices"),
        ([0, 0, 0, 1, 0, 1, 1, 1], "b", "hold 1\\+3 or 3\\+1 of its devices"),
        ([0, 0, 0, 0, 0, 0, 1, 1], "b", "hold 2\\+2 or 4 of its devices"),
    ],
)
def test_uneven_groups_raise(
    processes: list[int], axes: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh_groups, "processes_of", lambda *_: processes)
    program = on_mesh(mesh_of((2, 4), ("a", "b")), lambda v: psum_q(v, axes, carrier="xla"))
    with pytest.raises(NotImplementedError, match=text):
        program(normal(13, 8, 100))
