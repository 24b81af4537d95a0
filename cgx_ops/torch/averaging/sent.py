"""Sent: a completed message, whose callback may send further messages."""

from collections.abc import Callable, Sequence

import torch

from cgx_ops import Communicator, Config, Segment
from cgx_ops._core.refusal import reason_of, refuse
from cgx_ops.torch.graph.carried import Carrier
from cgx_ops.torch.graph.work import Residuals, start


class Sent:
    """A completed message of AveragingState.average(), and the messages that follow it."""

    def __init__(self, by: Communicator | Carrier, number: int, followers: Sequence[str]) -> None:
        """Describe a message.

        Args:
            by: its communicator or carrier.
            number: its index among the messages of its name, the same on all ranks.
            followers: the names that follow() is called with, on every rank.
        """
        self._by, self._number = by, number
        self._due = list(followers)

    def call(self, then: "Callable[[Sent], object]") -> None:
        """Call then(self). If it fails, refuse the followers that it has not sent.

        The other ranks wait for them. Their follow() then raises which rank failed, and why.
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
        """Average a buffer over the same ranks and wait for it. For use in average()'s `then` only.

        Threads call this in any order, which differs between ranks. Ranks match the messages by
        name, which is unique within a `then`, and by index. The carrier "c10d" matches by order:
        one thread runs all `then`, in the order of the messages.
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
