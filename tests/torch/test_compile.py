"""torch.ops.cgx under torch.compile, on two processes. The checks are in the rank programs."""

from typing import Any

import pytest
from support import torch_cases as tc
from support.rank_checks import Launch, RankCheck, rank_checks

# Two compilers share two cores, so deadlines are far above the usual half minute to a minute. A
# collective that misses its peer fails long before.
OPTIONS: dict[str, Any] = {"env": {**tc.ENVIRONMENT, "CGX_TIMEOUT": "90"}, "timeout": 600}
slow, exhaustive = [pytest.mark.slow], [pytest.mark.exhaustive]


DAILY = ["refused.*", "with_lowering", "forward_and_backward", "seeds", "in_place_on_the_input"]
LONGER = ["dynamic_shapes", "operators", "lists", "steps_with_feedback", "input_memory_not_reused"]
LONGER += ["checkpointed", "checkpointed_in_a_whole_step", "compiled_autograd"]


@rank_checks(
    Launch(2, "run_torch_compile.py", *DAILY, **OPTIONS),
    Launch(2, "run_torch_compile.py", *LONGER, marks=slow, **OPTIONS),
)
def test_errors_and_results_equal_eager(check: RankCheck) -> None:
    check.passes()


@rank_checks(
    Launch(
        2, "run_torch_compile.py", "forward_and_backward", "input_memory_not_reused",
        arguments=["--no-lowering"], marks=exhaustive, **OPTIONS,
    )
)  # fmt: skip
def test_results_without_inductors_lowering(check: RankCheck) -> None:
    check.passes()


@rank_checks(
    Launch(2, "run_torch_order.py", arguments=[12], marks=exhaustive, **OPTIONS),
)
def test_ranks_start_the_same_collectives(check: RankCheck) -> None:
    check.passes()
