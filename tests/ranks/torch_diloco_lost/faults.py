"""Where in an average a rank is killed, and which messages another rank misses.

A fault is a pair of functions: one for the victim, one for a survivor. Each is called just before
the average that fails, and patches the functions which the average calls.
"""

import os
import random
import signal
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import torch.distributed as dist

from cgx_ops.torch.averaging.confirmation import Confirmation
from cgx_ops.torch.averaging.exchange import Exchange
from cgx_ops.torch.diloco import DiLoCo

_start, _follow = Exchange.start, Confirmation.follow


def die(*_: Any, **__: Any) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def _patch(owner: type, name: str, function: Callable[..., Any]) -> None:
    setattr(owner, name, function)


def nothing(_: random.Random) -> None:
    pass


def mend() -> None:
    """Remove the patches."""
    _patch(Exchange, "start", _start)
    _patch(Confirmation, "follow", _follow)


# ---- the victim ----------------------------------------------------------------------------------


def before_send(_: random.Random) -> None:
    _patch(Exchange, "start", die)


def sending(random: random.Random) -> None:
    """Die up to 4 ms after the start, in whatever the average then does."""
    delay = random.uniform(0, 0.004)

    def start(self: Exchange, *args: Any, **kwargs: Any) -> Any:
        threading.Timer(delay, die).start()
        return _start(self, *args, **kwargs)

    _patch(Exchange, "start", start)


def before_confirmation(_: random.Random) -> None:
    _patch(Confirmation, "follow", die)


def after_confirmation(_: random.Random) -> None:
    def follow(self: Confirmation, *args: Any, **kwargs: Any) -> NoReturn:
        _follow(self, *args, **kwargs)
        die()

    _patch(Confirmation, "follow", follow)


def after_applying(_: random.Random) -> None:
    """Die in the next average, which another rank may have begun."""
    apply = DiLoCo._apply

    def applied(self: DiLoCo, *args: Any) -> None:
        apply(self, *args)
        before_send(random.Random(0))

    _patch(DiLoCo, "_apply", applied)


# ---- a survivor ----------------------------------------------------------------------------------


def misses_means(_: random.Random) -> None:
    """Have the average fail on this rank, as if the last message to it was lost."""

    def follow(self: Confirmation, *_: Any, **__: Any) -> NoReturn:
        self.average.fill_(float("nan"))
        raise dist.DistBackendError("the average was lost on this rank")

    _patch(Confirmation, "follow", follow)


def misses_confirmation(_: random.Random) -> None:
    """Have the confirmation fail on this rank only."""

    def follow(self: Confirmation, *args: Any, **kwargs: Any) -> NoReturn:
        _follow(self, *args, **kwargs)
        raise dist.DistBackendError("the confirmation was lost on this rank")

    _patch(Confirmation, "follow", follow)


Fault = Callable[[random.Random], None]
# ---- in regroup() --------------------------------------------------------------------------------


def _dies_in(function: str, call: int, *, after: bool = False) -> None:
    """Die in a call of a collective of torch, counted from 1."""
    calls, original = iter(range(1, 1000)), getattr(dist, function)

    def counted(*args: Any, **kwargs: Any) -> Any:
        last = next(calls) == call
        if last and not after:
            die()
        result = original(*args, **kwargs)
        return die() if last else result

    setattr(dist, function, counted)


# The first all_gather_object compares settings, the second one progress.
IN_REGROUP: dict[str, Callable[[], None]] = {
    "comparing": lambda: _dies_in("all_gather_object", 1),
    "before progress": lambda: _dies_in("all_gather_object", 2),
    "after progress": lambda: _dies_in("all_gather_object", 2, after=True),
    "first parameter": lambda: _dies_in("broadcast", 1),
    "third parameter": lambda: _dies_in("broadcast", 3),
    "last parameter": lambda: _dies_in("broadcast", 6, after=True),
}

# By name: for the victim, and for the survivor with the lowest number, or all of ON_ALL.
FAULTS: dict[str, tuple[Fault, Fault]] = {
    "none": (nothing, nothing),
    "before send": (before_send, nothing),
    "sending": (sending, nothing),
    "before confirmation": (before_confirmation, nothing),
    "after confirmation": (after_confirmation, nothing),
    "after applying": (after_applying, nothing),
    "one without means": (before_confirmation, misses_means),
    "one without confirmation": (after_confirmation, misses_confirmation),
    "all without confirmation": (after_confirmation, misses_confirmation),
}
ON_ALL = {"all without confirmation"}
