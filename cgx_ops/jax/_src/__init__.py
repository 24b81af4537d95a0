"""The implementation of cgx_ops.jax. Nothing here is public.

Imports point down: transforms, gradients, diloco -> collectives -> runtime -> cgx_ops._core.
"""
