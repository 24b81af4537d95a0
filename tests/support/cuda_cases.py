"""Helpers of CUDA tests: detection of a GPU, sizes and dtypes, and several ranks on one GPU.

Tests that need a GPU are marked needs_gpu, and needs_torch_gpu or needs_jax_gpu if they need that
framework. Without a GPU they are skipped with a reason. `make gpu` sets CGX_REQUIRE_GPU=1: no test
is skipped then, so a missing GPU is a failure. The detection imports neither torch nor jax.
"""

import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from cgx_ops._core import library
from support import launch

REQUIRED = os.environ.get("CGX_REQUIRE_GPU") == "1"

# ---- Detection of a GPU --------------------------------------------------------------------------


def missing_gpu() -> str:
    """Return the reason why libcgx cannot use a GPU here; "" if it can."""
    cuda = library.describe()["cuda"]
    if not cuda["built"]:
        return "cgx_ops was built without CUDA"
    if not cuda["driver"]:
        return "there is no NVIDIA driver here"
    return "" if cuda["devices"] else "the NVIDIA driver reports no GPU here"


def missing_torch_gpu() -> str:
    """Return the reason why torch cannot use a GPU here; "" if it can."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "torch is not installed"
    version = Path(spec.origin).with_name("version.py").read_text()
    if not re.search(r"^cuda\b.*= '", version, re.MULTILINE):
        return "the torch that is installed is built without CUDA"
    return missing_gpu()


def missing_jax_gpu() -> str:
    """Return the reason why jax cannot use a GPU here; "" if it can."""
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    if not any("cuda" in plugin.name for plugin in plugins):
        return "jax is not installed with its CUDA plugin"
    return missing_gpu()


def _needs(missing: Callable[[], str]) -> pytest.MarkDecorator:
    reason = missing()
    return pytest.mark.skipif(bool(reason) and not REQUIRED, reason=reason)


needs_gpu = _needs(missing_gpu)
needs_torch_gpu = _needs(missing_torch_gpu)
needs_jax_gpu = _needs(missing_jax_gpu)

# ---- Programs on the GPU -------------------------------------------------------------------------

SIZES = (0, 1, 17, 511, 512, 513, 2**20 + 7)
DTYPES = ("float32", "float16", "bfloat16")
BITS = (*range(1, 9), 32)
ROUNDINGS = ("nearest", "stochastic", "shift")
# COMMUNICATOR_TYPE, and the resulting transport between GPUs.
WIRES = {"SHM": "direct", "MPI": "staged"}


def on_one_gpu(
    n: int,
    program: str,
    *args: object,
    wire: str = "SHM",
    timeout: float = 300,
    kills: bool = False,
) -> list[str]:
    """Run tests/ranks/<program> on n ranks that share the first GPU; return their outputs.

    Args:
        n: number of ranks.
        program: in tests/ranks/.
        *args: its arguments.
        wire: COMMUNICATOR_TYPE: one of WIRES, or "AUTO".
        timeout: seconds until everything is killed.
        kills: whether a rank will die; the others continue.
    """
    # By default JAX would allocate three quarters of the GPU's memory for each rank.
    env = {"COMMUNICATOR_TYPE": wire, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    survive = ("--with-ft", "ulfm") if kills else ()
    return launch.mpirun(
        n, program, *args, env=env, timeout=timeout, mpirun_args=survive, check=not kills
    )
