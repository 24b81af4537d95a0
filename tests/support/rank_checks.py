"""One pytest item for each check of a rank program; one launch runs all selected checks.

    @rank_checks(Launch(3, "run_torch_ddp.py", env=ENVIRONMENT, timeout=180))
    def test_ddp(check: RankCheck) -> None:
        check.passes()

The first item launches the program with the names of all selected items. Each item then reads
its own result on every rank. Collection reads the names from the program's source, without
importing it. A launch fails all its items if the program reports different names.
"""

import ast
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ranks.checks import matches_name

from support import launch

RANKS = Path(__file__).parents[1] / "ranks"


class Launch:
    """One launch of a rank program, and the checks selected from it.

    Args:
        n: number of ranks.
        program: file in tests/ranks.
        *patterns: patterns of the selected checks; default: all.
        names: names of all checks of the program, if its source does not list them.
        arguments: arguments before the names.
        by: function of support.launch that starts the ranks.
        marks: marks of each item.
        timeout: seconds until the launch is killed.
        **options: more arguments of `by`.
    """

    def __init__(
        self,
        n: int,
        program: str,
        *patterns: str,
        names: Sequence[str] | None = None,
        arguments: Sequence[object] = (),
        by: Callable[..., list[str]] = launch.mpirun,
        marks: Sequence[pytest.MarkDecorator] = (),
        timeout: float = 240,
        **options: Any,
    ) -> None:
        self.n, self.program = n, program
        self.names = names_in(program) if names is None else names
        for pattern in patterns:
            if not any(matches_name(pattern, name) for name in self.names):
                raise ValueError(f"{program} has no check {pattern!r}, but {', '.join(self.names)}")
        self.chosen = [
            name
            for name in self.names
            if any(matches_name(each, name) for each in patterns or ("*",))
        ]
        self.selected: list[str] = []  # checks selected by pytest
        self._failures: dict[str, str] | None = None
        self.arguments, self.by, self.timeout, self.options = arguments, by, timeout, options
        self.marks = [*marks, pytest.mark.timeout(timeout + 20)]

    def failures(self, *arguments: object, **options: Any) -> dict[str, str]:
        """Return the reasons of failed checks, by name; the first call launches the program."""
        if self._failures is None:
            arguments = (self.n, self.program, *self.arguments, *arguments, *self.selected)
            options = {"timeout": self.timeout, **self.options, **options}
            try:
                outputs, failure = self.by(*arguments, **options), ""
            except launch.Failed as error:
                outputs, failure = error.outputs, str(error)
            except BaseException as error:  # a time limit or Ctrl-C: nothing is launched again
                self._failures = dict.fromkeys(self.selected, f"the launch failed: {error!r}")
                raise
            self._failures = failures_of(outputs, self.names, self.selected, failure)
        return self._failures


@dataclass(frozen=True)
class RankCheck:
    """A check of a launch."""

    launch: Launch
    name: str

    def passes(self, *arguments: object, **options: Any) -> None:
        """Fail unless the check passed on every rank.

        The first check of a launch starts the program, with the launch's arguments and options, and
        these.
        """
        failures = self.launch.failures(*arguments, **options)
        if self.name in failures:
            pytest.fail(failures[self.name], pytrace=False)


def rank_checks(*launches: Launch) -> pytest.MarkDecorator:
    """Parametrize a test with the selected checks of these launches, as its argument `check`."""
    return pytest.mark.parametrize(
        "check",
        [
            pytest.param(RankCheck(each, name), id=f"{name}-{each.n}", marks=each.marks)
            for each in launches
            for name in each.chosen
        ],
    )


def select(items: Sequence[pytest.Item]) -> None:
    """Make each launch run the checks of these items, which pytest has selected."""
    for check in _checks_of(items):
        if check.name not in check.launch.selected:
            check.launch.selected.append(check.name)


