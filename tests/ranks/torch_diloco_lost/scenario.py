"""Scenarios, and the members of their groups."""

from __future__ import annotations

import contextlib
import datetime
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed
from torch import nn

from cgx_ops import Config, Rules
from cgx_ops.torch.diloco import DiLoCo

from . import faults, oracle

dist: Any = torch.distributed  # its annotations refer to torch internals
TIMEOUT = datetime.timedelta(seconds=20)


@dataclass(frozen=True)
class Loss:
    """The end of a group, after which the remaining ranks make a new one.

    Attributes:
        average: which average of the group fails, from 1. 0: the call of regroup() does.
        victim: the number of the member that dies; None: the group ends without a loss.
        fault: a key of faults.FAULTS or, for average 0, of faults.IN_REGROUP.
        joins: number of new members in the next group.
        restores: the number of the member that loads its checkpoint from the beginning of the group
            before it regroups; None: no member does.
    """

    average: int
    victim: int | None
    fault: str
    joins: int = 0
    restores: int | None = None


@dataclass(frozen=True)
class Scenario:
    """A group of members 0 to size - 1, and its losses.

    New members have the next numbers. `deferred`: they create their loop before the group.
    `reconfigures`: the group changes its members (torch 2.14); otherwise there is a new one.
    """

    size: int
    losses: list[Loss]
    fragments: int = 1
    delay: int = 0
    alpha: float = 0.0
    carrier: Any = "native"
    feedback: bool = True
    dtype: str = "float32"
    width: int = 24
    deferred: bool = False
    reconfigures: bool = False
    seed: int = 0

    @property
    def groups(self) -> list[list[int]]:
        """The members of each group."""
        found, following = [list(range(self.size))], self.size
        for loss in self.losses:
            left = [each for each in found[-1] if each != loss.victim]
            found.append([*left, *range(following, following + loss.joins)])
            following += loss.joins
        return found


def loop_of(scenario: Scenario, member: int, *, connect: bool = True) -> DiLoCo:
    """Return the loop of a member, whose first parameters are those of no other."""
    torch.manual_seed(member)
    width = scenario.width
    layers = [nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 8)]
    model = nn.Sequential(*layers).to(getattr(torch, scenario.dtype))
    config = Config(bits=4, bucket_size=64, rounding="nearest", error_feedback=scenario.feedback)
    return DiLoCo(
        model, lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.5, nesterov=True),
        sync_every=3 * scenario.fragments, fragments=scenario.fragments,
        fragment_sync_delay=scenario.delay, fragment_update_alpha=scenario.alpha, config=config,
        rules=Rules(exact_vectors=False), carrier=scenario.carrier, connect=connect,
    )  # fmt: skip


