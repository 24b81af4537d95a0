"""The backend "cgx" of torch.distributed, its options and its launchers."""

from cgx_ops.torch.backend.process_group import BackendOptions, compressed, uncompressed

__all__ = ["BackendOptions", "compressed", "uncompressed"]
