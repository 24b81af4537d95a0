"""The backend "cgx" of torch.distributed.

process_group.py: the backend, its options, compressed() and uncompressed(). groups.py: the
communicator of any process group. launch.py: env:// under mpirun and srun. errors.py: exceptions.
"""

from cgx_ops.torch.backend.process_group import BackendOptions, compressed, uncompressed

__all__ = ["BackendOptions", "compressed", "uncompressed"]
