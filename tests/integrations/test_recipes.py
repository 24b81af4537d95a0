"""docs/guides/trainers.md shows lines of the programs that are tested here, and no others."""

import re
from pathlib import Path

HERE = Path(__file__).parent
TEXT = (HERE.parents[1] / "docs/guides/trainers.md").read_text()


def test_recipes_are_what_is_tested() -> None:
    sections = TEXT.split("\n## ")[1:]
    shown = set()
    for section in sections:
        if named := re.search(r"\]\(\.\./tests/integrations/(run_\w+\.py)\)", section):
            lines = iter(line.strip() for line in (HERE / named[1]).read_text().splitlines())
            recipe = re.findall(r"^    (.+)$", section, re.MULTILINE)
            assert recipe, named[1]
            for line in recipe:
                assert line.strip() == "..." or line.strip() in lines, f"{named[1]}: {line}"
            shown.add(named[1])
    assert shown == {file.name for file in HERE.glob("run_*.py")}
