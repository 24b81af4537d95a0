"""Rank program: invalid calls; compiled functions against eager ones and the oracle.

    run_torch_compile.py [--no-lowering] CHECK...

--no-lowering hides torch's private lowering of collectives from cgx_ops. The functions around
the collectives use only operations for which inductor matches eager bit for bit. The invalid
calls are in torch_refused.py.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import checks
import torch
import torch_refused
from support import torch_cases as tc
from torch._dynamo.compiled_autograd import _enable
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor import ir
from torch._inductor.utils import run_and_get_code
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

import cgx_ops

RANK, SIZE = cgx_ops.rank(), cgx_ops.size()
OPTIONS: dict[str, Any] = {"bits": 3, "bucket_size": 64, "config": tc.SRA}

Step = Callable[[torch.Tensor], torch.Tensor]


def run(
    function: Step, numel: int = 1000, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return output, gradient and the number of collectives of one forward and backward."""
    torch.manual_seed(100 + RANK)
    before = cgx_ops.init().collectives
    x = tc.values(RANK, numel, dtype).requires_grad_()
    y = function(x)
    y.backward(tc.values(RANK, numel, dtype, call=1))
    assert x.grad is not None
    return y.detach(), x.grad, cgx_ops.init().collectives - before


def oracle(numel: int, dtype: torch.dtype, rounding: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the expected result of run() for x -> 2 * allreduce(2 * relu(x))."""
    seeds = [tc.drawn_seeds(100 + rank)[0] for rank in range(SIZE)]
    options = {"rounding": rounding, "bits": 3, "bucket_size": 64}
    inputs = [tc.values(rank, numel, dtype) for rank in range(SIZE)]
    y = 2 * tc.expected([2 * x.relu() for x in inputs], seeds=seeds, **options)
    gradients = [2 * tc.values(rank, numel, dtype, call=1) for rank in range(SIZE)]
    seeds = [tc.gradient_seed(seed) for seed in seeds]
    gradient = tc.expected(gradients, seeds=seeds, **options) * 2
    return y, torch.where(inputs[RANK] > 0, gradient, 0)


def forward_and_backward() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for rounding in ("nearest", "stochastic"):

            def step(x: torch.Tensor, rounding: str = rounding) -> torch.Tensor:
                return 2 * tc.allreduce(2 * x.relu(), rounding=rounding, **OPTIONS)

            def in_place(x: torch.Tensor, rounding: str = rounding) -> torch.Tensor:
                y = 2 * x.relu()
                tc.allreduce_(y, rounding=rounding, **OPTIONS)
                return 2 * y

            y, gradient = oracle(1000, dtype, rounding)
            for function in (step, in_place):
                for call in (function, torch.compile(function, fullgraph=True)):
                    got = run(call, dtype=dtype)
                    assert tc.same_bits(got[0], y), (dtype, rounding, call)
                    assert tc.same_bits(got[1], gradient), (dtype, rounding, call)
                    assert got[2] == 2, got[2]


def lists() -> None:
    """Test a list in one message, its gradient in another: compiled, recomputed, several sizes."""

    def block(x: torch.Tensor) -> torch.Tensor:
        a, b = tc.coalesced([2 * x.relu(), x + 1], **OPTIONS)
        return a * a + b * b  # backward needs both again

    def recomputed(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, use_reentrant=False)

    want = run(block)
    assert want[2] == 2
    for call in (torch.compile(block, fullgraph=True), torch.compile(recomputed, fullgraph=True)):
        got = run(call)
        torch.testing.assert_close(got[:2], want[:2])
    compiled = torch.compile(lambda x: tc.coalesced([x, x + 1], **OPTIONS), dynamic=True)
    for numel in (17, 1000, 5000):
        torch.manual_seed(RANK)
        got = compiled(tc.values(RANK, numel))
        torch.manual_seed(RANK)
        x = tc.values(RANK, numel)
        assert all(map(tc.same_bits, got, tc.coalesced([x, x + 1], **OPTIONS))), numel


def steps_with_feedback() -> None:
    """Check residuals over steps, with two tensors in one message, forward only."""

    def step(x: torch.Tensor, residuals: list[torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
        (a, b), residuals = tc.feedback_list([2 * x.relu(), x[:300] + 1], residuals, **OPTIONS)
        return (a + 1, 2 * b), residuals

    found = []
    for call in (step, torch.compile(step, fullgraph=True)):
        torch.manual_seed(100 + RANK)
        residuals, results = [torch.zeros(1000), torch.zeros(300)], []
        for number in range(3):
            sums, residuals = call(tc.values(RANK, 1000, call=number), residuals)
            results += [*sums, *residuals]
        found.append(results)
    assert all(map(tc.same_bits, *found))
    assert found[0][2].any(), "the residual is zero"


def in_place_on_the_input() -> None:
    def step(x: torch.Tensor) -> None:
        tc.allreduce_(x, rounding="nearest", **OPTIONS)

    inputs = [tc.values(rank, 1000).reshape(8, 125) for rank in range(SIZE)]
    for call in (step, torch.compile(step, fullgraph=True)):
        x = inputs[RANK].clone()
        call(x)
        assert tc.same_bits(x, tc.expected(inputs, 3, 64)), call
        x = inputs[RANK].clone()
        call(x.t())
        assert tc.same_bits(x.t(), tc.expected([x.t() for x in inputs], 3, 64)), call


def dynamic_shapes() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return 2 * tc.allreduce(2 * x.relu(), rounding="nearest", **OPTIONS)

    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for numel in (17, 1000, 64, 5000):
        y, gradient = oracle(numel, torch.float32, "nearest")
        got = run(compiled, numel)
        assert tc.same_bits(got[0], y), numel
        assert tc.same_bits(got[1], gradient), numel
    assert counters["stats"]["unique_graphs"] == 1, counters["stats"]


def checkpointed() -> None:
    """Check that recomputation draws the forward's noise: y*y's gradient uses the recomputed y."""

    def block(x: torch.Tensor) -> torch.Tensor:
        y = tc.allreduce(2 * x, **OPTIONS)
        return y * y

    def recomputed(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, use_reentrant=False)

    plain = run(block)
    assert plain[2] == 2
    for call in (recomputed, torch.compile(recomputed, fullgraph=True)):
        got = run(call)
        assert tc.same_bits(got[0], plain[0]), call
        assert tc.same_bits(got[1], plain[1]), call
        assert got[2] == 3, got[2]  # forward, recomputation, gradient


def seeds() -> None:
    """Check that two calls draw different noise, and that manual_seed repeats both."""

    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([tc.allreduce(x, **OPTIONS), tc.allreduce(x, **OPTIONS)])

    for call in (step, torch.compile(step, fullgraph=True)):
        for grad in (False, True):
            x = tc.values(RANK, 1000).requires_grad_(grad)
            torch.manual_seed(RANK)
            first = call(x)
            second = call(x)
            torch.manual_seed(RANK)
            assert tc.same_bits(call(x), first)
            assert tc.same_bits(call(x), second)
            assert not tc.same_bits(first, second)
            assert not tc.same_bits(first[0], first[1]), (call, grad)


def compiled_autograd() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return 2 * tc.allreduce(2 * x.relu(), **OPTIONS)

    def with_feedback(x: torch.Tensor) -> torch.Tensor:
        y, lost = tc.feedback(2 * x.relu(), torch.zeros_like(x), **OPTIONS)
        assert not lost.requires_grad
        return 2 * y

    compiler = torch.compile(backend="aot_eager", fullgraph=True)
    for function in (step, with_feedback):
        want = run(function)
        counters.clear()
        with _enable(compiler):
            got = run(function)
        assert counters["compiled_autograd"]["captures"] == 1, counters
        assert tc.same_bits(got[0], want[0])
        assert tc.same_bits(got[1], want[1])


def checkpointed_in_a_whole_step() -> None:
    """Check the recomputed noise if one graph includes the backward pass."""

    def block(x: torch.Tensor) -> torch.Tensor:
        y = tc.allreduce(2 * x, **OPTIONS)
        return y * y

    def step(x: torch.Tensor) -> None:
        checkpoint(block, x, use_reentrant=False).sum().backward()

    gradients = []
    with torch._dynamo.config.patch(compiled_autograd=True):
        for call in (step, torch.compile(step, backend="aot_eager")):
            torch.manual_seed(100 + RANK)
            x = tc.values(RANK, 1000).requires_grad_()
            call(x)
            gradients.append(x.grad)
    assert tc.same_bits(*gradients)


def operators() -> None:
    for options in ({"rounding": "nearest"}, {"bits": 32, "op": "avg"}):
        for grad in (False, True):
            x = tc.values(RANK, 40).requires_grad_(grad)
            opcheck(tc.allreduce.default, (x,), options)
            opcheck(tc.allreduce_.default, (x * 2 if grad else x,), options)


def input_memory_not_reused() -> None:
    """Check that the input's memory is not reused while a late peer keeps the collective open."""

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = tc.allreduce(x * 2, 32)
        other = (x @ x).relu() * 3
        return y, (other @ x).relu() * 5

    inputs = [tc.values(rank, 512 * 512).reshape(512, 512) for rank in range(SIZE)]
    with inductor_config.patch(
        reorder_for_compute_comm_overlap=True,
        reorder_for_compute_comm_overlap_passes=["raise_comms", "sink_waits"],
    ):
        compiled = torch.compile(step, fullgraph=True)
        compiled(inputs[RANK])
        for _ in range(3):
            time.sleep(0.3 * RANK)
            y, _ = compiled(inputs[RANK])
            assert tc.same_bits(y, tc.expected([x * 2 for x in inputs], 32, algorithm="auto"))


def generated_code() -> str:
    def step(x: torch.Tensor) -> torch.Tensor:
        return tc.allreduce(2 * x, rounding="nearest") + 1

    _, (code,) = run_and_get_code(torch.compile(step, fullgraph=True), tc.values(RANK, 100))
    return code


def with_lowering() -> None:
    """Check that inductor reads the producer's buffer directly."""
    code = generated_code()
    assert "all_reduce_start.borrow(" in code
    assert "all_reduce_start.default(" not in code


def hide_lowering() -> None:
    """Check that inductor reads a copy. The first graph of a process determines this for all."""
    create = ir._CollectiveKernel.create_out_of_place
    del ir._CollectiveKernel.create_out_of_place
    code = generated_code()
    ir._CollectiveKernel.create_out_of_place = create
    assert "all_reduce_start.default(" in code
    assert "all_reduce_start.borrow(" not in code


def main() -> None:
    tc.forget_compiled_graphs()
    names = sys.argv[1:]
    if "--no-lowering" in names:
        names.remove("--no-lowering")
        hide_lowering()
    checks.run(
        checks.of_modules(torch_refused) | checks.named(
            with_lowering, forward_and_backward, in_place_on_the_input,
            dynamic_shapes, checkpointed, seeds, lists, steps_with_feedback, compiled_autograd,
            checkpointed_in_a_whole_step, operators, input_memory_not_reused,
        ),
        names,
        after=torch._dynamo.reset,
    )  # fmt: skip


if __name__ == "__main__":
    main()
