"""How processes that reconfigure a group (from torch 2.14 on) meet in its store."""

from __future__ import annotations

import datetime
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed
from hypothesis import given
from hypothesis import strategies as st

from cgx_ops.torch.backend.members import Handle, Meeting

dist: Any = torch.distributed  # its annotations refer to torch internals
TIMEOUT = datetime.timedelta(seconds=20)
AT_ONCE = 5.0  # seconds, far less than TIMEOUT: an error that does not wait for it


def handles(size: int) -> list[Handle]:
    return [Handle.of_this_process(rank) for rank in range(size)]


def meet(
    store: Any, own: Handle, members: Any, uuid: int, timeout: datetime.timedelta = TIMEOUT
) -> tuple[int, int] | str:
    """Return the rank and the number of ranks, or the text of the error."""
    try:
        meeting = Meeting("g", store, own, members, uuid)
        meeting.wait(timeout)
    except (ValueError, dist.DistBackendError) as error:
        return str(error)
    return meeting.rank, meeting.size


def meet_all(store: Any, calls: list[tuple[Handle, Any, int]]) -> list[Any]:
    """Let each process make its call at the same time."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(lambda call: meet(store, *call), calls))


def texts(members: list[Handle]) -> list[str]:
    return [str(each) for each in members]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_a_list_gives_ranks_by_position(size: int) -> None:
    members = handles(size)[::-1]
    met = meet_all(dist.HashStore(), [(each, texts(members), 7) for each in members])
    assert met == [(rank, size) for rank in range(size)]


def test_a_set_gives_ranks_by_the_rank_in_the_job() -> None:
    members = [Handle(rank, "0" * 16) for rank in (11, 2, 10, 1)]
    met = meet_all(dist.HashStore(), [(each, set(texts(members)), 7) for each in members])
    assert met == [(3, 4), (1, 4), (2, 4), (0, 4)]


def test_groups_meet_apart_and_again() -> None:
    store, members = dist.HashStore(), handles(4)
    halves = [(each, texts(members[:2]), 1) for each in members[:2]]
    halves += [(each, texts(members[2:]), 2) for each in members[2:]]
    assert meet_all(store, halves) == [(0, 2), (1, 2), (0, 2), (1, 2)]
    members = [each.next() for each in members]
    whole = [(each, texts(members), 3) for each in members]
    assert meet_all(store, whole) == [(rank, 4) for rank in range(4)]


@given(st.builds(Handle, st.integers(0, 2**31), st.from_regex("[0-9a-f]{16}", fullmatch=True),
                 st.integers(0, 2**63)))  # fmt: skip
def test_a_handle_is_a_text(handle: Handle) -> None:
    assert Handle.parse(str(handle)) == handle


@pytest.mark.parametrize("text", ["", "gloo:0:-1:0:", "cgx:0:12:0", "cgx:-1:0123456789abcdef:0"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a handle of the backend cgx"):
        Handle.parse(text)


# ---- Bad input: an error on every rank that waits for the one with the bad input -----------------


def test_a_uuid_is_used_once() -> None:
    store, (own,) = dist.HashStore(), handles(1)
    assert meet(store, own, [str(own)], 5) == (0, 1)
    assert "uuid 5 was already used: " in str(meet(store, own, [str(own)], 5))
    assert "already used with other handles" in str(meet(store, own.next(), [str(own.next())], 5))


def test_two_coordinators() -> None:
    store, members = dist.HashStore(), handles(3)
    begin = time.monotonic()
    first, second, third = meet_all(
        store,
        [
            (members[0], texts(members[:2]), 1),
            (members[1], texts(members), 1),
            (members[2], texts(members), 1),
        ],
    )
    # Which list is first depends on time; the members of both end either way.
    assert time.monotonic() - begin < AT_ONCE
    for outcome in (first, second, third):
        assert "one coordinator must choose" in str(outcome), (first, second, third)


def test_two_coordinators_with_different_uuids() -> None:
    store, members = dist.HashStore(), handles(3)
    soon = datetime.timedelta(seconds=0.3)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(
            lambda each: str(meet(store, members[each], texts(members), each + 1, soon)), (0, 1)
        )
    for outcome, other, uuid in ((first, members[1], 2), (second, members[0], 1)):
        assert f"{other} is in the reconfiguration with uuid {uuid}: one coordinator" in outcome
        assert f"{members[2]} is in" not in outcome
        assert "without processes that are lost" in outcome


def test_a_failed_reconfiguration_of_both_is_no_cause() -> None:
    store, members = dist.HashStore(), handles(3)
    soon = datetime.timedelta(seconds=0.2)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda each: meet(store, each, texts(members), 1, soon), members[:2]))
    outcome = str(meet(store, members[0], texts(members[:2]), 2, soon))
    assert outcome.endswith(
        f"for {members[1]} to call it; reconfigure without processes that are lost"
    )


def test_a_stale_handle_of_another_rank() -> None:
    store, members = dist.HashStore(), handles(3)
    begin = time.monotonic()
    calls = [(each, texts(members), 1) for each in (members[0], members[1].next(), members[2])]
    for outcome in meet_all(store, calls):
        assert "ended with an earlier reconfiguration" in str(outcome)
        assert str(members[1]) in str(outcome)
    assert time.monotonic() - begin < AT_ONCE


def test_a_handle_listed_twice() -> None:
    store, members = dist.HashStore(), handles(2)
    for each in members:
        assert "listed twice" in str(meet(store, each, texts([*members, members[0]]), 1))


def test_a_rank_that_is_not_listed() -> None:
    own, other = handles(2)
    assert "do not contain that of this process" in str(
        meet(dist.HashStore(), own, [str(other)], 1)
    )


def test_a_malformed_handle() -> None:
    (own,) = handles(1)
    assert "is not a handle" in str(meet(dist.HashStore(), own, [str(own), "x"], 1))


def test_no_handles() -> None:
    (own,) = handles(1)
    assert "do not contain" in str(meet(dist.HashStore(), own, [], 1))


def test_a_rank_that_does_not_come() -> None:
    store, (own, lost) = dist.HashStore(), handles(2)
    outcome = str(meet(store, own, texts([own, lost]), 1, datetime.timedelta(seconds=0.2)))
    assert f"waited 0.2 s for {lost} to call it" in outcome
    assert meet(store, own, [str(own)], 2) == (0, 1)  # a fresh uuid without the lost rank
