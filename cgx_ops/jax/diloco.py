"""diloco: devices train by themselves, and average what they have learnt every so many steps.

After a step in which a fragment of the parameters is due, on each device:

  1. send: how far its parameters have come from the anchor, with what was lost of that before, is
     averaged, compressed, in a program of its own, for whose end nobody waits
  2. apply, some steps later: an outer optimizer steps from the anchor by the average; parameters
     become the anchor, or a mixture of both

Douillard et al.: DiLoCo: Distributed Low-Communication Training of Language Models, 2023; Streaming
DiLoCo with overlapping communication, 2025. Stich: Local SGD Converges Fast and Communicates
Little, ICLR 2019. Sarfi et al.: Communication Efficient LLM Pre-training with SparseLoCo, 2025.
"""

from typing import Any, Literal

import jax

from cgx_ops.config import Config
from cgx_ops.jax.diloco_fragments import CALLER, Method
from cgx_ops.jax.diloco_loop import DiLoCo
from cgx_ops.jax.diloco_state import Layout
from cgx_ops.jax.knobs import check_feedback, checked_knobs, refuse_idle_feedback
from cgx_ops.jax.mesh_groups import Axes
from cgx_ops.jax.optimizer_state import import_optax
from cgx_ops.outer_loop import Schedule
from cgx_ops.rules import EXACT_BITS


def diloco(
    axis_name: Axes,
    *,
    sync_every: int,
    fragments: int = 1,
    fragment_sync_delay: int = 0,
    fragment_update_alpha: float = 0.0,
    outer_optimizer: Any = None,
    mean_over: Literal["ranks", "senders"] = "ranks",
    error_feedback: bool | None = None,
    residual_decay: float = 1.0,
    key: jax.Array | None = None,
    name: str = CALLER,
    mesh: jax.sharding.Mesh | None = None,
    param_specs: Any = None,
    **knobs: Any,
) -> DiLoCo:
    """Return an outer loop: parameters that differ between devices, averaged every few steps.

    Each device has parameters and an optimizer of its own, in arrays with one more axis in front,
    over the devices; what one device does in a step knows nothing of the others:

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
    torchtitan's words. Docs: docs/diloco.md.

    Args:
        axis_name: name of a mesh axis, or a tuple of names, over which devices train by themselves.
        sync_every: steps from one synchronisation of a parameter to the next.
        fragments: parts of the model that take turns, every fragments-th layer each, one every
          sync_every / fragments steps; they divide sync_every.
        fragment_sync_delay: steps from sending a fragment to applying it, less than that.
        fragment_update_alpha: how much of a parameter stays the device's own when its average is
          applied, from 0 to 1.
        outer_optimizer: an optax transformation, which gets the average of anchor - parameter as a
          gradient of the anchor, a fragment at a time; None: optax.sgd(0.7, momentum=0.9,
          nesterov=True).
        mean_over: "ranks": the mean over all devices. "senders": of each value over those that
          sent it (SparseLoCo), which takes compressor="topk".
        error_feedback: as of `average_gradients`.
        residual_decay: so.
        key: so.
        name: of the collectives, as of `psum_q`: another one for each outer loop in a program.
        mesh: of the devices; None: that of `jax.set_mesh`.
        param_specs: the PartitionSpecs of one device's parameters over other axes of the mesh, a
          tree like them; None: P() for all.
        **knobs: every other keyword of `psum_q` but residual, such as bits, compressor="levels" and
          rules=Rules([("bias|norm", 32)]). algorithm="auto" is "by_hosts" whatever the size, as in
          torch, and "one_shot" for "senders".

    Raises:
        ImportError: optax is not installed.
        ValueError: an argument is out of its range; error_feedback=True with a compressor with
          which it does not converge, or where all is exact; "senders" without compressor="topk".
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
    # A device knows what it sent only where nobody sends its values on.
    if knobs.get("algorithm", "auto") == "auto":
        knobs["algorithm"] = "one_shot" if senders else "by_hosts"
    if senders and (knobs["algorithm"] != "one_shot" or error_feedback is False):
        raise ValueError(
            f"{CALLER}: mean_over='senders' goes by what is not sent: give error_feedback=None "
            "and algorithm='one_shot', or leave them out"
        )
    checked = checked_knobs(CALLER, key=key, name=name, **knobs)
    if not name:
        raise ValueError(f"{CALLER}: name is ''; give one, by which processes find each other")
    if senders and any(
        config.bits != EXACT_BITS and config.compressor != "topk" for config in checked.configs
    ):
        raise ValueError(
            f"{CALLER}: mean_over='senders' is of values of which each device sends some: give "
            "compressor='topk', and rules that have it or 32 bits"
        )
    method = Method(
        axis_name, outer_optimizer, schedule.fragment_update_alpha, checked, knobs, error_feedback,
        Config(residual_decay=residual_decay).residual_decay, senders, mesh,
    )  # fmt: skip
    if error_feedback:
        refuse_idle_feedback(CALLER, checked.configs)
    for config in filter(method.keeps, checked.configs):
        check_feedback(CALLER, config)
    return DiLoCo(schedule, method, Layout(axis_name, mesh, param_specs))


def sparse_loco(
    axis_name: Axes, *, sync_every: int, density: float = 1 / 64, **more: Any
) -> DiLoCo:
    """Return SparseLoCo: the largest values of chunks of 4096, feedback in place of momentum.

    Each device sends a share `density` of what it owes, values in 2 bits, and keeps 0.95 of the
    rest; the outer optimizer is plain SGD of rate 1 over the mean of those that sent a value (Sarfi
    et al., 2025; the outer rate and the decay are Covenant-72B's).

    Args:
        axis_name: as of diloco().
        sync_every: so.
        density: of what is sent.
        **more: every other argument of diloco().
    """
    optax = import_optax("sparse_loco")
    settings: dict[str, Any] = {
        "compressor": "topk", "bucket_size": 4096, "value_bits": 2, "mean_over": "senders",
        "residual_decay": 0.95, "outer_optimizer": optax.sgd(1.0),
    }  # fmt: skip
    return diloco(axis_name, sync_every=sync_every, density=density, **{**settings, **more})
