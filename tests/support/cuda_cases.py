"""Helpers of CUDA tests: detection of a GPU, sizes and dtypes, and several ranks on one GPU.

Tests that need a GPU are marked needs_gpu, and needs_torch_gpu or needs_jax_gpu if they need that
framework. tests/cuda/conftest.py skips them without a GPU. `make gpu` sets CGX_REQUIRE_GPU=1: no
test is skipped then, so a missing GPU is a failure. The detection does not import torch or jax.
"""

import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cgx_ops._core import library
from support import launch

REQUIRED = os.environ.get("CGX_REQUIRE_GPU") == "1"

# ---- Detection of a GPU --------------------------------------------------------------------------


@cache
def missing_gpu() -> str:
    """Return the reason why libcgx cannot use a GPU here; "" if it can."""
    cuda = library.describe()["cuda"]
    if not cuda["built"]:
        return "cgx_ops was built without CUDA"
    if not cuda["driver"]:
        return "there is no NVIDIA driver here"
    return "" if cuda["devices"] else "the NVIDIA driver reports no GPU here"


@cache
def missing_torch_gpu() -> str:
    """Return the reason why torch cannot use a GPU here; "" if it can."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "torch is not installed"
    version = Path(spec.origin).with_name("version.py").read_text()
    if not re.search(r"^cuda\b.*= '", version, re.MULTILINE):
        return "the torch that is installed is built without CUDA"
    return missing_gpu()


@cache
def missing_jax_gpu() -> str:
    """Return the reason why jax cannot use a GPU here; "" if it can."""
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    if not any("cuda" in plugin.name for plugin in plugins):
        return "jax is not installed with its CUDA plugin"
    return missing_gpu()


MISSING: dict[str, Callable[[], str]] = {
    "": missing_gpu,
    "torch": missing_torch_gpu,
    "jax": missing_jax_gpu,
}
needs_gpu, needs_torch_gpu, needs_jax_gpu = (pytest.mark.gpu(name) for name in MISSING)

# ---- Programs on the GPU -------------------------------------------------------------------------

SIZES = (0, 1, 17, 511, 512, 513, 2**20 + 7)
DTYPES = ("float32", "float16", "bfloat16")
BITS = (*range(1, 9), 32)
ROUNDINGS = ("nearest", "stochastic", "shift")
# COMMUNICATOR_TYPE, and the resulting transport between GPUs.
WIRES = {"SHM": "direct", "MPI": "staged"}
# Parts of error texts that rank programs wait for, each in a literal of a source file.
CLOSED, CAPTURING, NOT_ENDED = "closed for GPUs", "capturing a CUDA graph", " ms given to wait"
# Errors of bad calls: type, part of the text, and its source file below cgx_ops/csrc.
BAD_CALLS = {
    "input on the host": ("InvalidArgument", "is in host memory", "cuda/device.cc"),
    "output on the host": ("InvalidArgument", "is in host memory", "cuda/device.cc"),
    "freed": ("InvalidArgument", "has been freed", "cuda/device.cc"),
    "null": ("InvalidArgument", "input", "plan.cc"),
    "ring": ("Unsupported", "one_shot and sra", "communicator.cc"),
    "bits": ("InvalidArgument", "bits", "config.cc"),
    "cgx_run of a GPU's memory": ("InvalidArgument", "use cgx_enqueue", "communicator.cc"),
    "cgx_enqueue for the CPU": ("InvalidArgument", "use cgx_start or cgx_run", "communicator.cc"),
    "another device": ("InvalidArgument", " is on cuda:", "cuda/device.cc"),
}

mps = ""  # the folder of NVIDIA's MPS; tests/cuda/conftest.py sets it


def on_one_gpu(
    n: int,
    program: str,
    *args: object,
    wire: str = "SHM",
    timeout: float = 100,
    kills: bool = False,
    shares: bool = True,
) -> list[str]:
    """Run tests/ranks/<program> on n ranks that share the first GPU; return their outputs.

    Args:
        n: number of ranks.
        program: in tests/ranks/.
        *args: its arguments.
        wire: COMMUNICATOR_TYPE: one of WIRES, or "AUTO".
        timeout: seconds until everything is killed.
        kills: whether a rank will die; the others continue.
        shares: whether to use MPS if it runs: a rank that dies may end its other clients.
    """
    env = {
        "COMMUNICATOR_TYPE": wire,
        # By default JAX would allocate three quarters of the GPU's memory for each rank.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    if mps and shares and not kills:
        # A client has 2 hardware queues by default. With 8, 20 clients did not all find some.
        env |= {"CUDA_MPS_PIPE_DIRECTORY": mps, "CUDA_DEVICE_MAX_CONNECTIONS": "4"}
    survive = ("--with-ft", "ulfm") if kills else ()
    return launch.mpirun(
        n, program, *args, env=env, timeout=timeout, mpirun_args=survive, check=not kills
    )


def without_gpu(n: int, program: str, *args: object, **options: Any) -> list[str]:
    """Run tests/ranks/<program> on n ranks with the stand-in for a GPU (no_gpu.py)."""
    path = Path(__file__).parents[1] / "ranks" / program
    return launch.mpirun(n, "run_without_gpu.py", path, *args, **options)
