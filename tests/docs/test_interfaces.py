"""docs/reference/interfaces.md matches the output of its generator."""

import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_page_is_current() -> None:
    pytest.importorskip("torch.nn")
    pytest.importorskip("jax.numpy")
    generator = runpy.run_path(str(DOCS / "generate_interfaces.py"))
    assert generator["page"]() == (DOCS / "reference/interfaces.md").read_text()
