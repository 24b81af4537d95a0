"""The Python blocks of the guides run on two ranks."""

from pathlib import Path

import pytest
from ranks.run_guide import blocks_of
from support import launch

GUIDES = Path(__file__).resolve().parents[2] / "docs" / "guides"
PAGES = (
    "checkpoints",
    "from_deepspeed",
    "from_dgc",
    "from_mergecomp_grace",
    "from_power_sgd",
    "from_torch_cgx",
    "monitoring",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_the_blocks_of_a_guide_run(name: str, tmp_path: Path) -> None:
    page = GUIDES / f"{name}.md"
    count = len(blocks_of(page))
    assert count, "the page has no block that uses cgx_ops"
    outputs = launch.torchrun(2, "run_guide.py", page, tmp_path, env={"JAX_PLATFORMS": "cpu"})
    expected = [f"ok block {number}" for number in range(count)]
    for output in outputs:
        assert [line for line in output.splitlines() if line.startswith("ok ")] == expected, output
