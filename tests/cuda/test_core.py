"""The core on a GPU shared by ranks: bitwise results, streams, graphs, failures.

Ranks are processes with both wires (COMMUNICATOR_TYPE: SHM is direct, MPI is staged through the
host), or threads of one process. They run tests/ranks/run_cuda_core.py.
"""

import json
from typing import Any

import pytest
from support.cuda_cases import (
    BAD_CALLS,
    CAPTURING,
    WIRES,
    missing_gpu,
    missing_torch_gpu,
    needs_torch_gpu,
    on_one_gpu,
)

pytestmark = [needs_torch_gpu, pytest.mark.timeout(140)]
PROGRAM = "run_cuda_core.py"


def ranks(n: int, *args: object, **options: Any) -> list[Any]:
    """Return the result of each rank."""
    outputs = on_one_gpu(n, PROGRAM, *args, **options)
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def test_gpu_is_found() -> None:
    """Fail under `make gpu` (CGX_REQUIRE_GPU=1) if there is no GPU; otherwise skip."""
    assert missing_gpu() == ""
    assert missing_torch_gpu() == ""


# ---- 1. Results ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "wire", "sets"),
    [
        (1, "SHM", ["features", "by_size"]),
        (2, "SHM", ["matrix"]),
        (2, "SHM", ["features", "by_size", "compressors"]),
        (2, "MPI", ["sample", "features", "by_size"]),
        (2, "AUTO", ["sample"]),
        (4, "SHM", ["sample", "features", "by_size"]),
        (4, "MPI", ["sample", "features", "compressors, some"]),
    ],
)
def test_results_equal_those_of_the_cpu(n: int, wire: str, sets: list[str]) -> None:
    """Compare bit for bit, alternating CPU and GPU collectives of one communicator."""
    for rank, found in enumerate(ranks(n, "results", *sets, wire=wire, timeout=120)):
        assert n == 1 or found["wire"] == WIRES.get(wire, "direct")
        assert found["count"] > 300
        assert not found["wrong"], f"rank {rank}: {len(found['wrong'])} of {found['count']} differ"


@pytest.mark.parametrize("n", [2, 4])
def test_results_of_threads(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use several ranks in one process, each on its own stream."""
    # See docs/explanation/gpu.md.
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")
    args = ("results", "--threads", n, "features", "by_size")
    (output,) = on_one_gpu(1, PROGRAM, *args, timeout=120, shares=False)
    found = [json.loads(line) for line in output.splitlines()[-n:]]
    assert [(each["count"] > 300, each["wrong"]) for each in found] == [(True, [])] * n


def test_codec() -> None:
    """Test the kernels of one rank alone."""
    (found,) = ranks(1, "codec")
    assert found["count"] > 300 and not found["wrong"], found


@pytest.mark.exhaustive
@pytest.mark.timeout(820)
@pytest.mark.parametrize("wire", WIRES)
def test_more_than_two_to_the_31_bytes(wire: str) -> None:
    assert ranks(2, "large", wire=wire, timeout=800) == [True, True]


# ---- 2. Streams and graphs -----------------------------------------------------------------------


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("n", [2, 4])
def test_streams(n: int, wire: str) -> None:
    """Test earlier and later work on the stream, side streams, and several communicators."""
    assert ranks(n, "streams", wire=wire) == [[]] * n


@pytest.mark.parametrize(("n", "wire"), [(2, "SHM"), (4, "SHM"), (2, "MPI"), (2, "AUTO")])
def test_graphs(n: int, wire: str) -> None:
    """Record and replay if devices are connected directly; otherwise expect an error."""
    for found in ranks(n, "graphs", wire=wire):
        assert found["wrong"] == []
        if WIRES.get(wire) == "staged":
            kind, text = found["refused"]
            assert kind == "Unsupported" and CAPTURING in text, found["refused"]
        else:  # ranks of one host are connected directly by default
            assert found["refused"] is None


# ---- 3. Failures ---------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("n", [2, 4])
def test_mismatch(n: int, wire: str) -> None:
    """Check that all ranks report the mismatch, no output looks valid, and CPU collectives work."""
    for found in ranks(n, "mismatch", wire=wire):
        assert found["whole"]
        assert len(found["outcomes"]) == 8
        for word, outcome in found["outcomes"].items():
            kind, text = outcome["error"]
            assert kind == "MismatchError" and word in text and "against" in text, outcome
            assert outcome["immediate"] is None and outcome["nan"] and outcome["next"], outcome


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(("n", "how"), [(2, "kill"), (4, "kill"), (4, "absent")])
def test_lost_rank(n: int, how: str, wire: str) -> None:
    """Check that the others raise within the deadline, and their outputs are NaN."""
    outputs = on_one_gpu(n, PROGRAM, "lost", how, 5, wire=wire, kills=True)
    found = [json.loads(output.splitlines()[-1]) for output in outputs[:-1]]
    for each in found:
        assert each["error"][0] in ("PeerFailed", "DeadlineExceeded"), each
        assert each["nan"] and each["next"], each
    # The first rank to detect it notifies the others, which then name that rank.
    assert any(f"rank {n - 1}" in each["error"][1] for each in found), found


@pytest.mark.parametrize("wire", WIRES)
def test_bad_calls(wire: str) -> None:
    """Check that each error states the remedy, and that the communicator remains usable."""
    for found in ranks(2, "bad", wire=wire):
        assert found["whole"]
        assert len(found["errors"]) >= len(BAD_CALLS) - 1  # the last one needs two GPUs
        for name, error in found["errors"].items():
            kind, word, _ = BAD_CALLS[name]
            assert error and error[0] == kind and word in error[1], (name, error)


@pytest.mark.alone
@pytest.mark.parametrize("wire", WIRES)
def test_out_of_memory(wire: str) -> None:
    """Check the error and its deadline. Later calls must work when memory is free."""
    found = ranks(2, "memory", wire=wire, shares=False)
    assert all(each["later"] for each in found)
    errors = [each["error"] for each in found if each["error"]]
    assert any(kind == "SystemFailure" and "memory" in text for kind, text in errors), found
