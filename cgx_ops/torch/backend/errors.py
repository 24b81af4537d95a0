"""The exceptions of failures among ranks in PyTorch, one for each status of cgx.h.

Each is a torch.distributed.DistBackendError and the exception that numpy's calls raise, so that
programs decide by the type. In backward() torch raises a plain DistBackendError.
"""

import torch.distributed as dist

from cgx_ops import _torch_ops, errors


class MismatchError(errors.MismatchError, dist.DistBackendError):
    """Ranks called one collective with different arguments."""


class DeadlineExceeded(errors.DeadlineExceeded, dist.DistBackendError):
    """A collective outlived its deadline; its communicator is closed."""


class PeerFailed(errors.PeerFailed, dist.DistBackendError):
    """A peer died or gave up."""


class Closed(errors.Closed, dist.DistBackendError):
    """The communicator was closed before the call."""


class SystemFailure(errors.SystemFailure, dist.DistBackendError):
    """MPI or the operating system refused."""


_KINDS: dict[type[errors.CgxError], type[dist.DistBackendError]] = {
    errors.MismatchError: MismatchError,
    errors.DeadlineExceeded: DeadlineExceeded,
    errors.PeerFailed: PeerFailed,
    errors.Closed: Closed,
    errors.SystemFailure: SystemFailure,
}


def register() -> None:
    """Have the compiled part raise these. Once per process."""
    _torch_ops.make_errors_by(_from_status)


def as_backend_error(error: errors.CgxError, text: str) -> dist.DistBackendError:
    """Return the DistBackendError of this text that stands for an error of the core."""
    return _KINDS.get(type(error), dist.DistBackendError)(text)


def _from_status(status: int, text: str) -> dist.DistBackendError:
    return as_backend_error(errors.from_status(status, text), text)
