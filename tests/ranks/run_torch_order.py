"""Rank program: ranks start the same collectives, however a compiler changes their programs.

Tests unused results, equal calls, and independent calls that each rank uses in a different order.
Calls have no names, so a different order is an error, and a missing call is a late peer.

        run_torch_order.py RUNS     number of runs with unused results: 12 cover every combination
"""

import sys
from collections.abc import Callable

import checks
import torch
from support import torch_cases as tc
from torch._inductor import config as inductor_config

import cgx_ops

RANK, SIZE = cgx_ops.rank(), cgx_ops.size()


def on_all_ranks(value: int) -> bool:
    """Return whether every rank has this value."""
    x = torch.tensor([float(value)])
    return tc.allreduce(x, 32, op="min").item() == tc.allreduce(x, 32, op="max").item()


def count(call: Callable[[], object]) -> int:
    """Return the number of collectives that call() ran."""
    before = cgx_ops.init().collectives
    call()
    return cgx_ops.init().collectives - before


def unused_results() -> None:
    """Check that rank 0 uses the result and rank 1 does not, with fresh compilations."""
    for run in range(int(sys.argv[1])):
        torch._dynamo.reset()
        grad = run % 2 == 0

        def step(x: torch.Tensor, run: int = run) -> torch.Tensor:
            y = tc.allreduce(x * 2, rounding="nearest" if run % 4 < 2 else "stochastic")
            if run % 3 == 0:
                tc.allreduce_(x + 1)
            if run % 3 == 1:
                y = y + tc.coalesced([x, x + 1])[0]
            return x * 3 + y if RANK == 0 else x * 3

        compiled = torch.compile(step, fullgraph=True)
        x = tc.values(RANK, 300).requires_grad_(grad)
        calls = count(lambda compiled=compiled, x=x: compiled(x))
        assert calls == (1 if run % 3 == 2 else 2), (run, calls)


def equal_calls() -> None:
    """Check that two equal calls stay two or become one, on all ranks the same."""
    for rounding in ("nearest", "stochastic"):
        for grad in (False, True):

            def step(x: torch.Tensor, rounding: str = rounding) -> torch.Tensor:
                a = tc.allreduce(x + 1, rounding=rounding)
                b = tc.allreduce(x + 1, rounding=rounding)
                c, d = tc.coalesced([x, a], rounding=rounding)
                e, f = tc.coalesced([x, a], rounding=rounding)
                return a * b + c * d * e * f

            torch._dynamo.reset()
            x = tc.values(RANK, 300).requires_grad_(grad)
            compiled = torch.compile(step, fullgraph=True)
            calls = count(lambda compiled=compiled, x=x: compiled(x))
            assert on_all_ranks(calls), calls
            assert calls == 4 or (calls == 2 and rounding == "nearest"), calls


def independent_calls() -> None:
    """Make calls of three sizes, used in a different order on each rank."""

    def step(x: torch.Tensor) -> torch.Tensor:
        parts = [tc.allreduce(x[: 100 + i] * (i + 1), 32) for i in range(2)]
        parts += tc.coalesced([x[:102] * 3, x[:103]], 32)
        order = [2, 0, 1, 3] if RANK == 0 else [3, 1, 2, 0]
        total = x.sum()
        for i in order:
            total = total + (parts[i] * (RANK + 1)).relu().sum()
        return total

    overlap = {
        "reorder_for_compute_comm_overlap": True,
        "reorder_for_compute_comm_overlap_passes": ["raise_comms", "sink_waits"],
    }
    for config in ({}, overlap):
        for grad in (False, True):
            torch._dynamo.reset()
            x = tc.values(RANK, 200).requires_grad_(grad)
            with inductor_config.patch(config):
                total = torch.compile(step, fullgraph=True)(x)
            torch.testing.assert_close(total, step(x))


def main() -> None:
    tc.forget_compiled_graphs()
    checks.run(checks.named(unused_results, equal_calls, independent_calls), sys.argv[2:])


if __name__ == "__main__":
    main()
