"""compress_collectives(): all-reduces in compiled graphs travel quantized; the code stays as it is.

    with cgx_ops.torch.compress_collectives(cgx_ops.Config(bits=4)) as rewrite:
        train(torch.compile(step))
    print(rewrite.rewritten)

    torch.compile(step, options={"post_grad_custom_post_pass": compress_collectives()})

A pass of inductor, after all of inductor's own work on the graph, DDP's fusion included. It finds
`_c10d_functional.all_reduce` and `all_reduce_coalesced`: what functional collectives,
`dist.all_reduce`, DTensor and DDP's Python reducer are in a graph. Each is replaced by what
`torch.ops.cgx.quantized_allreduce` is in a graph: native where the group has a communicator of
cgx_ops (backend "cgx"), else carried by the group's own collectives (gloo).

    1. Choice: which all-reduces, and why not the others
    2. splice: one all-reduce becomes the traced operator; before that rewrite_groups.py joins those
       that are of one group of a plan
    3. Rewrite: the pass, its cache key, what it says at the end

A graph is compiled once and kept: what was compiled inside the block stays compressed after it, and
what was compiled before stays as it was. Backward graphs are compiled by the first backward(),
which therefore belongs into the block too. Ranks must use equal settings, as for any collective.

Rounding at random draws its seeds in the graph, forward and backward apart. An all-reduce that
activation checkpointing repeats in backward is therefore rounded anew; use rounding="nearest" to
have the same values twice.
"""

import hashlib
import logging
import warnings
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.fx

from cgx_ops import Communicator, Config
from cgx_ops.errors import InvalidArgument, NotFound
from cgx_ops.planner import Plan
from cgx_ops.torch._compat import graphs
from cgx_ops.torch.graph import inductor, rewrite_groups
from cgx_ops.torch.graph.rewrite_groups import AllReduce, joined
from cgx_ops.torch.graph.work import devices

_log = logging.getLogger(__name__)

Group = dist.ProcessGroup | str

_functional = torch.ops._c10d_functional
_WAIT = _functional.wait_tensor.default
_FORMS = (_functional.all_reduce.default, _functional.all_reduce_coalesced.default)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# What decides what becomes of a graph.
_SOURCES = [Path(str(module.__file__)) for module in (graphs, rewrite_groups)] + [Path(__file__)]


class NothingRewritten(UserWarning):
    """A compress_collectives() block ended and no graph of it has a compressed collective."""


# ---- 1. which ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """Which all-reduces are compressed: those that refusal() has nothing against.

    Attributes:
        groups: names of groups; None: all.
        dtypes: of the tensors.
        min_numel: fewest elements, over all tensors of a coalesced call.
    """

    groups: tuple[str, ...] | None
    dtypes: tuple[torch.dtype, ...]
    min_numel: int

    def refusal(self, values: list[torch.Tensor], op: str, group: str) -> str | None:
        """Say why an all-reduce of these (fake) tensors stays as it is; None: it does not."""
        if op not in ("sum", "avg"):
            return f"op {op!r}; only sum and avg can be compressed"
        if self.groups is not None and group not in self.groups:
            return f"group {group!r} is not one of groups={list(self.groups)}"
        kinds = {value.dtype for value in values}
        if len(kinds) > 1:
            return "tensors of several dtypes in one call"
        for dtype in kinds - set(self.dtypes):
            return f"{dtype} is not one of dtypes={list(self.dtypes)}"
        places = {value.device for value in values}
        if len(places) > 1:
            return "tensors on several devices in one call"
        native = has_communicator(group)
        for device in {place.type for place in places} - set(devices() if native else ("cpu",)):
            how = "this build of cgx_ops" if native else "a group of another backend than 'cgx'"
            return f"tensors on {device}, which {how} does not serve"
        numels = [value.numel() for value in values]
        if not all(isinstance(numel, int) for numel in numels):
            return "a size that is not static; compile with dynamic=False"
        if sum(numels) < self.min_numel:
            return f"fewer than min_numel={self.min_numel} elements"
        return None


# ---- 2. how --------------------------------------------------------------------------------------


def has_communicator(group: str) -> bool:
    """Tell whether cgx_ops has a communicator of the group's name."""
    try:
        Communicator.find(group)
    except NotFound:
        return False
    return True