def left_out(items: Sequence[pytest.Item]) -> dict[str, list[str]]:
    """Return, by program, the checks without an item."""
    chosen: dict[str, set[str]] = {}
    names: dict[str, Sequence[str]] = {}
    for check in _checks_of(items):
        names[check.launch.program] = check.launch.names
        chosen.setdefault(check.launch.program, set()).add(check.name)
    missing = {
        program: [name for name in names[program] if name not in chosen[program]]
        for program in chosen
    }
    return {program: left for program, left in missing.items() if left}


def failures_of(
    outputs: Sequence[str], names: Sequence[str], selected: Sequence[str], failure: str
) -> dict[str, str]:
    """Return the reasons of failed checks, by name, from the outputs of the ranks.

    Args:
        outputs: the output of each rank.
        names: the expected names of all checks of the program, in order.
        selected: the checks that should have run.
        failure: error of the launch, with the ends of the outputs; "" if every rank succeeded.
    """
    for rank, output in enumerate(outputs):
        reported = re.findall(r"^checks: (\[.*\])$", output, re.MULTILINE)
        if reported and json.loads(reported[0]) != list(names):
            wrong = f"rank {rank} has checks {reported[0]}; the tests expect {json.dumps(names)}"
            return dict.fromkeys(selected, wrong)
    passed = [set(re.findall(r"^ok (.*): [0-9.]+ s$", output, re.MULTILINE)) for output in outputs]
    ended = [bool(re.search(r"^ok all$", output, re.MULTILINE)) for output in outputs]
    culprit, failures = "", {}
    for name in sorted(selected, key=list(names).index):
        late = [rank for rank, of_rank in enumerate(passed) if name not in of_rank]
        if not outputs or late:
            ends = failure or "\n---\n".join(outputs)
            failures[name] = (
                f"{name} was not run on ranks {late}: {culprit} failed before it"
                if culprit
                else f"{name} did not pass on ranks {late}\n{ends}"
            )
            culprit = culprit or name
    if not failures and (failure or not all(ended)):
        why = "All checks passed, then the program failed"
        return dict.fromkeys(selected, f"{why}\n{failure or outputs}")
    return failures


def listed(program: str, variable: str = "CHECKS") -> list[str]:
    """Return the names in the lists that a module in tests/ranks assigns to a variable."""
    found = []
    for node in ast.parse((RANKS / program).read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == variable for target in targets):
            value = node.value  # type: ignore[attr-defined]
            assert isinstance(value, (ast.List, ast.Tuple)), ast.unparse(node)
            found += map(ast.unparse, value.elts)
    return found


def names_in(program: str) -> list[str]:
    """Return the names of a rank program's checks, in order, from its source.

    Raises:
        ValueError: the source does not call checks.of_modules() or checks.named() with plain names.
    """
    tree = ast.parse((RANKS / program).read_text())
    modules = dict(_imports(tree))
    found: list[str] = []
    for call in _calls(tree):
        arguments = [ast.unparse(argument) for argument in call.args]
        if call.func.attr == "named":  # type: ignore[attr-defined]
            found += arguments
        else:
            for module in (modules.get(argument, argument) for argument in arguments):
                prefix = module.removeprefix("torch_")
                file = f"{module.replace('.', '/')}.py"
                found += [f"{prefix}.{check}" for check in listed(file)]
    if not found or not all(re.fullmatch(r"[\w.]+", name) for name in found):
        raise ValueError(f"{program} lists no checks by plain names: {found}")
    return found


def _calls(tree: ast.AST) -> list[ast.Call]:
    """Return the calls of checks.of_modules() and checks.named(), in source order."""
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func) in ("checks.of_modules", "checks.named")
    ]
    return sorted(calls, key=lambda call: (call.lineno, call.col_offset))


def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the imported names, with their modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _checks_of(items: Sequence[pytest.Item]) -> Iterator[RankCheck]:
    for item in items:
        callspec = getattr(item, "callspec", None)
        check = callspec.params.get("check") if callspec else None
        if isinstance(check, RankCheck):
            yield check
