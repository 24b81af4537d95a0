"""diloco: devices train independently, and average their progress every few steps.

After a step in which a fragment of the parameters is due, each device does:

  1. send: the difference of outer parameters and parameters, plus the residual, is averaged,
     compressed, in a separate program that runs at the same time as the next steps
  2. apply, some steps later: an outer optimizer steps from the outer parameters by the average;
     parameters become the outer parameters, or a mixture of both

Douillard et al.: DiLoCo: Distributed Low-Communication Training of Language Models, 2023; Streaming
DiLoCo with overlapping communication, 2025. Stich: Local SGD Converges Fast and Communicates
Little, ICLR 2019. Sarfi et al.: Communication Efficient LLM Pre-training with SparseLoCo, 2025.
"""

from dataclasses import replace
from typing import Any, Literal, Unpack

import jax

from cgx_ops.config import Algorithm, Config, Keywords
from cgx_ops.jax._src.collectives.mesh_groups import Axes
from cgx_ops.jax._src.collectives.options import Carrier, checked_options
from cgx_ops.jax._src.diloco.fragments import CALLER, Method
from cgx_ops.jax._src.diloco.loop import DiLoCo
from cgx_ops.jax._src.diloco.state import Layout
from cgx_ops.jax._src.transforms.base import import_optax
from cgx_ops.methods.outer_loop import Schedule
from cgx_ops.planner import Plan
from cgx_ops.rules import Rules


def diloco(
    axis_name: Axes,
    *,
    sync_every: int,
    fragments: int = 1,
    fragment_sync_delay: int = 0,
    fragment_update_alpha: float = 0.0,
    outer_optimizer: Any = None,
    mean_over: Literal["ranks", "senders"] = "ranks",
    config: Config | None = None,
    key: jax.Array | None = None,
    name: str = CALLER,
    rules: Rules = Rules(),  # noqa: B008  (immutable)
    fuse: bool | Plan = True,
    carrier: Carrier = "native",
    mesh: jax.sharding.Mesh | None = None,
    param_specs: Any = None,
    **keywords: Unpack[Keywords],
) -> DiLoCo:
    """Create an outer loop: devices train independently and average parameters every few steps.

    Each device has its own parameters and its own inner optimizer. They are arrays with one more
    axis in front, over the devices. An inner step does not communicate::

        loop = diloco("data", sync_every=30, bits=4, mesh=mesh)
        params, state = loop.replicate(weights), loop.init(weights)
        moments = loop.replicate(adamw.init(weights))

        @partial(jax.jit, donate_argnums=(0, 1))
        @jax.shard_map(mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        @jax.vmap                      # over the one copy that a device has
        def inner(params, moments, batch):
            gradients = jax.grad(loss_of)(params, batch)
            updates, moments = adamw.update(gradients, moments, params)
            return optax.apply_updates(params, updates), moments

        for batch in batches:
            params, moments = inner(params, moments, batch)
            params, state = loop.outer(params, state)

    The arguments `sync_every`, `fragments`, `fragment_sync_delay` and `fragment_update_alpha` have
    the names of torchft and torchtitan.

    Args:
        axis_name: Name of a mesh axis, or a tuple of names, over which devices train independently.
        sync_every: Steps between two synchronizations of a parameter, at least 1.
        fragments: Number of parts of the model that are synchronized in turn. A fragment has every
            fragments-th layer, and one is sent every `sync_every / fragments` steps. Must divide
            `sync_every`. Default 1.
        fragment_sync_delay: Steps from sending a fragment to applying it, less than `sync_every /
            fragments`. Default 0.
        fragment_update_alpha: Share of the device's own parameter that is kept when a fragment is
            applied, from 0 (default) to 1.
        outer_optimizer: An optax transformation. Its gradient is the average of outer parameter
            minus parameter, one fragment at a time. None (default) means
            `optax.sgd(0.7, momentum=0.9, nesterov=True)`.
        mean_over: "ranks" (default) averages over all devices. "senders" averages each value over
            the devices that sent it (SparseLoCo), which needs `compressor="topk"`.
        config: How differences are sent, as in `average_gradients`. None (default) means
            `Config(error_feedback=True)`. The algorithm "auto" means "by_hosts", and "one_shot" for
            "senders".
        key: A PRNG key for random rounding, as in `average_gradients`.
        name: Identifies the collectives across processes. Each outer loop of a program needs a
            different name. Default "diloco".
        rules: Settings per leaf, by its path, as in `average_gradients`.
        fuse: How leaves share messages, as in `psum_q`.
        carrier: "native" (default) or "xla", as in `psum_q`.
        mesh: The mesh of the devices. None (default) is the mesh of `jax.set_mesh`.
        param_specs: The PartitionSpecs of one device's parameters over other mesh axes, a tree like
            them. None (default) means `P()` for all.
        **keywords: `bits`, `bucket_size`, `compressor` and `rounding` override fields of `config`.

    Returns:
        A `DiLoCo` loop.

    Raises:
        ImportError: optax is not installed.
        ValueError: An argument is out of range; "senders" without `compressor="topk"`, error
            feedback or algorithm "one_shot"; `name` is empty.
        TypeError: A key or static argument has the wrong type, as in `psum_q`.
        NotImplementedError: When it sends: "senders", and several processes have several devices of
            the axis each.

    Example:
        >>> import jax
        >>> from cgx_ops.jax import diloco
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> loop = diloco("data", sync_every=2, bits=4, mesh=mesh)
        >>> weights = jax.numpy.ones((30, 40))
        >>> params, state = loop.replicate(weights), loop.init(weights)
        >>> for _ in range(2):
        ...     params = params - 0.5          # instead of an inner step
        ...     params, state = loop.outer(params, state)
        >>> params.shape, bool((params == state.outer_parameters).all())
        ((1, 30, 40), True)
    """
    optax = import_optax(CALLER)
    schedule = Schedule(sync_every, fragments, fragment_sync_delay, fragment_update_alpha)
    if outer_optimizer is None:
        outer_optimizer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    if mean_over not in ("ranks", "senders"):
        raise ValueError(f"{CALLER}: mean_over is {mean_over!r}; it must be 'ranks' or 'senders'")
    senders = mean_over == "senders"
    options = checked_options(
        CALLER, config or Config(error_feedback=True), keywords,
        key=key, name=name, rules=rules, fuse=fuse, carrier=carrier,
    )  # fmt: skip
    if options.config.algorithm == "auto":
        # A device can find out what it sent only if no other device forwards its values.
        algorithm: Algorithm = "one_shot" if senders else "by_hosts"
        options = replace(options, config=replace(options.config, algorithm=algorithm))
    if senders and (
        options.config.algorithm != "one_shot" or options.config.error_feedback is False
    ):
        raise ValueError(
            f"{CALLER}: mean_over='senders' needs error feedback and algorithm='one_shot': leave "
            "error_feedback and algorithm out"
        )
    if not name:
        raise ValueError(
            f"{CALLER}: name is ''; it must not be empty, since processes identify their loop by it"
        )
    alpha = schedule.fragment_update_alpha
    method = Method(
        axis_name, outer_optimizer, alpha, options, senders, mesh, is_configured=config is not None
    )
    return DiLoCo(schedule, method, Layout(axis_name, mesh, param_specs))