def trace(values: list[torch.Tensor], op: str, group: str, config: Config) -> torch.fx.Graph:
    """Return the graph that quantized_allreduce_coalesced is for these fake tensors."""
    carrier = "native" if has_communicator(group) else "c10d"

    def reduce(*xs: torch.Tensor) -> list[torch.Tensor]:
        options = {"op": op, "group_name": group, "carrier": carrier, "config": str(config)}
        return torch.ops.cgx.quantized_allreduce_coalesced(list(xs), **options)

    return graphs.trace(reduce, values)


def splice(graph: torch.fx.Graph, reduced: AllReduce, traced: torch.fx.Graph) -> None:
    """Replace an all-reduce and its waits by a traced graph of the same inputs and outputs.

    What comes before the first wait goes where the all-reduce was, the rest to where its first
    result is needed: what lies between overlaps with the communication, as it did before.
    """
    node, outputs = reduced.node, reduced.outputs
    order = {each: place for place, each in enumerate(graph.nodes)}
    users = [user for output, _ in outputs for user in output.users]
    needed = min(users, key=order.__getitem__, default=node.next)

    place = node
    new: dict[torch.fx.Node, Any] = {}
    sources = iter(reduced.inputs)
    results: Any = ()
    for inner in traced.nodes:
        if inner.op == "placeholder":
            new[inner] = next(sources)
        elif inner.op == "output":
            results = [new[result] for result in inner.args[0]]
        else:
            place = needed if inner.target is _WAIT else place
            with graph.inserting_before(place):
                new[inner] = graph.node_copy(inner, new.__getitem__)

    for output, index in outputs:
        for user in list(output.users):
            if user.target is _WAIT:
                user.replace_all_uses_with(results[index])
                graph.erase_node(user)
        output.replace_all_uses_with(results[index])
        if output is not node:
            graph.erase_node(output)
    graph.erase_node(node)


# ---- 3. the pass ---------------------------------------------------------------------------------


