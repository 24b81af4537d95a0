"""Adaptive bits in JAX: statistics inside a program, and one program per change of the bits."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.sharding import PartitionSpec as P
from support.jax_cases import mesh_of, normal, use_cpu_devices

import cgx_ops.jax
from cgx_ops import Config, InvalidArgument, Rules
from cgx_ops.jax import numels_of, pmean_q, psum_q, statistics
from cgx_ops.planner import AdaptiveBits, Plan, allocate_bits, allocate_rates

use_cpu_devices(8)

CONFIG = Config(bits=4, bucket_size=64, rounding="nearest")
ALL = Rules(exact_vectors=False)  # measures vectors, too


def tree_of(step: int) -> dict[str, Any]:
    """Return the inputs of two devices, with different scales."""
    shapes = {"a": (1000,), "b": (100, 50), "c": (1999,)}
    scales = {"a": 30.0, "b": 0.2, "c": 1.0}
    return {n: scales[n] * normal(7 * step + i, 2, *s) for i, (n, s) in enumerate(shapes.items())}


@pytest.mark.parametrize("compressor", ["uniform", "levels", "entropy"])
def test_statistics_are_the_oracles(compressor: Any) -> None:
    tree = {**{n: x[0] for n, x in tree_of(0).items()}, "one": np.float32(3), "none": np.ones(0)}
    measure = partial(statistics, bucket_size=64, compressor=compressor)
    assert set(measure(tree)) == {"b"}
    assert set(measure(tree, rules=Rules([("b", 8)], exact_vectors=False))) == {"a", "c", "one"}
    found = jax.jit(partial(measure, rules=ALL))(tree)
    assert set(found) == {"a", "b", "c", "one"}
    for name, value in found.items():
        x = np.asarray(tree[name]).reshape(-1)
        want = reference.statistic(x, 64, ranges=compressor == "uniform") / x.size
        assert float(value) == pytest.approx(want, rel=1e-5)


def test_each_change_compiles_a_program() -> None:
    mesh = mesh_of((2,), ("d",))

    @partial(jax.jit, static_argnames="plan")
    def step(tree: Any, plan: Plan) -> Any:
        def body(rows: Any) -> Any:
            own = jax.tree.map(lambda x: x[0], rows)
            found = jax.lax.pmean(statistics(own, bucket_size=64, rules=ALL), "d")
            return psum_q(own, "d", bits=4, bucket_size=64, rules=plan.rules), found

        return jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P())(tree)

    bits = AdaptiveBits(every=3, samples=3, most_changes=2)
    numels = numels_of(jax.tree.map(lambda x: x[0], tree_of(0)))
    losses = []
    for i in range(8):
        bits.advance(i, CONFIG)
        tree = tree_of(i)
        sums, found = step(tree, plan=bits.plan())
        bits.observe(i, numels, found)
        losses.append(found)
        # Different bits give different values: those of a program compiled for these bits only.
        alone = jax.shard_map(
            lambda rows: psum_q(
                jax.tree.map(lambda x: x[0], rows), "d", bits=4, bucket_size=64,
                rules=bits.plan().rules,
            ),
            mesh=mesh, in_specs=P("d"), out_specs=P(),
        )(tree)  # fmt: skip
        for name, value in sums.items():
            assert np.array_equal(np.asarray(value), np.asarray(alone[name])), (i, name)
    means = [numels[n] * sum(float(found[n]) for found in losses[:3]) / 3 for n in "abc"]
    want = allocate_bits(means, [numels[n] for n in "abc"], config=CONFIG)
    assert [bits.bits[n] for n in "abc"] == want != [4] * 3
    compiled: Any = step
    assert compiled._cache_size() == 1 + bits.changes == 2


def test_rates_of_entropy_follow_the_statistics() -> None:
    mesh, config = mesh_of((2,), ("d",)), Config(compressor="entropy", rate=2)

    @partial(jax.jit, static_argnames="plan")
    def step(tree: Any, plan: Plan) -> Any:
        def body(rows: Any) -> Any:
            own = jax.tree.map(lambda x: x[0], rows)
            found = jax.lax.pmean(statistics(own, compressor="entropy", rules=ALL), "d")
            return psum_q(own, "d", config=config, rules=plan.rules), found

        return jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P())(tree)

    def error(tree: Any, sums: Any) -> float:
        exact = {name: np.asarray(x, np.float64).sum(axis=0) for name, x in tree.items()}
        return sum(float(np.square(np.asarray(sums[n]) - exact[n]).sum()) for n in exact)

    bits = AdaptiveBits(every=2, samples=2)
    numels = numels_of(jax.tree.map(lambda x: x[0], tree_of(0)))
    losses = []
    for i in range(4):
        bits.advance(i, config)
        _, found = step(tree_of(i), plan=bits.plan())
        bits.observe(i, numels, found)
        losses.append(found)
    counts = [numels[n] for n in "abc"]
    means = [numels[n] * sum(float(found[n]) for found in losses[:2]) / 2 for n in "abc"]
    assert [bits.bits[n] for n in "abc"] == allocate_rates(means, counts, config=config)
    uniform = replace(bits.plan(), bits=(2.0, 2.0, 2.0))
    errors = [error(tree_of(4), step(tree_of(4), plan)[0]) for plan in (bits.plan(), uniform)]
    # With equal rates, these small leaves share a block and its step, which is nearly as good.
    assert errors[0] < errors[1] / 2


def test_documentation_snippet() -> None:
    page = (Path(__file__).parents[2] / "docs/guides/planner.md").read_text()
    block = re.search(r"```python\n(bits = AdaptiveBits.*?)```", page, re.DOTALL)
    assert block is not None
    params, batches = {"w": normal(1, 40, 40), "b": normal(3, 40)}, normal(2, 1, 8, 40)

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        return jnp.square(batch @ params["w"] + params["b"]).mean()

    names = {
        "AdaptiveBits": AdaptiveBits, "P": P, "batches": batches, "cgx_ops": cgx_ops,
        "config": Config(bits=4), "jax": jax, "loss": loss, "mesh": mesh_of((4,), ("data",)),
        "params": params, "partial": partial, "pmean_q": pmean_q,
    }  # fmt: skip
    exec(block[1], names)
    own = [jax.grad(loss)(params, rows)["w"] for rows in batches[0].reshape(4, 2, 40)]
    exact = sum(own) / 4
    # A 4-bit level is at most 2 max / 15, and rounding errs by half of it, in each device's message
    # and in their average, whose magnitudes may be larger by that error.
    largest = float(max(jnp.abs(g).max() for g in own))
    bound = largest / 15 + largest * (1 + 1 / 15) / 15
    got: Any = names["gradients"]
    assert set(names["found"]) == {"w"}
    assert float(jnp.abs(got["w"] - exact).max()) <= bound < float(jnp.abs(exact).max())


def test_invalid_settings_raise() -> None:
    with pytest.raises(InvalidArgument, match="compressor is 'topk'"):
        statistics({}, compressor="topk")  # pyright: ignore[reportArgumentType]
