"""Tests that need a GPU: skipped without one, divided into parts, under MPS.

`make gpu-test` runs parts in parallel, because a rank seldom uses all of the GPU:

    pytest tests/cuda -m "gpu and not alone" --part 1/8

A launch of a rank program is in one part, with all its checks.
"""

import os

import pytest
from support import cuda_cases
from support.rank_checks import RankCheck


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="K/N", default="1/1", help="run the K-th of N parts")


def pytest_configure() -> None:
    """Remove MPS from this process's environment; on_one_gpu() passes it to most ranks."""
    cuda_cases.mps = os.environ.pop("CUDA_MPS_PIPE_DIRECTORY", "")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        for mark in item.iter_markers("gpu"):
            reason = cuda_cases.MISSING[mark.args[0]]()
            if reason and not cuda_cases.REQUIRED:
                item.add_marker(pytest.mark.skip(reason=reason))
    part, parts = map(int, str(config.getoption("part", "1/1")).split("/"))
    if parts == 1:
        return
    groups: dict[object, int] = {}
    mine, others = [], []
    for item in items:
        number = groups.setdefault(_group(item), len(groups)) if _needs_gpu(item) else 0
        (mine if number % parts == part - 1 else others).append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = mine


def _needs_gpu(item: pytest.Item) -> bool:
    return item.get_closest_marker("gpu") is not None


def _group(item: pytest.Item) -> object:
    """Return what one part runs: a launch with all its checks, or a test."""
    check = getattr(getattr(item, "callspec", None), "params", {}).get("check")
    return check.launch if isinstance(check, RankCheck) else item
