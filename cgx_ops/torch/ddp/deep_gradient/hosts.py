"""Hosts: values are added up within a host, exact, and sent from host to host, sparse.

1. the ranks of a host add up their gradients
2. its first rank, which alone has momenta and residuals, sends to those of the other hosts
3. it gives the sum of all to its host

Where one fails those who wait for the next are told why, at once.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from cgx_ops import Communicator, Config, Segment
from cgx_ops._core.tables import EXACT_BITS
from cgx_ops.torch.graph.work import Residuals, future_of, or_refuse, reason_of, refuse, start

_EXACT = Config(bits=EXACT_BITS)


class Hosts:
    """The ranks of this host, and the first ranks of all hosts, which make two communicators.

    Attributes:
        whole: the ranks of all hosts.
        local: this host's ranks.
        firsts: of each host the first rank; None on the others.
    """

    def __init__(self, comm: Communicator) -> None:
        """Divide a communicator. Collective over it."""
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

    def gather(self, kept: torch.Tensor, name: str) -> None:
        """Have the first rank of each host take over what its ranks have: in place, and wait."""
        self._add_up(kept, [Segment(0, kept.numel())], f"{name}, kept").wait()
        if self.firsts is None:
            kept.zero_()

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
            config: how it travels from host to host.
            segments: its layers.
            name: matches it with what other ranks average.
            residuals: of each segment, or None; used on the first rank of a host alone.
            before: called there when the message has the sums of this host's ranks.
            then: called when it is done, and before the future is.

        Returns:
            A future of the message.
        """
        places, back = [Segment(s.offset, s.numel) for s in segments], _back(name)
        # Counted here, where ranks start messages in one order; what follows is started on threads.
        number = self.local.next_call(back)
        added = future_of(self._add_up, message, places, name)

        def between(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            parts = [message[s.offset : s.offset + s.numel] for s in segments]
            if self.firsts is None:
                future.value()  # raises what went wrong
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
            self._add_up(message, places, back, number).wait()
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
    """Return the name of the message in which a host gets the sum of all."""
    return f"{name}, back"


_known: dict[int, Hosts] = {}


def hosts_of(comm: Communicator) -> Hosts | None:
    """Return the hosts of a communicator; None if there is one, or each has one rank.

    The first call is collective over `comm`.
    """
    if comm.hosts == 1 or comm.hosts == comm.size:
        return None
    if comm.id not in _known:
        for known in [x for x in _known.values() if x.whole.closed]:  # their names may come again
            del _known[known.whole.id]
            known.close()
        _known[comm.id] = Hosts(comm)
    return _known[comm.id]
