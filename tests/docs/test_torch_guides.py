"""The Python blocks of the guides to PyTorch and DiLoCo run on two ranks."""

from pathlib import Path

import pytest
from support import launch
from support.pages import python_blocks

GUIDES = Path(__file__).resolve().parents[2] / "docs" / "guides"
PAGES = [*sorted((GUIDES / "torch").glob("*.md")), GUIDES / "diloco.md"]


def test_the_pages_are_found() -> None:
    assert len(PAGES) > 10


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = len(python_blocks(page.read_text()))
    if not count:
        pytest.skip("the page has no block")
    monkeypatch.chdir(tmp_path)
    expected = [f"ok block {number}" for number in range(count)]
    for output in launch.torchrun(2, "run_torch_guide.py", page):
        assert [line for line in output.splitlines() if line.startswith("ok ")] == expected, output
