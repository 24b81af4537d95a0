"""The implementation of cgx_ops.jax. Nothing here is public."""
