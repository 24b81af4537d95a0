"""psum_q on meshes of processes under mpirun.

1. the tests with the marker `mpirun`, as `mpirun pytest`
2. the order of calls does not matter, and other thunks run concurrently
3. several Python threads

jax/test_faults.py tests failures.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from support.jax_cases import PROGRAMS, order_expected, order_inputs
from support.launch import mpirun
from support.rank_checks import Launch, RankCheck, rank_checks

HERE = Path(__file__).parent
ENVIRONMENT = {
    "XLA_FLAGS": "",
    "JAX_PLATFORMS": "cpu",
    "OMP_NUM_THREADS": "1",
    "CGX_TIMEOUT": "60",  # the deadline if a defect makes a test hang
}
# For programs that are also tested in one process, with LLVM's optimizations, which are slow.
UNOPTIMIZED = ENVIRONMENT | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}

# ---- 1. tests of other files ---------------------------------------------------------------------


def check_pytest(
    ranks: int, *args: object, timeout: float, env: Mapping[str, str] = ENVIRONMENT
) -> None:
    """Run pytest on ranks with 8/ranks devices each; all must run equally many tests."""
    outputs = mpirun(
        ranks, "run_pytest.py", "-q", "-x", "--color=no", "-p", "no:cacheprovider", *args,
        env=env, timeout=timeout,
    )  # fmt: skip
    counts = [
        {kind: int(count) for count, kind in re.findall(r"(\d+) (passed|skipped)", output)}
        for output in (output.splitlines()[-1] for output in outputs)
    ]
    assert all(count["passed"] > 0 for count in counts), counts
    # A rank without devices in a test's mesh skips the test.
    assert len({sum(count.values()) for count in counts}) == 1, counts


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_residuals_of_several_devices_a_process() -> None:
    check_pytest(
        2, "-m", "not exhaustive", "-k", "conservation and float32 or scan",
        HERE / "test_residuals.py",
        timeout=220, env=UNOPTIMIZED,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_all_to_all_of_several_devices_a_process() -> None:
    check_pytest(
        2, "-m", "not exhaustive", "-k", "meshes or vmap or derivatives or trees",
        HERE / "test_all_to_all.py",
        timeout=220, env=UNOPTIMIZED,
    )  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.timeout(240)
def test_meshes_and_compressors_of_several_devices_a_process() -> None:
    some = "test_meshes or sums or residuals or indices or vote or [topk-4] or [randk-4]"
    files = [HERE / f"test_{subject}.py" for subject in ("meshes", "compressors", "votes")]
    check_pytest(2, "-m", "not exhaustive", "-k", some, *files, timeout=220, env=UNOPTIMIZED)


@pytest.mark.exhaustive
@pytest.mark.timeout(2500)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_all_files(ranks: int) -> None:
    """Leave out exhaustive tests, because 8 processes have many XLA threads."""
    which = [] if ranks == 2 else ["-m", "not exhaustive"]
    check_pytest(ranks, *which, *sorted(HERE.glob("test_*.py")), timeout=2400)


# ---- 2. order ------------------------------------------------------------------------------------


Mesh = tuple[int, int]  # processes, devices in each
Wanted = dict[Mesh, Path]


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> Wanted:
    """Return files with the results of the programs of jax_cases, by mesh."""
    files = {}
    for ranks, devices in ((2, 1), (2, 2), (4, 1)):
        file = tmp_path_factory.mktemp("wanted") / f"{ranks}x{devices}.npy"
        np.save(file, order_expected(order_inputs(ranks * devices), devices))
        files[ranks, devices] = file
    return files


def check_order(
    mesh: Mesh, wanted: Wanted, launches: int, *args: object,
    timeout: float, programs: Collection[str] = PROGRAMS.keys(),
) -> list[str]:  # fmt: skip
    ranks, devices = mesh
    outputs = mpirun(
        ranks, "run_jax_order.py", wanted[mesh], devices, launches, *programs, *args,
        env=ENVIRONMENT, timeout=timeout,
    )  # fmt: skip
    for output in outputs:
        for program in programs:
            assert f"ok {program}" in output
    return outputs


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("mesh", "first"), [((2, 2), 0), pytest.param((4, 1), 1, marks=pytest.mark.exhaustive)]
)
def test_order_does_not_matter(mesh: Mesh, first: int, wanted: Wanted) -> None:
    """Test each program on one of the meshes; test_a_hundred_launches() tests all on both."""
    check_order(mesh, wanted, 3, programs=list(PROGRAMS)[first::2], timeout=220)


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("extra", [-1, 0])
@pytest.mark.parametrize("mesh", [(2, 2), (4, 1)])
def test_a_hundred_launches(mesh: Mesh, extra: int, wanted: Wanted) -> None:
    check_order(mesh, wanted, 100, "--extra", extra, timeout=1180)


@pytest.mark.exhaustive
@pytest.mark.timeout(240)
@pytest.mark.parametrize("rank", [0, 1])
def test_rank_with_extra_compilations(rank: int, wanted: Wanted) -> None:
    programs = ["independent", "inner_jit"]
    check_order((2, 1), wanted, 2, "--extra", rank, programs=programs, timeout=220)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_rank_that_loads_compiled_programs(wanted: Wanted, tmp_path: Path) -> None:
    for hits in (False, True):
        outputs = check_order(
            (2, 1), wanted, 2, "--cache", tmp_path, programs=["inner_jit"], timeout=110
        )
        assert ("cache hits: 0" not in outputs[0]) == hits


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "program", [pytest.param("independent", marks=pytest.mark.slow), "backward"]
)
def test_xla_computes_while_messages_wait(program: str, tmp_path: Path) -> None:
    outputs = mpirun(2, "run_jax_overlap.py", tmp_path, program, env=ENVIRONMENT, timeout=100)
    for output in outputs:
        assert "ok" in output.splitlines()


# ---- 3. threads ----------------------------------------------------------------------------------


def threads(devices: int, *names: str, marks: Sequence[pytest.MarkDecorator] = ()) -> Launch:
    return Launch(
        2, "run_jax_threads.py", *names, arguments=[devices], env=ENVIRONMENT, timeout=100,
        marks=marks,
    )  # fmt: skip


@rank_checks(
    threads(
        1,
        "names",
        "losses_in_blocks",
        "exported",
        "compiled_in_threads",
        "main_thread_*",
        "unnamed",
        "names_beside_xla",
        "one_name",
    ),
    threads(2, "own_functions", "unnamed", "names_of_*", marks=[pytest.mark.slow]),
    threads(2, "one_function", marks=[pytest.mark.exhaustive]),
)
def test_threads(check: RankCheck) -> None:
    """Run all in one launch, because errors must leave the communicator usable."""
    check.passes()
