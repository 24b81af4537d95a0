"""Deep Gradient Compression for DistributedDataParallel: ranks send the largest of what they owe.

    from cgx_ops.torch import ddp
    state = ddp.DeepGradientState(density=0.001, momentum=0.9, warmup_steps=400)
    model.register_comm_hook(state, ddp.deep_gradient_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)      # without momentum

  1. the hook
  2. the plan: which layers of a bucket are sparse
  3. a step: momentum; what is sparse and what is exact, a message each; what is kept

Lin, Han, Mao, Wang, Dally: Deep Gradient Compression: Reducing the Communication Bandwidth for
Distributed Training, ICLR 2018. The state is in state.py.
"""

import contextlib
from collections.abc import Callable, Iterator
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
from cgx_ops.torch.ddp.bucket import (
    BucketInfo,
    inspect_bucket,
    refuse,
    require_names,
    require_state,
)
from cgx_ops.torch.ddp.deep_gradient.hosts import Hosts, hosts_of
from cgx_ops.torch.ddp.deep_gradient.state import DeepGradientState
from cgx_ops.torch.ddp.unused_parameters import unused_kept
from cgx_ops.torch.graph.work import failed

_HOOK = "deep_gradient_hook"
_EXACT = Config(bits=EXACT_BITS, algorithm="by_hosts")

# ---- 1. the hook ---------------------------------------------------------------------------------


