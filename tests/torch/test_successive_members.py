"""What a process stores for the successive members of a group (from torch 2.14 on)."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch.distributed

from cgx_ops import Communicator, Config, communicator
from cgx_ops._core import library, verdicts
from cgx_ops.errors import NotFound
from cgx_ops.torch import BackendOptions
from cgx_ops.torch.backend import make
from cgx_ops.torch.backend.members import Meeting
from cgx_ops.torch.backend.process_group import native_options

dist: Any = torch.distributed  # its annotations refer to torch internals
NAME = "successive"
TIMEOUT = datetime.timedelta(seconds=20)


def close(*_: str) -> None:
    """Close the group's communicator, as the backend does in C++."""
    with contextlib.suppress(NotFound):
        library.call("cgx_comm_close", Communicator.find(NAME).id)


def measure() -> None:
    """Store calls and a verdict, as auto_bits does among several ranks."""
    made = Communicator.find(NAME)
    made.next_call("timing")
    verdicts.slot_of(made.id, Config())


@pytest.fixture
def connect() -> Iterator[Callable[[], int]]:
    """Return a function that connects the next members, this process alone."""
    options = native_options(BackendOptions(), NAME, TIMEOUT)
    chosen = make.Chosen(measure=measure)
    members = make._Reconfigurations(NAME, dist.HashStore(), 0, options, chosen)
    uuids = iter(range(100))

    def connected() -> int:
        _, _, communicator, _ = members.reconfigure([members.handle()], next(uuids), TIMEOUT, close)
        return communicator

    yield connected
    close()


@pytest.mark.parametrize("error", [KeyboardInterrupt("stop"), RuntimeError("no store")])
def test_the_next_members_connect_after_an_error_at_the_end(
    connect: Callable[[], int], error: BaseException
) -> None:
    connect()
    failing = mock.patch.object(Meeting, "end", side_effect=error)
    with failing, pytest.raises(type(error), match=str(error)):
        connect()
    with pytest.raises(NotFound):
        Communicator.find(NAME)
    connect()


def test_calls_and_verdicts_of_earlier_members_are_freed(connect: Callable[[], int]) -> None:
    made = [connect() for _ in range(3)]
    for by_id in (communicator._calls, verdicts._slots):
        assert set(made) & set(by_id) == {made[-1]}
