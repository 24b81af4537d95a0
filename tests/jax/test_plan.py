"""psum_q(fuse=plan): one message per group of a plan; grouping changes no bits."""

import re
import threading
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.jax_cases import SRA, mesh_of, normal, on_mesh, same_bits, use_cpu_devices
from support.launch import mpirun, threads

from cgx_ops import Communicator, MismatchError
from cgx_ops.jax import average_gradients, estimated_ready, numels_of, psum_q
from cgx_ops.jax._src.collectives.plans import Planned, agree
from cgx_ops.planner import Costs, Plan

use_cpu_devices(8)

pytestmark = pytest.mark.timeout(120)

SHAPES = {"dense": {"bias": (50,), "kernel": (40, 50)}, "layers": [(300,), (70, 10)]}
NAMES = ("dense.bias", "dense.kernel", "layers.0", "layers.1")
PLAN = Plan(NAMES, (50, 2000, 300, 700), (4, 4, 32, 4), ((3,), (0, 2), (1,)))


def tree_of(seed: int) -> Any:
    def leaf(shape: tuple[int, ...]) -> Any:
        return normal(seed + len(shape), 2, *shape)

    return jax.tree.map(leaf, SHAPES, is_leaf=lambda x: isinstance(x, tuple))


def test_plan_names_leaves_as_rules_do() -> None:
    tree = jax.tree.map(lambda x: x[0], tree_of(0))
    assert numels_of(tree) == dict(zip(NAMES, PLAN.numels, strict=True))
    assert numels_of(jax.eval_shape(lambda: tree)) == numels_of(tree)
    assert numels_of(jnp.ones(3)) == {"": 3}
    with pytest.raises(ValueError, match="two leaves have the same name"):
        numels_of({"a.b": 1.0, "a": {"b": 2.0}})
    planned = Plan.of(numels_of(tree), [0.3, 0.2, 0.1, 0.0], Costs(link_fixed=0.15))
    assert planned.order == [3, 2, 1, 0]


def test_groups_are_messages_with_equal_bits() -> None:
    tree, key = tree_of(10), jax.random.key(3)

    def body(fuse: Any) -> Any:
        def reduce(t: Any) -> Any:
            zeros = jax.tree.map(jnp.zeros_like, t)
            return psum_q(t, "d", key=key, fuse=fuse, config=SRA, residual=zeros)

        return on_mesh(mesh_of((2,), ("d",)), reduce)

    planned, whole = body(PLAN)(tree), body(True)(tree)
    assert len(jax.tree.leaves(planned)) == 2 * len(NAMES)
    for mine, theirs in zip(jax.tree.leaves(planned), jax.tree.leaves(whole), strict=True):
        assert same_bits(np.asarray(mine), np.asarray(theirs))
    for fuse, messages in ((PLAN, 3), (True, 1), (False, 4)):
        assert body(fuse).lower(tree).as_text().count("@cgx_psum_q") == messages


def test_bits_of_a_plan_are_rules() -> None:
    tree = tree_of(20)
    mesh = mesh_of((2,), ("d",))
    planned = on_mesh(mesh, lambda t: psum_q(t, "d", fuse=PLAN, rules=PLAN.rules))(tree)
    exact = jax.tree.map(lambda x: x.sum(axis=0), tree)
    error = jax.tree.map(lambda mine, sums: float(np.abs(mine[0] - sums).max()), planned, exact)
    assert error["layers"][0] < 1e-4 < 0.01 < error["layers"][1]


def test_optax_accepts_a_plan() -> None:
    pytest.importorskip("optax")
    tree = tree_of(30)
    mesh = mesh_of((2,), ("d",))

    def step(fuse: Any) -> Any:
        optimizer = average_gradients("d", bits=2, fuse=fuse, config=SRA, mesh=mesh)

        def body(gradients: Any) -> Any:
            return optimizer.update(gradients, optimizer.init(gradients))[0]

        return on_mesh(mesh, body)(tree)

    for mine, theirs in zip(jax.tree.leaves(step(PLAN)), jax.tree.leaves(step(True)), strict=True):
        assert same_bits(np.asarray(mine), np.asarray(theirs))


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (replace(PLAN, numels=(50, 2000, 301, 700)), "'layers.0', x has 300 values .* 301 values"),
        (replace(PLAN, names=("bias", *NAMES[1:])), "'dense.bias', x has 50 .* no such leaf"),
        (
            Plan((*NAMES, "head"), (*PLAN.numels, 9), (4,) * 5, (*PLAN.groups, (4,))),
            "'head', x has no such leaf and the plan has 9 values",
        ),
    ],
)
def test_plan_of_another_tree_raises(other: Plan, says: str) -> None:
    step = on_mesh(mesh_of((2,), ("d",)), lambda t: psum_q(t, "d", fuse=other))
    with pytest.raises(ValueError, match=f"psum_q: the plan was made for another tree:.*{says}"):
        step(tree_of(0))


