"""Rank program: whatever a compiler does to a rank's program, ranks start the same collectives.

Unused results, equal calls, and independent calls that each rank uses in another order. Calls have
no name, so that an order that differs is an error, and a call that is missing a late peer.

    run_torch_order.py RUNS     of unused results: 12 have every combination
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
    """Tell whether every rank has this value."""
    x = torch.tensor([float(value)])
    return tc.allreduce(x, 32, op="min").item() == tc.allreduce(x, 32, op="max").item()


def count(call: Callable[[], object]) -> int:
    """Return the number of collectives that call() ran."""
    before = cgx_ops.init().collectives
    call()
    return cgx_ops.init().collectives - before


def unused_results() -> None:
    """Rank 0 uses the result and rank 1 does not: each program is compiled from the start."""
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
    """Two equal calls stay two or become one; on every rank alike, whoever uses them."""
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
    """Calls of three sizes, consumed in an order of each rank's own."""

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