def sparse_loco(
    axis_name: Axes, *, sync_every: int, density: float = 1 / 64, **more: Any
) -> DiLoCo:
    """Create a SparseLoCo outer loop: only the largest values of each chunk of 4096 are sent.

    Each device sends a fraction `density` of its differences plus residuals, with 2 bits per value.
    The residual is 0.95 of the rest. The outer optimizer is `optax.sgd(1.0)` without momentum,
    over the mean of the devices that sent a value (Sarfi et al., 2025; outer rate and decay are
    those of Covenant-72B).

    Args:
        axis_name: Name of a mesh axis, or a tuple of names.
        sync_every: Steps between two synchronizations of a parameter.
        density: The fraction of values that each device sends. Default 1/64.
        **more: All other arguments of `diloco`, except `config` and `mean_over`.

    Returns:
        A `DiLoCo` loop.

    Raises:
        ImportError: optax is not installed.
        ValueError: An argument is out of range, as in `diloco`.
        TypeError: An argument has the wrong type, as in `diloco`, or is unknown.
        NotImplementedError: When it sends: several processes have several devices of the axis each.

    Example:
        >>> import jax
        >>> from cgx_ops.jax import sparse_loco
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> loop = sparse_loco("data", sync_every=30, mesh=mesh)
        >>> loop.init(jax.numpy.ones((64, 64))).residual.shape
        (1, 64, 64)
    """
    optax = import_optax("sparse_loco")
    config = Config(
        compressor="topk", density=density, bucket_size=4096, value_bits=2, residual_decay=0.95
    )
    more.setdefault("outer_optimizer", optax.sgd(1.0))
    return diloco(axis_name, sync_every=sync_every, config=config, mean_over="senders", **more)