class Rewrite:
    """What compress_collectives() returns: context manager and graph pass. Nested, all take part.

    Attributes:
        config: how values travel.
        choice: which all-reduces do.
        plan: which of them share a message; None: each is one.
    """

    def __init__(self, config: Config, choice: Choice, plan: Plan | None = None) -> None:
        self.config, self.choice, self.plan = config, choice, plan
        settings = repr((asdict(config), choice, plan))
        self._settings = hashlib.sha256(settings.encode()).hexdigest()[:16]
        self._before = self._counted()
        self._installed: AbstractContextManager[object] | None = None

    # Inductor stores its counters with a graph and restores them when the graph comes from a cache,
    # so that a hit counts like the compilation did.

    def _count(self, what: str) -> None:
        graphs.compile_counters()[f"cgx_ops rewrite {self._settings}: {what}"] += 1

    def _counted(self) -> Counter[str]:
        start = f"cgx_ops rewrite {self._settings}: "
        counted = graphs.compile_counters().items()
        return Counter({k.removeprefix(start): n for k, n in counted if k.startswith(start)})

    @property
    def counts(self) -> dict[str, int]:
        """What happened since this was made, by objects with these settings: events by kind.

        "graphs" and "rewritten"; every other key is why so many all-reduces stayed as they were.
        """
        now = self._counted()
        now.subtract(self._before)
        return {what: n for what, n in now.items() if n > 0}

    @property
    def rewritten(self) -> int:
        """All-reduces compressed so far, those in graphs that came from a cache included."""
        return self.counts.get("rewritten", 0)

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Rewrite one graph in place."""
        self._count("graphs")
        graphs.sort_graph(graph)
        found = []
        for node in list(graph.nodes):
            if node.op != "call_function" or node.target not in _FORMS:
                continue
            inputs, op, group = graphs.arguments(node)
            nodes = inputs if isinstance(inputs, (list, tuple)) else [inputs]
            values = [each.meta["val"] for each in nodes]
            op, group = op.lower(), graphs.group_name(group)
            refusal = self.choice.refusal(values, op, group)
            _log.debug("all_reduce %s: %s", node, refusal or "compressed")
            self._count(refusal or "rewritten")
            if refusal is None:
                found.append(AllReduce(node, values, op, group))
        for each in found if self.plan is None else joined(graph, found, self.plan):
            splice(graph, each, trace(each.values, each.op, each.group, self.config))
        graph.lint()

    def uuid(self) -> object:
        """Return all that decides what this does to a graph: a part of the caches' keys.

        Carried messages have sizes of their own on each rank; ranks may share a cache.
        """
        digest = hashlib.sha256()
        for path in _SOURCES:
            digest.update(path.read_bytes())
        groups = [(name, *where, has_communicator(name)) for name, where in graphs.groups()]
        return digest.hexdigest(), self._settings, devices(), groups

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Return self: inductor copies its configuration, and the pass in it stays this one."""
        return self

    def __enter__(self) -> Self:
        if self._installed is not None:
            raise InvalidArgument("this compress_collectives() block is open; make another one")
        self._before = self._counted()
        self._installed = graphs.post_grad_pass(self)
        self._installed.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        installed, self._installed = self._installed, None
        assert installed is not None
        installed.__exit__(kind, error, traceback)
        if kind is None and not self.rewritten:
            warnings.warn(self._why_nothing(), NothingRewritten, stacklevel=2)

    def _why_nothing(self) -> str:
        counts = self.counts
        compiled = counts.pop("graphs", 0)
        text = "compress_collectives() compressed nothing: "
        if counts:
            filtered = "; ".join(f"{n} of {what}" for what, n in counts.items())
            return text + f"every all-reduce of {compiled} compiled graphs was left out: {filtered}"
        if compiled:
            text += f"{compiled} graphs were compiled in the block and none has an all-reduce. "
        else:
            text += (
                "no graph was compiled in the block. A model that ran before keeps its graphs: "
                "run it inside for the first time, or call torch._dynamo.reset(). "
            )
        text += (
            "DistributedDataParallel reduces gradients outside of graphs unless "
            'torch._dynamo.config.optimize_ddp is "python_reducer" when it is made (now it is '
            f"{graphs.optimize_ddp()!r}) and backward() runs under compiled autograd. "
            'The backend "cgx" and the hook of cgx_ops.torch.ddp compress what it reduces there.'
        )
        return text


def compress_collectives(
    config: Config | None = None,
    *,
    groups: Iterable[Group] | None = None,
    dtypes: Iterable[torch.dtype] | None = None,
    min_numel: int = 1024,
    plan: Plan | None = None,
) -> Rewrite:
    """Compress the all-reduces (sum and avg) of what is compiled in a block, or with an option.

    Args:
        config: how values travel; None: Config(), 4 bits.
        groups: process groups, or their names; None: all.
        dtypes: None: float32, float16 and bfloat16.
        min_numel: calls with fewer elements stay as they are.
        plan: all-reduces of tensors that it has in one group become one message, in the place of
            the last of them, as far as none needs another's result. Graphs know no names: tensors
            are found by their sizes, in the order of the graph. Its bits are not used.

    Returns:
        A context manager, which warns with NothingRewritten when it ends and no graph has a
        compressed all-reduce, and a value for torch.compile's option "post_grad_custom_post_pass".

    Raises:
        InvalidArgument: dtypes that cannot be compressed, no groups or a min_numel below 0.
    """
    config = Config() if config is None else config
    kinds = _DTYPES if dtypes is None else tuple(dict.fromkeys(dtypes))
    if not kinds or not set(kinds) <= set(_DTYPES):
        raise InvalidArgument(f"dtypes is {list(kinds)}; it must be some of {list(_DTYPES)}")
    if min_numel < 0:
        raise InvalidArgument(f"min_numel is {min_numel}; it must be 0 or more")
    names = None
    if groups is not None:
        names = tuple(map(graphs.group_name, groups))
        if not names:
            raise InvalidArgument("groups is empty; give None for all groups")
    graphs.declare_graph_pass(Rewrite)
    inductor.key_caches()  # graphs are looked up before the pass traces an operator
    return Rewrite(config, Choice(names, kinds, min_numel), plan)
