"""The compiled XLA FFI handlers (xla_ffi/*.cc); used by cgx_ops.jax only."""

from typing import Any

def cpu_handlers() -> dict[str, Any]:
    """Return capsules of the handlers by XLA's target, for jax.ffi.register_ffi_target.

    psum_q, psum_scatter_q and all_gather_q have a dictionary of capsules by FFI stage.
    """

def cuda_handlers() -> dict[str, Any]:
    """Return the handlers for CUDA, like cpu_handlers(), without carrier="xla" and gates."""

def site_type() -> dict[str, Any]:
    """Return capsules of the handlers' state type, for jax.ffi.register_ffi_type."""

def cuda_site_type() -> dict[str, Any]:
    """Return the state type for CUDA, whose plugin numbers types separately."""

def compilation_begins() -> None:
    """Mark the begin of a compilation (or loading) of an executable."""

def compilation_ends() -> None:
    """Mark the end of a compilation, with or without success."""

def set_local_timeout(seconds: float) -> None:
    """Set the deadline of collectives with several devices of this process."""

def set_cuda_devices(ids: dict[int, int]) -> None:
    """Set JAX's ids of this process's GPUs, by CUDA's ordinals, before any handler runs."""

def set_world(comm: int) -> None:
    """Set the communicator of JAX's processes. The default is cgx_ops.init()."""
