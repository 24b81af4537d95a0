"""Shared by all tests: report header, selection under `mpirun pytest`, a time limit, warnings.

Deadlines and markers are in pyproject.toml.
"""

import os
import time

import hypothesis
import pytest
from support import rank_checks

import cgx_ops
from cgx_ops._core import binary, library, user_warnings

# Deadlines of hypothesis are disabled: each test has the limit of pyproject.toml.
hypothesis.settings.register_profile("without deadlines", deadline=None)
hypothesis.settings.load_profile("without deadlines")


def pytest_report_header() -> list[str]:
    """Show the versions of the tested libraries."""
    build = library.describe()
    bindings = [name for name in ("torch", "jax") if name in binary.built_with()]
    return [
        f"cgx_ops: {cgx_ops.__version__}, bindings: {', '.join(bindings) or 'none'}",
        f"CPU target: {build['cpu_target']} of {', '.join(build['cpu_targets'])}",
    ]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --until, by which .ci/run limits its time."""
    text = "skip tests that would begin later (seconds since 1970)"
    parser.addoption("--until", type=float, default=float("inf"), metavar="TIME", help=text)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests after --until. Reset warnings, so that each test sees those of earlier ones."""
    if time.time() > item.config.option.until:
        pytest.skip("no time is left (--until)")
    user_warnings.forget()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip, under mpirun, tests that start processes or test a single process.

    Raises UsageError if whole files are run and a check of their rank programs has no item.
    """
    if not any("::" in argument for argument in config.args):
        for program, names in rank_checks.left_out(items).items():
            raise pytest.UsageError(f"no test runs {', '.join(names)} of {program}")
    if int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1")) == 1:
        return
    for item in items:
        if not item.get_closest_marker("mpirun"):
            item.add_marker(pytest.mark.skip(reason="is about one process, or starts its own"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Make rank programs run the selected checks."""
    rank_checks.select(session.items)
