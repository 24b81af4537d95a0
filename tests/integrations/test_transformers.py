"""transformers' Trainer over the backend "cgx", on the CPU, with a small GPT-2."""

from collections.abc import Callable

import pytest

pytest.importorskip("transformers")


def test_training_resumes_bitwise_equal(train: Callable) -> None:
    trained = train("run_transformers.py")
    assert trained.resumed == trained.digest
