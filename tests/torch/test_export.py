"""opcheck of every operator of torch.ops.cgx, and torch.export of models that use them."""

import io
from typing import Any

import pytest
import torch
from support import launch
from support import torch_cases as tc
from torch.library import opcheck

from cgx_ops import Communicator, Config

coalesced: Any = torch.ops.cgx.quantized_allreduce_coalesced


def kernel_options(*, rank: int | None = None, rounding: Any = "nearest") -> tuple[Any, ...]:
    """Return the low-level operators' arguments after their tensors."""
    seed = torch.tensor(7) if rounding != "nearest" else None
    call = tc.packed(Config(4, 64, rounding, "sra"))
    return (seed, call, "") if rank is None else (seed, call, rank, 2, rank)


def calls(name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return calls of an operator; a KeyError means that an operator is not tested."""
    x, grad = tc.values(0, 200), tc.values(1, 200).requires_grad_()
    xs = [x, tc.values(0, 30).reshape(5, 6).t()]
    y, ys = x / 8, [each / 8 for each in xs]
    arrived, gathered = torch.zeros(80, dtype=torch.uint8), torch.zeros(160, dtype=torch.uint8)
    nearest: dict[str, Any] = {"rounding": "nearest"}
    exact: dict[str, Any] = {"bits": 32, "op": "avg"}
    public = [((x,), nearest), ((grad,), nearest), ((grad,), exact)]
    codecs: list[dict[str, Any]] = [
        {"compressor": "topk", "density": 0.1, "value_bits": 8},
        {"compressor": "levels", "bits": 2, "rotation": 32},
        {"compressor": "sign"},
    ]
    codecs = [tc.keywords(**own) for own in codecs]
    public += [((x,), own) for own in codecs] + [((grad,), own) for own in codecs]
    pairs = [
        ((x, y), nearest),
        ((grad, y), {"op": "avg"}),
        *(((grad, y), own) for own in codecs[:2]),
    ]
    start = [((x, *kernel_options(rounding=r)), {}) for r in ("nearest", "stochastic")]
    own = Config(compressor="topk", density=0.1)
    start += [((x, None, tc.packed(own), ""), {})]
    start += [((x, torch.tensor(7), tc.packed(Config(compressor="randk")), ""), {})]
    start_list = [
        ((xs, residuals, *kernel_options(rounding=r)), {})
        for residuals in ([], ys)
        for r in ("nearest", "shift")
    ]
    seed, call, group = kernel_options(rounding="stochastic")
    scatter = [((x, kept, seed, call, 1, group), {}) for kept in ([], [y])]
    scatter.append(((x, [], *kernel_options()[:2], 1, group), {}))
    gather = [((x, seed, call, 1, group), {}), ((x, *kernel_options()[:2], 1, group), {})]
    options = [(seed, call, group), kernel_options()]
    exchange = [((x, [200], [200], *each), {}) for each in options]
    return {
        "quantized_all_to_all": [
            ((x,), nearest),
            ((x, [200], None), nearest),
            ((grad, [200], [200]), {**nearest, "grad_config": str(Config(4))}),
        ],
        "quantized_all_to_all_single": exchange,
        "quantized_all_to_all_single_start": exchange,
        "quantized_all_to_all_single_start.borrow": exchange,
        "quantized_reduce_scatter": public,
        "quantized_reduce_scatter_with_feedback": pairs,
        "quantized_all_gather": [((x,), nearest), ((grad,), nearest), ((grad,), {"bits": 32})],
        "quantized_reduce_scatter_tensor": scatter,
        "quantized_reduce_scatter_tensor_start": scatter,
        "quantized_reduce_scatter_tensor_start.borrow": scatter,
        "quantized_all_gather_into_tensor": gather,
        "quantized_all_gather_into_tensor_start": gather,
        "quantized_all_gather_into_tensor_start.borrow": gather,
        "quantized_allreduce": public,
        "quantized_allreduce_": [((x,), nearest), ((grad * 2,), nearest), ((x,), exact)],
        "quantized_allreduce_coalesced": [((xs,), nearest), (([grad, x],), exact), (([],), {})],
        "quantized_allreduce_with_feedback": pairs,
        "quantized_allreduce_coalesced_with_feedback": [((xs, ys), nearest), (([], []), {})],
        "draw_seed": [((torch.empty(0),), {})],
        "draw_indices": [((torch.empty(0), "", "checked"), {})],
        "quantized_all_reduce": start,
        "quantized_all_reduce_start": start,
        "quantized_all_reduce_start.borrow": start,
        "quantized_all_reduce_coalesced": start_list,
        "quantized_all_reduce_coalesced_start": start_list,
        "carried_encode": [
            ((xs, residuals, 80, *kernel_options(rank=rank)), {})
            for rank in (0, 1)
            for residuals in ([], ys)
        ],
        "carried_reduce": [
            ((xs, residuals, arrived, 80, *kernel_options(rank=0)), {}) for residuals in ([], ys)
        ],
        "carried_decode": [((xs, gathered, *kernel_options(rank=1)), {})],
    }[name]


OPERATORS = sorted(
    name.removeprefix("cgx::")
    for name in torch._C._dispatch_get_all_op_names()
    if name.startswith("cgx::")
)


@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck(name: str) -> None:
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.cgx, packet), overload or "default")
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    # opcheck compares values, but every draw differs, and a start has no value before its wait. The
    # public operators are traced into these.
    if not name.startswith("draw_") and "_start" not in name:
        checks.append("test_aot_dispatch_dynamic")
    for arguments, keywords in calls(name):
        opcheck(operator, arguments, keywords, test_utils=checks)


class Model(torch.nn.Module):
    """Use the plain, the coalesced and the in-place form."""

    def __init__(self, group: str) -> None:
        super().__init__()
        self.options = {"group_name": group, "rounding": "nearest", "config": tc.SRA}

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        y = 2 * x
        tc.allreduce_(y, 4, 64, **self.options)
        both = coalesced([x, x[:300] + 1], 4, 64, **self.options)
        return [tc.allreduce(2 * x, 4, 64, **self.options), *both, y]


@pytest.mark.parametrize("decomposed", [False, True])
def test_exported_models_reduce(decomposed: bool) -> None:
    """Save and load a model, as public operators, or as their start and wait."""
    group, inputs = f"exported-{decomposed}", [tc.values(rank, 1000) for rank in range(2)]
    programs = []
    for rank in range(2):
        program = torch.export.export(Model(f"{group}/{rank}"), (inputs[rank],))
        if decomposed:
            program = program.run_decompositions()
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        programs.append(torch.export.load(file))
        targets = [str(node.target) for node in program.graph.nodes]
        form = "all_reduce%s_start" if decomposed else "allreduce%s"
        for which in ("", "_coalesced"):
            assert f"cgx.quantized_{form % which}.default" in targets, targets

    def run(rank: int, comm: Communicator) -> list[torch.Tensor]:
        assert comm.name == f"{group}/{rank}"
        return programs[rank].module()(inputs[rank])

    twice = tc.expected([2 * x for x in inputs], 4, 64)
    first = tc.expected(inputs, 4, 64)
    second = tc.expected([x[:300] + 1 for x in inputs], 4, 64)
    for results in launch.threads(2, run, name=group):
        for got, want in zip(results, (twice, first, second, twice), strict=True):
            assert tc.same_bits(got, want)
