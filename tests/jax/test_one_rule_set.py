"""One rule set gives every layer the same settings under DDP, FSDP2 and JAX."""

import json
import math
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from support import launch
from support import rules_cases as cases
from support.jax_cases import mesh_of, use_cpu_devices

import cgx_ops.jax
from cgx_ops.jax._src.collectives import trees

use_cpu_devices(8)


def test_by_hand() -> None:
    found = {
        name: cases.settings_of(cases.RULES.of(name, len(shape), cases.CONFIG))
        for name, shape in cases.SHAPES.items()
    }
    assert found == cases.expected()


@pytest.mark.slow
def test_by_ddp_and_fsdp() -> None:
    by_ddp, by_fsdp = launch.mpirun(2, "run_rules.py")[0].splitlines()
    assert json.loads(by_ddp) == cases.expected()
    assert json.loads(by_fsdp) == cases.expected()


@pytest.mark.parametrize("fuse", [True, False])
def test_by_jax(fuse: bool) -> None:
    found: dict[str, Any] = {}

    def bind(leaves: Any, seeds: Any, settings: Any, *rest: Any) -> Any:
        for leaf, config in zip(leaves, settings.configs, strict=True):
            found[cases.name_of(math.prod(leaf.shape))] = cases.settings_of(config)
        return original(leaves, seeds, settings, *rest)

    tree: Any = {}
    for name, shape in cases.SHAPES.items():
        *parents, last = name.split(".")
        at = tree
        for part in parents:
            at = at.setdefault(part, {})
        at[last] = jnp.ones(shape)

    def body(t: Any) -> Any:
        mine = jax.tree.map(lambda x: jax.lax.pcast(x, "d", to="varying"), t)
        return cgx_ops.jax.psum_q(
            mine, "d", bits=4, bucket_size=256, rules=cases.RULES, fuse=fuse,
        )  # fmt: skip

    original = trees.bind
    with mock.patch.object(trees, "bind", bind):
        mesh = mesh_of((2,), ("d",))
        jax.block_until_ready(
            jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P()))(tree)
        )
    assert found == cases.expected()
