"""Accelerate over the backend "cgx", on the CPU, also with its own PowerSGD hook."""

from collections.abc import Callable

import pytest
from support import launch

pytest.importorskip("accelerate")


def test_training_resumes_bitwise_equal(train: Callable) -> None:
    trained = train("run_accelerate.py", start=launch.mpirun)
    assert trained.resumed == trained.digest


def test_power_sgd_of_torch(train: Callable) -> None:
    train("run_accelerate.py", "power_sgd")
