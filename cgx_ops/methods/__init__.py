"""Methods of compressed training, without a framework: PyTorch and JAX build on them."""
