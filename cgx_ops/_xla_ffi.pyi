"""The compiled XLA FFI handlers (xla_ffi/*.cc); used by cgx_ops.jax only."""

from typing import Any

def cpu_handlers() -> dict[str, Any]:
    """Return capsules of the handlers by XLA's target, for jax.ffi.register_ffi_target.

    psum_q, psum_scatter_q and all_gather_q share a dictionary of theirs, by FFI stage.
    """

def cuda_handlers() -> dict[str, Any]:
    """Return what cpu_handlers does, for CUDA, which has no carrier="xla" and no gates."""

def site_type() -> dict[str, Any]:
    """Return capsules of the handlers' state type, for jax.ffi.register_ffi_type."""

def cuda_site_type() -> dict[str, Any]:
    """Return what site_type does, for CUDA, whose plugin numbers types by itself."""

def compilation_begins() -> None:
    """Say that XLA is about to compile (or load) an executable."""

def compilation_ends() -> None:
    """Say that a compilation is over, with or without success."""

def set_local_timeout(seconds: float) -> None:
    """Set the deadline of collectives that several devices of this process take part in."""

def set_cuda_devices(ids: dict[int, int]) -> None:
    """Tell JAX's ids of this process's GPUs, by CUDA's ordinals; before any handler runs."""

def set_world(comm: int) -> None:
    """Set the communicator whose ranks are JAX's processes; it is cgx_ops.init() until then."""
