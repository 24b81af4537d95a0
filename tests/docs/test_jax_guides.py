"""The Python blocks of each page in docs/guides/jax/ run in order as one program."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.pages import python_blocks

PAGES = sorted((Path(__file__).resolve().parents[2] / "docs" / "guides" / "jax").glob("*.md"))
_DEVICES = 'import jax\njax.config.update("jax_num_cpu_devices", 4)\n'


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_run(page: Path, tmp_path: Path) -> None:
    blocks = python_blocks(page.read_text())
    if not blocks:
        pytest.skip("no example")
    program = tmp_path / "page.py"
    program.write_text(_DEVICES + "\n".join(blocks))
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    result = subprocess.run(
        [sys.executable, "-W", "error", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert result.returncode == 0, result.stderr
