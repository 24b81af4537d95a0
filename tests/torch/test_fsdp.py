"""FSDP2 with compressed collectives: every message, all training modes, replicas of HSDP."""

import re

import pytest
import torch
from support import torch_cases as tc
from support.rank_checks import Launch, RankCheck, rank_checks
from torch import nn

from cgx_ops import InvalidArgument
from cgx_ops.torch import fsdp
from cgx_ops.torch.fsdp.block import Parameter

FEEDBACK = ["feedback_matches_reduce_scatter", "averaged_in_eight_bits", "compressors_by_rule"]
FEEDBACK += ["resumed_feedback_is_bitwise_equal", "bad_feedback"]
WHOSE = ["residuals_stay_with_their_parameters", "loaded_state_can_be_consolidated"]
WHOSE += ["residuals_fit_other_wrapping"]
SLOW_ON_TWO = ["adaptive.*", "replicas_do_not_drift", "all_training_modes_with_differences"]
SLOW_ON_TWO += ["in_host_memory"]
SLOW_ON_TWO += ["training.*", "rules.*", "refusals.*", "other_layouts"]
ON_TWO = ["messages_equal_the_oracle", "weights_in_forward", "other_layouts", "training.*"]
ON_TWO += ["rules.*", "refusals.*", "ambient.*", *FEEDBACK, *WHOSE]
ON_FOUR = ["messages_equal_the_oracle", "hybrid", "smaller_mesh_after_forward", *WHOSE]
ON_FOUR += ["settings_apply_to_gathered_weights"]
ON_FOUR += ["feedback_matches_reduce_scatter", "failure_on_one_rank"]
ON_FOUR += ["differences_equal_the_oracle", "unchanged_weights_are_not_sent", "bad_differences"]
ON_FOUR += ["exact_codec_by_rule", "state_loaded_on_one_rank"]
ON_FOUR += ["replicas_of_shards", "replica_states.failure_on_one_rank"]
ON_FOUR += ["replicas.reset_discards_accumulated"]
SLOW_ON_FOUR = ["ambient.defaults", "differences.resumed_differences_are_bitwise_equal"]
SLOW_ON_FOUR += ["replicas.*", "replica_states.*"]
LONGER = [*FEEDBACK, "differences_fit_any_number_of_shards"]
LONGER += ["consolidated_residuals_fit_any_number_of_shards"]
PROGRAM = "run_torch_fsdp.py"


@rank_checks(
    Launch(4, PROGRAM, *ON_FOUR, env=tc.ENVIRONMENT, timeout=150),
    Launch(4, PROGRAM, *SLOW_ON_FOUR, env=tc.ENVIRONMENT, timeout=300, marks=[pytest.mark.slow]),
    Launch(2, PROGRAM, *SLOW_ON_TWO, env=tc.ENVIRONMENT, timeout=150, marks=[pytest.mark.slow]),
    Launch(4, PROGRAM, *LONGER, env=tc.ENVIRONMENT, timeout=400, marks=[pytest.mark.exhaustive]),
    Launch(
        3, PROGRAM, "replicas.*", env=tc.ENVIRONMENT, timeout=150, marks=[pytest.mark.exhaustive]
    ),
    Launch(2, PROGRAM, *ON_TWO, env=tc.ENVIRONMENT, timeout=150, marks=[pytest.mark.exhaustive]),
)
def test_ranks(check: RankCheck) -> None:
    check.passes()


def test_model_without_fsdp_raises() -> None:
    with pytest.raises(InvalidArgument, match=re.escape("fully_shard before compress")):
        fsdp.compress(nn.Linear(2, 2))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("rows", [1, 5, 24])
def test_parameters_are_found_in_blocks(dim: int, ranks: int, rows: int) -> None:
    """FSDP pads the last shards of dimension 0; shards of other dimensions have equal lengths."""
    shape = torch.Size((rows, 24, 3))
    whole = torch.arange(1.0, shape.numel() + 1).view(shape)
    length = -(-shape[dim] // ranks)
    numel = shape.numel() // shape[dim] * length
    blocks = torch.full((ranks, numel + 7), -1.0)
    parameter = Parameter("p", shape, dim, 5, numel)
    parameter.put_into(blocks, whole)
    for rank in range(ranks):
        part = whole.narrow(dim, min(rank * length, shape[dim]), 0)
        if rank * length < shape[dim]:
            part = whole.narrow(dim, rank * length, min(length, shape[dim] - rank * length))
        mine = blocks[rank, 5 : 5 + numel]
        assert mine[: part.numel()].equal(part.flatten())
        assert not mine[part.numel() :].any()
    assert (blocks[:, :5] == -1).all() and (blocks[:, 5 + numel :] == -1).all()
    assert parameter.cut_from(blocks).equal(whole)


def test_state_resumes_from_its_state_dict() -> None:
    state = fsdp.State(seed=5)
    seeds = [state.weights_seed(name) for name in ("a", "b", "a")]
    assert seeds[0] == seeds[2] != seeds[1]
    other = fsdp.State()
    other.load_state_dict(state.state_dict())
    assert other.weights_seed("a") == seeds[0]
    other.load_state_dict({"seed": 5, "draws": 7, "reductions": 3, "used": 1})
    assert other.state_dict() == {"seed": 5, "draws": 7, "reductions": 3, "used": 1}
    assert other.weights_seed("a") != seeds[0]
    assert other.state_dict() == {"seed": 5, "draws": 8, "reductions": 3, "used": 0}
