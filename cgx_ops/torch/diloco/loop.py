"""DiLoCo: ranks train by themselves, and average what they have learnt every so many steps.

    from cgx_ops.torch.diloco import DiLoCo
    diloco = DiLoCo(model, sync_every=30, config=cgx_ops.Config(bits=4))
    for batch in batches:
        loss(model, batch).backward()
        optimizer.step()                  # each rank's own: no DistributedDataParallel
        diloco.step()

After a step in which a fragment of the parameters is due:

  1. send: the differences of its parameters from the outer parameters, with their residuals, are
     averaged, compressed, in the background
  2. apply, some steps later: an outer optimizer steps the outer parameters by the average; the
     parameters become these, or a mixture of both

Douillard et al.: DiLoCo: Distributed Low-Communication Training of Language Models, 2023; Streaming
DiLoCo with overlapping communication, 2025. Stich: Local SGD Converges Fast and Communicates
Little, ICLR 2019. Sarfi et al.: Communication Efficient LLM Pre-training with SparseLoCo, 2025.
ranks.py: the same start on all ranks; fragments.py: the parameters of a fragment. docs/guides/diloco.md.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, SupportsIndex, Unpack

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Optimizer

from cgx_ops import Config, Rules
from cgx_ops.config import Keywords, config_of
from cgx_ops.errors import InvalidArgument, Unsupported
from cgx_ops.methods.outer_loop import Schedule, strided
from cgx_ops.torch.averaging.arithmetic import full_precision
from cgx_ops.torch.averaging.exchange import Carriers, Exchange, Flight, check_parameters
from cgx_ops.torch.averaging.grad_scaler import after_every_step
from cgx_ops.torch.averaging.layers import named_layers
from cgx_ops.torch.averaging.loaded import require_keys, require_layers
from cgx_ops.torch.diloco.fragments import of_modules
from cgx_ops.torch.diloco.ranks import CALLER, synchronize

_KEPT = ("steps", "applied", "mean_over", "outer", "exchange")


@dataclass
class Outer:
    """What a checkpoint has that is equal on all ranks.

    An object of its own, so that torch.distributed.checkpoint saves it whole, whatever is in it.

    Attributes:
        parameters: the outer ones, by name.
        optimizer: the outer one's state_dict().
        flight: the fragment that was sent and not yet applied, and its means; or None.
    """

    parameters: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    flight: tuple[int, list[torch.Tensor]] | None


torch.serialization.add_safe_globals([Outer])


class DiLoCo:
    """An outer loop over the parameters of a model, on the ranks of a process group.

    Argument names are torchft's and torchtitan's. A rank takes the memory of the outer
    parameters (float32), of the outer optimizer's state and, with error feedback, of the residuals,
    beside the model.

    Attributes:
        schedule: when fragments are sent and applied.
        fragments: the places of each fragment's parameters.
        names: of the parameters.
        parameters: those of the model that require gradients.
        outer_parameters: what they were when they were applied last, float32, equal on all ranks.
        outer_optimizer: steps the outer parameters.
        exchange: how differences travel, and what was lost of them.
        mean_over: whose mean it is.
        steps: inner steps so far.
        applied: fragments that were applied so far.
    """

    def __init__(
        self,
        model: nn.Module,
        outer_optimizer: Optimizer | Callable[[list[nn.Parameter]], Optimizer] | None = None,
        *,
        sync_every: int,
        fragments: int | Sequence[nn.Module] = 1,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
        config: Config | None = None,
        rules: Rules = Rules(),  # noqa: B008  (immutable)
        seed: int = 0,
        mean_over: Literal["ranks", "senders"] = "ranks",
        process_group: dist.ProcessGroup | None = None,
        carrier: Carriers = "native",
        backup_device: torch.device | str | None = None,
        pin_memory: bool = True,
        **keywords: Unpack[Keywords],
    ) -> None:
        """Make all ranks begin with the parameters of the first one. Collective.

        Args:
            model: one rank's; not in DistributedDataParallel, whose gradients are averaged. What
                requires no gradient, and buffers, stay each rank's own.
            outer_optimizer: gets the average of outer parameter - parameter as the gradient. One
                made over the model's parameters, as torchft takes it, which from now on has the
                outer ones in place of them; or what makes one from these; None: torch.optim.SGD
                with lr=0.7, momentum=0.9, nesterov=True.
            sync_every: steps from one synchronisation of a parameter to the next. 1 to 500 are in
                use.
            fragments: parts of the model that take turns, one every sync_every / fragments steps:
                how many, each of every fragments-th layer; or which modules they are.
            fragment_sync_delay: steps from sending a fragment to applying it, less than that.
            fragment_update_alpha: how much of a parameter stays the rank's own when its average is
                applied, from 0 to 1.
            config: how differences travel; None: Config(error_feedback=True), 4 bits.
            rules: settings of parameters by name.
            seed: of the noise.
            mean_over: "ranks": the mean over all. "senders": of each value over those that sent it
                (SparseLoCo), which takes compressor="topk" and error feedback.
            process_group: whose ranks average; None: the default group.
            carrier: who moves the bytes, as of cgx_ops.torch.ddp.QuantizedAllreduceState.
            backup_device: where outer parameters and the outer optimizer's state lie; None: with
                the parameters. "cpu" frees a GPU's memory.
            pin_memory: whether outer parameters on the CPU of a model on a GPU lie in pinned
                memory.
            **keywords: bits, bucket_size, compressor and rounding, which replace those of config.

        Raises:
            InvalidArgument (a ValueError): an argument is out of its range, or ranks differ in it,
                or in parameters (on every rank, which names both sides).
            TypeError: a parameter is complex, sparse or of float64.
            RuntimeError: a peer is late or gone.
        """
        config = config_of(config or Config(error_feedback=True), **keywords)
        count = fragments if isinstance(fragments, SupportsIndex) else len(fragments)
        self.schedule = Schedule(sync_every, count, fragment_sync_delay, fragment_update_alpha)
        named = [(name, p) for name, p in named_layers(model) if p.requires_grad]
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        check_parameters(CALLER, self.parameters)
        if isinstance(fragments, SupportsIndex):
            self.fragments = strided(self.names, self.schedule.fragments)
        else:
            self.fragments = of_modules(CALLER, fragments, named)
        if mean_over not in ("ranks", "senders"):
            raise InvalidArgument(f"{CALLER}: mean_over is {mean_over!r}; 'ranks' or 'senders'")
        self.mean_over = mean_over
        if mean_over == "senders":  # where others send values on, a rank does not know what it sent
            config = replace(config, algorithm="one_shot")
        self.exchange = Exchange(CALLER, process_group, config, carrier, rules, seed)
        self.exchange.warn_of_unmatched(self.names)
        if mean_over == "senders":
            self.exchange.require_kept(self.names, self.parameters)
        device = torch.device(backup_device or self.parameters[0].device)
        pins = pin_memory and device.type == "cpu" and self.parameters[0].is_cuda
        self.outer_parameters = [_outer_parameter(p, device, pins) for p in self.parameters]
        self.outer_optimizer = _outer(outer_optimizer, self.parameters, self.outer_parameters)
        self.steps = self.applied = 0
        self._flight: tuple[int, Flight] | None = None
        synchronize(self, is_new=True)

    # ---- 1. steps --------------------------------------------------------------------------------

    @full_precision()
    def step(self) -> None:
        """Count an inner step, and send and apply what is due after it.

        All ranks call it after each step of their own. It waits where a fragment is applied, for
        what is left of its exchange; never longer than the group's timeout.

        Raises:
            RuntimeError: a synchronisation has failed, since a peer is late or gone, or differs.
                Parameters, outer parameters and residuals are as they were before it: go on with
                regroup(), or train on, where the group still serves.
        """
        self.steps += 1
        sent = self.schedule.sent_after(self.steps)
        if sent is not None:
            with _failing(sent):
                self._flight = sent, self._send(sent)
        applied = self.schedule.applied_after(self.steps)
        if self._flight is not None and self._flight[0] == applied:
            (fragment, flight), self._flight = self._flight, None
            with _failing(fragment):
                means = flight.wait()
            self._apply(fragment, means)

    @contextlib.contextmanager
    def after(self, inner_optimizer: Optimizer) -> Iterator[None]:
        """Call step() after every step of an optimizer, within the block.

        A step that a torch.amp.GradScaler skips, because this rank's gradients overflow, counts,
        too: all ranks synchronise after the same iteration.
        """
        with after_every_step(inner_optimizer, self.step):
            yield

    def _send(self, fragment: int) -> Flight:
        places = self.fragments[fragment]
        pairs = [(self.outer_parameters[i], self.parameters[i]) for i in places]
        deltas = [a.to(p.device, non_blocking=True) - p.to(torch.float32) for a, p in pairs]
        names = [self.names[i] for i in places]
        return self.exchange.start(names, deltas, of_senders=self.mean_over == "senders")

    def _apply(self, fragment: int, means: Sequence[torch.Tensor]) -> None:
        places = self.fragments[fragment]
        for i, mean in zip(places, means, strict=True):
            self.outer_parameters[i].grad = mean.to(self.outer_parameters[i].device)
        with torch.enable_grad():  # some optimizers differentiate
            self.outer_optimizer.step()
        alpha = self.schedule.fragment_update_alpha
        for i in places:
            parameter, outer = self.parameters[i], self.outer_parameters[i]
            outer.grad = None
            new = outer.to(parameter.device, non_blocking=True)
            if alpha:
                new = alpha * parameter.to(torch.float32) + (1 - alpha) * new
            parameter.copy_(new)
        self.applied += 1

    # ---- 2. ranks that come and go ---------------------------------------------------------------

    def regroup(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Go on with the ranks of another group: after some are lost, or with new ones. Collective.

        Newcomers make a DiLoCo over the group where the others call this. Whoever has applied the
        most has the outer parameters, the outer optimizer's state and the count of steps of all,
        exactly; who lacks some of that begins again from these. Residuals stay with those who have
        them: they are part of the next averages. A fragment under way is given up.

        Args:
            process_group: the new one; None: the default group.

        Raises:
            As DiLoCo().
        """
        self._flight = None
        self.exchange.process_group = process_group
        self.exchange.connect()
        self.exchange.residuals.owner = None  # a rank's number may be another one now
        self.exchange.residuals.claim(*self.exchange.place)
        synchronize(self, is_new=False)

    @full_precision()
    def restart(self) -> None:
        """Have the parameters begin again from the outer ones, equal on all ranks."""
        for parameter, outer in zip(self.parameters, self.outer_parameters, strict=True):
            parameter.copy_(outer)

    # ---- 3. checkpoints --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what is saved beside the model and the inner optimizer, each rank's own.

        What is under way is waited for, and saved.

        Raises:
            RuntimeError: it has failed; as step().
        """
        flight = None
        if self._flight is not None:
            with _failing(self._flight[0]):
                flight = self._flight[0], [mean.clone() for mean in self._flight[1].wait()]
        parameters = {name: p.detach().clone() for name, p in self._named_outer()}
        outer = Outer(parameters, copy.deepcopy(self.outer_optimizer.state_dict()), flight)
        counts = {"steps": self.steps, "applied": self.applied, "mean_over": self.mean_over}
        return {**counts, "outer": outer, "exchange": self.exchange.saved()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue, in place, where the one was that state_dict() was called of.

        Parameters are those of the model's own checkpoint: each rank's, to go on as if nothing had
        been; or restart() has them begin from the outer ones.

        Raises:
            InvalidArgument: this is not the state_dict() of a DiLoCo, or another model's, or of
                another mean_over, or lacks this rank's residuals.
        """
        require_keys(CALLER, state_dict, _KEPT)
        if state_dict["mean_over"] != self.mean_over:  # the exchange has a config for one of them
            raise InvalidArgument(
                f"{CALLER}.load_state_dict: mean_over is {state_dict['mean_over']!r} there and "
                f"{self.mean_over!r} here: give {CALLER}() what it was given there"
            )
        outer: Outer = state_dict["outer"]
        saved = outer.parameters
        shapes = {name: tuple(x.shape) for name, x in saved.items()}
        own = {name: tuple(p.shape) for name, p in self._named_outer()}
        if shapes != own:
            require_layers(
                f"{CALLER}.load_state_dict", [shapes], own, strict=True, has_partial=False
            )
            name = min(shapes.items() ^ own.items())[0]
            raise InvalidArgument(
                f"{CALLER}.load_state_dict: the outer parameters are another model's: "
                f"{name!r} has shape {shapes.get(name)} there and {own.get(name)} here"
            )
        self.exchange.load_state_dict(state_dict["exchange"])
        with full_precision():
            for name, parameter in self._named_outer():
                parameter.copy_(saved[name])
        self.outer_optimizer.load_state_dict(copy.deepcopy(outer.optimizer))
        self.steps, self.applied = state_dict["steps"], state_dict["applied"]
        self._flight = None
        if outer.flight is not None:
            fragment, means = outer.flight
            self._flight = fragment, Flight([mean.clone() for mean in means])

    def consolidate(self) -> None:
        """Make what was lost its mean over the ranks, so that any number of ranks loads it.

        Collective. As of cgx_ops.torch.ddp.QuantizedAllreduceState.
        """
        if self._flight is not None:
            with _failing(self._flight[0]):
                self._flight[1].wait()
        self.exchange.consolidate()

    def _named_outer(self) -> Iterator[tuple[str, nn.Parameter]]:
        return zip(self.names, self.outer_parameters, strict=True)


