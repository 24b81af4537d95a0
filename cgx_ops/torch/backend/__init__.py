"""The backend "cgx" of torch.distributed, and the communicators of process groups."""

from cgx_ops.torch.backend.process_group import BackendOptions, compressed, uncompressed

__all__ = ["BackendOptions", "compressed", "uncompressed"]
