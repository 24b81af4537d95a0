"""Public names have complete docstrings, examples that run, and entries in the reference."""

import dataclasses
import doctest
import enum
import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.public_names import MODULES, find, members_of, names_of, public_names

pytest.importorskip("torch.nn")
pytest.importorskip("jax.numpy")

ROOT = Path(__file__).resolve().parents[2]
NAMES = public_names()
CALLABLE = [name for name in NAMES if callable(find(name))]
_SECTIONS = r"^(Args|Returns|Yields|Raises|Attributes|Example|Examples|Note):$"


def sections_of(documented: Any) -> dict[str, str]:
    """Return the parts of a Google-style docstring; the text before the first is ""."""
    parts = re.split(_SECTIONS, inspect.getdoc(documented) or "", flags=re.MULTILINE)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def parameters_of(call: Any) -> list[str]:
    """Return the parameters that a docstring must describe."""
    return [
        name
        for name, parameter in inspect.signature(call).parameters.items()
        if name not in ("self", "cls") and not name.startswith("_")
    ]


def described(text: str) -> set[str]:
    """Return the names that a section lists. A line has one or several: `a, b: text`."""
    entries = re.findall(r"^    ((?:\*{0,2}\w+(?:, |(?= \(|:)))+)", text, re.MULTILINE)
    return {name.strip("* ") for entry in entries for name in entry.split(",")}


def problems(documented: Any, *, returns: bool) -> list[str]:
    """Return the parts that are missing in the docstring of a function or class."""
    sections = sections_of(documented)
    summary = sections[""].strip().split("\n\n")[0]
    found = [] if summary.endswith((".", ":")) else ["no summary that ends with a period"]
    parameters = parameters_of(documented)
    listed = described(sections.get("Args", "")) | described(sections.get("Attributes", ""))
    missing = [name for name in parameters if name not in listed]
    found += [f"no description of {', '.join(missing)}"] if missing else []
    # In Google style, a summary that begins with "Return" needs no section.
    if returns and not summary.startswith("Return") and not {"Returns", "Yields"} & set(sections):
        found.append("no Returns")
    if parameters and "Raises" not in sections:
        found.append("no Raises")
    return found


def returns_something(function: Any) -> bool:
    """Return whether a function is annotated with a return value."""
    return inspect.signature(function).return_annotation not in (
        None,
        "None",
        inspect.Signature.empty,
    )


def is_record(owner: Any) -> bool:
    """Return whether a class only holds values, so that its constructor raises nothing."""
    return issubclass(owner, tuple) or (
        dataclasses.is_dataclass(owner) and not hasattr(owner, "__post_init__")
    )


@pytest.mark.parametrize("name", CALLABLE)
def test_the_docstring_is_complete(name: str) -> None:
    documented = find(name)
    if inspect.isclass(documented):
        if issubclass(documented, Exception | enum.Enum):
            assert sections_of(documented)[""].strip(), f"{name} has no docstring"
            return
        found = problems(documented, returns=False)
        if is_record(documented):
            found = [problem for problem in found if problem != "no Raises"]
        for member, value in members_of(documented):
            if isinstance(value, property):
                found += [] if inspect.getdoc(value) else [f"{member}: no docstring"]
                continue
            text = problems(value, returns=returns_something(value))
            # A method need not repeat the errors of its class.
            found += [f"{member}: {problem}" for problem in text if problem != "no Raises"]
    else:
        found = problems(documented, returns=returns_something(documented))
    assert not found, f"{name}: {'; '.join(found)}"


@pytest.mark.parametrize("name", CALLABLE)
def test_there_is_an_example(name: str) -> None:
    assert ">>> " in (inspect.getdoc(find(name)) or ""), f"{name} has no example"


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_examples_run(module: str) -> None:
    """Run them in a separate process, since they start and end process groups."""
    done = subprocess.run(
        [sys.executable, __file__, module],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_has_an_entry(name: str) -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs/reference").glob("*.md"))
    directive = r"^\.\. auto(?:function|class|exception|data)::"
    assert re.search(rf"{directive} {re.escape(name)}$", pages, re.MULTILINE), name


def run_examples(module: str) -> int:
    """Run the examples of a module's public names and of their methods; return the failures."""
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    finder = doctest.DocTestFinder(recurse=True)
    for name in names_of(importlib.import_module(module)):
        documented = find(f"{module}.{name}")
        if not callable(documented):
            continue
        for example in finder.find(documented, f"{module}.{name}", module=False, globs={}):
            runner.run(example)
    return runner.summarize().failed


if __name__ == "__main__":
    sys.exit(run_examples(sys.argv[1]) > 0)
