"""The communicators of torch's process groups, for any backend.

A group of the backend "cgx" is created with its communicator, under the group's name. Any other
group gets a communicator over its Store in the first call that needs one, which is collective over
its ranks.
"""

import contextlib
import datetime
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from cgx_ops import Communicator, _torch_ops
from cgx_ops._core import world
from cgx_ops._core.consistency import Gather
from cgx_ops.communicator import forget_calls
from cgx_ops.errors import CgxError, InvalidArgument, NotFound, Unsupported
from cgx_ops.torch._compat import parallel
from cgx_ops.torch.backend import launch
from cgx_ops.torch.backend.errors import as_backend_error

NAME = "cgx"  # of the backend


def is_ours(group: dist.ProcessGroup) -> bool:
    """Return whether a group uses the backend "cgx", for any device."""
    return NAME in (parallel.backends_of(group) or "")


# ---- 1. communicators over a Store ---------------------------------------------------------------


def own_store(store: parallel.Store, name: str, rank: int) -> parallel.Store:
    """Return a part of a group's store that belongs to one communicator of this name.

    A store may outlive its groups, as torchrun's does, and then contains keys of an earlier group
    of this name. So each rank counts its calls, and the count is part of the keys.
    """
    store = parallel.PrefixStore(f"{name}/cgx", store)
    return parallel.PrefixStore(str(store.add(f"made/{rank}", 1)), store)


def store_allgather(
    store: parallel.Store, rank: int, size: int, name: str, timeout: datetime.timedelta
) -> Gather:
    """Return an allgather of small blobs over a Store, to create one communicator.

    Each round has its own keys. The last rank that reads a round's blobs deletes them.
    """
    rounds = iter(range(2**31))

    def allgather(mine: bytes) -> Sequence[bytes]:
        prefix = str(next(rounds))
        keys = [f"{prefix}/{peer}" for peer in range(size)]
        store.set(keys[rank], mine.hex())
        try:
            store.wait(keys, timeout)
        except RuntimeError as error:  # a FileStore raises no DistError
            late = [peer for peer, key in enumerate(keys) if not store.check([key])]
            raise dist.DistBackendError(
                f"cgx, group '{name}': rank {rank} waited {timeout.total_seconds():g} s for ranks "
                f"{late} of {size} to connect; check that they are running and use this group"
            ) from error
        blobs = [bytes.fromhex(store.get(key).decode()) for key in keys]
        if store.add(f"{prefix}/read", 1) == size:
            for key in (*keys, f"{prefix}/read"):
                store.delete_key(key)
        return blobs

    return allgather


def connect(
    gather: Gather,
    rank: int,
    size: int,
    name: str,
    timeout: datetime.timedelta,
    transport: str | None,
    *,
    noise_rank: int | None = None,
    elastic: bool = False,
    connect_timeout: datetime.timedelta | None = None,
) -> Communicator:
    """Create the communicator of a group. Collective over its ranks.

    Args:
        gather: an allgather among the ranks.
        rank: this rank in the group.
        size: number of ranks.
        name: the communicator's name.
        timeout: its default deadline.
        transport: as in BackendOptions.
        noise_rank: as in Communicator.create; None: the rank in the job.
        elastic: as in Communicator.create.
        connect_timeout: limit for connecting the ranks. None: `timeout`.

    Raises:
        DistBackendError: the ranks cannot be connected, or one of them does not arrive.
    """
    if launch.under_mpirun() and not elastic:
        world.of_launcher()  # starts MPI, for ranks on several hosts
    with contextlib.suppress(NotFound):
        old = Communicator.find(name)
        if old.closed:  # its group failed and was not destroyed
            old.close()
    try:
        return Communicator.create(
            rank,
            size,
            gather,
            name,
            transport=transport,
            timeout=timeout.total_seconds(),
            noise_rank=_rank_in_job(rank) if noise_rank is None else noise_rank,
            elastic=elastic,
            connect_timeout=(connect_timeout or timeout).total_seconds(),
        )
    except Unsupported as error:
        raise dist.DistBackendError(
            f"cgx, group '{name}': {error}. If ranks cannot reach each other, use "
            "init_process_group('gloo') (or 'nccl') and compress with carrier='c10d'"
        ) from error
    except CgxError as error:
        raise as_backend_error(error, f"cgx, group '{name}': {error}") from error


def _rank_in_job(rank: int) -> int:
    return dist.get_rank() if dist.is_initialized() else rank


# ---- 2. the communicator of a group --------------------------------------------------------------


