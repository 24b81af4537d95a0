"""Residuals by layer: created on first use, rejected for another model's layers, decayed."""

import pytest
import torch

from cgx_ops import Config, InvalidArgument, Segment
from cgx_ops.torch.averaging.residuals import Residuals, decayed


def test_a_layer_keeps_its_residual() -> None:
    residuals, gradient = Residuals(), torch.ones(3, 4, dtype=torch.bfloat16)
    first = residuals.of("a", gradient)
    assert first.dtype == torch.bfloat16 and first.tolist() == [0] * 12
    first += 2
    assert residuals.of("a", gradient).tolist() == [2] * 12
    assert residuals.of("a", gradient.float()).dtype == torch.float32
    with pytest.raises(InvalidArgument, match="layer 'a' has 12 elements, but its gradient has 5"):
        residuals.of("a", torch.zeros(5))


def test_the_owner_may_change_its_rank_unless_residuals_were_loaded() -> None:
    residuals = Residuals()
    residuals.of("a", torch.ones(4)).fill_(2)
    residuals.claim(2, 5)
    residuals.claim(1, 3)  # the group was rebuilt
    loaded = Residuals.restored(residuals.saved(1, 3, per_rank=True))
    with pytest.raises(InvalidArgument, match="those of rank 1 of 3, but this is rank 0 of 3"):
        loaded.claim(0, 3)
    loaded.claim(1, 3)
    loaded.claim(0, 2)
    assert loaded.of("a", torch.ones(4)).tolist() == [2] * 4


def test_decay() -> None:
    kept = [torch.full((4,), 8.0), None]
    segments, half = [Segment(0, 4), Segment(4, 4)], Config(residual_decay=0.5)
    taken, keep = decayed(kept, half, segments)
    assert taken is not None and taken[0] is not None and taken[1] is None
    assert taken[0].tolist() == [4] * 4
    taken[0].fill_(3)
    assert kept[0].tolist() == [8] * 4  # a failed step ends here
    keep()
    assert kept[0].tolist() == [3] * 4
    whole, _ = decayed(kept, Config(), segments)
    assert whole is not None and whole[0] is kept[0]
    assert decayed(None, half, segments)[0] is None
    own = [Segment(0, 4, Config(residual_decay=0.25)), segments[1]]
    taken, _ = decayed(kept, half, own)
    assert taken is not None and taken[0] is not None and taken[0].tolist() == [0.75] * 4
