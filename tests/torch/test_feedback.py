"""torch.ops.cgx.quantized_allreduce_with_feedback and its coalesced form."""

from typing import Any

import numpy as np
import pytest
import reference
import torch
from support import launch
from support import torch_cases as tc

from cgx_ops import Communicator, Config

NEAREST: dict[str, Any] = {"rounding": "nearest", "config": tc.SRA}
SIZES = (5000, 17, 0, 600)


def expected(
    xs: list[torch.Tensor], residuals: list[torch.Tensor], bits: int, op: reference.Op
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the result and the ranks' new residuals."""
    lost = [tc.to_numpy(each).copy() for each in residuals]
    segment = reference.Segment(0, xs[0].numel(), bits, 64)
    want = reference.allreduce(
        [tc.to_numpy(x) for x in xs], [segment], op=op, algorithm="sra", residuals=lost
    )

    def to_torch(array: Any) -> torch.Tensor:
        if xs[0].dtype == torch.bfloat16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    return to_torch(want), [to_torch(each) for each in lost]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_equals_the_oracle(size: int, dtype: torch.dtype) -> None:
    """Check that the tensor and its residual are unchanged, and both results are new."""

    def rank_program(rank: int, comm: Communicator) -> list[tuple[torch.Tensor, torch.Tensor]]:
        found = []
        for numel in SIZES:
            x, e = tc.values(rank, numel, dtype), tc.values(rank, numel, dtype, call=1) / 8
            before = x.clone(), e.clone()
            found.append(tc.feedback(x, e, 2, 64, "avg", comm.name, **NEAREST))
            assert tc.same_bits(x, before[0])
            assert tc.same_bits(e, before[1])
        return found

    ranks = launch.threads(size, rank_program)
    for i, numel in enumerate(SIZES):
        xs = [tc.values(rank, numel, dtype) for rank in range(size)]
        es = [tc.values(rank, numel, dtype, call=1) / 8 for rank in range(size)]
        want, residuals = expected(xs, es, 2, "avg")
        for rank, found in enumerate(ranks):
            y, residual = found[i]
            assert tc.same_bits(y, want), (numel, rank)
            assert tc.same_bits(residual, residuals[rank]), (numel, rank)


def test_a_list_is_one_message() -> None:
    def rank_program(rank: int, comm: Communicator) -> Any:
        xs = [tc.values(rank, numel, call=i) for i, numel in enumerate(SIZES)]
        es = [tc.values(rank, numel, call=10 + i) / 8 for i, numel in enumerate(SIZES)]
        results = tc.feedback_list(xs, es, 2, 64, "sum", comm.name, **NEAREST)
        assert comm.collectives == 1
        assert tc.feedback_list([], [], group_name=comm.name) == ([], [])
        return results

    ranks = launch.threads(2, rank_program)
    for i, numel in enumerate(SIZES):
        xs = [tc.values(rank, numel, call=i) for rank in range(2)]
        es = [tc.values(rank, numel, call=10 + i) / 8 for rank in range(2)]
        want, residuals = expected(xs, es, 2, "sum")
        for rank, (ys, new) in enumerate(ranks):
            assert tc.same_bits(ys[i], want)
            assert tc.same_bits(new[i], residuals[rank])


def test_an_input_and_its_residual_have_one_gradient() -> None:
    def rank_program(rank: int, comm: Communicator) -> Any:
        x, e = (tc.values(rank, 1000, call=i).requires_grad_() for i in range(2))
        y, residual = tc.feedback(x, e, 4, 64, "avg", comm.name, **NEAREST)
        assert not residual.requires_grad
        return torch.autograd.grad(y, [x, e], tc.values(rank, 1000, call=2))

    want = tc.expected([tc.values(rank, 1000, call=2) for rank in range(2)], 4, 64, op="avg")
    for of_x, of_residual in launch.threads(2, rank_program):
        assert tc.same_bits(of_x, want)
        assert tc.same_bits(of_residual, want)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"compressor": "sign"}, "a vote has no magnitude"),
        ({"compressor": "ternary"}, "without clip=True its error is larger than the signal"),
        ({"compressor": "qsgd", "bits": 2, "bucket_size": 100}, "use more bits or smaller"),
    ],
)
def test_feedback_that_diverges(keywords: dict[str, Any], words: str) -> None:
    """Check that the error is raised on every rank."""

    def rank_program(rank: int, comm: Communicator) -> None:
        x = torch.ones(100)
        with pytest.raises(ValueError, match=words):
            tc.feedback(x, torch.zeros(100), group_name=comm.name, **keywords)

    launch.threads(2, rank_program)


@pytest.mark.parametrize(
    ("residual", "keywords", "error", "words"),
    [
        (torch.zeros(99), {}, ValueError, "a residual for each tensor, of its shape"),
        (torch.zeros(100).half(), {}, TypeError, "one message has one dtype"),
        (
            torch.zeros(100),
            {"op": "max", "bits": 32},
            ValueError,
            "'max' does not support residuals",
        ),
        (torch.zeros(100), {"bits": 32}, ValueError, "bits=32: there is no quantization error"),
    ],
)
def test_invalid_residuals(
    residual: torch.Tensor, keywords: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        tc.feedback(torch.ones(100), residual, **keywords)


@pytest.mark.parametrize("carrier", ["native", "c10d"])
@pytest.mark.parametrize(("tensors", "residuals"), [(1, 0), (0, 1), (3, 1), (1, 3), (2, 4), (4, 2)])
def test_list_with_wrong_number_of_residuals(tensors: int, residuals: int, carrier: str) -> None:
    with pytest.raises(ValueError, match="a residual for each tensor"):
        tc.feedback_list(
            [torch.ones(100)] * tensors, [torch.zeros(100)] * residuals, carrier=carrier
        )


def test_kernel_with_wrong_number_of_residuals() -> None:
    xs, call = [torch.ones(100)] * 3, tc.packed(Config(rounding="nearest"))
    cgx = torch.ops.cgx
    with pytest.raises(ValueError, match="a residual for each tensor"):
        cgx.quantized_all_reduce_coalesced(xs, xs[:1], None, call, "")
    with pytest.raises(ValueError, match="a residual for each tensor"):
        cgx.carried_encode(xs, xs[:1], 80, None, call, 0, 2, 0)


@pytest.mark.parametrize("carrier", ["native", "c10d"])
def test_an_exact_list(carrier: str) -> None:
    xs = [torch.ones(100), torch.ones(20)]
    with pytest.raises(
        ValueError, match=r"bits=32: there is no quantization error.*leave it out, or use fewer"
    ):
        tc.feedback_list(xs, list(map(torch.zeros_like, xs)), bits=32, carrier=carrier)
