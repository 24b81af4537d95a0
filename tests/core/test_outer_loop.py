"""outer_loop: when fragments are sent and applied, their layers, invalid settings."""

from typing import Any

import numpy as np
import pytest

from cgx_ops.errors import InvalidArgument
from cgx_ops.methods.outer_loop import Schedule, strided


def _events(schedule: Schedule, steps: int) -> list[tuple[int, str, int]]:
    found: list[tuple[int, str, int]] = []
    for step in range(1, steps + 1):
        found += [(step, "send", f) for f in [schedule.sent_after(step)] if f is not None]
        found += [(step, "apply", f) for f in [schedule.applied_after(step)] if f is not None]
    return found


def test_one_fragment_is_sent_and_applied_after_the_same_step() -> None:
    expected = [(3, "send", 0), (3, "apply", 0), (6, "send", 0), (6, "apply", 0)]
    assert _events(Schedule(3), 8) == expected


def test_fragments_take_turns_and_are_applied_later() -> None:
    assert _events(Schedule(6, 2, 1), 12) == [
        (2, "send", 0),
        (3, "apply", 0),
        (5, "send", 1),
        (6, "apply", 1),
        (8, "send", 0),
        (9, "apply", 0),
        (11, "send", 1),
        (12, "apply", 1),
    ]


def test_layers_are_strided() -> None:
    names = ["embed.weight", "blocks.0.a.weight", "blocks.0.b.bias", "blocks.1.a.weight", "scale"]
    assert strided(names, 2) == [[0, 3], [1, 2, 4]]
    assert strided(names, 1) == [[0, 1, 2, 3, 4]]
    with pytest.raises(InvalidArgument, match=r"there are 4 layers: embed, blocks\.0, "):
        strided(names, 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "sync_every is 0; it must be an integer of at least 1"),
        ((True,), "sync_every is True"),
        ((2.0,), r"sync_every is 2\.0"),
        ((6, 0), "fragments is 0"),
        ((6, 4), "sync_every is 6, fragments 4; fragments must divide it"),
        ((6, 2, -1), "fragment_sync_delay is -1"),
        ((6, 2, 3), "it must be less than sync_every / fragments, 3"),
        ((6, 2, 1, 1.5), r"fragment_update_alpha is 1\.5; it must be from 0 to 1"),
        ((6, 2, 1, float("nan")), "fragment_update_alpha is nan"),
        ((6, 2, 1, "0"), "fragment_update_alpha is '0'"),
    ],
)
def test_invalid_settings(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Schedule(*arguments)  # pyright: ignore[reportArgumentType]


def test_numpy_numbers() -> None:
    given: Any = (np.int64(6), np.int32(2), 1, np.float32(0.5))
    assert repr(Schedule(*given)) == repr(Schedule(6, 2, 1, 0.5))
