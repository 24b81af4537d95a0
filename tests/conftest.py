"""What every test shares: the header's lines, and what runs under `mpirun pytest`.

Deadlines and markers are in pyproject.toml.
"""

import os

import hypothesis
import pytest
from support import rank_checks

import cgx_ops
from cgx_ops._core import binary, library, user_warnings

# A busy machine fails no test: each has pyproject.toml's limit.
hypothesis.settings.register_profile("without deadlines", deadline=None)
hypothesis.settings.load_profile("without deadlines")


def pytest_report_header() -> list[str]:
    """Show which libraries are tested."""
    build = library.describe()
    bindings = [name for name in ("torch", "jax") if name in binary.built_with()]
    return [
        f"cgx_ops: {cgx_ops.__version__}, bindings: {', '.join(bindings) or 'none'}",
        f"CPU target: {build['cpu_target']} of {', '.join(build['cpu_targets'])}",
    ]


def pytest_runtest_setup() -> None:
    """Show each test the warnings that earlier ones have seen."""
    user_warnings.forget()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip, under mpirun, what starts processes of its own or is about one process.

    Raises:
        UsageError: whole files have no item for a check of a rank program that they launch.
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
    """Have rank programs run the checks that are selected."""
    rank_checks.select(session.items)
