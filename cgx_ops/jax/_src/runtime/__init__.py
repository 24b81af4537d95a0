"""JAX, its processes, and the handlers that run in them."""
