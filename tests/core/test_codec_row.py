"""A codec is one file and one row: tests/cpp/pairs_codec.h, and every face of the package has it.

A copy of the package has a libcgx.so that is built with that row. Its encodings have lengths of
their own and cannot be cut, as no codec of the product's has by now.
"""

import os
import shutil
from pathlib import Path

import pytest
from support import cpp_programs, launch

import cgx_ops


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for PYTHONPATH."""
    library = cpp_programs.build("cgx_with_pairs") / "with_pairs" / "libcgx.so"
    folder = tmp_path_factory.mktemp("with_pairs")
    source = Path(cgx_ops.__file__).parent
    shutil.copytree(source, folder / "cgx_ops", ignore=shutil.ignore_patterns("csrc", "libcgx.so"))
    shutil.copy(library, folder / "cgx_ops")
    return folder


@pytest.mark.timeout(700)
@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_a_codec_of_unknown_length(package: Path, n: int) -> None:
    path = os.pathsep.join([str(package), launch.python_path()])
    environment = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    launch.check_ok(launch.mpirun(n, "run_codec_row.py", env=environment, timeout=300))
