"""The GPU's programs without a GPU: a changed signature, option, name or error text fails here.

The rank programs run with a stand-in for the GPU (support/no_gpu.py), and their checks must pass,
except those that wait for what only a GPU does. test_torch.py does the same with
ranks/run_cuda_torch.py, tools/test_gpu_benchmarks.py with the benchmarks, and test_jax.py runs
ranks/run_cuda_jax.py on XLA:CPU.
"""

import ctypes
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support import cuda_cases, no_gpu
from support.cuda_cases import BAD_CALLS, without_gpu

from cgx_ops import Config
from cgx_ops._core import library, structs

ROOT = Path(__file__).parents[2]

# Scenarios of run_cuda_core.py that need a GPU, and why.
NEED_GPU = {
    "bad": "all memory is that of the host",
    "large": "takes minutes",
    "memory": "no memory is full",
}

# ---- Programs ------------------------------------------------------------------------------------


def core(n: int, *arguments: object, **options: Any) -> list[Any]:
    """Return the result of each rank."""
    outputs = without_gpu(n, "run_cuda_core.py", *arguments, **options)
    return [json.loads(output.splitlines()[-1]) for output in outputs]


@pytest.mark.slow
def test_results() -> None:
    for found in core(2, "results", "compressors, some", env={"COMMUNICATOR_TYPE": "MPI"}):
        assert found["count"] > 100 and not found["wrong"], found
        assert found["wire"] == "staged"


def test_results_of_threads_and_codec() -> None:
    (output,) = without_gpu(1, "run_cuda_core.py", "results", "--threads", 2, "compressors, some")
    found = [json.loads(line) for line in output.splitlines()[-2:]]
    assert [(each["count"] > 100, each["wrong"]) for each in found] == [(True, [])] * 2
    (codec,) = core(1, "codec")
    assert codec["count"] > 50 and not codec["wrong"], codec


def test_streams_and_graphs() -> None:
    assert core(2, "streams") == [[]] * 2
    assert core(2, "graphs") == [{"refused": None, "wrong": []}] * 2


def test_failures() -> None:
    for found in core(2, "mismatch"):
        assert found["whole"] and len(found["outcomes"]) == 8
        for word, outcome in found["outcomes"].items():
            kind, text = outcome["error"]
            assert kind == "MismatchError" and word in text and "against" in text, outcome
            assert outcome["immediate"] is None and outcome["nan"] and outcome["next"], outcome
    (survivor, _) = without_gpu(
        2, "run_cuda_core.py", "lost", "kill", 5, mpirun_args=("--with-ft", "ulfm"), check=False
    )
    found = json.loads(survivor.splitlines()[-1])
    assert found["error"][0] == "PeerFailed" and found["nan"] and found["next"], found


def test_all_scenarios_run() -> None:
    tests = Path(__file__).read_text()
    source = (ROOT / "tests/ranks/run_cuda_core.py").read_text()
    names = re.findall(r"^ {8}(\w+)  ", source, re.MULTILINE)  # in its docstring
    assert len(names) == 9
    assert {name for name in names if f'"{name}"' not in tests} == set()


# ---- What the stand-in checks --------------------------------------------------------------------


def test_wrong_number_of_arguments() -> None:
    codec = structs.Codec(config=Config().native, device=no_gpu.CUDA)
    for arguments in ((None, 0, None), (None, 0, None, None, None)):
        with pytest.raises(AssertionError, match="cgx_quantize"):
            no_gpu.call("cgx_quantize", ctypes.byref(codec), *arguments)
    with pytest.raises(ctypes.ArgumentError):
        no_gpu.call("cgx_quantize", ctypes.byref(codec), None, 0.5, None, None)


def test_unknown_stream() -> None:
    codec = structs.Codec(config=Config().native, device=no_gpu.CUDA, stream=1)
    with pytest.raises(AssertionError, match="is not the handle of a stream"):
        no_gpu.call("cgx_quantize", ctypes.byref(codec), None, 0, None, None)


def test_threads_use_pinned_memory() -> None:
    copy = no_gpu._copies(torch.Tensor.cpu)
    assert copy(torch.ones(1)) == 1
    with ThreadPoolExecutor(1) as pool, pytest.raises(AssertionError, match="use pinned memory"):
        pool.submit(copy, torch.ones(1)).result()


STRUCTS = [
    each
    for name, each in vars(structs).items()
    if isinstance(each, type(ctypes.Structure)) and not name.startswith("_")
]


@pytest.mark.parametrize("struct", STRUCTS)
def test_unknown_fields_of_structs(struct: type[ctypes.Structure]) -> None:
    with pytest.raises(AttributeError, match="strem"):
        struct().strem = 1  # type: ignore[attr-defined]


def test_every_function_of_the_header_that_python_calls_has_types() -> None:
    """Check that ctypes gets as many types as cgx.h has parameters."""
    header = "\n".join(
        (ROOT / f"cgx_ops/csrc/include/cgx/{name}.h").read_text()
        for name in ("cgx", "config", "status")
    )
    for name, types in library._CALLS.items():
        (parameters,) = re.findall(rf"^CGX_API \w+ {name}\(([^)]*)\)", header, re.MULTILINE)
        count = 0 if parameters == "void" else parameters.count(",") + 1
        assert count == len(types), f"{name}({parameters}) in the header"


# ---- Error texts that only a GPU can show --------------------------------------------------------

TEXTS = [
    (cuda_cases.CLOSED, "cgx_ops/csrc/device/group.cc"),
    (cuda_cases.CAPTURING, "cgx_ops/csrc/device/group.cc"),
    (cuda_cases.NOT_ENDED, "torch_ops/cuda.cc"),
    *((text, f"cgx_ops/csrc/{file}") for _, text, file in BAD_CALLS.values()),
]


@pytest.mark.parametrize(("text", "file"), dict.fromkeys(TEXTS))
def test_error_texts_exist(text: str, file: str) -> None:
    assert text in (ROOT / file).read_text()
