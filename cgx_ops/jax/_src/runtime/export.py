"""register: what programs need that one process exports and another runs (jax.export)."""

import jax

from cgx_ops.jax._src.runtime import handlers


def register() -> list[jax.export.DisabledSafetyCheck]:
    """Make cgx's custom calls known to XLA, and return their names as jax.export takes them.

    A process that traces a collective registers them automatically. Call this where a program is
    only loaded, in the thread that runs it first, before that compiles it, and where one is
    exported, since jax.export refuses custom calls without it:

        exported = jax.export.export(step, disabled_checks=cgx_ops.jax.register())(weights, batch)
        file.write_bytes(exported.serialize())

        cgx_ops.jax.register()  # in another process
        step = jax.export.deserialize(file.read_bytes()).call

    An exported program runs with the cgx_ops release that exported it, on as many devices of the
    one platform that it is for; a group of processes is part of it, so every process loads what a
    process of an equal mesh exported.

    Starts the XLA backend: call `initialize` first where there are several processes.

    Returns:
        The checks to disable, for jax.export.export(..., disabled_checks=).
    """
    handlers.note_collective()  # what is loaded is compiled, and never lowered
    return [jax.export.DisabledSafetyCheck.custom_call(name) for name in handlers.targets()]
