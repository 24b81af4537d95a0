"""torch.ops.cgx under torch.compile, on two processes: see the rank programs for what is shown."""

import pytest
from support import launch
from support import torch_cases as tc

# Two compilers share two cores, so deadlines are far above the usual half minute to a minute. A
# collective that misses its peer fails long before, and says so.
ENVIRONMENT = {**tc.ENVIRONMENT, "CGX_TIMEOUT": "90"}


def ends_well(program: str, *arguments: str) -> None:
    launch.check_ok(launch.mpirun(2, program, *arguments, env=ENVIRONMENT, timeout=600))


@pytest.mark.timeout(620)
def test_refusals_and_results_are_those_of_eager() -> None:
    ends_well("run_torch_compile.py")


@pytest.mark.exhaustive
@pytest.mark.timeout(620)
def test_results_without_inductors_lowering() -> None:
    ends_well("run_torch_compile.py", "--no-lowering")


@pytest.mark.timeout(620)
@pytest.mark.parametrize(
    "runs",
    [pytest.param(4, marks=pytest.mark.slow), pytest.param(12, marks=pytest.mark.exhaustive)],
)
def test_ranks_start_the_same_collectives(runs: int) -> None:
    ends_well("run_torch_order.py", str(runs))


@pytest.mark.slow
@pytest.mark.timeout(620)
def test_compressors_in_graphs() -> None:
    ends_well("run_torch_codecs.py", "in_graphs")
