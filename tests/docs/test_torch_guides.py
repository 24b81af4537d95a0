"""The Python blocks of the guides to PyTorch and DiLoCo run on two ranks, in one launch."""

from pathlib import Path

import pytest
from support import launch
from support.pages import python_blocks

GUIDES = Path(__file__).resolve().parents[2] / "docs" / "guides"
PAGES = [*sorted((GUIDES / "torch").glob("*.md")), GUIDES / "diloco.md"]
WITH_BLOCKS = [page for page in PAGES if python_blocks(page.read_text())]


def test_the_pages_are_found() -> None:
    assert len(PAGES) > 10


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return what each rank prints."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("guides"))
        return launch.torchrun(2, "run_torch_guide.py", *WITH_BLOCKS, timeout=270)


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_BLOCKS, ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run(page: Path, outputs: list[str]) -> None:
    count = len(python_blocks(page.read_text()))
    expected = [f"ok {page.stem} {number}" for number in range(count)]
    for output in outputs:
        found = [line for line in output.splitlines() if line.startswith(f"ok {page.stem} ")]
        assert found == expected, output
