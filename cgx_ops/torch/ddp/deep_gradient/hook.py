"""Deep Gradient Compression for DistributedDataParallel.

Ranks accumulate gradients and send the largest values. Lin, Han, Mao, Wang, Dally: Deep Gradient
Compression: Reducing the Communication Bandwidth for Distributed Training, ICLR 2018.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from cgx_ops import Config, Segment
from cgx_ops._core.tables import EXACT_BITS
from cgx_ops.errors import InvalidArgument
from cgx_ops.methods.deep_gradient import Method, checked_config, is_sparse, sparse_knobs
from cgx_ops.torch._compat.parallel import GradBucket
from cgx_ops.torch.averaging.arithmetic import full_precision, use_on_this_stream
from cgx_ops.torch.averaging.layers import segments_of
from cgx_ops.torch.averaging.residuals import nothing
from cgx_ops.torch.averaging.state import rules_of
from cgx_ops.torch.averaging.unused_parameters import unused_kept
from cgx_ops.torch.ddp.bucket import (
    BucketInfo,
    inspect_bucket,
    refuse,
    require_names,
    require_state,
)
from cgx_ops.torch.ddp.deep_gradient.hosts import Hosts, hosts_of
from cgx_ops.torch.ddp.deep_gradient.state import DeepGradientState
from cgx_ops.torch.graph.work import failed

_HOOK = "deep_gradient_hook"
_EXACT = Config(bits=EXACT_BITS, algorithm="by_hosts")

# ---- 1. the hook ---------------------------------------------------------------------------------


@full_precision()
def deep_gradient_hook(
    state: DeepGradientState, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients with Deep Gradient Compression.

    Register it with `DistributedDataParallel.register_comm_hook`. Each rank adds its clipped
    gradient g to the momentum u, and u to the accumulated gradient v::

        u = m u + g,   v = v + u
        u = m (u + g), v = v + u + g      (Nesterov)

    It sends the largest values of each layer's v. There u becomes 0, and v becomes 0 or the
    rounding error of the sent values. The average of the sent values replaces the gradient,
    momentum included. In layers that are not sparse, the exact mean of g goes through the momentum,
    the same on all ranks. Each bucket sends two messages: one for the sparse layers, one for the
    others. Later failures, such as a rank with other arguments or a lost peer, are stored in the
    future. `backward` then raises a RuntimeError with the text of the first error. On a GPU such a
    failure sets the gradients to NaN, and the next bucket's future holds the error.

    Args:
        state: a `DeepGradientState`.
        bucket: gradients in one flat float32, float16 or bfloat16 tensor, on the CPU or a GPU.
            Messages and arithmetic are float32.

    Returns:
        A future of the same tensor, averaged in place. The hook does not wait for it.

    Raises:
        TypeError: the dtype, layout or device of gradients is not supported; the text names the
            layers.
        InvalidArgument: cgx_ops cannot connect the process group, or the group is not the model's.
            Also if names of layers are unknown, a rule sets a layer to something other than sparse
            or exact, or the state belongs to another model, rank or number of ranks.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> from cgx_ops.torch import ddp
        >>> dist.init_process_group("cgx", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = DistributedDataParallel(torch.nn.Linear(64, 64))
        >>> state = ddp.DeepGradientState(density=0.01, momentum=0.9)
        >>> model.register_comm_hook(state, ddp.deep_gradient_hook)
        >>> model(torch.ones(8, 64)).sum().backward()
        >>> model.module.weight.grad.shape
        torch.Size([64, 64])
        >>> dist.destroy_process_group()
    """
    require_state(_HOOK, state, DeepGradientState)
    info = inspect_bucket(_HOOK, state, bucket)
    refuse(_HOOK, info)
    require_names(_HOOK, info)
    state.note(bucket.parameters())
    exchange = _Exchange(state, bucket, info)
    info.raise_refusal(exchange.or_refuse())
    with exchange.or_refuse():
        exchange.take_state(info)
    return exchange.start()


# ---- 2. the plan ---------------------------------------------------------------------------------


