"""Lightning's Trainer with DDPStrategy(process_group_backend="cgx"), on the CPU."""

from collections.abc import Callable

import pytest
from support import launch

pytest.importorskip("lightning")


def test_training_resumes_bitwise_equal(train: Callable) -> None:
    trained = train("run_lightning.py", start=launch.torchrun)
    assert trained.resumed == trained.digest


def test_residuals_are_saved(train: Callable) -> None:
    env = {"CGX_COMPRESSOR": "levels", "CGX_COMPRESSION_QUANTIZATION_BITS": "2"}
    trained = train("run_lightning.py", start=launch.mpirun, env=env)
    assert trained.resumed == trained.digest
