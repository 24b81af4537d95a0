"""A launch of checks that a rank program runs over groups of one rank, of two ranks, and so on."""

from collections.abc import Sequence

import pytest

from support import launch
from support import torch_cases as tc
from support.rank_checks import Launch, listed


def over_groups(
    n: int, program: str, *names: str, marks: Sequence[pytest.MarkDecorator] = ()
) -> Launch:
    """Launch a program's CHECKS by torchrun over groups of 1 to n ranks, and its other checks.

    The program's ON_TWO are checks over groups of two ranks.
    """
    over = [
        f"{check} on {size}"
        for size in range(1, n + 1)
        for check in listed(program) + (listed(program, "ON_TWO") if size == 2 else [])
    ]
    return Launch(
        n, program, names=[*over, *names], by=launch.torchrun, marks=marks, env=tc.ENVIRONMENT,
        timeout=300,
    )  # fmt: skip
