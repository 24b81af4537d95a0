"""Every page of docs/tutorials/ runs as written: its files, its commands, the output that it shows.

The test executes two kinds of blocks, in the order of the page:

- ```` ```{code-block} python ```` with `:caption: train.py` is a file of that name.
- ```` ```{code-block} console ```` has commands, each after `$ ` and followed by its output.

In the output, any number matches any other number, and any run of spaces matches one space. A line
`...` matches any number of lines. Lines of stdout and stderr may be mixed in any order, because
launchers forward them separately.
"""

import functools
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

TUTORIALS = Path(__file__).resolve().parents[2] / "docs" / "tutorials"
PAGES = sorted(path for path in TUTORIALS.glob("*.md") if path.name != "index.md")
DEADLINE = 150  # seconds for a command that takes 20 on two idle cores

_BLOCK = re.compile(r"^```\{code-block\} *(\w+)\n((?::[\w-]+:[^\n]*\n)*)\n*(.*?)^```$", re.M | re.S)
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:[.,]\d+)*(?:e[-+]?\d+)?", re.ASCII)
# On a busy machine, a process of torch 2.13 may abort if it ends right after a gloo collective,
# even without cgx_ops. The command is then repeated.
_ABORT = "terminate called without an active exception"
_ENVIRONMENT = {
    # mpirun in a container: as root, with more ranks than cores
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "PYTHONUNBUFFERED": "1",  # keeps the order of the output lines
    "JAX_PLATFORMS": "cpu",
}


@dataclass(frozen=True)
class File:
    """A file that the reader saves."""

    name: str
    text: str


@dataclass(frozen=True)
class Command:
    """A command that the reader types, and the lines that it prints."""

    text: str
    output: tuple[str, ...]


def steps_of(page: str) -> list[File | Command]:
    """Return the files and commands of a page, in order.

    Raises:
        AssertionError: the page has no command, or shows no output of one.
    """
    steps: list[File | Command] = []
    for language, options, body in _BLOCK.findall(page):
        caption = re.search(r"^:caption: *(\S+)$", options, re.MULTILINE)
        if caption:
            steps.append(File(caption[1], body))
        elif language == "console":
            steps += _commands(body)
    assert any(isinstance(step, Command) for step in steps), "the page has no command"
    return steps


def _commands(body: str) -> list[Command]:
    before, *parts = re.split(r"^\$ ", body, flags=re.MULTILINE)
    assert not before.strip(), f"a console block begins without a command: {before!r}"
    commands = []
    for part in parts:
        lines = part.rstrip("\n").split("\n")
        end = next(i for i, line in enumerate(lines) if not line.endswith("\\"))
        command = Command("\n".join(lines[: end + 1]), tuple(lines[end + 1 :]))
        shown = [line for line in command.output if line != "..."]
        assert shown or command.text.startswith("export "), f"no output is shown: {command.text}"
        commands.append(command)
    return commands


def agrees(shown: tuple[str, ...], out: list[str], err: list[str]) -> bool:
    """Compare the lines that a page shows with those that a command wrote to stdout and stderr."""
    page, first, second = ([_plain(line) for line in lines] for lines in (shown, out, err))

    @functools.cache
    def matches(i: int, j: int, k: int) -> bool:
        has_first, has_second = j < len(first), k < len(second)
        if i == len(page):
            return not has_first and not has_second
        if page[i] == "...":
            return (
                matches(i + 1, j, k)
                or (has_first and matches(i, j + 1, k))
                or (has_second and matches(i, j, k + 1))
            )
        return (has_first and first[j] == page[i] and matches(i + 1, j + 1, k)) or (
            has_second and second[k] == page[i] and matches(i + 1, j, k + 1)
        )

    return matches(0, 0, 0)


def _plain(line: str) -> str:
    return line if line == "..." else " ".join(_NUMBER.sub("#", line).split())


