"""ExchangingOptimizer: the base of optimizers that average over the ranks themselves."""

import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch.optim import Optimizer

from cgx_ops import Config
from cgx_ops._core.consistency import require_same
from cgx_ops.errors import InvalidArgument
from cgx_ops.torch.averaging.arithmetic import full_precision
from cgx_ops.torch.averaging.exact import gather_over, mean_over, state_ahead, values_on
from cgx_ops.torch.averaging.exchange import Exchange, check_parameters
from cgx_ops.torch.averaging.grad_scaler import (
    Scaling,
    handles_overflow,
    scaling_of,
    without_scaling_if_failed,
)
from cgx_ops.torch.averaging.layers import layer_name
from cgx_ops.torch.averaging.loaded import require_layers


class ParamUpdate(NamedTuple):
    """A parameter that is about to be updated.

    Attributes:
        name: its index among the optimizer's parameters.
        group: its settings.
        state: its state.
        parameter: the parameter.
        gradient: this rank's gradient, float32.
    """

    name: str
    group: dict[str, Any]
    state: dict[str, torch.Tensor]
    parameter: torch.Tensor
    gradient: torch.Tensor


@dataclass
class RankLocalState:
    """The parts of parameters' states that differ between ranks.

    A separate class, so that torch.distributed.checkpoint saves each rank's as one object.

    Attributes:
        state: by index of the parameter and name.
    """

    state: dict[int, dict[str, torch.Tensor]]


torch.serialization.add_safe_globals([RankLocalState])


