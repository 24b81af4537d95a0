"""The implementation of cgx_ops.jax. Nothing here is public.

Imports point down: transforms, gradients, diloco -> collectives -> runtime -> cgx_ops._core.
"""

from cgx_ops._core import versions

# Before importing modules that use parts of JAX that differ between versions.
versions.require_framework("jax")
