"""Pages have limited length and width, and all pages that files refer to exist."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_OTHERS = ("README", "CONTRIBUTING", "CHANGELOG", "examples/README", "benchmarks/README")
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *(ROOT / f"{name}.md" for name in _OTHERS)])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
GENERATED = {"docs/reference/interfaces.md"}  # its rows are signatures


def prose(page: str) -> list[tuple[int, str]]:
    """Return the numbered lines of a page that are not code."""
    lines, fence = [], ""
    for number, line in enumerate((ROOT / page).read_text().splitlines(), 1):
        mark = re.match(r"\s*(```+|:::+)", line)
        if mark and not fence:
            fence = mark[1]
        elif mark and line.strip() == fence:
            fence = ""
        elif not fence:
            lines.append((number, line))
    return lines


def test_the_pages_are_found() -> None:
    assert len(NAMES) > 40


@pytest.mark.parametrize("page", NAMES)
def test_a_page_is_short_and_narrow(page: str) -> None:
    length = len((ROOT / page).read_text().splitlines())
    if page != "CHANGELOG.md":
        assert length <= (120 if page == "README.md" else 250)
    # Rows of tables cannot be broken; another test limits the length of their cells.
    wide = [n for n, line in prose(page) if len(line) > 100 and not line.startswith("|")]
    assert not wide, f"lines of more than 100 columns: {wide}"


@pytest.mark.parametrize("page", NAMES)
def test_cells_of_tables_are_short(page: str) -> None:
    if page in GENERATED:
        return
    long = [
        (number, len(cell.split()))
        for number, line in prose(page)
        if line.startswith("|")
        for cell in re.sub(r"\]\([^)]*\)", "]", line).split("|")
        if len(cell.split()) > 20
    ]
    assert not long, f"cells of more than 20 words (line, words): {long}"


def test_pages_that_files_refer_to_exist() -> None:
    """Check sources, tests, messages and other pages.

    The CHANGELOG and the tables of results may name pages that were moved since.
    """
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout.split()
    missing = set()
    for name in tracked:
        path = ROOT / name
        if name.startswith(("CHANGELOG.md", "benchmarks/results/")) or not path.is_file():
            continue
        text = path.read_text(errors="replace")
        missing |= {
            (name, page)
            for page in re.findall(r"\bdocs/[\w/]+\.md\b", text)
            if not (ROOT / page).exists()
        }
        if path.suffix == ".md":
            missing |= {
                (name, link)
                for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text)
                if not (path.parent / link).exists()
            }
    assert not missing
