"""diloco: devices train independently, and average their progress every few steps.

After a step in which a fragment of the parameters is due, on each device:

  1. send: the difference of its parameters to the outer parameters, plus the residual, is averaged,
     compressed, in a separate program that runs beside the next steps
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
    rules: Rules | None = Rules(),  # noqa: B008  (it cannot be changed)
    fuse: bool | Plan = True,
    carrier: Carrier = "native",
    mesh: jax.sharding.Mesh | None = None,
    param_specs: Any = None,
    **keywords: Unpack[Keywords],
) -> DiLoCo:
    """Return an outer loop: parameters that differ between devices, averaged every few steps.

    Each device has separate parameters and a separate optimizer, in arrays with one more axis in
    front, over the devices. A step of one device does not depend on the others:

        loop = diloco("data", sync_every=30, bits=4, mesh=mesh)
        params, state = loop.replicate(weights), loop.init(weights)

        @partial(jax.jit, donate_argnums=(0, 1))
        @jax.shard_map(mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        @jax.vmap                      # over the one copy that a device has
        def inner(params, moments, batch):
            gradients = jax.grad(loss)(params, batch)
            updates, moments = adamw.update(gradients, moments, params)
            return optax.apply_updates(params, updates), moments

        for batch in batches:
            params, moments = inner(params, moments, batch)
            params, state = loop.outer(params, state)

    `sync_every`, `fragments`, `fragment_sync_delay` and `fragment_update_alpha` are torchft's and
    torchtitan's words. Docs: docs/guides/diloco.md.

    Args:
        axis_name: name of a mesh axis, or a tuple of names, over which devices train independently.
        sync_every: steps from one synchronisation of a parameter to the next.
        fragments: parts of the model that take turns, every fragments-th layer each, one every
          sync_every / fragments steps; they divide sync_every.
        fragment_sync_delay: steps from sending a fragment to applying it, less than that.
        fragment_update_alpha: how much of a parameter stays the device's own when its average is
          applied, from 0 to 1.
        outer_optimizer: an optax transformation. It gets the average of outer parameter - parameter
          as the gradient of the outer parameter, a fragment at a time. None: optax.sgd(0.7,
          momentum=0.9, nesterov=True).
        mean_over: "ranks": the mean over all devices. "senders": of each value over those that
          sent it (SparseLoCo), which takes compressor="topk".
        config: as of `average_gradients`. algorithm="auto" is "by_hosts" whatever the size, as in
          torch, and "one_shot" for "senders".
        key: as of `average_gradients`.
        name: of the collectives, as of `psum_q`: another one for each outer loop in a program.
        rules: as of `average_gradients`.
        fuse: as of `psum_q`.
        carrier: as of `psum_q`.
        mesh: of the devices; None: that of `jax.set_mesh`.
        param_specs: the PartitionSpecs of one device's parameters over other axes of the mesh, a
          tree like them; None: P() for all.
        **keywords: bits, bucket_size, compressor and rounding, which replace those of config.

    Raises:
        ImportError: optax is not installed.
        ValueError: an argument is out of its range; "senders" without compressor="topk"; at init,
          error feedback does not converge, or all leaves are exact with error_feedback=True.
        NotImplementedError: when it sends; "senders" where several processes have several devices
          of the axis each, whose values are summed before they are sent.
        TypeError: as `psum_q`.
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
        # A device can find out what it sent only if no other device sends its values on.
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
        raise ValueError(f"{CALLER}: name is ''; give one, by which processes find each other")
    alpha = schedule.fragment_update_alpha
    method = Method(
        axis_name, outer_optimizer, alpha, options, senders, mesh, is_configured=config is not None
    )
    return DiLoCo(schedule, method, Layout(axis_name, mesh, param_specs))


def sparse_loco(
    axis_name: Axes, *, sync_every: int, density: float = 1 / 64, **more: Any
) -> DiLoCo:
    """Return SparseLoCo: the largest values of chunks of 4096, feedback in place of momentum.

    Each device sends a share `density` of differences plus residuals, in 2 bits, and keeps 0.95
    of the rest; the outer optimizer is plain SGD of rate 1 over the mean of those that sent a value
    (Sarfi et al., 2025; the outer rate and the decay are Covenant-72B's).

    Args:
        axis_name: as of diloco().
        sync_every: as of diloco().
        density: the share of values that is sent.
        **more: every other argument of diloco() but config and mean_over.
    """
    optax = import_optax("sparse_loco")
    config = Config(
        compressor="topk", density=density, bucket_size=4096, value_bits=2, residual_decay=0.95
    )
    more.setdefault("outer_optimizer", optax.sgd(1.0))
    return diloco(axis_name, sync_every=sync_every, config=config, mean_over="senders", **more)