def sparse_loco(
    model: nn.Module, *, sync_every: int, density: float = 1 / 64, **more: Any
) -> DiLoCo:
    """Return SparseLoCo: the largest values of chunks of 4096, feedback in place of momentum.

    Each rank sends a share `density` of what it owes, values in 2 bits, and keeps 0.95 of the rest;
    the outer optimizer is plain SGD of rate 1 over the mean of those that sent a value (Sarfi et
    al., 2025; the outer rate and the decay are Covenant-72B's).

    Args:
        model: as of DiLoCo().
        sync_every: so.
        density: of what is sent.
        **more: every other argument of DiLoCo() but config and mean_over.
    """
    config = Config(
        compressor="topk", density=density, bucket_size=4096, value_bits=2, error_feedback=True,
        residual_decay=0.95,
    )  # fmt: skip
    more.setdefault("outer_optimizer", lambda params: SGD(params, lr=1.0))
    return DiLoCo(model, sync_every=sync_every, config=config, mean_over="senders", **more)


@contextlib.contextmanager
def _failing(fragment: int) -> Iterator[None]:
    """Say of a failed synchronisation what it leaves."""
    try:
        yield
    except (InvalidArgument, Unsupported):  # of the call, not of the ranks
        raise
    except RuntimeError as error:
        raise RuntimeError(
            f"{CALLER}: fragment {fragment} was not averaged; parameters, outer parameters and "
            f"residuals are as they were. Go on with the ranks that are left by regroup(): {error}"
        ) from error


def _outer_parameter(parameter: torch.Tensor, device: torch.device, pinned: bool) -> nn.Parameter:
    values = parameter.detach().to(device=device, dtype=torch.float32, copy=True)
    return nn.Parameter(values.pin_memory() if pinned else values)


def _outer(
    given: Optimizer | Callable[[list[nn.Parameter]], Optimizer] | None,
    parameters: Sequence[nn.Parameter],
    outer: list[nn.Parameter],
) -> Optimizer:
    """Return the outer optimizer, over the outer parameters."""
    if given is None:
        return SGD(outer, lr=0.7, momentum=0.9, nesterov=True)
    if not isinstance(given, Optimizer):
        return given(outer)
    outer_of = dict(zip(parameters, outer, strict=True))
    known = {p for group in given.param_groups for p in group["params"] if p.requires_grad}
    if known != set(parameters) or given.state:
        raise InvalidArgument(
            f"{CALLER}: outer_optimizer must be new, over all parameters of the model: "
            "torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True); or give "
            "what makes it: lambda params: torch.optim.SGD(params, lr=0.7)"
        )
    for group in given.param_groups:
        group["params"] = [outer_of[p] for p in group["params"] if p.requires_grad]
    return given