@dataclass(eq=False)
class _Layer:
    """A layer of a bucket.

    Attributes:
        name: name of the layer.
        values: its part of the message: first the gradient, then the values to average, then the
            average.
        segment: its settings.
        sparse: whether the layer has a v.
        lost: the part of v that this step does not send; None if it sends everything.
        v: accumulated gradient that was not sent yet; None if the layer is not sparse.
        u: its momentum; None without momentum.
    """

    name: str
    values: torch.Tensor
    segment: Segment
    sparse: bool
    lost: torch.Tensor | None
    v: torch.Tensor | None = None
    u: torch.Tensor | None = None

    def add(self, method: Method) -> None:
        """Add the gradient to momentum and v, and put v into the message."""
        assert self.v is not None
        self._correct(method)
        self.values.copy_(self.v.add_(self.values))

    def keep(self) -> None:
        """Keep the part of v that was not sent; reset the momentum of values that were sent."""
        if self.v is None:
            return
        if self.lost is None:
            self.v.zero_()
            return
        if self.u is not None:
            self.u.masked_fill_(self.lost != self.v, 0)
        self.v.copy_(self.lost)

    def finish(self, method: Method) -> None:
        """Apply momentum to the average of a layer that is not sparse.

        Values of the momentum that are not finite become zero.
        """
        if self.u is None or self.lost is not None:
            return
        if self.v is None:
            self._correct(method)
        self.u.nan_to_num_(0.0, 0.0, 0.0)

    def _correct(self, method: Method) -> None:
        """Replace a gradient by the momentum's update."""
        if self.u is None:
            return
        if method.nesterov:
            self.values.add_(self.u.add_(self.values).mul_(method.momentum))
        else:
            self.values.copy_(self.u.mul_(method.momentum).add_(self.values))


def _clipped(gradient: torch.Tensor, limit: float | None) -> None:
    """Scale a gradient down, in place, to an L2 norm of at most `limit`.

    If a value is not finite, all finite ones become zero.
    """
    if limit is not None:
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
        gradient.mul_((limit / norm).clamp(max=1).nan_to_num(0.0).float())


# ---- 3. a step -----------------------------------------------------------------------------------


