"""The code in the guides to trainers and Ray is part of the tested programs."""

import re
from pathlib import Path

from support.pages import python_blocks

HERE = Path(__file__).parent
GUIDES = HERE.parents[1] / "docs/guides"
PAGES = ("trainers.md", "ray.md")


def test_recipes_equal_the_tested_programs() -> None:
    shown = set()
    for page in PAGES:
        for section in re.split(r"\n## (?=.*\n)", (GUIDES / page).read_text()):
            named = re.search(r"\]\(\.\./\.\./tests/integrations/(run_\w+\.py)\)", section)
            blocks = python_blocks(section)
            if not named:
                continue
            # An iterator: `in` goes on behind the line that it found, so the order counts, too.
            program = (line.strip() for line in (HERE / named[1]).read_text().splitlines())
            recipe = [line.strip() for block in blocks for line in block.splitlines()]
            assert recipe, named[1]
            for line in recipe:
                assert line in ("", "...") or line in program, f"{named[1]}: {line}"
            shown.add(named[1])
    assert shown == {file.name for file in HERE.glob("run_*.py")}
