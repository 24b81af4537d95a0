"""equinox and optax with error feedback, 2 bits, on two processes without MPI."""

from collections.abc import Callable

import pytest
from support import launch

pytest.importorskip("equinox")


def test_training_resumes_bitwise_equal(train: Callable) -> None:
    trained = train("run_equinox.py", start=launch.torchrun)
    assert trained.resumed == trained.digest
