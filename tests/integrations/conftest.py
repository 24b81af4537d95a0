"""Common test of all trainers: run a program on two ranks and check its reports."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support import launch

BITS = {"CGX_COMPRESSION_QUANTIZATION_BITS": "4"}
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Trained:
    """The report of a rank.

    Attributes:
        losses: the loss of each epoch or step.
        ratio: bytes of the gradients divided by bytes sent.
        digest: digest of the parameters of the uninterrupted run.
        resumed: the same for a second run, resumed from the first one's checkpoint.
    """

    losses: list[float]
    ratio: float
    digest: str
    resumed: str


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., Trained]:
    """Return a function that runs a program of this folder and checks its reports."""

    def run(
        program: str, *args: object, start: Callable[..., Sequence[str]] = launch.torchrun,
        env: dict[str, str] | None = None, **options: Any,
    ) -> Trained:  # fmt: skip
        """Run on two ranks in 4 bits; the first argument of the program is an empty folder."""
        options = {"env": BITS | (env or {}), "timeout": 200} | options
        outputs = start(2, HERE / program, tmp_path, *args, **options)
        first, second = (Trained(**json.loads(text.splitlines()[-1])) for text in outputs)
        assert first.losses[-1] < first.losses[0] / 2, outputs[0]
        assert first.ratio > 4 and second.ratio > 4
        assert first.digest == second.digest and first.resumed == second.resumed
        return first

    return run
