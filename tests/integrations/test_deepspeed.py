"""DeepSpeed's engine over the backend "cgx", on the CPU: without ZeRO, and in its first stage."""

from collections.abc import Callable

import pytest

pytest.importorskip("deepspeed")


@pytest.mark.parametrize("stage", [0, 1])
def test_training_resumes_bitwise_equal(train: Callable, stage: int) -> None:
    trained = train("run_deepspeed.py", stage, env={"DS_ACCELERATOR": "cpu"})
    assert trained.resumed == trained.digest
