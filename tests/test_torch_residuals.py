"""Residuals by layer: made when they are asked for, decayed, refused for another model's layers."""

import pytest
import torch

from cgx_ops import InvalidArgument
from cgx_ops.torch.residuals import Residuals


def test_a_layer_keeps_its_residual() -> None:
    residuals, gradient = Residuals(), torch.ones(3, 4, dtype=torch.bfloat16)
    first = residuals.of("a", gradient)
    assert first.dtype == torch.bfloat16 and first.tolist() == [0] * 12
    first += 2
    assert residuals.of("a", gradient).tolist() == [2] * 12
    assert residuals.of("a", gradient.float()).dtype == torch.float32
    with pytest.raises(InvalidArgument, match="layer 'a' has 12 elements, its gradient 5"):
        residuals.of("a", torch.zeros(5))


def test_decay() -> None:
    residuals, gradient = Residuals(), torch.ones(4)
    residuals.of("a", gradient).fill_(8)
    assert residuals.of("a", gradient, 0.5).tolist() == [4] * 4
    assert residuals.of("a", gradient, 0.5).tolist() == [2] * 4
    assert residuals.of("a", gradient).tolist() == [2] * 4