def test_fuse_is_a_bool_or_a_plan() -> None:
    step = on_mesh(mesh_of((2,), ("d",)), lambda t: psum_q(t, "d", fuse="plan"))  # pyright: ignore
    with pytest.raises(TypeError, match=r"fuse is 'plan'; it must be a bool or a cgx_ops.planner"):
        step(tree_of(0))


def test_messages_of_4_mib_without_a_plan() -> None:
    """Expect messages of about 4 MiB, last leaves first, and one message for a small tree."""

    def messages(*sizes: int) -> list[list[int]]:
        leaves = [jax.ShapeDtypeStruct((2, size << 17), jnp.float32) for size in sizes]  # 512 KiB
        mesh = mesh_of((2,), ("d",))
        step = jax.shard_map(lambda t: psum_q(t, "d"), mesh=mesh, in_specs=P("d"), out_specs=P())
        text = jax.jit(step).lower(leaves).as_text()
        calls = [line for line in text.splitlines() if "@cgx_psum_q" in line]
        shapes = [line[line.rindex(") -> ") :] for line in calls]
        return [[int(n) >> 17 for n in re.findall(r"1x(\d+)xf32", shape)] for shape in shapes]

    assert messages(4, 4, 4) == [[4, 4, 4]]
    assert messages(1, 2, 3, 4, 5, 6, 7) == [[7], [5, 6], [1, 2, 3, 4]]
    assert messages(30, 1, 1) == [[1, 1], [30]]


def test_agree_among_some_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    own = threading.local()
    monkeypatch.setattr("cgx_ops.jax._src.collectives.plans.world", lambda: own.world)
    other = replace(PLAN, bits=(4, 8, 32, 4))

    def run(rank: int, world: Communicator) -> None:
        own.world = world
        if rank == 1:
            return
        agree.__wrapped__("jit_step", Planned(PLAN, (0, 2)))
        with pytest.raises(
            MismatchError, match=r"rank 0 has tensor 3 'dense.kernel' .*, rank 1 has .* 8 bits"
        ):
            agree.__wrapped__("jit_step", Planned(other if rank else PLAN, (0, 2)))

    threads(3, run, timeout=20)


def test_estimated_ready_times_follow_the_order_of_use() -> None:
    tree = {"a": jnp.ones(10), "b": {"c": jnp.ones((5, 4)), "d": jnp.ones(20)}}
    assert estimated_ready(tree, 0.5) == pytest.approx([0.5, 0.4, 0.2])
    assert estimated_ready(tree, 0.5, forward=["b.c", "a", "b.d"]) == pytest.approx([0.3, 0.5, 0.2])
    for forward, says in ((["a", "b.c"], "b.d"), (["a", "b.c", "b.d", "a"], "'a'")):
        with pytest.raises(ValueError, match=f"name of each leaf exactly once.*{says}"):
            estimated_ready(tree, 0.5, forward=forward)
    with pytest.raises(ValueError, match="backward is -1"):
        estimated_ready(tree, -1)


@pytest.mark.slow
def test_different_plans_raise_at_compilation() -> None:
    for output in mpirun(2, "run_jax_plan.py", env={"CGX_TIMEOUT": "60"}, timeout=100):
        compiled, repeated, agreed, sums = output.splitlines()[-4:]
        for line in (compiled, repeated, agreed):
            assert "ranks have different plans: rank 0 has tensor 1 'b'" in line
            assert "rank 1 has 'b' (2000 values, 4 bits, group 1)" in line
        assert float(compiled.split()[2]) < 30
        assert sums == "sums [2.0]"
