"""torch.ops.cgx.quantized_allreduce_coalesced: a list of tensors in one message."""

import numpy as np
import pytest
import reference
import torch
from support import launch
from support import torch_cases as tc

from cgx_ops import Communicator, Config

coalesced = torch.ops.cgx.quantized_allreduce_coalesced
SIZES = [513, 0, 17, 1, 5000, 512, 8]  # tensors of 8 or fewer elements are sent exactly


def inputs(rank: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [tc.values(rank, size, dtype, call=i) for i, size in enumerate(SIZES)]


def segments(bits: int, bucket_size: int) -> list[reference.Segment]:
    offsets = np.cumsum([0, *SIZES[:-1]]).tolist()
    return [reference.Segment(o, n, bits, bucket_size) for o, n in zip(offsets, SIZES, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_tensors_have_separate_buckets(dtype: torch.dtype, n: int) -> None:
    cases: list[tuple[int, int, reference.Op]] = [(1, 64, "sum"), (4, 512, "avg"), (32, 512, "sum")]

    def rank_program(rank: int, comm: Communicator) -> tuple[list[list[torch.Tensor]], int]:
        before = comm.collectives
        results = [
            coalesced(inputs(rank, dtype), bits, bucket_size, op, comm.name, rounding="nearest")
            for bits, bucket_size, op in cases
        ]
        return results, comm.collectives - before

    ranks = launch.threads(n, rank_program)
    for i, (bits, bucket_size, op) in enumerate(cases):
        flat = [tc.to_numpy(torch.cat(inputs(rank, dtype))) for rank in range(n)]
        want = reference.allreduce(
            flat, segments(bits, bucket_size), op=op, algorithm="auto", rounding="nearest"
        )
        for rank, (results, count) in enumerate(ranks):
            assert count == len(cases), "one message each"
            assert [y.shape for y in results[i]] == [x.shape for x in inputs(rank)]
            got = tc.to_numpy(torch.cat(results[i]))
            np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


def test_shapes_and_strides_are_preserved() -> None:
    def rank_program(rank: int, comm: Communicator) -> None:
        x = tc.values(rank, 600).reshape(20, 30)
        scalar = torch.tensor(float(rank + 1))
        y, z, s = coalesced([x.t(), x, scalar], 32, 512, "sum", comm.name)
        assert (y.shape, z.shape, s.shape) == ((30, 20), (20, 30), ())
        assert tc.same_bits(y.t().contiguous(), z)
        assert s.item() == 3

    launch.threads(2, rank_program)


def test_an_empty_list_sends_nothing() -> None:
    def rank_program(rank: int, comm: Communicator) -> None:
        assert coalesced([], 4, 512, "sum", comm.name) == []
        assert comm.collectives == 0

    launch.threads(2, rank_program)


def test_gradients_are_reduced_in_one_message() -> None:
    def rank_program(rank: int, comm: Communicator) -> tuple[list[torch.Tensor], int]:
        a, b = (tc.values(rank, size).requires_grad_() for size in (100, 1000))
        y, z = coalesced([a, b], 4, 64, "avg", comm.name, rounding="nearest", config=tc.SRA)
        upstream = [tc.values(rank, 100, call=1), tc.values(rank, 1000, call=2)]
        gradients = torch.autograd.grad([y, z], [a, b], upstream)
        return list(gradients), comm.collectives

    ranks = launch.threads(2, rank_program)
    for i, (size, call) in enumerate([(100, 1), (1000, 2)]):
        upstream = [tc.values(rank, size, call=call) for rank in range(2)]
        want = tc.expected(upstream, 4, 64, op="avg")
        for gradients, count in ranks:
            assert tc.same_bits(gradients[i], want)
            assert count == 2


def test_a_tensor_without_gradient_in_the_list() -> None:
    def rank_program(_rank: int, comm: Communicator) -> None:
        a, b = torch.ones(100, requires_grad=True), torch.ones(100)
        y, _ = coalesced([a, b], 32, 512, "sum", comm.name)
        y.sum().backward()
        assert a.grad is not None
        assert torch.equal(a.grad, torch.full((100,), 2.0))

    launch.threads(2, rank_program)


@pytest.mark.parametrize(
    ("xs", "error", "words"),
    [
        ([torch.ones(8), torch.ones(8).half()], TypeError, "one message has one dtype"),
        (
            [torch.ones(8, dtype=torch.int32)],
            TypeError,
            "float32, float16 and bfloat16 are supported",
        ),
        ([torch.ones(8), torch.ones(8).to_sparse()], TypeError, r"to_dense\(\)"),
    ],
)
def test_bad_lists_raise(xs: list[torch.Tensor], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        coalesced(xs)


def test_rejected_call_draws_no_seed() -> None:
    state = torch.get_rng_state()
    with pytest.raises(TypeError):
        coalesced([torch.ones(100), torch.ones(8, dtype=torch.int32)])
    assert torch.equal(state, torch.get_rng_state())


def test_messages_of_wrong_size_raise() -> None:
    cgx, x, few = torch.ops.cgx, [torch.randn(2**16)], torch.empty(3, dtype=torch.uint8)
    options = (None, tc.packed(Config(rounding="nearest", algorithm="sra")))
    for call in (
        lambda: cgx.carried_encode(x, [], 3, *options, 0, 2, 0),
        lambda: cgx.carried_reduce(x, [], few, 9000, *options, 0, 2, 0),
        lambda: cgx.carried_decode(x, few, *options, 0, 2, 0),
    ):
        with pytest.raises(ValueError, match=r"has (room for )?3 bytes"):
            call()
    with pytest.raises(TypeError, match="expected uint8"):
        cgx.carried_decode(x, few.float(), *options, 0, 2, 0)
    for rank, size in ((0, -1), (2, 2), (-1, 2)):
        with pytest.raises(ValueError, match=f"rank is {rank} and size {size}"):
            cgx.carried_encode(x, [], 3, *options, rank, size, 0)
