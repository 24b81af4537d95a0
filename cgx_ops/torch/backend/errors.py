"""The exceptions of failed collectives in PyTorch.

Each derives from torch.distributed.DistBackendError and from the exception of the numpy API, so
that programs can catch either. The error of a hook's future is a plain DistBackendError.
"""

import torch.distributed as dist

from cgx_ops import _torch_ops, errors


class MismatchError(errors.MismatchError, dist.DistBackendError):
    """Ranks called a collective with different arguments."""


class DeadlineExceeded(errors.DeadlineExceeded, dist.DistBackendError):
    """A collective exceeded its deadline; its communicator is closed."""


class PeerFailed(errors.PeerFailed, dist.DistBackendError):
    """A peer died or aborted."""


class Closed(errors.Closed, dist.DistBackendError):
    """The communicator was closed before the call."""


class SystemFailure(errors.SystemFailure, dist.DistBackendError):
    """MPI or the operating system returned an error."""


_KINDS: dict[type[errors.CgxError], type[dist.DistBackendError]] = {
    errors.MismatchError: MismatchError,
    errors.DeadlineExceeded: DeadlineExceeded,
    errors.PeerFailed: PeerFailed,
    errors.Closed: Closed,
    errors.SystemFailure: SystemFailure,
}


def register() -> None:
    """Make the binding raise these exceptions. Call once per process."""
    _torch_ops.make_errors_by(_from_status)


def as_backend_error(error: errors.CgxError, text: str) -> dist.DistBackendError:
    """Return the DistBackendError for an error of the core, with this text."""
    return _KINDS.get(type(error), dist.DistBackendError)(text)


def _from_status(status: int, text: str) -> dist.DistBackendError:
    return as_backend_error(errors.from_status(status, text), text)
