"""Every compressor in torch.ops.cgx (checks in the rank program), and invalid arguments."""

import re
from typing import Any

import pytest
import torch
from support import torch_cases as tc
from support.rank_checks import Launch, RankCheck, rank_checks

# Two compilers share two cores.
ENVIRONMENT = {**tc.ENVIRONMENT, "CGX_TIMEOUT": "90"}
PROGRAM = "run_torch_codecs.py"
EACH = [f"{each}_match_numpy" for each in ("single_calls", "lists", "gradients")]
OF_SEVERAL = [*EACH, "indices_depend_on_call_index", "mismatched_settings"]


@rank_checks(
    Launch(1, PROGRAM, *EACH, env=tc.ENVIRONMENT, timeout=180, marks=[pytest.mark.slow]),
    Launch(3, PROGRAM, *OF_SEVERAL, env=tc.ENVIRONMENT, timeout=180),
    Launch(2, PROGRAM, "in_graphs", env=ENVIRONMENT, timeout=600, marks=[pytest.mark.slow]),
    Launch(
        4, PROGRAM, *OF_SEVERAL, env=tc.ENVIRONMENT, timeout=180, marks=[pytest.mark.exhaustive]
    ),
)
def test_results_equal_numpy(check: RankCheck) -> None:
    check.passes()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"compressor": "lz4"}, "compressor is 'lz4'; it must be one of 'uniform', 'levels'"),
        ({"compressor": "topk", "density": 0.0}, "density is 0.0; it must be"),
        ({"compressor": "topk", "density": 1.5}, "density is 1.5; it must be"),
        ({"compressor": "topk", "density": float("nan")}, "density is nan; it must be"),
        ({"density": 0.1}, "which compressor='uniform' does not support: it belongs to topk"),
        ({"clip": True}, "it belongs to ternary"),
        ({"compressor": "topk", "value_bits": 9}, "value_bits is 9"),
        ({"compressor": "levels", "rotation": 33}, "rotation is 33"),
        ({"compressor": "levels", "bits": 5}, "from 1 to 4, or 32"),
        ({"compressor": "topk", "bits": 2}, "bits is 2; compressor='topk' has a fixed width"),
        ({"compressor": "qsgd", "rounding": "nearest"}, "supports 'stochastic': give that"),
        ({"compressor": "levels", "bits": 2, "rounding": "stochastic"}, "supports 'nearest'"),
        ({"compressor": "sign", "gather_bits": 4}, "gather_bits"),
    ],
)
def test_invalid_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        tc.allreduce(torch.ones(100), **tc.keywords(**options))