@full_precision()
def deep_gradient_hook(
    state: DeepGradientState, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients over the ranks with momentum, the largest values of each layer.

    Give it to DistributedDataParallel.register_comm_hook(). Each rank adds its gradient g, clipped,
    to the momentum u and that to v, what it has not sent yet:

        u = m u + g, v = v + u;  with Nesterov's momentum u = m (u + g), v = v + u + g

    It sends the largest values of v; there v and u become 0, or v what the values lost on their
    way. The average of what all ranks sent stands for the gradient, momentum included. Of layers
    that are not sparse the mean of g goes through the momentum, on all ranks alike. Two messages a
    bucket: one of all sparse layers, one of all others.

    Args:
        state: a DeepGradientState.
        bucket: gradients in one flat float32, float16 or bfloat16 tensor, on the CPU or a GPU.
            Messages and all arithmetic are float32.

    Returns:
        A future of the same tensor, averaged in place; the hook does not wait for it.

    Raises:
        TypeError: gradients of another dtype, layout or device; it names the layer.
        InvalidArgument: the process group cannot be served, or is not the model's; names of layers
            are not known; a rule has a layer travel otherwise than sparse or exact; the state is
            another model's, another rank's or another number of ranks'.

    What goes wrong later is in the future, as with quantized_allreduce_hook.
    """
    require_state(_HOOK, state, DeepGradientState)
    info = inspect_bucket(_HOOK, state, bucket)
    refuse(_HOOK, info)
    require_names(_HOOK, info)
    for kept in (state.residuals, state.momenta):
        kept.claim(*state.place)
    state.note(bucket.parameters())
    loaded = [dict(each) for each in state.by_layer()]
    exchange = _Exchange(state, bucket, info)
    if info.refusal:  # the exchange began entries for the layers of this model
        for kept, before in zip(state.by_layer(), loaded, strict=True):
            kept.clear()
            kept.update(before)
    info.raise_refusal(exchange.or_refuse())
    return exchange.start()


# ---- 2. the plan ---------------------------------------------------------------------------------


@dataclass(eq=False)
class _Layer:
    """A layer of a bucket.

    Attributes:
        name: the layer's.
        values: its part of the message: the gradient, then what is averaged, then the average.
        segment: how it travels.
        v: what is not sent yet; None if the layer is not sparse.
        u: its momentum; None without momentum.
        lost: what is not sent in this step; None if all is.
    """

    name: str
    values: torch.Tensor
    segment: Segment
    v: torch.Tensor | None
    u: torch.Tensor | None
    lost: torch.Tensor | None

    def add(self, method: Method) -> None:
        """Add the gradient to momentum and v, which is to be sent then."""
        assert self.v is not None
        self._correct(method)
        self.values.copy_(self.v.add_(self.values))

    def keep(self) -> None:
        """Keep what is not sent; where something is, momentum begins anew."""
        if self.v is None:
            return
        if self.lost is None:
            self.v.zero_()
            return
        if self.u is not None:
            self.u.masked_fill_(self.lost != self.v, 0)
        self.v.copy_(self.lost)

    def finish(self, method: Method) -> None:
        """Have the average of a layer that is not sparse go through the momentum.

        There, too, what is not finite leaves no trace.
        """
        if self.u is None or self.lost is not None:
            return
        if self.v is None:
            self._correct(method)
        self.u.nan_to_num_(0.0, 0.0, 0.0)

    def _correct(self, method: Method) -> None:
        """Put what momentum makes of a gradient in its place."""
        if self.u is None:
            return
        if method.nesterov:
            self.values.add_(self.u.add_(self.values).mul_(method.momentum))
        else:
            self.values.copy_(self.u.mul_(method.momentum).add_(self.values))


def _clipped(gradient: torch.Tensor, limit: float | None) -> None:
    """Scale a gradient down, in place, to an L2 norm of at most `limit`.

    Beside what is not finite nothing is left of it.
    """
    if limit is not None:
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
        gradient.mul_((limit / norm).clamp(max=1).nan_to_num(0.0).float())


# ---- 3. a step -----------------------------------------------------------------------------------


class _Exchange:
    """One bucket's way through a step."""

    def __init__(self, state: DeepGradientState, bucket: GradBucket, info: BucketInfo) -> None:
        self.state, self.method, self.buffer = state, state.method, bucket.buffer()
        self.message = self.buffer.float()  # the buffer itself, if that is what it is
        self.name = f"deep_gradient/{bucket.index()}"
        self.name_of_exact = f"{self.name}, exact"
        self.ranks = state.group.size()
        self.hosts = self._hosts()
        layers = self._planned(info)
        # What the ranks of a host add up goes its way whole, too.
        self.sparse = [x for x in layers if x.lost is not None or (self.hosts and x.v is not None)]
        self.exact = [x for x in layers if x not in self.sparse]
        if self.hosts is not None:
            self._gather(self.hosts)
        self.restore = nothing
        if info.finds_unused:
            values, kept = [x.values for x in layers], [(x.u, x.v) for x in layers]
            self.restore = unused_kept(state, values, kept, self.name)

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
            values, v, u, rest = self.message[part], None, None, None
            segment = Segment(at, numel, _EXACT)
            if is_sparse(layer.name, rules.of(layer.name, layer.dimensions, state.config), numel):
                v = state.residuals.of(layer.name, values)
                now = _EXACT if info.config is None else place.config or config
                if is_sparse(layer.name, now, numel) and self.ranks > 1:
                    on_gpu = values.is_cuda
                    knobs = sparse_knobs(method, now, numel, info.step, gpu=on_gpu)
                    if knobs["density"] < 1:
                        segment, rest = Segment(at, numel, now.with_own(**knobs)), lost[part]
            elif layer.name in state.residuals.tensors:
                raise InvalidArgument(
                    f"layer '{layer.name}' was sparse, and what is kept of it is each rank's own; "
                    "now it is exact: begin with a new state, or give it the config and rules it "
                    "was saved with"
                )
            if method.momentum:
                u = state.momenta.of(layer.name, values)
            found.append(_Layer(layer.name, values, segment, v, u, rest))
        return found

    def start(self) -> torch.futures.Future[torch.Tensor]:
        """Send what is sparse and what is exact; the rest follows when it is there."""
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
        """Refuse the messages that wait for no other one if the block, which prepares them, fails.

        Their ranks are those of all hosts, or, of sparse layers, those of this host.
        """
        flat = [self.name] if self.sparse and self.hosts is None else []
        exact = [self.name_of_exact] if self.exact else []
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.state.or_refuse(*exact, *flat))
            if self.sparse and self.hosts is not None:
                stack.enter_context(self.hosts.or_refuse(self.name))
            yield

    @full_precision()
    def _prepare(self) -> None:
        """Make of gradients what is sent."""
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

    def _gather(self, hosts: Hosts) -> None:
        """Have the first rank of this host take over what others have of layers, once.

        Before what is kept of a layer is noted, for a step in which nobody uses it.
        """
        for layer in self.sparse:
            if layer.name not in self.state.gathered:
                for what, kept in (("v", layer.v), ("u", layer.u)):
                    if kept is not None:
                        hosts.gather(kept, f"{what} of {layer.name}")
                self.state.gathered.add(layer.name)

    @full_precision()
    def _add(self) -> None:
        for layer in self.sparse:
            layer.add(self.method)

    @full_precision()
    def _finish(self) -> None:
        """Keep what was not sent; write the averages."""
        layers = self.sparse + self.exact
        use_on_this_stream(self.message, *(x for e in layers for x in (e.u, e.v, e.lost)))
        for layer in layers:
            layer.keep()
            layer.finish(self.method)
        self.restore()
        if self.message is not self.buffer:
            self.buffer.copy_(self.message)
