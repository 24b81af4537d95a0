"""Join the all-reduces of a compiled graph that belong to one group of a plan.

1. match tensors to the plan by size, because a graph has no parameter names
2. split groups whose all-reduces depend on each other
3. join each part into one all_reduce_coalesced at the place of the last one, and move users of
   earlier results behind it
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
        values: its (fake) tensors.
        op: "sum" or another one.
        group: name of the process group.
    """

    node: torch.fx.Node
    values: list[torch.Tensor]
    op: str
    group: str

    @property
    def kind(self) -> Hashable:
        """The properties that all-reduces must share to be joined."""
        first = self.values[0]
        return self.op, self.group, first.dtype, first.device

    @property
    def inputs(self) -> list[Any]:
        """The nodes of its tensors."""
        given = self.node.args[0]
        return list(given) if isinstance(given, (list, tuple)) else [given]

    @property
    def outputs(self) -> list[tuple[torch.fx.Node, int]]:
        """The nodes of its results, each with its index."""
        if self.node.target is _functional.all_reduce.default:
            return [(self.node, 0)]
        assert all(user.target is operator.getitem for user in self.node.users), self.node.users
        return [(user, int(user.args[1])) for user in self.node.users]  # type: ignore[arg-type]


def joined(graph: torch.fx.Graph, found: Sequence[AllReduce], plan: Plan) -> list[AllReduce]:
    """Join the all-reduces of each group of a plan; return the resulting all-reduces."""
    result: list[AllReduce] = []
    for together in _groups(found, plan):
        for members in _independent(graph, together):
            result.append(_join(graph, members) if len(members) > 1 else members[0])
    return result


# ---- 1. match ------------------------------------------------------------------------------------


def _groups(found: Iterable[AllReduce], plan: Plan) -> list[list[AllReduce]]:
    """Return the all-reduces of each group of the plan, and each all-reduce without a group alone.

    Tensors of the same size are assigned in the order of the graph and of the plan. An all-reduce
    of several tensors belongs to the last of their groups.
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


# ---- 2. split ------------------------------------------------------------------------------------


def _independent(graph: torch.fx.Graph, together: list[AllReduce]) -> list[list[AllReduce]]:
    """Split a list, in the graph's order, where an all-reduce depends on an earlier result.

    Also split where an operator in between writes to a tensor, because a moved node might read it.
    """
    parts: list[list[AllReduce]] = [[]]
    members = {each.node: each for each in together}
    needing: set[torch.fx.Node] = set()  # the results of this part, and nodes that depend on them
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
    for node in list(graph.nodes):  # in order: users come after their inputs
        if node is call:
            break
        if any(needed in made for needed in node.all_input_nodes):
            made.add(node)
            place.append(node)
            place = node
    return AllReduce(call, values, members[-1].op, members[-1].group)