def lines_of(text: str) -> list[str]:
    """Return the lines of an output that are not blank."""
    return [line for line in text.splitlines() if line.strip()]


def run_page(page: str, folder: Path) -> None:
    """Follow the steps of a page in an empty folder.

    Raises:
        pytest.fail.Exception: a command failed, took too long, or printed something else.
    """
    exports = ""
    for step in steps_of(page):
        if isinstance(step, File):
            (folder / step.name).write_text(step.text)
        elif step.text.startswith("export "):
            exports += step.text + "\n"
        else:
            _run(step, exports, folder)


def _run(command: Command, exports: str, folder: Path) -> None:
    status, out, err = _execute(exports + command.text, folder)
    for _ in range(2):
        if status == 0 or _ABORT not in err:
            break
        status, out, err = _execute(exports + command.text, folder)
    shown = tuple(lines_of("\n".join(command.output)))
    expected, printed = "\n".join(shown), f"--- stdout\n{out}\n--- stderr\n{err}"
    if status is None:
        pytest.fail(f"$ {command.text}\ntook more than {DEADLINE} s and printed\n{printed}")
    if status not in ((0, 1) if command.text.startswith("diff ") else (0,)):
        pytest.fail(f"$ {command.text}\nended with status {status} and printed\n{printed}")
    if not agrees(shown, lines_of(out), lines_of(err)):
        pytest.fail(f"$ {command.text}\nshould print\n{expected}\nbut printed\n{printed}")


def _execute(script: str, folder: Path) -> tuple[int | None, str, str]:
    """Return the exit status, stdout and stderr of a script; status None means a timeout."""
    environment = os.environ | _ENVIRONMENT
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment.pop("CGX_LOG", None)
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")  # nothing from other runs
    process = subprocess.Popen(
        ["bash", "-c", script],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return None, *process.communicate()
    return process.returncode, out, err


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_runs_as_written(page: Path, tmp_path: Path) -> None:
    run_page(page.read_text(), tmp_path)


# ---- tests of the test itself --------------------------------------------------------------------

FAILURES = (AssertionError, pytest.fail.Exception)
PAGE = """
```{code-block} python
:caption: hello.py

print("loss 0.123, equal: True")
```

```{code-block} console
$ export GREETING=hello
$ python hello.py && echo $GREETING
SHOWN
```
"""


@pytest.mark.parametrize(
    "shown",
    [
        "loss 7.5, equal: True\nhello",
        "...\nhello",
        "loss 0.1, equal: True\n...",
        "...\nloss   0.1, equal: True\n...\nhello\n...",
    ],
)
def test_output_agrees(shown: str, tmp_path: Path) -> None:
    run_page(PAGE.replace("SHOWN", shown), tmp_path)


@pytest.mark.parametrize(
    "shown",
    [
        "loss 0.123, equal: False\nhello",
        "loss 0.123, equal: True",
        "loss 0.123, equal: True\nhello\nand more",
        "hello\n...",
        "...\ngoodbye\n...",
    ],
)
def test_other_output_is_a_failure(shown: str, tmp_path: Path) -> None:
    with pytest.raises(FAILURES, match="but printed"):
        run_page(PAGE.replace("SHOWN", shown), tmp_path)


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("# Words only\n", "the page has no command"),
        (PAGE.split("```{code-block} console")[0], "the page has no command"),
        (PAGE.replace("SHOWN\n", ""), "no output is shown"),
        (PAGE.replace("SHOWN", "..."), "no output is shown"),
        (PAGE.replace("hello.py &&", "absent.py &&").replace("SHOWN", "x"), "ended with status"),
    ],
)
def test_a_page_without_output_is_a_failure(page: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(FAILURES, match=message):
        run_page(page, tmp_path)


def test_a_command_has_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "DEADLINE", 1)
    page = PAGE.replace("python hello.py", "sleep 600").replace("SHOWN", "hello")
    with pytest.raises(FAILURES, match="took more than 1 s"):
        run_page(page, tmp_path)
