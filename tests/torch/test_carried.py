"""carrier="c10d" under torchrun, without MPI. The checks are in the rank program."""

import uuid
from collections.abc import Sequence

import pytest
from support import launch
from support import torch_cases as tc
from support.rank_checks import Launch, RankCheck, listed, rank_checks

PROGRAM = "run_torch_carried.py"


def on(n: int, marks: Sequence[pytest.MarkDecorator]) -> Launch:
    names = [
        f"{check} on {size}"
        for size in range(1, n + 1)
        for check in listed(PROGRAM) + (listed(PROGRAM, "ON_TWO") if size == 2 else [])
    ]
    return Launch(
        n, PROGRAM, names=[*names, "the_default_group"], by=launch.torchrun, marks=marks,
        arguments=[uuid.uuid4().hex], env=tc.ENVIRONMENT, timeout=300,
    )  # fmt: skip


@rank_checks(on(3, [pytest.mark.slow]), on(4, [pytest.mark.exhaustive]))
def test_gloo_carries_the_same_bits(check: RankCheck) -> None:
    check.passes()
