"""flax nnx and its Optimizer with value_and_grad, 4 bits, on two processes of mpirun."""

from collections.abc import Callable

import pytest
from support import launch

pytest.importorskip("flax")


def test_training_resumes_bitwise_equal(train: Callable) -> None:
    trained = train("run_nnx.py", start=launch.mpirun)
    assert trained.resumed == trained.digest
