"""Deep Gradient Compression: several ranks per host, and the warm-up.

torch/test_hooks.py tests the hook.
"""

import pytest
from support import torch_cases as tc
from support.rank_checks import Launch, RankCheck, rank_checks

from cgx_ops import Config, InvalidArgument
from cgx_ops.methods.deep_gradient import Method, sparse_knobs


def on(hosts: str, *marks: pytest.MarkDecorator) -> Launch:
    numbers = hosts.replace("a", "0").replace("b", "1")
    return Launch(
        4, "run_torch_deep_gradient_hosts.py", arguments=[numbers], env=tc.ENVIRONMENT,
        hosts=hosts, timeout=100, marks=marks,
    )  # fmt: skip


@rank_checks(on("a,a,b,b", pytest.mark.slow), on("a,b,b,b", pytest.mark.exhaustive))
def test_ranks_that_share_hosts(check: RankCheck) -> None:
    check.passes()


# ---- the warm-up ---------------------------------------------------------------------------------


def method(density: float = 0.001, warmup_steps: int = 0) -> Method:
    return Method(density, 0.9, nesterov=False, clip=None, warmup_steps=warmup_steps)


@pytest.mark.parametrize(
    ("warmup_steps", "stages"),
    [
        (0, [(0, 0.0)]),
        (400, [(0, 0.25), (100, 0.0625), (200, 0.015625), (300, 0.00390625), (400, 0.0)]),
        (6, [(0, 0.25), (2, 0.0625), (3, 0.015625), (5, 0.00390625), (6, 0.0)]),
        (2, [(0, 0.25), (1, 0.015625), (2, 0.0)]),
        (1, [(0, 0.25), (1, 0.0)]),
    ],
)
def test_stages_of_the_warmup(warmup_steps: int, stages: list[tuple[int, float]]) -> None:
    found = method(warmup_steps=warmup_steps)
    assert found.stages() == stages
    for step in range(warmup_steps + 3):
        expected = next(least for start, least in reversed(stages) if start <= step)
        assert found.least_density(step) == expected


def test_how_a_layer_is_sent() -> None:
    own = Config(compressor="topk", value_bits=16)
    found = sparse_knobs(method(warmup_steps=4), own, 100_000, 1, gpu=False)
    assert found == {"density": 0.0625, "bucket_size": 100_000}
    ruled = Config(compressor="topk", density=0.5)
    assert sparse_knobs(method(warmup_steps=4), ruled, 9, 1, gpu=True)["density"] == 0.5
    assert sparse_knobs(method(), own, 100_000, 9, gpu=True)["bucket_size"] == 8192
    assert sparse_knobs(method(), own, 100, 9, gpu=True)["bucket_size"] == 100


def test_limit_of_each_rank() -> None:
    assert method().limit(4) is None
    assert Method(0.1, 0.9, nesterov=False, clip=3.0, warmup_steps=0).limit(4) == 1.5


def test_arguments_are_checked() -> None:
    with pytest.raises(InvalidArgument, match="density is True"):
        method(density=True)
    with pytest.raises(InvalidArgument, match="warmup_steps is True"):
        method(warmup_steps=True)
