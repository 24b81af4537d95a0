"""All-reduces of a compiled graph, joined to the groups of a plan before they are rewritten.

    1. match: a graph knows no names of parameters; tensors of a plan are found by their sizes
    2. which of a group may be one: none that needs another's result
    3. join: one all_reduce_coalesced in the place of the last of them, exact as they were

What used the results of earlier ones comes after it, where it was not already.
"""

import operator
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.fx

from cgx_ops.planner import Plan
from cgx_ops.torch._compat import graphs

_functional = torch.ops._c10d_functional


class AllReduce(NamedTuple):
    """An all-reduce of a graph.

    Attributes:
        node: all_reduce or all_reduce_coalesced.
        values: the (fake) tensors that it reduces.
        op: "sum", or another one.
        group: the name of the process group.
    """

    node: torch.fx.Node
    values: list[torch.Tensor]
    op: str
    group: str

    @property
    def kind(self) -> Hashable:
        """What all have in common that may share a call."""
        first = self.values[0]
        return self.op, self.group, first.dtype, first.device

    @property
    def inputs(self) -> list[Any]:
        """The nodes of the tensors that it reduces."""
        given = self.node.args[0]
        return list(given) if isinstance(given, (list, tuple)) else [given]

    @property
    def outputs(self) -> list[tuple[torch.fx.Node, int]]:
        """The nodes that are its results, each with its number."""
        if self.node.target is _functional.all_reduce.default:
            return [(self.node, 0)]
        assert all(user.target is operator.getitem for user in self.node.users), self.node.users
        return [(user, int(user.args[1])) for user in self.node.users]  # type: ignore[arg-type]


def joined(graph: torch.fx.Graph, found: Sequence[AllReduce], plan: Plan) -> list[AllReduce]:
    """Join all-reduces of a graph that are of one group of a plan; return what there is then."""
    result: list[AllReduce] = []
    for together in _groups(found, plan):
        for members in _independent(graph, together):
            result.append(_join(graph, members) if len(members) > 1 else members[0])
    return result


# ---- 1. match ------------------------------------------------------------------------------------


def _groups(found: Iterable[AllReduce], plan: Plan) -> list[list[AllReduce]]:
    """Return those of each group of the plan, and by themselves those that are in none.

    Of tensors of one size the first in the graph is taken for the one that the plan sends first. An
    all-reduce of several tensors is of the last group of any.
    """
    waiting: dict[int, deque[int]] = defaultdict(deque)
    for number, group in enumerate(plan.groups):
        for i in group:
            waiting[plan.numels[i]].append(number)
    groups: dict[Hashable, list[AllReduce]] = {}
    for each in found:
        numbers = [
            waiting[value.numel()].popleft() if waiting[value.numel()] else None
            for value in each.values
        ]
        known = [number for number in numbers if number is not None]
        key = (max(known), each.kind) if known else each.node
        groups.setdefault(key, []).append(each)
    return list(groups.values())


# ---- 2. which may be one -------------------------------------------------------------------------


def _independent(graph: torch.fx.Graph, together: list[AllReduce]) -> list[list[AllReduce]]:
    """Cut a list, in the graph's order, where one needs what an earlier one made.

    Also where an operator in between writes to a tensor: what would move might read it.
    """
    parts: list[list[AllReduce]] = [[]]
    members = {each.node: each for each in together}
    needing: set[torch.fx.Node] = set()  # the results of this part, and what was made of them
    for node in graph.nodes:
        depends = any(needed in needing for needed in node.all_input_nodes)
        if node in members:
            if depends:
                parts.append([])
                needing.clear()
            parts[-1].append(members[node])
            needing.add(node)
        elif needing and _writes(node):
            parts.append([])
            needing.clear()
        elif depends:
            needing.add(node)
    return [part for part in parts if part]


def _writes(node: torch.fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


# ---- 3. join -------------------------------------------------------------------------------------


def _join(graph: torch.fx.Graph, members: Sequence[AllReduce]) -> AllReduce:
    last = members[-1].node
    inputs = [x for member in members for x in member.inputs]
    values = [value for member in members for value in member.values]
    _, op, group = graphs.arguments(last)
    with graph.inserting_after(last):
        call = graph.call_function(_functional.all_reduce_coalesced.default, (inputs, op, group))
    call.meta["val"] = values
    place, first = call, 0
    made: set[torch.fx.Node] = set()
    for member in members:
        for output, index in member.outputs:
            with graph.inserting_after(place):
                place = graph.call_function(operator.getitem, (call, first + index))
            place.meta["val"] = values[first + index]
            output.replace_all_uses_with(place)
            made.add(place)
            if output is not member.node:
                graph.erase_node(output)
        first += len(member.values)
        graph.erase_node(member.node)
    for node in list(graph.nodes):  # in order: users follow what they use
        if node is call:
            break
        if any(needed in made for needed in node.all_input_nodes):
            made.add(node)
            place.append(node)
            place = node
    return AllReduce(call, values, members[-1].op, members[-1].group)
