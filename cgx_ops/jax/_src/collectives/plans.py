"""Which leaves of a tree share a message: by a plan, or by size.

1. leaves by name, and when their gradients are ready
2. messages, with a plan or without one
3. agreement: processes that compile a planned program compare their plans
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from cgx_ops.jax._src.collectives.options import name_of_leaf
from cgx_ops.jax._src.runtime.processes import world
from cgx_ops.planner import Plan

# Of values. Of 25 million float32 on links from 100 Mbit/s to memory: docs/guides/planner.md.
_MESSAGE_BYTES = 4 << 20

# ---- 1. leaves ---------------------------------------------------------------------------------


def numels_of(tree: Any) -> dict[str, int]:
    """Return the number of values of each leaf of a tree, by its name in rules and plans.

    For cgx_ops.planner.Plan.of(), in the order of the leaves.

    Args:
        tree: a pytree of arrays or jax.ShapeDtypeStructs.

    Raises:
        ValueError: two leaves have one name.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    numels = {name_of_leaf(path): math.prod(getattr(leaf, "shape", ())) for path, leaf in leaves}
    if len(numels) < len(leaves):
        raise ValueError("two leaves have one name, which a plan cannot distinguish: rename one")
    return numels


def estimated_ready(
    tree: Any, backward: float, *, forward: Sequence[str] | None = None
) -> list[float]:
    """Return an estimate of when each leaf's gradient is ready, for Plan.of().

    A compiled program does not report when it has computed which gradient, so only the whole is
    measured. The estimate: gradients become ready one after the other, that of the leaf used last
    first, and each takes time in proportion to its number of values. That is what dense layers
    take; a convolution's values take longer, an embedding's less. Ranks must give equal arguments.

    Args:
        tree: as of numels_of().
        backward: seconds of the backward pass: those of jax.value_and_grad, less the forward's.
        forward: names of all leaves, in the order in which the model uses them; None: the tree's
            order, which for dicts is that of their sorted keys.

    Returns:
        Seconds from the start of the backward pass, in the order of numels_of().

    Raises:
        ValueError: `forward` does not have each name once; `backward` is no time.
    """
    numels = numels_of(tree)
    order = list(numels) if forward is None else list(forward)
    if sorted(order) != sorted(numels):
        odd = sorted({*order} ^ {*numels}) or sorted(
            name for name in order if order.count(name) > 1
        )
        raise ValueError(f"forward must have the name of each leaf once; see {odd[:4]}")
    if not 0 <= backward < math.inf:
        raise ValueError(f"backward is {backward!r}; it must be seconds, >= 0")
    total, computed = max(1, sum(numels.values())), 0
    ready: dict[str, float] = {}
    for name in reversed(order):
        computed += numels[name]
        ready[name] = backward * computed / total
    return [ready[name] for name in numels]


# ---- 2. messages -------------------------------------------------------------------------------


def messages_of(caller: str, x: Any, fuse: bool | Plan, *, parts: bool) -> Sequence[int]:
    """Return for each leaf of x the number of the message that it may share with others.

    The messages of the last leaves come first: as a rule their gradients are ready first.

    Args:
        caller: for errors.
        x: a pytree of arrays.
        fuse: the user's.
        parts: whether several messages of one call can travel at a time.

    Raises:
        ValueError: the plan is of another tree.
    """
    if isinstance(fuse, Plan):
        return _planned(caller, x, fuse)
    leaves = jax.tree.leaves(x)
    if not fuse:
        return range(len(leaves))[::-1]
    if not parts:
        return [0] * len(leaves)
    return _in_parts([jnp.size(leaf) * jnp.result_type(leaf).itemsize for leaf in leaves])


def _planned(caller: str, x: Any, plan: Plan) -> Sequence[int]:
    numels = numels_of(x)
    planned = dict(zip(plan.names, plan.numels, strict=True))
    for name in [*numels, *planned]:
        if numels.get(name) != planned.get(name):
            has = [
                "no such leaf" if of.get(name) is None else f"{of[name]} values"
                for of in (numels, planned)
            ]
            raise ValueError(
                f"{caller}: the plan is of another tree: of {name!r}, x has {has[0]} and the plan "
                f"{has[1]}. Make it with Plan.of(cgx_ops.jax.numels_of(x), ...)"
            )
    group_of = {plan.names[i]: number for number, of in enumerate(plan.groups) for i in of}
    return [group_of[name] for name in numels]


def _in_parts(sizes: Sequence[int]) -> Sequence[int]:
    """Cut leaves of so many bytes, the last ones first, into parts that are about equal."""
    total = sum(sizes)
    parts = max(1, total // _MESSAGE_BYTES)
    numbers, before = [], 0
    for size in reversed(sizes):  # a leaf is where its middle is
        numbers.append(min(parts - 1, (2 * before + size) * parts // max(1, 2 * total)))
        before += size
    return numbers[::-1]


# ---- 3. agreement ------------------------------------------------------------------------------


@functools.cache
def agree(plan: Plan, processes: tuple[int, ...]) -> None:
    """Require that all processes of a program have this plan, when it is first compiled with it.

    Args:
        plan: of a call in the program.
        processes: of JAX, those of the mesh, in order; each of them calls this.

    Raises:
        MismatchError: on all of them; it names the first leaf that differs.
    """
    everyone = world()
    if processes == tuple(range(everyone.size)):
        plan.agree(everyone)
        return
    name = f"cgx_ops.jax._src.collectives.plans/{','.join(map(str, processes))}"
    with everyone.group(processes, name=name) as some:
        plan.agree(some)
