"""register: prepare for programs that one process exports and another one runs (jax.export)."""

import jax

from cgx_ops.jax._src.runtime import handlers


def register() -> list[jax.export.DisabledSafetyCheck]:
    """Register the custom calls of cgx_ops with XLA, and return their names for `jax.export`.

    `jax.export` refuses unknown custom calls, so pass the names where a program is exported. Where
    a program is only loaded, call this first. A process that traces a collective registers the
    calls automatically::

        checks = cgx_ops.jax.register()
        exported = jax.export.export(step, disabled_checks=checks)(weights, batch)
        file.write_bytes(exported.serialize())

        cgx_ops.jax.register()  # in another process
        step = jax.export.deserialize(file.read_bytes()).call

    An exported program needs the same release of cgx_ops, the same platform and the same number of
    devices. It contains its groups of processes, so every process loads a program that was exported
    for an equal mesh.

    This starts the XLA backend. With several processes call `initialize` first.

    Returns:
        The checks to disable: the argument `disabled_checks` of `jax.export.export`.

    Raises:
        RuntimeError: JAX cannot start its CPU backend.

    Example:
        >>> import jax
        >>> import cgx_ops.jax
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> step = jax.jit(jax.shard_map(
        ...     lambda x: cgx_ops.jax.psum_q(x, "data"),
        ...     mesh=mesh, in_specs=jax.P(), out_specs=jax.P(),
        ... ))
        >>> x = jax.numpy.ones(4)
        >>> exported = jax.export.export(step, disabled_checks=cgx_ops.jax.register())(x)
        >>> jax.export.deserialize(exported.serialize()).call(x)
        Array([1., 1., 1., 1.], dtype=float32)
    """
    return [jax.export.DisabledSafetyCheck.custom_call(name) for name in handlers.targets()]