class _Slot:
    """The communicator of one group once it exists; the lock is held while it is created."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.communicator: Communicator | None = None
        self.era = ""  # of the members; see era_of()
        self.closes: weakref.finalize[..., Any] | None = None  # when the group is freed


_slots: "weakref.WeakKeyDictionary[dist.ProcessGroup, _Slot]" = weakref.WeakKeyDictionary()
_slots_lock = threading.Lock()


def register() -> None:
    """Let operators and init() find the communicators of groups here. Call once per process."""
    _torch_ops.find_groups_by(_id_of, _size_of)
    world.adopt_torch(lambda: communicator_of(parallel.group_or_default(None)))
    parallel.before_reconfigure(_leave)


def _size_of(name: str) -> int:
    """Return the size of a group, of all ranks for an empty name, without connecting it."""
    if not name and dist.is_initialized():
        return dist.get_world_size()
    group = parallel.group_by_name(name) if name else None
    return _found(name).size if group is None else group.size()


def _id_of(name: str) -> int:
    """Return the id of a group's communicator, of all ranks for an empty name."""
    return _found(name).id


def _found(name: str) -> Communicator:
    try:
        if not name:
            return world.init()
        group = parallel.group_by_name(name)
        return Communicator.find(name) if group is None else communicator_of(group)
    except NotFound as error:
        raise InvalidArgument(str(error)) from None
    except (InvalidArgument, dist.DistBackendError):
        raise
    except CgxError as error:
        raise as_backend_error(error, str(error)) from error


def communicator_of(group: dist.ProcessGroup) -> Communicator:
    """Return the communicator of a process group. Collective over its ranks in the first call.

    Raises:
        InvalidArgument: torch.distributed does not list the group, so that it has no store.
        DistBackendError: the ranks cannot be connected, or one of them does not arrive.
    """
    slot = _slot_of(group)
    if slot.communicator is None:
        with slot.lock:
            slot.communicator = slot.communicator or _find_or_make(group, slot)
    return slot.communicator


def _slot_of(group: dist.ProcessGroup) -> _Slot:
    slot = _slots.get(group)
    if slot is None:
        with _slots_lock:
            slot = _slots.setdefault(group, _Slot())
    return slot


def era_of(group: dist.ProcessGroup) -> str:
    """Return a text for the members of a group; "" until they change.

    It is the same on all of them, and another one for every change of the same object.
    """
    return _slot_of(group).era


_leavers: list[Callable[[Communicator], None]] = []


def before_change(leave: Callable[[Communicator], None]) -> Callable[[Communicator], None]:
    """Let changes of members first call this function with the communicator of the old ones."""
    _leavers.append(leave)
    return leave


def forget(name: str, era: str) -> None:
    """Note that the members of the groups with this name change; `era` is that of the next."""
    listed = parallel.group_by_name(name)
    if listed is not None:
        _slot_of(listed)
    for group, slot in list(_slots.items()):
        if group.group_name == name:
            slot.era, old, slot.communicator = era, slot.communicator, None
            if old is not None:
                forget_calls(old.id)
                for leave in _leavers:
                    leave(old)


def _leave(group: dist.ProcessGroup, uuid: int) -> None:
    """Abort the communicator of a group of another backend whose members change."""
    if is_ours(group):  # its backend does this
        return
    if not getattr(group, "supports_reconfigure", False):  # torch will raise
        return
    old = _slot_of(group).communicator
    forget(group.group_name, f"/{uuid}")
    if old is not None and not old.closed:
        old.abort(f"its process group is reconfigured (uuid {uuid})")


def _find_or_make(group: dist.ProcessGroup, slot: _Slot) -> Communicator:
    with contextlib.suppress(NotFound):
        return Communicator.find(group.group_name)
    if is_ours(group):
        raise dist.DistBackendError(
            f"cgx, group '{group.group_name}': it is not connected: it was aborted, or "
            "torch.distributed._reconfigure has not connected it"
        )
    store = parallel.store_of(group)
    if store is None:
        raise InvalidArgument(
            f"torch.distributed does not list the process group '{group.group_name}', so cgx_ops "
            "cannot connect its ranks: create it with torch.distributed.new_group"
        )
    name = f"{dist.get_backend(group)}/{group.group_name}{slot.era}"
    rank, size = group.rank(), group.size()
    timeout = parallel.group_timeout(group) or dist.default_pg_timeout
    gather = store_allgather(own_store(store, name, rank), rank, size, name, timeout)
    _close_stale(name)
    made = connect(gather, rank, size, name, timeout, None, elastic=bool(slot.era))
    if slot.closes is not None:
        slot.closes.detach()
    slot.closes = weakref.finalize(group, _close_if_open, made)
    slot.closes.atexit = False
    return made


def _close_stale(name: str) -> None:
    """Close the communicator of an earlier group of this name that is still referenced."""
    with contextlib.suppress(NotFound):
        Communicator.find(name).close()


def _close_if_open(communicator: Communicator) -> Any:
    with contextlib.suppress(CgxError):
        communicator.close()
