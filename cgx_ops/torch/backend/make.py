"""Create backends "cgx": compare options, connect the ranks, add the inner backends."""

import datetime
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from cgx_ops import Communicator, _torch_ops
from cgx_ops._core.consistency import Gather, require_same
from cgx_ops.communicator import forget_calls
from cgx_ops.torch._compat import parallel
from cgx_ops.torch.backend import groups
from cgx_ops.torch.backend.members import Handle, Meeting
from cgx_ops.torch.graph.work import devices

# Makes the backend of a group that is split off or merged: (store, rank, size, options).
MakeRelated = Callable[[parallel.Store, int, int, _torch_ops.Options], _torch_ops.Backend]

_GROUPS = 2**20  # more than a process makes between two reconfigurations


@dataclass(frozen=True)
class Chosen:
    """What BackendOptions say about creating a group.

    Attributes:
        compared: version and options that must be equal on all ranks. Empty: they come from another
            group, where they were compared.
        transport: the name of the transport, or None.
        measure: called on every rank once they are connected, or None.
    """

    compared: dict[str, Any] = field(default_factory=dict)
    transport: str | None = None
    measure: Callable[[], None] | None = None


def connected(
    store: parallel.Store,
    rank: int,
    size: int,
    options: _torch_ops.Options,
    related: MakeRelated,
    chosen: Chosen = Chosen(),
    noise_rank: int | None = None,
    elastic: bool = False,
) -> _torch_ops.Backend:
    """Create the backend of a group. Collective over its ranks.

    Args:
        store: the group's store.
        rank: this rank in the group.
        size: number of ranks.
        options: the binding's options.
        related: makes the backends of groups that are split off.
        chosen: the rest.
        noise_rank: as in Communicator.create; None: the rank in the job.
        elastic: as in Communicator.create.
    """
    name, timeout = options.group_name, options._timeout
    store = groups.own_store(store, name, rank)
    comm, inner = _connect(store, rank, size, options, chosen, timeout, noise_rank, elastic)
    try:
        return _torch_ops.Backend(rank, size, comm.id, inner, "cuda" in devices(), options, related)
    except BaseException:
        comm.close()
        raise


def unconnected(
    store: parallel.Store,
    rank: int,
    options: _torch_ops.Options,
    related: MakeRelated,
    chosen: Chosen,
) -> _torch_ops.Backend:
    """Create the backend of a group that torch's reconfigure connects, from torch 2.14 on.

    Args:
        store: the group's store.
        rank: this rank in the group, until it is connected.
        options: the binding's options.
        related: makes the backends of groups that are split off.
        chosen: the rest.
    """
    name = options.group_name
    reconfigurations = _Reconfigurations(
        name, parallel.PrefixStore(f"{name}/cgx/members", store), rank, options, chosen
    )
    return _torch_ops.Backend(
        rank, 1, -1, {}, "cuda" in devices(), options, related, reconfigurations
    )


class _Reconfigurations:
    """The successive members of a group, for its backend: see Backend::Reconfigurations in C++."""

    def __init__(
        self,
        name: str,
        store: parallel.Store,
        rank: int,
        options: _torch_ops.Options,
        chosen: Chosen,
    ) -> None:
        self._name, self._store = name, store
        self._options, self._chosen = options, chosen
        self._handle = Handle.of_this_process(dist.get_rank() if dist.is_initialized() else rank)
        self._lock = threading.Lock()
        self._communicator: int | None = None  # the id of the last one

    def handle(self) -> str:
        return str(self._handle)

    def reconfigure(
        self,
        handles: list[str] | set[str],
        uuid: int,
        timeout: datetime.timedelta | None,
        disconnect: Callable[[str], None],
    ) -> tuple[int, int, int, dict[str, Any]]:
        """Connect the processes with these handles, under their new ranks.

        The group has no communicator while this runs, nor after it fails.

        Args:
            handles: those of the next members.
            uuid: as in Meeting.
            timeout: for the members to come, and for each step of connecting them.
            disconnect: ends the old group's communicator and collectives, for a reason.

        Returns:
            The rank, the number of ranks, the communicator's id and the inner backends.
        """
        if not self._lock.acquire(blocking=False):
            raise dist.DistBackendError(
                f"cgx, group '{self._name}': another thread reconfigures it: one at a time"
            )
        try:
            return self._meet(handles, uuid, timeout or self._options._timeout, disconnect)
        finally:
            self._lock.release()

    def _meet(
        self,
        handles: list[str] | set[str],
        uuid: int,
        timeout: datetime.timedelta,
        disconnect: Callable[[str], None],
    ) -> tuple[int, int, int, dict[str, Any]]:
        name = self._name
        meeting = Meeting(name, self._store, self._handle, handles, uuid)
        rank, size = meeting.rank, meeting.size
        disconnect(f"it is reconfigured (uuid {uuid}) to {size} ranks")
        groups.forget(name, f"/{uuid}")
        if self._communicator is not None:
            forget_calls(self._communicator)
            self._communicator = None
        meeting.wait(timeout)
        comm, inner = _connect(
            meeting.store, rank, size, self._options, self._chosen, timeout,
            noise_rank=rank, elastic=True,
        )  # fmt: skip
        try:
            meeting.end()
            _update_torch(name, uuid, size)
            self._handle, self._communicator = self._handle.next(), comm.id
            return rank, size, comm.id, inner
        except BaseException:
            comm.close()  # its name would be taken
            raise


