"""psum_q on a mesh of processes under mpirun, one device each."""

from collections.abc import Collection
from pathlib import Path

import numpy as np
import pytest
from jax_cases import PROGRAMS, order_expected, order_inputs
from launch import mpirun

TESTS = Path(__file__).parent
ENVIRONMENT = {"PYTHONPATH": str(TESTS), "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Return files with the results of the programs of jax_cases, by the number of ranks."""
    files = {}
    for ranks in (2, 4):
        files[ranks] = tmp_path_factory.mktemp("wanted") / f"{ranks}.npy"
        np.save(files[ranks], order_expected(order_inputs(ranks)))
    return files


def check_order(
    ranks: int, wanted: Path, launches: int, *args: object, timeout: float,
    programs: Collection[str] = PROGRAMS.keys(),
) -> list[str]:  # fmt: skip
    outputs = mpirun(
        ranks, "run_jax_order.py", wanted, launches, *programs, *args,
        env=ENVIRONMENT, timeout=timeout,
    )  # fmt: skip
    for output in outputs:
        for program in programs:
            assert f"ok {program}" in output
    return outputs


@pytest.mark.timeout(240)
@pytest.mark.parametrize("ranks", [2, 4])
def test_order_does_not_matter(ranks: int, wanted: dict[int, Path]) -> None:
    check_order(ranks, wanted[ranks], 10, timeout=220)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_compiles_more(rank: int, wanted: dict[int, Path]) -> None:
    programs = ["independent", "inner_jit"]
    check_order(2, wanted[2], 2, "--extra", rank, programs=programs, timeout=220)


@pytest.mark.timeout(240)
def test_a_rank_that_loads_what_the_other_compiles(wanted: dict[int, Path], tmp_path: Path) -> None:
    for hits in (False, True):
        outputs = check_order(
            2, wanted[2], 2, "--cache", tmp_path, programs=["inner_jit"], timeout=110
        )
        assert ("cache hits: 0" not in outputs[0]) == hits


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("extra", [-1, 0])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_hundred_launches(ranks: int, extra: int, wanted: dict[int, Path]) -> None:
    check_order(ranks, wanted[ranks], 100, "--extra", extra, timeout=1180)


@pytest.mark.timeout(150)
def test_meshes_and_training() -> None:
    for output in mpirun(4, "run_jax_mesh.py", env=ENVIRONMENT, timeout=140):
        assert output.count("ok check_") == 6


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "case",
    [
        "mismatch",
        "late",
        "initialize_twice",
        "initialize_late_on_one_rank",
        "two_devices_each",
        "not_initialized",
    ],
)
def test_errors(case: str) -> None:
    environment = {**ENVIRONMENT, **({"CGX_TIMEOUT": "3"} if case == "late" else {})}
    for output in mpirun(2, "run_jax_errors.py", case, env=environment, timeout=100):
        assert "ok" in output.splitlines()