class _Exchange:
    """The messages of one bucket in a step."""

    def __init__(self, state: DeepGradientState, bucket: GradBucket, info: BucketInfo) -> None:
        self.state, self.method, self.buffer = state, state.method, bucket.buffer()
        self.message = self.buffer.float()  # the buffer itself if it is float32
        self.name = f"deep_gradient/{bucket.index()}"
        self.name_of_exact = f"{self.name}, exact"
        self.ranks = state.group.size()
        self.hosts = self._hosts()
        self.layers = self._planned(info)
        # Layers that a host's ranks add up are in the sparse message, even when sent in full.
        self.sparse = [x for x in self.layers if x.lost is not None or (self.hosts and x.sparse)]
        self.exact = [x for x in self.layers if x not in self.sparse]
        self.restore: Callable[[], None] = nothing

    def take_state(self, info: BucketInfo) -> None:
        """Take the state of the layers.

        Raises:
            InvalidArgument: the state belongs to another model or rank.
        """
        state, hosts = self.state, self.hosts
        if hosts is None:
            self._claim()
        else:
            gathers = [x for x in self.sparse if x.name not in state.gathered]
            with hosts.or_refuse_gathers([_kept("v", x) for x in gathers]):
                self._claim()
            self._gather(hosts, gathers)
        if info.finds_unused:
            values, kept = [x.values for x in self.layers], [(x.u, x.v) for x in self.layers]
            self.restore = unused_kept(state, values, kept, self.name)

    def _claim(self) -> None:
        state = self.state
        for kept in (state.residuals, state.momenta):
            kept.claim(*state.place)
        for layer in self.layers:
            if layer.sparse:
                layer.v = state.residuals.of(layer.name, layer.values)
            elif layer.name in state.residuals.tensors:
                raise InvalidArgument(
                    f"layer '{layer.name}' was sparse, so that its residuals differ between ranks, "
                    "and is exact now: start with a new state, or use the config and rules that it "
                    "was saved with"
                )
            if self.method.momentum:
                layer.u = state.momenta.of(layer.name, layer.values)

    def _hosts(self) -> Hosts | None:
        state = self.state
        flat = state.carrier != "native" or state.config.algorithm == "one_shot"
        return None if flat or self.ranks == 1 else hosts_of(state.communicator())

    def _planned(self, info: BucketInfo) -> list[_Layer]:
        state, method = self.state, self.method
        config = Config(bits=EXACT_BITS) if info.config is None else info.config
        if config.bits != EXACT_BITS:
            checked_config(config)
        rules = rules_of(state)
        segments = segments_of(rules, info.layers, info.offsets, config)
        lost = torch.zeros_like(self.message)
        found = []
        for layer, place in zip(info.layers, segments, strict=True):
            at, numel = place.offset, layer.numel
            part = slice(at, at + numel)
            segment, rest = Segment(at, numel, _EXACT), None
            own = rules.of(layer.name, layer.dimensions, state.config)
            sparse = is_sparse(layer.name, own, numel)
            now = _EXACT if info.config is None else place.config or config
            if sparse and is_sparse(layer.name, now, numel) and self.ranks > 1:
                on_gpu = self.message.is_cuda
                knobs = sparse_knobs(method, now, numel, info.step, gpu=on_gpu)
                if knobs["density"] < 1:
                    segment, rest = Segment(at, numel, now.with_own(**knobs)), lost[part]
            found.append(_Layer(layer.name, self.message[part], segment, sparse, rest))
        return found

    def start(self) -> torch.futures.Future[torch.Tensor]:
        """Send the messages of sparse and exact layers; their callbacks do the rest."""
        try:
            with self.or_refuse():
                self._prepare()
        except Exception as error:
            return failed(error)
        if not self.sparse:
            done = self._average_exact(then=self._finish)
        else:
            means = self._average_exact() if self.exact else None

            def finish() -> None:
                if means is not None:
                    means.wait()
                self._finish()

            done = self._average_sparse(finish)
        return done.then(lambda future: (future.value(), self.buffer)[1])

    @contextlib.contextmanager
    def or_refuse(self) -> Iterator[None]:
        """Refuse this bucket's independent messages if the block that prepares them fails.

        They go to all ranks; with hosts, the message of sparse layers goes to the ranks of this
        host first.
        """
        flat = [self.name] if self.sparse and self.hosts is None else []
        exact = [self.name_of_exact] if self.exact else []
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.state.or_refuse(self.buffer.device, *exact, *flat))
            if self.sparse and self.hosts is not None:
                stack.enter_context(self.hosts.or_refuse(self.name))
            yield

    @full_precision()
    def _prepare(self) -> None:
        """Turn gradients into the values to send."""
        for layer in self.sparse + self.exact:
            _clipped(layer.values, self.method.limit(self.ranks))
        for layer in self.exact:
            if layer.v is not None:
                layer.add(self.method)
        if self.hosts is None:
            self._add()

    def _average_exact(
        self, then: Callable[[], object] = lambda: None
    ) -> torch.futures.Future[torch.Tensor]:
        segments = [layer.segment for layer in self.exact]
        return self.state.average(
            self.message, _EXACT, segments=segments, seed=[0] * len(segments),
            name=self.name_of_exact, then=lambda _: then(),
        )  # fmt: skip

    def _average_sparse(self, then: Callable[[], object]) -> torch.futures.Future[torch.Tensor]:
        config = replace(self.state.config, algorithm="one_shot")
        segments = [layer.segment for layer in self.sparse]
        lost = [layer.lost for layer in self.sparse]
        if self.hosts is not None:
            return self.hosts.average(
                self.message, config, segments=segments, name=self.name, residuals=lost,
                before=self._add, then=then,
            )  # fmt: skip
        return self.state.average(
            self.message, config, segments=segments, seed=[0] * len(segments), name=self.name,
            residuals=lost, then=lambda _: then(),
        )  # fmt: skip

    def _gather(self, hosts: Hosts, layers: Sequence[_Layer]) -> None:
        """Move the u and v of sparse layers to the first rank of the host, once.

        Done before unused_kept() copies them for a step in which no rank uses the layer.
        """
        for layer in layers:
            for what, kept in (("v", layer.v), ("u", layer.u)):
                if kept is not None:
                    hosts.gather(kept, _kept(what, layer))
            self.state.gathered.add(layer.name)

    @full_precision()
    def _add(self) -> None:
        for layer in self.sparse:
            layer.add(self.method)

    @full_precision()
    def _finish(self) -> None:
        """Store the unsent values; write the averages."""
        layers = self.sparse + self.exact
        use_on_this_stream(self.message, *(x for e in layers for x in (e.u, e.v, e.lost)))
        for layer in layers:
            layer.keep()
            layer.finish(self.method)
        self.restore()
        if self.message is not self.buffer:
            self.buffer.copy_(self.message)


def _kept(what: str, layer: _Layer) -> str:
    """Return the name of the message that gathers a layer's u or v."""
    return f"{what} of {layer.name}, kept"
