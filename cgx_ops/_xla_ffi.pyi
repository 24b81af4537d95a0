"""The compiled XLA FFI handlers (xla_ffi/*.cc); used by cgx_ops.jax only."""

from typing import Any

def collective_handlers() -> dict[str, Any]:
    """Return capsules of the handlers by FFI stage, for jax.ffi.register_ffi_target."""

def carried_handlers() -> dict[str, Any]:
    """Return capsules of the handlers of carrier="xla" by target, for register_ffi_target."""

def allreduce_q_handler() -> Any:
    """Return a capsule of allreduce_q's handler, for jax.ffi.register_ffi_target."""

def gate_handler() -> Any:
    """Return a capsule of the handler of overlap.py's gates, for jax.ffi.register_ffi_target."""

def cuda_collective_handlers() -> dict[str, Any]:
    """Return what collective_handlers does, for CUDA."""

def cuda_allreduce_q_handler() -> Any:
    """Return what allreduce_q_handler does, for CUDA."""

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

def version() -> str:
    """Return the version of the libcgx that the handlers use."""
