"""Hierarchical averages for Deep Gradient Compression: exact within a host, sparse between hosts.

1. the ranks of a host add up their gradients
2. its first rank, the only one with momenta and residuals, exchanges with those of the other hosts
3. it sends the sum of all to the ranks of its host

If a stage fails, the ranks that wait for the next stage get the reason immediately.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from cgx_ops import Communicator, Config, Segment
from cgx_ops._core.refusal import or_refuse, reason_of, refuse
from cgx_ops._core.tables import EXACT_BITS
from cgx_ops.torch.backend import groups
from cgx_ops.torch.graph.work import Residuals, future_of, start

_EXACT = Config(bits=EXACT_BITS)


class Hosts:
    """Two communicators: the ranks of this host, and the first ranks of all hosts.

    Attributes:
        whole: the ranks of all hosts.
        local: the ranks of this host.
        firsts: the first rank of each host; None on the other ranks.
    """

    def __init__(self, comm: Communicator) -> None:
        """Split a communicator. Collective over it."""
        name = f"{comm.name}/deep_gradient {comm.next_call('deep_gradient')}"
        local = comm.split(comm.host, name=f"{name}, host")
        assert local is not None
        self.whole, self.local = comm, local
        self.firsts = comm.split(None if local.rank else 0, name=f"{name}, hosts")

    def close(self) -> None:
        """Free both communicators. Not collective."""
        self.local.close()
        if self.firsts is not None:
            self.firsts.close()

    def abort(self, reason: str) -> None:
        """End the collectives of both communicators on all their ranks, and free them."""
        self.local.abort(reason)
        if self.firsts is not None:
            self.firsts.abort(reason)

    def gather(self, kept: torch.Tensor, name: str) -> None:
        """Add up a tensor of a host's ranks on its first rank, in place, and wait.

        On the other ranks it becomes zero.
        """
        self._add_up(kept, [Segment(0, kept.numel())], name).wait()
        if self.firsts is None:
            kept.zero_()

    @contextlib.contextmanager
    def or_refuse_gathers(self, names: Sequence[str]) -> Iterator[None]:
        """Refuse this rank's next calls of gather() if the block before them fails.

        Args:
            names: of the calls. The other ranks fail in the first one, so only that is refused.
        """
        with or_refuse(self.local, names[0]) if names else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def or_refuse(self, name: str) -> Iterator[None]:
        """Refuse this rank's next average() of a name if the block that prepares it fails."""
        try:
            yield
        except Exception as error:
            refuse(self.local, name, -1, reason_of(error))
            number = self.local.next_call(_back(name))
            if self.firsts is not None:
                refuse(self.firsts, name, number, reason_of(error))
            raise

    def average(
        self,
        message: torch.Tensor,
        config: Config,
        *,
        segments: Sequence[Segment],
        name: str,
        residuals: Residuals,
        before: Callable[[], None],
        then: Callable[[], object],
    ) -> torch.futures.Future[torch.Tensor]:
        """Average a message over all ranks in place, in the background.

        Args:
            message: float32.
            config: settings of the messages between hosts.
            segments: its layers.
            name: name of the message, which identifies it across ranks.
            residuals: of each segment, or None; used on the first rank of a host only.
            before: called there when the message has the sums of this host's ranks.
            then: called when the average is done, before the future completes.

        Returns:
            A future of the message.
        """
        plain, back = [Segment(s.offset, s.numel) for s in segments], _back(name)
        # Counted here, in an order that all ranks share; threads start later messages in any order.
        number = self.local.next_call(back)
        added = future_of(self._add_up, message, plain, name)

        def between(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            parts = [message[s.offset : s.offset + s.numel] for s in segments]
            if self.firsts is None:
                future.value()  # raises the message's error
                with or_refuse(self.local, back, number):
                    for part in parts:
                        part.zero_()
            else:
                with or_refuse(self.firsts, name, number):
                    future.value()
                with or_refuse(self.local, back, number):
                    with or_refuse(self.firsts, name, number):
                        before()
                    start(
                        self.firsts, "allreduce", message, message, config, segments=segments,
                        seed=[0] * len(segments), name=name, occurrence=number,
                        residuals=residuals,
                    ).wait()  # fmt: skip
                    for part in parts:
                        part.div_(self.whole.size)
            self._add_up(message, plain, back, number).wait()
            then()
            return message

        return added.then(between)

    def _add_up(
        self,
        x: torch.Tensor,
        segments: Sequence[Segment],
        name: str,
        occurrence: int | None = None,
    ) -> dist.Work:
        return start(
            self.local, "allreduce", x, x, _EXACT, segments=segments, seed=[0] * len(segments),
            name=name, occurrence=occurrence,
        )  # fmt: skip


def _back(name: str) -> str:
    """Return the name of the message that sends the sum of all to a host."""
    return f"{name}, back"


_known: dict[int, Hosts] = {}


def hosts_of(comm: Communicator) -> Hosts | None:
    """Return the hosts of a communicator; None if it has one host, or one rank on each host.

    The first call is collective over `comm`.
    """
    if comm.hosts == 1 or comm.hosts == comm.size:
        return None
    if comm.id not in _known:
        for known in [x for x in _known.values() if x.whole.closed]:  # their names may be reused
            del _known[known.whole.id]
            known.close()
        _known[comm.id] = Hosts(comm)
    return _known[comm.id]


@groups.before_change
def _leave(comm: Communicator) -> None:
    if comm.id in _known:
        _known.pop(comm.id).abort("the members of its process group change")