@handles_overflow
class ExchangingOptimizer(Optimizer):
    """An optimizer that averages its updates over the ranks.

    Attributes:
        of_state: names in a parameter's state; these are float32 and have the parameter's shape.
        of_rank: those of them that differ between ranks.
        of_copy: attributes of copies and pickles in addition to those of torch's optimizers.
        exchange: settings of the messages, step count and residuals.
    """

    of_state: ClassVar[tuple[str, ...]] = ()
    of_rank: ClassVar[tuple[str, ...]] = ()
    of_copy: ClassVar[tuple[str, ...]] = ("exchange", "_consolidated")

    def __init__(self, params: Any, defaults: dict[str, Any], exchange: Exchange) -> None:
        self.exchange = exchange
        self._compared = self._consolidated = False
        super().__init__(params, defaults)

    @property
    def _caller(self) -> str:
        return self.exchange.caller

    # ---- 1. parameters ---------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, the same on all ranks, before the first step.

        Args:
            param_group: a dict with "params" and settings, as in torch's optimizers.

        Raises:
            TypeError: a parameter is complex, sparse or float64.
            InvalidArgument: a setting is out of range, or the first step is done.
        """
        if self.exchange.steps:
            raise InvalidArgument(
                f"{self._caller}: parameters can only be added before the first step, because "
                "ranks identify them by their order"
            )
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        self.check_group(group)
        check_parameters(self._caller, [p for g in self.param_groups for p in g["params"]])
        for parameter in group["params"]:
            zeros = torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
            self.state[parameter] = {name: zeros.clone() for name in self.of_state}

    def check_group(self, group: dict[str, Any]) -> None:
        """Check the settings of a group of parameters.

        Args:
            group: the group.

        Raises:
            InvalidArgument: a setting is out of range.
        """
        for name in ("lr", "weight_decay"):
            if not group[name] >= 0:
                raise InvalidArgument(
                    f"{self._caller}: {name} is {group[name]!r}; it must be at least 0"
                )

    # ---- 2. a step -------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update all parameters. Collective.

        All ranks call it after the same number of backward passes. A parameter without a gradient
        counts as one with a zero gradient, because other ranks may have one. Parameters that do not
        require gradients are not updated. Under a torch.amp.GradScaler, a step in which the
        gradients of any rank overflow is skipped on all ranks.

        Args:
            closure: a function that recomputes the loss, or None.

        Returns:
            What `closure` returned; None without one.

        Raises:
            TypeError: a gradient is sparse or complex.
            InvalidArgument: parameters or settings differ between ranks (first step; every rank
                raises it), cgx_ops cannot connect the process group, or the state belongs to
                another rank.
            RuntimeError: a peer is late or lost, or sent something else; the text names the rank.
                Parameters and states are unchanged, so the step can be repeated.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with without_scaling_if_failed(self):
            self._step_together()
        return loss

    @full_precision()
    def _step_together(self) -> None:
        scaling = scaling_of(self)
        if not self._compared:
            self._require_same_states(by_scaler=scaling is not None)
        if scaling is not None and self.exchange.any_rank(scaling.overflows):
            return
        self._consolidated = False
        known = [(group, p) for group in self.param_groups for p in group["params"]]
        with self.exchange.or_refuse(known[0][1].device, self._caller):
            params = [
                ParamUpdate(str(i), group, self.state[p], p, self._gradient_of(i, p, scaling))
                for i, (group, p) in enumerate(known)
                if p.requires_grad
            ]
        for each, update in zip(params, self.updates(params), strict=True):
            lr, decay = each.group["lr"], each.group["weight_decay"]
            wide = each.parameter.to(torch.float32)
            each.parameter.copy_(wide - lr * (update + decay * wide))

    def updates(self, params: list[ParamUpdate]) -> list[torch.Tensor]:
        """Update the states of parameters from their gradients.

        Args:
            params: the parameters.

        Returns:
            The update of each parameter, which is multiplied by lr.
        """
        raise NotImplementedError

    def averaged(
        self,
        params: list[ParamUpdate],
        tensors: list[torch.Tensor],
        *,
        config: Config | None = None,
    ) -> list[torch.Tensor]:
        """Average a tensor of each parameter over the ranks.

        Args:
            params: the parameters.
            tensors: one for each parameter.
            config: settings of this message, as in Exchange.start().

        Returns:
            The means.
        """
        return self.exchange.mean([each.name for each in params], tensors, config=config)

    def _gradient_of(
        self, index: int, parameter: torch.Tensor, scaling: Scaling | None
    ) -> torch.Tensor:
        gradient = parameter.grad
        if gradient is None:
            return torch.zeros_like(parameter, dtype=torch.float32)
        if gradient.layout != torch.strided or gradient.is_complex():
            raise TypeError(
                f"{self._caller}: the gradient of parameter {index} of shape "
                f"{tuple(parameter.shape)} is {gradient.layout}, {gradient.dtype}; it must be "
                "dense and real: make the layer with sparse=False"
            )
        wide = gradient.to(torch.float32)
        return wide if scaling is None else wide * scaling.inverse

    # ---- 3. compare ranks ------------------------------------------------------------------------

    def _require_same_states(self, *, by_scaler: bool) -> None:
        """Compare parameters and settings across ranks. Collective."""
        fields: dict[str, object] = {"step": self.exchange.steps, "a GradScaler:": by_scaler}
        fields |= self._settings()
        for i, settings in enumerate(self._common()["groups"]):
            fields |= {f"group {i}'s {name}": value for name, value in settings.items()}
        for i, p in enumerate(p for group in self.param_groups for p in group["params"]):
            values = p.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
            digest = hashlib.sha256(values).hexdigest()[:16]
            fields[f"parameter {i}"] = f"of shape {tuple(p.shape)} and digest {digest}"
        require_same(
            self._caller,
            fields,
            gather_over(self.exchange.group),
            "All ranks need the same settings and parameters: broadcast the parameters first, as "
            "DistributedDataParallel does, or load the same checkpoint",
            error=InvalidArgument,
        )
        self._compared = True

    def _settings(self) -> dict[str, object]:
        """Return the settings, besides those of parameter groups, that are equal on all ranks."""
        return {name: getattr(self.exchange, name) for name in ("config", "rules", "carrier")}

    # ---- 4. changes of members -------------------------------------------------------------------

    def synchronize(self) -> None:
        """Continue on all ranks from the one that has done the most steps. Collective.

        Call it after the members of the group have changed, before the next forward: the last step
        may have failed on some ranks only, and new ranks have done none. All ranks take parameters,
        settings and the common state of the rank that is ahead; of equal ones, the lowest. Each
        rank keeps its own momenta, which a new rank starts at zero. Ranks that were not behind keep
        their residuals; others start from zero, because the parameters contain theirs.
        Learning-rate schedulers and buffers of the model are not part of it.

        Raises:
            InvalidArgument: ranks have other optimizers or parameters of other shapes or dtypes;
                every rank raises it.
            RuntimeError: a peer is late or lost; the text names the rank.
        """
        group = self.exchange.group
        source, steps, settings = state_ahead(group, self.exchange.steps, self._common())
        parameters = [p for g in self.param_groups for p in g["params"]]
        require_same(
            f"{self._caller}.synchronize",
            {
                "groups of parameters:": _sizes(self.param_groups),
                **{f"parameter {i}": f"{p.dtype} {[*p.shape]}" for i, p in enumerate(parameters)},
            },
            gather_over(group),
            "Make the same model and optimizer on all ranks",
            error=InvalidArgument,
        )
        common = [name for name in self.of_state if name not in self.of_rank]
        kept = [*parameters, *(self.state[p][name] for p in parameters for name in common)]
        found = [values_on(group, source, each) for each in kept]
        # Nothing changes before all of it has arrived, so that a failed call can be repeated.
        for each, values in zip(kept, found, strict=True):
            each.detach().copy_(values)
        self.exchange.continue_at(steps)
        self._adopt(settings)
        self._compared = False

    def _common(self) -> dict[str, Any]:
        """Return the settings that are equal on all ranks and may change with the steps."""
        groups = [{n: x for n, x in g.items() if n != "params"} for g in self.param_groups]
        return {"groups": groups}

    def _adopt(self, common: dict[str, Any]) -> None:
        """Take what _common() returned on another rank."""
        for group, settings in zip(self.param_groups, common["groups"], strict=True):
            parameters = group["params"]
            group.clear()
            group.update(settings, params=parameters)

    # ---- 5. checkpoints --------------------------------------------------------------------------

    def consolidate(self) -> None:
        """Replace the state that differs between ranks by its mean over the ranks. Collective.

        A checkpoint that is saved afterwards can be loaded on any number of ranks.

        Raises:
            InvalidArgument: ranks have residuals of different parameters.
        """
        group = self.exchange.group
        self.exchange.consolidate()
        for state in self.state.values():
            for name in self.of_rank:
                state[name] = mean_over(group, state[name])
        self._consolidated = True

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint. Each rank saves its own.

        Returns:
            The state_dict of a torch optimizer, plus "exchange" (settings and residuals) and "own"
            (the state that differs between ranks).

        Raises:
            InvalidArgument: torch's get_state_dict() is the caller, which drops the two additional
                keys.
        """
        self._refuse_get_state_dict()
        saved = {**super().state_dict(), "exchange": self.exchange.saved(), "own": {}}
        if self.of_rank and not self._consolidated:
            states = saved["state"].items()
            own = {i: {n: x for n, x in s.items() if n in self.of_rank} for i, s in states}
            saved["state"] = {
                i: {n: x for n, x in s.items() if n not in self.of_rank} for i, s in states
            }
            saved["own"] = {self._own_key(): RankLocalState(own)}
        return saved

    def _refuse_get_state_dict(self) -> None:
        frame = inspect.currentframe()
        while frame is not None:
            where = frame.f_globals.get("__name__"), frame.f_code.co_name
            if where == _DROPS_KEYS:
                raise InvalidArgument(
                    f"{self._caller}: torch's get_state_dict() drops the state of the exchange: "
                    "save optimizer.state_dict() on every rank instead, and restore it with "
                    "optimizer.load_state_dict()"
                )
            frame = frame.f_back

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of copies and pickles. Ranks compare them at the next step."""
        own = {name: getattr(self, name) for name in self.of_copy}
        return {**super().__getstate__(), **own, "_compared": False}

    def _own_key(self) -> str:
        group = self.exchange.group
        return f"rank {group.rank()} of {group.size()}"

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        """Restore the optimizer from what `state_dict` returned; training continues bit for bit.

        Args:
            state_dict: what `state_dict` returned, on this rank or through
                torch.distributed.checkpoint.

        Raises:
            InvalidArgument: the state belongs to another optimizer or model, or lacks this rank's
                residuals.
        """
        if "exchange" not in state_dict:
            raise InvalidArgument(
                f"{self._caller}.load_state_dict: the key 'exchange' is missing: pass what the "
                f"state_dict() of a {self._caller} returned"
            )
        caller = state_dict["exchange"].get("caller")
        if caller != self._caller:
            raise InvalidArgument(
                f"{self._caller}.load_state_dict: the state belongs to a {caller}; pass what the "
                f"state_dict() of a {self._caller} returned"
            )
        owned = state_dict["own"]
        if owned and self._own_key() not in owned:
            raise InvalidArgument(
                f"{self._caller}.load_state_dict: the state is that of {', '.join(owned)}, but "
                f"this is {self._own_key()}: load each rank's own state. For another number of "
                "ranks, call consolidate() on all ranks before you save the checkpoint"
            )
        own = owned[self._own_key()].state if owned else {}
        numbers = [i for g in state_dict["param_groups"] for i in g["params"]]
        parameters = [p for g in self.param_groups for p in g["params"]]
        saved = [state_dict["state"].get(i, {}) | own.get(i, {}) for i in numbers]
        there, here = _sizes(state_dict["param_groups"]), _sizes(self.param_groups)
        if there != here:  # checked before anything is changed
            raise InvalidArgument(
                f"{self._caller}.load_state_dict: the groups of the state have {there} parameters, "
                f"but those of this optimizer have {here}: the state is another model's; load this "
                "model's state"
            )
        require_layers(
            f"{self._caller}.load_state_dict",
            [dict.fromkeys(map(str, each)) for each in (state_dict["state"], own)],
            set(map(str, numbers)),
            strict=True,
            has_partial=False,
        )
        there, here = _names(state_dict["param_groups"]), _names(self.param_groups)
        if there and here:
            require_layers(
                f"{self._caller}.load_state_dict",
                [dict.fromkeys(there)],
                here,
                strict=True,
                has_partial=False,
            )
        for i, (p, state) in enumerate(zip(parameters, saved, strict=True)):
            found = {name: tuple(x.shape) for name, x in state.items()}
            if found != dict.fromkeys(self.of_state, tuple(p.shape)):
                raise InvalidArgument(
                    f"{self._caller}.load_state_dict: parameter {i} has shape {tuple(p.shape)}, "
                    f"but its saved state has {found}: the state is another model's; load this "
                    "model's state"
                )
        self.exchange.load_state_dict(state_dict["exchange"])
        kept = {k: v for k, v in state_dict.items() if k not in ("exchange", "own")}
        super().load_state_dict(kept)
        for p, state in zip(parameters, saved, strict=True):
            # Undo torch's cast to the parameter's dtype.
            self.state[p] = {name: x.to(p.device, copy=True) for name, x in state.items()}
        self._compared, self._consolidated = False, not owned


# The function that keeps only "state" and "param_groups" of a state_dict().
_DROPS_KEYS = "torch.distributed.checkpoint.state_dict", "_get_optim_state_dict"


def _names(groups: list[dict[str, Any]]) -> list[str]:
    """Return the parameters' names if the optimizer was created with named parameters."""
    return [layer_name(name) for group in groups for name in group.get("param_names", ())]


def _sizes(groups: list[dict[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]
