"""Sent: a message of a hook that has arrived, and the messages that its callback sends next."""

from collections.abc import Callable, Sequence

import torch

from cgx_ops import Communicator, Config, Segment
from cgx_ops.torch.graph.carried import Carrier
from cgx_ops.torch.graph.work import Residuals, reason_of, refuse, start


class Sent:
    """A message of AveragingState.average() that is there, and the messages that follow it."""

    def __init__(self, by: Communicator | Carrier, number: int, followers: Sequence[str]) -> None:
        """Describe a message.

        Args:
            by: what carried it.
            number: of those of its name, as all ranks count them.
            followers: the names that follow() is called with, on every rank.
        """
        self._by, self._number = by, number
        self._due = list(followers)

    def call(self, then: "Callable[[Sent], object]") -> None:
        """Call then(self); if it fails, refuse what it has not sent: the other ranks wait for it.

        Their follow() raises which rank failed, and why.
        """
        try:
            then(self)
        except Exception as error:
            if isinstance(self._by, Communicator):
                for name in self._due:
                    refuse(self._by, name, self._number, reason_of(error))
            elif self._due:
                self._by.disconnect(error)
            raise

    def follow(
        self,
        buffer: torch.Tensor,
        config: Config,
        *,
        segments: Sequence[Segment],
        seed: Sequence[int],
        name: str,
        residuals: Residuals | None = None,
    ) -> None:
        """Average a buffer over the same ranks, and wait for it: in average()'s `then` alone.

        Threads come here in any order, another one on each rank: ranks match what they send by its
        name, which is one for each call in a `then`, and the number. The carrier "c10d" goes by the
        order, which is that of the messages followed: one thread does all of `then`.
        """
        if isinstance(self._by, Carrier):
            self._by.reduce(
                buffer, config, op="avg", segments=segments, seed=seed, residuals=residuals
            )
            self._due.remove(name)
            return
        started = start(
            self._by, "allreduce", buffer, buffer, config, op="avg", segments=segments,
            seed=seed, name=name, occurrence=self._number, residuals=residuals,
        )  # fmt: skip
        self._due.remove(name)
        started.wait()
