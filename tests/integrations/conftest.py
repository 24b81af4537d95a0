"""How every trainer is tested: two ranks of a program, and what must hold of what they print."""

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
    """What a rank of a program printed.

    Attributes:
        losses: of each epoch or step.
        ratio: of the bytes that its gradients are, to those that were sent.
        digest: of the parameters of the run that went through.
        resumed: of those of a second one that goes on from where the first saved itself half way.
    """

    losses: list[float]
    ratio: float
    digest: str
    resumed: str


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., Trained]:
    """Return what runs a program of this folder, and checks what must hold of every trainer."""

    def run(
        program: str, *args: object, start: Callable[..., Sequence[str]] = launch.torchrun,
        env: dict[str, str] | None = None, **options: Any,
    ) -> Trained:  # fmt: skip
        """Run it on two ranks in 4 bits; its first argument is a folder that is empty."""
        options = {"env": BITS | (env or {}), "timeout": 200} | options
        outputs = start(2, HERE / program, tmp_path, *args, **options)
        first, second = (Trained(**json.loads(text.splitlines()[-1])) for text in outputs)
        assert first.losses[-1] < first.losses[0] / 2, outputs[0]
        assert first.ratio > 4 and second.ratio > 4
        assert first.digest == second.digest and first.resumed == second.resumed
        return first

    return run
