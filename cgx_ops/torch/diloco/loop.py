"""DiLoCo: ranks train independently, and average their progress every `sync_every` steps.

When a fragment of the parameters is due, its differences from the outer parameters are averaged,
compressed, in the background. Some steps later an outer optimizer updates the outer parameters with
the average. Then the parameters are set to the outer parameters, or mixed with them. Guide:
docs/guides/diloco.md.

Douillard et al.: DiLoCo: Distributed Low-Communication Training of Language Models, 2023; Streaming
DiLoCo with overlapping communication, 2025. Stich: Local SGD Converges Fast and Communicates
Little, ICLR 2019. Sarfi et al.: Communication Efficient LLM Pre-training with SparseLoCo, 2025.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, SupportsIndex, Unpack

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from cgx_ops import Config, Rules
from cgx_ops.config import Keywords, config_of
from cgx_ops.errors import InvalidArgument
from cgx_ops.methods.outer_loop import Schedule, strided
from cgx_ops.torch.averaging.arithmetic import full_precision
from cgx_ops.torch.averaging.exchange import Carriers, Exchange, Flight, check_parameters
from cgx_ops.torch.averaging.grad_scaler import after_every_step
from cgx_ops.torch.averaging.layers import named_layers
from cgx_ops.torch.averaging.loaded import require_keys, require_layers
from cgx_ops.torch.diloco.fragments import of_modules
from cgx_ops.torch.diloco.outer import optimizer_of, outer_parameter
from cgx_ops.torch.diloco.ranks import CALLER, arguments_of, failing, synchronize

_KEPT = ("steps", "applied", "mean_over", "outer", "exchange")


@dataclass
class Outer:
    """The part of a checkpoint that is equal on all ranks.

    A separate class, so that torch.distributed.checkpoint saves it as one object.

    Attributes:
        parameters: the outer parameters, by name.
        optimizer: the outer optimizer's state_dict().
        flight: the fragment that was sent but not applied yet, and its means; or None.
    """

    parameters: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    flight: tuple[int, list[torch.Tensor]] | None


torch.serialization.add_safe_globals([Outer])


class DiLoCo:
    """An outer loop over the parameters of a model, on the ranks of a process group.

    Each rank trains its own model with its own optimizer, without DistributedDataParallel, and
    calls `step` after each optimizer step. Argument names follow torchft and torchtitan. Besides
    the model, a rank stores the outer parameters (float32), the outer optimizer's state and, with
    error feedback, the residuals.

    The constructor is collective: all ranks start with the parameters of the first rank, or with
    the state of the ranks that call `regroup`.

    Args:
        model: this rank's model, not in DistributedDataParallel. Parameters that do not require
            gradients, and buffers, are not averaged.
        outer_optimizer: updates the outer parameters; its gradient is the average of outer
            parameter - parameter. Pass a function that makes an optimizer from a list of outer
            parameters. Or pass an optimizer over the model's parameters, as in torchft; they are
            replaced by the outer ones. None: torch.optim.SGD with lr=0.7, momentum=0.9,
            nesterov=True.
        sync_every: number of steps between two averages of a parameter; usually 1 to 500.
        fragments: parts of the model that are averaged in turn, one every sync_every / fragments
            steps. An int n: each fragment has every n-th layer. Modules: one fragment for each.
        fragment_sync_delay: number of steps between sending a fragment and applying its average;
            less than sync_every / fragments.
        fragment_update_alpha: weight of the rank's own parameter when an average is applied, from 0
            (replace it) to 1.
        config: settings of the messages. None: `Config(error_feedback=True)`, which is 4 bits.
        rules: settings of parameters by name.
        seed: seed of random rounding, 0 or more.
        mean_over: "ranks" averages each value over all ranks. "senders" averages it over the ranks
            that sent it (SparseLoCo), and requires compressor="topk" with error feedback.
        process_group: the ranks that average. None: the default group.
        carrier: "native" sends by cgx_ops' own transports, over a group of any backend. "c10d"
            sends by torch's collectives: CPU tensors by gloo, CUDA tensors by the process group,
            for example NCCL, not gloo. With the same algorithm, both give the same bits.
        backup_device: device of the outer parameters and the outer optimizer's state. None: that of
            the parameters. "cpu" saves GPU memory.
        pin_memory: whether outer parameters on the CPU use pinned memory if the model is on a GPU.
        connect: whether the constructor is collective. False: it does not communicate, and the
            process group need not exist yet; call `regroup` on all ranks before the first step.
        **keywords: `bits`, `bucket_size`, `compressor` or `rounding`; each overrides that field of
            `config`.

    Attributes:
        schedule: when fragments are sent and applied.
        fragments: indices of each fragment's parameters.
        names: names of the parameters.
        parameters: parameters of the model that require gradients.
        outer_parameters: their last applied values, float32, equal on all ranks.
        outer_optimizer: the optimizer of the outer parameters.
        optimizer_arguments: its type and first settings, which ranks compare.
        exchange: settings and residuals of the messages.
        steps: number of inner steps so far.
        applied: number of applied fragments so far.
        joined: whether this rank has the common state of the ranks.

    The argument `mean_over` is also an attribute.

    Raises:
        InvalidArgument: an argument is out of range, or arguments or parameters differ between
            ranks (every rank raises it; the text names both values).
        TypeError: a parameter is complex, sparse or float64.
        RuntimeError: a peer is late or lost.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from cgx_ops.torch.diloco import DiLoCo
        >>> dist.init_process_group("cgx", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.Linear(64, 1)  # without DistributedDataParallel
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> diloco = DiLoCo(model, sync_every=10, bits=4)
        >>> for _ in range(20):
        ...     model(torch.randn(8, 64)).square().mean().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     diloco.step()
        >>> diloco.applied
        2
        >>> dist.destroy_process_group()
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
        connect: bool = True,
        **keywords: Unpack[Keywords],
    ) -> None:
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
            raise InvalidArgument(
                f"{CALLER}: mean_over is {mean_over!r}; it must be 'ranks' or 'senders'"
            )
        self.mean_over = mean_over
        # With other algorithms a rank cannot see which of its values were sent on.
        if mean_over == "senders":
            config = replace(config, algorithm="one_shot")
        self.exchange = Exchange(CALLER, process_group, config, carrier, rules, seed)
        self.exchange.warn_of_unmatched(self.names)
        if mean_over == "senders":
            self.exchange.require_kept(self.names, self.parameters)
        device = torch.device(backup_device or self.parameters[0].device)
        pins = pin_memory and device.type == "cpu" and self.parameters[0].is_cuda
        self.outer_parameters = [outer_parameter(p, device, pins) for p in self.parameters]
        self.outer_optimizer = optimizer_of(outer_optimizer, self.parameters, self.outer_parameters)
        self.optimizer_arguments = arguments_of(self.outer_optimizer)
        self.steps = self.applied = 0
        self.joined = False
        self._flight: tuple[int, Flight] | None = None
        self._unconfirmed: tuple[int, Flight] | None = None
        if connect:
            synchronize(self)

    # ---- 1. steps --------------------------------------------------------------------------------

    @full_precision()
    def step(self) -> None:
        """Count an inner step, and send or apply the fragments that are due.

        Call it on all ranks after each inner step. It waits only where a fragment is applied, for
        the rest of its exchange, and at most for the group's timeout.

        Raises:
            InvalidArgument: the loop was created with connect=False, and `regroup` was not called.
            RuntimeError: an average failed, because a peer is late, lost or has other arguments.
                Parameters, outer parameters and residuals are unchanged. Continue with `regroup`.
        """
        if not self.joined:
            raise InvalidArgument(
                f"{CALLER}: step() was called before regroup(); after connect=False call regroup() "
                "on all ranks first"
            )
        self.steps += 1
        sent = self.schedule.sent_after(self.steps)
        if sent is not None:
            with failing(sent):
                self._flight = sent, self._send(sent)
        applied = self.schedule.applied_after(self.steps)
        if self._flight is not None and self._flight[0] == applied:
            self._unconfirmed, self._flight = self._flight, None
            fragment, flight = self._unconfirmed
            with failing(fragment):
                means = flight.wait()
            self._unconfirmed = None
            self._apply(fragment, means)

    @contextlib.contextmanager
    def after(self, inner_optimizer: Optimizer) -> Iterator[None]:
        """Call step() after every step of an optimizer within the block.

        Steps that a torch.amp.GradScaler skips, because this rank's gradients overflow, count, too.
        So all ranks synchronize after the same iteration.

        Args:
            inner_optimizer: the optimizer of this rank.

        Yields:
            Nothing.
        """
        with after_every_step(inner_optimizer, self.step):
            yield

    def _send(self, fragment: int) -> Flight:
        members = self.fragments[fragment]
        pairs = [(self.outer_parameters[i], self.parameters[i]) for i in members]
        deltas = [a.to(p.device, non_blocking=True) - p.to(torch.float32) for a, p in pairs]
        names = [self.names[i] for i in members]
        senders = self.mean_over == "senders"
        return self.exchange.start(names, deltas, of_senders=senders, confirms=True)

    def _apply(self, fragment: int, means: Sequence[torch.Tensor]) -> None:
        members = self.fragments[fragment]
        for i, mean in zip(members, means, strict=True):
            self.outer_parameters[i].grad = mean.to(self.outer_parameters[i].device)
        with torch.enable_grad():  # some optimizers need gradients
            self.outer_optimizer.step()
        alpha = self.schedule.fragment_update_alpha
        for i in members:
            parameter, outer = self.parameters[i], self.outer_parameters[i]
            outer.grad = None
            new = outer.to(parameter.device, non_blocking=True)
            if alpha:
                new = alpha * parameter.to(torch.float32) + (1 - alpha) * new
            parameter.copy_(new)
        self.applied += 1

    # ---- 2. ranks that come and go ---------------------------------------------------------------

    def regroup(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Continue with the ranks of another group, after some were lost or joined. Collective.

        New ranks construct a DiLoCo over the group while the others call this, or construct it with
        `connect=False` and call this, too. Afterwards outer parameters, outer optimizer, step
        counts and the schedule are equal on all ranks, to the bit.

        A pending average is applied if all remaining ranks of the old group have its means, or one
        has its confirmation, because then all ranks had them. It is discarded otherwise. New ranks,
        and ranks that missed averages, continue from the outer parameters, without residuals. Ranks
        restored from an older checkpoint missed some. Other parameters and residuals are unchanged.
        A confirmed average stays applied if this call fails.

        Args:
            process_group: the new group. None: the default group.

        Raises:
            InvalidArgument: arguments or parameters differ between ranks.
            RuntimeError: a peer is late or lost. Call it again, over another group.
        """
        self._unconfirmed, self._flight = self._flight or self._unconfirmed, None
        if self._unconfirmed is not None:
            with contextlib.suppress(RuntimeError):
                self._unconfirmed[1].wait()
            if self._unconfirmed[1].is_confirmed:  # even if a rank was restored without the means
                self._settle(is_applied=True)
        has_means = self._unconfirmed is not None and self._unconfirmed[1].has_means
        self.exchange.process_group = process_group
        self.exchange.connect()
        self.exchange.residuals.owner = None  # this rank's number may have changed
        self.exchange.residuals.claim(*self.exchange.place)
        synchronize(self, has_means=has_means, settle=self._settle)

    @full_precision()
    def _settle(self, is_applied: bool) -> None:
        """Apply or discard the average that was not confirmed."""
        unconfirmed, self._unconfirmed = self._unconfirmed, None
        if is_applied and unconfirmed is not None:
            fragment, flight = unconfirmed
            self._apply(fragment, flight.accept())

    @full_precision()
    def restart(self) -> None:
        """Set the parameters to the outer parameters, which are equal on all ranks."""
        for parameter, outer in zip(self.parameters, self.outer_parameters, strict=True):
            parameter.copy_(outer)

    # ---- 3. checkpoints --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, besides model and inner optimizer.

        Each rank saves its own. The call waits for a pending fragment and saves its average.

        Returns:
            The state by name.

        Raises:
            RuntimeError: the pending average failed; see `step`.
        """
        flight = None
        if self._flight is not None:
            with failing(self._flight[0]):
                flight = self._flight[0], [mean.clone() for mean in self._flight[1].wait()]
        parameters = {name: p.detach().clone() for name, p in self._named_outer()}
        outer = Outer(parameters, copy.deepcopy(self.outer_optimizer.state_dict()), flight)
        counts = {"steps": self.steps, "applied": self.applied, "mean_over": self.mean_over}
        return {**counts, "outer": outer, "exchange": self.exchange.saved()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the outer loop in place from what `state_dict` returned.

        Restore the model's parameters from the model's own checkpoint, or call `restart` to set
        them to the outer parameters.

        Args:
            state_dict: what `state_dict` returned on this rank.

        Raises:
            InvalidArgument: this is not the state_dict of a DiLoCo, it belongs to another model or
                another mean_over, or it lacks this rank's residuals.
        """
        require_keys(CALLER, state_dict, _KEPT)
        if state_dict["mean_over"] != self.mean_over:  # the exchange's config depends on it
            raise InvalidArgument(
                f"{CALLER}.load_state_dict: mean_over is {state_dict['mean_over']!r} in the "
                f"checkpoint and {self.mean_over!r} here: create the {CALLER} with the "
                "checkpoint's arguments"
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
                f"{name!r} has shape {shapes.get(name)} in the checkpoint and {own.get(name)} here"
            )
        self.exchange.load_state_dict(state_dict["exchange"])
        with full_precision():
            for name, parameter in self._named_outer():
                parameter.copy_(saved[name])
        self.outer_optimizer.load_state_dict(copy.deepcopy(outer.optimizer))
        self.steps, self.applied = state_dict["steps"], state_dict["applied"]
        self._flight = self._unconfirmed = None
        self.joined = True
        if outer.flight is not None:
            fragment, means = outer.flight
            self._flight = fragment, Flight([mean.clone() for mean in means])

    def consolidate(self) -> None:
        """Replace residuals by their mean over the ranks. Collective.

        A checkpoint that is saved afterwards can be loaded on any number of ranks.

        Raises:
            InvalidArgument: ranks have residuals of different parameters.
            RuntimeError: the pending average failed; see `step`.
        """
        if self._flight is not None:
            with failing(self._flight[0]):
                self._flight[1].wait()
        self.exchange.consolidate()

    def _named_outer(self) -> Iterator[tuple[str, nn.Parameter]]:
        return zip(self.names, self.outer_parameters, strict=True)
