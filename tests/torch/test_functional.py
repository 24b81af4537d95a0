"""cgx_ops.torch.all_reduce and related functions. The checks are in the rank program."""

from collections.abc import Sequence

import pytest
from support import launch
from support import torch_cases as tc
from support.rank_checks import Launch, RankCheck, listed, rank_checks

PROGRAM = "run_torch_functional.py"


def on(n: int, marks: Sequence[pytest.MarkDecorator] = ()) -> Launch:
    names = [
        f"{check} on {size}"
        for size in range(1, n + 1)
        for check in listed(PROGRAM) + (listed(PROGRAM, "ON_TWO") if size == 2 else [])
    ]
    return Launch(
        n, PROGRAM, names=[*names, "group_forms", "bad_calls"], by=launch.torchrun, marks=marks,
        env=tc.ENVIRONMENT, timeout=300,
    )  # fmt: skip


@rank_checks(on(2), on(4, [pytest.mark.slow]))
def test_functions_over_gloo(check: RankCheck) -> None:
    check.passes()
