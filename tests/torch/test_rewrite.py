"""compress_collectives() under torchrun. The checks are in the rank program."""

import uuid
from collections.abc import Sequence

import pytest
import torch
from support import launch
from support import torch_cases as tc
from support.rank_checks import Launch, RankCheck, listed, rank_checks

from cgx_ops.planner import Plan
from cgx_ops.torch.graph.rewrite import compress_collectives
from cgx_ops.torch.graph.rewrite_groups import AllReduce, joined

_functional = torch.ops._c10d_functional


def _graph(numels: list[int], chained: bool = False, writes: bool = False) -> torch.fx.Graph:
    """Return a graph of an all-reduce, its wait and a use for each size, in sequence."""
    graph = torch.fx.Graph()
    inputs = [graph.placeholder(f"x{numel}") for numel in numels]
    results: list[torch.fx.Node] = []
    for x, numel in zip(inputs, numels, strict=True):
        x = graph.call_function(torch.ops.aten.add.Tensor, (x, results[-1] if results else x))
        if not chained:
            x = graph.call_function(torch.ops.aten.mul.Tensor, (inputs[len(results)], 2))
        if writes:
            graph.call_function(torch.ops.aten.copy_.default, (inputs[len(results)], x))
        reduced = graph.call_function(_functional.all_reduce.default, (x, "sum", "0"))
        x.meta["val"] = reduced.meta["val"] = torch.empty(numel)
        waited = graph.call_function(_functional.wait_tensor.default, (reduced,))
        results.append(graph.call_function(torch.ops.aten.add.Tensor, (waited, 1)))
    graph.output(results)
    return graph


def _joined(graph: torch.fx.Graph, plan: Plan) -> list[list[int]]:
    """Join all-reduces of one group; return the sizes of each call, in the graph's order."""
    found = [
        AllReduce(node, [node.meta["val"]], "sum", "0")
        for node in graph.nodes
        if node.target is _functional.all_reduce.default
    ]
    calls = {each.node: each for each in joined(graph, found, plan)}
    graph.eliminate_dead_code()
    graph.lint()  # checks that values are defined before their use
    return [[v.numel() for v in calls[n].values] for n in graph.nodes if n in calls]


def test_independent_groups_of_a_plan_are_joined() -> None:
    plan = Plan(("a", "b", "c", "d"), (10, 20, 30, 10), (4,) * 4, ((3, 2), (1, 0)))
    sizes = [10, 30, 7, 10, 20]  # the plan sends the first one of size 10 first
    graph = _graph(sizes)
    assert _joined(graph, plan) == [[10, 30], [7], [10, 20]]
    (output,) = (node for node in graph.nodes if node.op == "output")
    waits = [result.args[0] for result in output.args[0]]
    assert [wait.args[0].meta["val"].numel() for wait in waits] == sizes
    for options in ({"chained": True}, {"writes": True}):
        assert _joined(_graph(sizes, **options), plan) == [[size] for size in sizes]


def test_unordered_graph_is_sorted() -> None:
    """Start from a graph as left by torch's fusion of DDP's all-reduces."""
    graph = _graph([10, 20])
    nodes = list(graph.nodes)
    reduced = next(node for node in nodes if node.target is _functional.all_reduce.default)
    reduced.append(reduced.args[0])
    with pytest.raises(RuntimeError, match="before it has been defined"):
        graph.lint()
    compress_collectives(min_numel=100)(graph)
    graph.lint()
    assert len(graph.nodes) == len(nodes)


PROGRAM = "run_torch_rewrite.py"
CHECKS = listed(PROGRAM)
NAMES = [f"{check} over {carrier}" for check in CHECKS for carrier in ("gloo", "cgx")]
IN_TURNS = [f"{check} over {('gloo', 'cgx')[i % 2]}" for i, check in enumerate(CHECKS)]


def on_two(*names: str, marks: Sequence[pytest.MarkDecorator]) -> Launch:
    return Launch(
        2, PROGRAM, *names, names=NAMES, by=launch.torchrun, arguments=[uuid.uuid4().hex],
        env=tc.ENVIRONMENT, timeout=300, marks=marks,
    )  # fmt: skip


@rank_checks(
    on_two(*IN_TURNS, f"{CHECKS[0]} over cgx", marks=[pytest.mark.slow]),
    on_two(marks=[pytest.mark.exhaustive]),
)
def test_collectives_in_graphs_are_compressed(check: RankCheck) -> None:
    """Run every check on one of two groups with different carriers, or on both."""
    check.passes()
