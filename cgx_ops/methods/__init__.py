"""Methods of compressed training without a framework; PyTorch and JAX use them."""
