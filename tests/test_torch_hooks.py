"""What PyTorch builds around hooks, post-local SGD, optimizers that average by themselves.

The rank program says what is shown.
"""

import launch
import pytest
import torch_cases as tc


def run(n: int, *args: str, timeout: float = 100) -> None:
    for output in launch.mpirun(
        n, "run_torch_hooks.py", *args, env=tc.ENVIRONMENT, timeout=timeout
    ):
        assert output.rstrip().endswith("ok all"), output


@pytest.mark.timeout(120)
def test_two_ranks() -> None:
    daily = "by_name bad_names zero_redundancy post_local_sgd as_the_reference what_is_sent resumed"
    run(2, *daily.split())


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
@pytest.mark.parametrize("n", [2, 4])
def test_all_hooks_and_more_ranks(n: int) -> None:
    run(n, "--slow", timeout=250)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("n", [1, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_optimizers_and_averagers_of_other_numbers_of_ranks(n: int) -> None:
    run(n, "optim", *(["averager"] if n > 1 else []))
