"""Which leaves of a tree share a message: by a plan, or by size.

1. leaves by name, and when their gradients are ready
2. messages, with a plan or without one
3. processes that compile a planned program compare their plans
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cgx_ops.jax._src.collectives.options import name_of_leaf
from cgx_ops.jax._src.runtime.processes import world
from cgx_ops.planner import Plan

# Size of a message before compression. Measured with 25 million float32 on links from 100 Mbit/s to
# shared memory: docs/guides/planner.md.
_MESSAGE_BYTES = 4 << 20

# ---- 1. leaves ---------------------------------------------------------------------------------


def numels_of(tree: Any) -> dict[str, int]:
    """Return the number of values of each leaf of a pytree, by leaf name.

    It is the input of `cgx_ops.planner.Plan.of`. Leaf names are those of rules, such as
    "layers.0.kernel".

    Args:
        tree: A pytree of arrays or `jax.ShapeDtypeStruct`.

    Returns:
        A dict from name to number of values, in the order of the leaves.

    Raises:
        ValueError: Two leaves have the same name.

    Example:
        >>> import jax.numpy as jnp
        >>> from cgx_ops.jax import numels_of
        >>> numels_of({"kernel": jnp.zeros((64, 10)), "bias": jnp.zeros(10)})
        {'bias': 10, 'kernel': 640}
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    numels = {name_of_leaf(path): math.prod(getattr(leaf, "shape", ())) for path, leaf in leaves}
    if len(numels) < len(leaves):
        raise ValueError(
            "two leaves have the same name, and a plan identifies leaves by name: rename one"
        )
    return numels


def estimated_ready(
    tree: Any, backward: float, *, forward: Sequence[str] | None = None
) -> list[float]:
    """Estimate when the gradient of each leaf is ready, as input of `cgx_ops.planner.Plan.of`.

    XLA does not report when it has computed a gradient, so only the whole backward pass is
    measured. The estimate assumes that gradients become ready one by one, starting with the leaf
    used last, and that each takes time in proportion to its number of values. This holds for dense
    layers. Convolutions take longer per value, embeddings less. All ranks must pass equal
    arguments.

    Args:
        tree: A pytree of arrays or `jax.ShapeDtypeStruct`.
        backward: Seconds of the backward pass: the time of `jax.value_and_grad` less that of the
            forward pass.
        forward: Names of all leaves in the order in which the model uses them. None (default) is
            the order of the tree, which for dicts is that of the sorted keys.

    Returns:
        Seconds from the start of the backward pass, in the order of `numels_of`.

    Raises:
        ValueError: `forward` does not contain each name exactly once; `backward` is negative or not
            finite.

    Example:
        >>> import jax.numpy as jnp
        >>> from cgx_ops.jax import estimated_ready
        >>> tree = {"first": jnp.zeros(300), "last": jnp.zeros(100)}
        >>> estimated_ready(tree, backward=0.4)
        [0.4, 0.1]
    """
    numels = numels_of(tree)
    order = list(numels) if forward is None else list(forward)
    if sorted(order) != sorted(numels):
        odd = sorted({*order} ^ {*numels}) or sorted(
            name for name in order if order.count(name) > 1
        )
        raise ValueError(f"forward must contain the name of each leaf exactly once; see {odd[:4]}")
    if not 0 <= backward < math.inf:
        raise ValueError(f"backward is {backward!r}; it must be a number of seconds, at least 0")
    total, computed = max(1, sum(numels.values())), 0
    ready: dict[str, float] = {}
    for name in reversed(order):
        computed += numels[name]
        ready[name] = backward * computed / total
    return [ready[name] for name in numels]


# ---- 2. messages -------------------------------------------------------------------------------


def messages_of(caller: str, x: Any, fuse: bool | Plan, *, parts: bool) -> Sequence[int]:
    """Return the message number of each leaf of x. Leaves of one number may share a message.

    The messages of the last leaves have the lowest numbers, since their gradients are usually ready
    first.

    Args:
        caller: The public function, for errors.
        x: A pytree of arrays.
        fuse: The user's argument.
        parts: Whether several messages of one call can be sent at the same time.

    Raises:
        ValueError: The plan was made for another tree.
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
                f"{caller}: the plan was made for another tree: for leaf {name!r}, x has {has[0]} "
                f"and the plan has {has[1]}. Create it with Plan.of(cgx_ops.jax.numels_of(x), ...)"
            )
    group_of = {plan.names[i]: number for number, of in enumerate(plan.groups) for i in of}
    return [group_of[name] for name in numels]


def _in_parts(sizes: Sequence[int]) -> Sequence[int]:
    """Split leaves of these sizes in bytes, the last ones first, into parts of about equal size."""
    total = sum(sizes)
    parts = max(1, total // _MESSAGE_BYTES)
    numbers, before = [], 0
    for size in reversed(sizes):  # a leaf is in the part of its middle
        numbers.append(min(parts - 1, (2 * before + size) * parts // max(1, 2 * total)))
        before += size
    return numbers[::-1]


# ---- 3. comparison -----------------------------------------------------------------------------


class Planned(NamedTuple):
    """The plan of a call in a program.

    Attributes:
        plan: The plan.
        processes: JAX's indices of the mesh's processes, in order.
    """

    plan: Plan
    processes: tuple[int, ...]


@functools.cache
def agree(program: str, planned: Planned) -> None:
    """Require that all processes of a program have the same plan, when they compile it.

    A lowering must not compare: one process may lower a program that it does not run.

    Args:
        program: The name of its module. Programs that threads compile at the same time need
            different names.
        planned: The plan of a call in the program. Each of its processes calls this function.

    Raises:
        MismatchError: On all of them. It names the first leaf that differs.
    """
    plan, processes = planned
    everyone, name = world(), f"cgx_ops.jax._src.collectives.plans/{program}"
    if processes == tuple(range(everyone.size)):
        plan.agree(everyone, name=name)
        return
    with everyone.group(processes, name=f"{name}/{','.join(map(str, processes))}") as some:
        plan.agree(some)
