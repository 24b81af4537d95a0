"""The compiled XLA FFI handlers (xla_ffi/*.cc); used by cgx_ops.jax only."""

from typing import Any

def psum_q_handlers() -> dict[str, Any]:
    """Capsules of the handlers by FFI stage, for jax.ffi.register_ffi_target."""

def site_type() -> dict[str, Any]:
    """Capsules of the handlers' state type, for jax.ffi.register_ffi_type."""

def compilation_begins() -> None:
    """Says that XLA is about to compile (or load) an executable."""

def compilation_ends() -> None:
    """Says that a compilation is over, with or without success."""

def set_timeout(seconds: float) -> None:
    """Sets the deadline of collectives started from now on; 0: that of their communicator."""

def version() -> str:
    """Version of the libcgx that the handlers use."""