class Member:
    """A member of the groups of a scenario.

    Attributes:
        loop: of this member, once it is in a group.
        applied: how many averages were applied when each of its groups began.
    """

    def __init__(self, scenario: Scenario, number: int, store: Any) -> None:
        self.scenario, self.number, self.store = scenario, number, store
        self.loop: DiLoCo | None = None
        self.applied: list[int] = []
        self._totals: list[tuple[oracle.Values, oracle.Values]] = []
        self._lost: list[oracle.Values] = []  # residuals of ranks that died
        self._old: oracle.Oracle | None = None  # of the last group that trained
        self._before: Any = None  # what this rank had applied, and its parameters, before regroup()
        self._victims: list[int] = []  # since that group trained
        self._checkpoint: Any = None  # of the beginning of the group
        self._restored: int | None = None  # the member that has loaded its checkpoint

    def run(self) -> None:
        """Train in each group until its loss, and in the last one for two rounds."""
        losses = [*self.scenario.losses, None]
        for index, (members, loss) in enumerate(zip(self.scenario.groups, losses, strict=True)):
            if self.number not in members:
                continue
            self._meet(index, members)
            if loss is not None and not loss.average:
                self._fail_to_join(loss)
            else:
                self._join()
                self._old = self._started(members)
                self._train(index, self._old, loss)
            if loss is not None and loss.victim is not None:
                self._victims.append(loss.victim)
            self._restored = None if loss is None else loss.restores
            if self._restored == self.number:
                self._restore()
        self._conserves()
        dist.barrier()
        dist.destroy_process_group()

    def _restore(self) -> None:
        assert self.loop is not None
        state, parameters = self._checkpoint
        self.loop.load_state_dict(state)
        with torch.no_grad():
            for mine, saved in zip(self.loop.parameters, parameters, strict=True):
                mine.copy_(saved)

    def _meet(self, index: int, members: list[int]) -> None:
        if self.loop is not None and self._before is None:
            self._before = self.loop.applied, oracle.state_of(self.loop)["params"]
        self._deferred = loop_of(self.scenario, self.number, connect=False)
        if self.scenario.reconfigures:
            self._reconfigure(index, members)
            return
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group(
            "cgx", store=dist.PrefixStore(f"group {index}", self.store), timeout=TIMEOUT,
            rank=members.index(self.number), world_size=len(members),
        )  # fmt: skip

    def _reconfigure(self, index: int, members: list[int]) -> None:
        if not dist.is_initialized():
            dist.init_process_group(
                "cgx", store=self.store, timeout=TIMEOUT, enable_reconfigure=True,
                rank=self.number, world_size=1 + max(map(max, self.scenario.groups)),
            )  # fmt: skip
        self.store.set(f"group {index}, {self.number}", dist._get_reconfigure_handle())
        handles = [self.store.get(f"group {index}, {each}").decode() for each in members]
        assert dist._reconfigure(index + 1, handles, timeout=TIMEOUT).wait()

    def _join(self) -> None:
        if self.loop is not None:
            self.loop.regroup()
        elif self._old is None and self.number >= self.scenario.size and self.scenario.deferred:
            self._deferred.regroup()
            self.loop = self._deferred
        else:
            self.loop = loop_of(self.scenario, self.number)

    def _fail_to_join(self, loss: Loss) -> None:
        """Lose a rank in regroup(), which may fail or not on each of the others."""
        if self.number == loss.victim:
            faults.IN_REGROUP[loss.fault]()
        with contextlib.suppress(RuntimeError):
            self._join()
        assert self.number != loss.victim

    def _started(self, members: list[int]) -> oracle.Oracle:
        assert self.loop is not None
        if self._old is not None:
            self._check_survivor(self._old)
        mine = oracle.state_of(self.loop)
        states: list[Any] = [None] * len(members)
        dist.all_gather_object(states, mine)
        for state in states:
            for count in ("steps", "applied", "exchanges"):
                assert state[count] == mine[count], f"{count}: {state[count]} and {mine[count]}"
            oracle.same(state["outer"], mine["outer"], "outer")
            oracle.same(state["momentum"], mine["momentum"], "momentum")
        if self._old is None:
            dtype = self.loop.parameters[0].dtype
            for p, outer in zip(self.loop.parameters, self.loop.outer_parameters, strict=True):
                assert torch.equal(p, outer.to(dtype))
            assert not self.loop.exchange.residuals.tensors
        self.applied.append(self.loop.applied)
        self._checkpoint = (
            self.loop.state_dict(),
            [p.detach().clone() for p in self.loop.parameters],
        )
        return oracle.Oracle(self.loop, members, states)

    def _check_survivor(self, old: oracle.Oracle) -> None:
        """Compare with the group's oracle before or after the average that failed.

        A member that was restored is as in the checkpoint or, if it missed averages, as a new one.
        """
        loop, (applied, params) = self.loop, self._before
        self._before = None
        assert loop is not None
        while old.applied < loop.applied:
            old.step()
        assert applied <= loop.applied <= applied + 1
        want = old.history[loop.applied]
        rank = old.members.index(self.number)
        state = oracle.state_of(loop)
        oracle.same(state["outer"], want["outer"], "outer")
        oracle.same(state["momentum"], want["momentum"], "momentum")
        is_behind = self._restored == self.number and loop.applied > applied
        if self.scenario.feedback:
            own = {n: of_ranks[rank] for n, of_ranks in want["residuals"].items()}
            own = {n: np.zeros_like(e) for n, e in own.items()} if is_behind else own
            oracle.same(state["residuals"], own, "residuals")
        if is_behind:
            params = {n: old.rounded(x) for n, x in want["outer"].items()}
        elif loop.applied > applied:  # it was applied while regrouping
            alpha = np.float32(self.scenario.alpha)
            for name in want["names"]:
                mixed = alpha * params[name] + (np.float32(1) - alpha) * want["outer"][name]
                params[name] = old.rounded(mixed)
        oracle.same(state["params"], params, "parameters")
        self._totals += want["sums"]
        if self._restored is not None and loop.applied > self.applied[-1]:
            self._victims.append(self._restored)  # it has lost its residuals
        for victim in filter(old.members.__contains__, self._victims):
            of_victim = old.members.index(victim)
            self._lost.append({n: each[of_victim] for n, each in want["residuals"].items()})
        self._victims = []

    def _train(self, index: int, expected: oracle.Oracle, loss: Loss | None) -> None:
        loop = self.loop
        assert loop is not None
        schedule = loop.schedule
        fault = faults.FAULTS[loss.fault] if loss else (faults.nothing, faults.nothing)
        first = min(m for m in expected.members if loss is None or m != loss.victim)
        sends = 0
        noise = random.Random(f"{self.scenario.seed} {index}")
        until = loop.steps + 2 * schedule.sync_every + 1
        while loss is not None or loop.steps < until:
            for name, change in oracle.moves(loop, self.number, loop.steps).items():
                p = loop.parameters[loop.names.index(name)]
                with torch.no_grad():
                    p += torch.from_numpy(change).view(p.shape).to(p.dtype)
            sends += schedule.sent_after(loop.steps + 1) is not None
            if loss and sends == loss.average and loss.victim is not None:
                if self.number == loss.victim:
                    fault[0](noise)
                elif self.number == first or loss.fault in faults.ON_ALL:
                    fault[1](noise)
            try:
                loop.step()
            except RuntimeError as error:
                assert loss is not None, error
                assert "was not applied" in str(error), error
                faults.mend()
                return
            expected.step()
            state = oracle.state_of(loop)
            rank = expected.members.index(self.number)
            oracle.same(state["params"], expected.loop.params[rank], f"step {loop.steps}")
            oracle.same(state["outer"], expected.loop.anchor, f"step {loop.steps}, outer")
            if loss and loss.victim is None and sends == loss.average:
                if loss.restores is not None:
                    loop.state_dict()  # waits for a pending average
                    dist.barrier()
                return
            assert sends < 9, "no rank was lost"
        if self.scenario.feedback:
            rank = expected.members.index(self.number)
            own = {n: x[rank] for n, x in expected.loop.residuals.items()}
            oracle.same(oracle.residuals(loop), own, "residuals")
        self._totals += expected.sums
        self._left = expected.loop.residuals

    def _conserves(self) -> None:
        """Check that sums of means, with all residuals, are the sums of differences.

        Only a member of all groups has seen all messages.
        """
        if not self.scenario.feedback or self.number >= self.scenario.size:
            return
        size = len(self.scenario.groups[0]) + sum(loss.joins for loss in self.scenario.losses)
        for name, owned in self._left.items():
            sent = sum(means[name] for means, _ in self._totals if name in means)
            moved = sum(d[name] for _, d in self._totals if name in d)
            pending = sum(x.astype(np.float64) for x in owned)
            pending = pending + sum(each[name].astype(np.float64) for each in self._lost)
            largest = max(float(np.abs(d[name]).max()) for _, d in self._totals if name in d)
            # An average rounds a few times for each rank: difference, residual, sum, momentum.
            bound = len(self._totals) * (4 * size + 8) * 2.0**-24 * size * max(1.0, largest)
            assert np.abs(sent + pending - moved).max() <= bound, name
