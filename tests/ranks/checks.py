"""Run the checks of a rank program one after another in one process, and report each by name.

    mpirun -np 2 python run_torch_ddp.py                          # all
    mpirun -np 2 python run_torch_ddp.py "ddp.steps.*" resumed    # some, by name

A check is a function without arguments. It fails by raising an exception.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from types import ModuleType
from typing import TypeVar

Check = Callable[[], object]
Function = TypeVar("Function", bound=Callable[..., object])


def named(*checks: Check) -> dict[str, Check]:
    """Return the checks keyed by their function names."""
    return _by_name([(check.__name__, check) for check in checks])


def of_modules(*modules: ModuleType) -> dict[str, Callable[..., object]]:
    """Return the modules' CHECKS, keyed by names such as "ddp.steps.accumulates".

    The checks of some modules take arguments; bind them before running.
    """
    return _by_name(
        [
            (f"{module.__name__.removeprefix('torch_')}.{check.__name__}", check)
            for module in modules
            for check in module.CHECKS
        ]
    )


def run(
    checks: Mapping[str, Check],
    patterns: Sequence[str] | None = None,
    after: Check | None = None,
) -> None:
    """Run the checks that match a pattern (all without patterns), then print "ok all".

    support/rank_checks.py parses the output.

    Args:
        checks: the checks by name.
        patterns: patterns for whole names, or for the part after any dot; default: sys.argv[1:].
        after: called after each check, for example a barrier.

    Raises:
        ValueError: a pattern matches no check.
        Exception: the exception of the first check that failed, with the check's name as a note.
    """
    patterns = sys.argv[1:] if patterns is None else patterns
    for pattern in patterns:
        if not any(matches_name(pattern, name) for name in checks):
            raise ValueError(f"no check is {pattern!r}; there are {', '.join(checks)}")
    print(f"checks: {json.dumps(list(checks))}", flush=True)
    for name, check in checks.items():
        if patterns and not any(matches_name(pattern, name) for pattern in patterns):
            continue
        start = time.monotonic()
        try:
            check()
            if after is not None:
                after()
        except BaseException as error:
            error.add_note(f"The check that failed: {name}")
            raise
        print(f"ok {name}: {time.monotonic() - start:.1f} s", flush=True)
    print("ok all", flush=True)


def matches_name(pattern: str, name: str) -> bool:
    """Return whether a pattern matches a name, or the part of the name after any dot."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _by_name(pairs: Sequence[tuple[str, Function]]) -> dict[str, Function]:
    checks = dict(pairs)
    if len(checks) < len(pairs):
        raise ValueError(f"several checks have one name: {[name for name, _ in pairs]}")
    return checks