def _update_torch(name: str, uuid: int, size: int) -> None:
    """Set in torch what it needs to make groups of the default group's new members.

    torch names a group by the number of groups that the process has made. A new process has
    another number, and both parts of a split have the same one. The uuid is common to the members,
    and used once: it gives their next group a name that no other group has.

    Args:
        name: of the group that is reconfigured; nothing changes if it is not the default group.
        uuid: of the reconfiguration.
        size: number of members.
    """
    default = dist.group.WORLD
    if default is not None and default.group_name == name:
        parallel.set_groups_made((2 * uuid + 1) * _GROUPS)  # never 0, where processes begin
        parallel.set_ranks_of_default_group(size)


def _connect(
    store: parallel.Store,
    rank: int,
    size: int,
    options: _torch_ops.Options,
    chosen: Chosen,
    timeout: datetime.timedelta,
    noise_rank: int | None,
    elastic: bool,
) -> tuple[Communicator, dict[str, Any]]:
    """Return the communicator and the inner backends of a group. Collective over its ranks.

    Args:
        store: a part of the store that only these ranks use.
        rank: this rank in the group.
        size: number of ranks.
        options: the binding's options.
        chosen: the rest.
        timeout: of each step of connecting.
        noise_rank: as in Communicator.create; None: the rank in the job.
        elastic: as in Communicator.create.
    """
    name = options.group_name
    gather = groups.store_allgather(store, rank, size, name, timeout)
    _require_same_options(name, chosen, gather)
    comm = groups.connect(
        gather, rank, size, name, options._timeout, chosen.transport,
        noise_rank=noise_rank, elastic=elastic, connect_timeout=timeout,
    )  # fmt: skip
    try:
        inner = _inner(store, rank, size, options, timeout)
        if chosen.measure:
            chosen.measure()
    except BaseException:
        comm.close()
        raise
    return comm, inner


def _require_same_options(name: str, chosen: Chosen, gather: Gather) -> None:
    """Raise on every rank if ranks have different versions or compression options.

    With different options, ranks could wait for each other: some would use the DDP hook, others
    not.
    """
    if not chosen.compared:
        return
    require_same(
        f"the backend cgx, group '{name}'",
        chosen.compared,
        gather,
        "Use the same version of cgx_ops, BackendOptions and CGX_* variables on all ranks. mpirun "
        "forwards a variable to other hosts only if you name it: mpirun -x "
        "CGX_COMPRESSION_QUANTIZATION_BITS",
        error=dist.DistBackendError,
    )


def _inner(
    store: parallel.Store,
    rank: int,
    size: int,
    options: _torch_ops.Options,
    timeout: datetime.timedelta,
) -> dict[str, Any]:
    """Create the backends that run everything that the core does not, by device type.

    Args:
        store: the group's own part of the store.
        rank: this rank in the group.
        size: number of ranks.
        options: the binding's options.
        timeout: for connecting gloo.
    """
    gloo_store = parallel.PrefixStore("gloo", store)
    try:
        gloo: Any = dist.ProcessGroupGloo(gloo_store, rank, size, timeout=timeout)
    except RuntimeError as error:
        raise dist.DistBackendError(
            f"cgx, group '{options.group_name}': rank {rank}: gloo cannot connect the {size} ranks "
            f"within {timeout.total_seconds():g} s; a rank may have ended: {error}"
        ) from error
    inner: dict[str, Any] = {"cpu": gloo}
    if torch.cuda.is_available() and dist.is_nccl_available():
        nccl_options = dist.ProcessGroupNCCL.Options()
        nccl_options._timeout = options._timeout
        nccl_store = parallel.PrefixStore("nccl", store)
        inner["cuda"] = dist.ProcessGroupNCCL(nccl_store, rank, size, nccl_options)
    for backend in inner.values():
        backend.options.group_name = options.group_name
        backend.options.global_ranks_in_group = options.global_ranks_in_group
    return inner
