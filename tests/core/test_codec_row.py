"""A new codec needs one file and one table row (tests/cpp/pairs_codec.h) to work in every API.

The test uses a copy of the package with a libcgx.so built with that row. The codec's messages have
variable lengths.
"""

import os
import shutil
from pathlib import Path

import pytest
from support import cpp_programs, launch
from support.rank_checks import Launch, RankCheck, rank_checks

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


@rank_checks(
    Launch(2, "run_codec_row.py", timeout=600, marks=[pytest.mark.slow]),
    Launch(3, "run_codec_row.py", timeout=600, marks=[pytest.mark.exhaustive]),
)
def test_a_codec_of_unknown_length(check: RankCheck, package: Path) -> None:
    path = os.pathsep.join([str(package), launch.python_path()])
    check.passes(env={"PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
