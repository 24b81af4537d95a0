"""Runs the checks of a rank program, one after another in one launch, and reports each by name.

    mpirun -np 2 python run_torch_ddp.py                          # all
    mpirun -np 2 python run_torch_ddp.py "ddp.steps.*" resumed    # some, by name

A check is a function without arguments that raises to fail.
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
    """Return checks by the names of their functions."""
    return _by_name([(check.__name__, check) for check in checks])


def of_modules(*modules: ModuleType) -> dict[str, Callable[..., object]]:
    """Return all that lists CHECKS of modules have, by names such as "ddp.steps.accumulates".

    Those of some modules take arguments: bind them.
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
    """Run the checks that a pattern names, or all if there is none; at the end print "ok all".

    support/rank_checks.py reads what is printed.

    Args:
        checks: by name.
        patterns: of whole names or of what follows a name's dots; sys.argv's by default.
        after: called after each check, such as a barrier.

    Raises:
        ValueError: a pattern is of no check.
        Exception: what the first check to fail raised, with the check's name.
    """
    patterns = sys.argv[1:] if patterns is None else patterns
    for pattern in patterns:
        if not any(is_of(pattern, name) for name in checks):
            raise ValueError(f"no check is {pattern!r}; there are {', '.join(checks)}")
    print(f"checks: {json.dumps(list(checks))}", flush=True)
    for name, check in checks.items():
        if patterns and not any(is_of(pattern, name) for pattern in patterns):
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


def is_of(pattern: str, name: str) -> bool:
    """Return whether a pattern matches a name, or the rest of it after any of its dots."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _by_name(pairs: Sequence[tuple[str, Function]]) -> dict[str, Function]:
    checks = dict(pairs)
    if len(checks) < len(pairs):
        raise ValueError(f"several checks have one name: {[name for name, _ in pairs]}")
    return checks
