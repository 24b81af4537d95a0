"""Bits that follow a model as it trains: measured every so many steps, decided alike on all ranks.

    in some steps    each rank takes the statistic of every tensor that is free (codec.statistic);
                     ranks average them, exactly, in one small message
    LAG steps later  all ranks have the average, and count it
    every so often   allocate_bits() (or CGX's clusters) of the mean: the bits from this step on

A decision is a function of the averages, which are equal on all ranks to the bit, and of the steps:
no rank tells another what it decided. What ranks begin with is compared when they begin (agree()),
and every collective's header has a hash of its segments' bits.

AdaptiveBits knows no framework. cgx_ops.torch.ddp feeds it bucket by bucket; in JAX a program
returns the statistics (cgx_ops.jax.statistics), and its rules are static arguments.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple

from cgx_ops._core.consistency import require_same
from cgx_ops._core.exchange import exchange
from cgx_ops._core.tables import EXACT_BITS
from cgx_ops.communicator import Communicator
from cgx_ops.config import Config
from cgx_ops.errors import InvalidArgument, require_integer
from cgx_ops.planner.bits import allocate_bits, predicted_error
from cgx_ops.planner.clusters import cluster_bits
from cgx_ops.planner.plan import Plan

LAG = 2  # steps from a statistic to its average, so that nobody waits for it
_SAVES = 0.97  # of the bits, at most: else what is in force stays,
_EXCEEDS = 1.1  # unless it now loses so many times what it may
_CGX_CHOICES = (2, 3, 4)


class Sample(NamedTuple):
    """Statistics of one step, the mean over ranks.

    Attributes:
        step: in which they were taken.
        names: of the tensors, in an order that is equal on all ranks.
        numels: values of each.
        losses: of each, the statistic by value.
    """

    step: int
    names: tuple[str, ...]
    numels: tuple[int, ...]
    losses: tuple[float, ...]


_SETTINGS = ("every", "samples", "budget", "choices", "alpha", "most_changes")


class AdaptiveBits:
    """In how many bits each tensor travels, decided anew every so many steps.

    Equal on all ranks; it pickles, and a run that is resumed with it continues to the same bits.

    Attributes:
        every: steps from one decision to the next.
        samples: in how many of them statistics are taken, evenly spaced; it divides `every`.
        budget: "squared" or "norm", as of allocate_bits(); "clusters": CGX's k-means, which keeps
            no budget.
        choices: bits that tensors may have; None: those of allocate_bits(), of clusters (2, 3, 4).
        alpha: the budget, as a multiple of the error of uniform bits.
        most_changes: after so many the bits stay; None: no end.
        bits: in force, by name; a tensor that is not there has the bits of the config.
        numels: values of each tensor in `bits`.
        changes: how often bits changed.
    """

    def __init__(
        self,
        *,
        every: int = 100,
        samples: int = 10,
        budget: Literal["squared", "norm", "clusters"] = "squared",
        choices: Sequence[int] | None = None,
        alpha: float = 1.0,
        most_changes: int | None = None,
    ) -> None:
        """Begin without a decision.

        Raises:
            InvalidArgument: a value out of its range.
        """
        if samples < 1 or every < samples or every % samples:
            raise InvalidArgument(
                f"every is {every} and samples {samples}; every must be a multiple of samples, of "
                "which there is one or more"
            )
        if budget not in ("squared", "norm", "clusters"):
            raise InvalidArgument(
                f"budget is {budget!r}; it must be 'squared', 'norm' or 'clusters'"
            )
        if choices is not None and not choices:
            raise InvalidArgument("choices is empty; give bits from 1 to 8, or None")
        for bits in choices or ():
            Config(bits=bits)  # checks them
        if most_changes is not None:
            most_changes = require_integer("most_changes", most_changes, 0, 2**63 - 1)
        allocate_bits([], [], alpha=alpha)  # checks alpha
        self.every, self.samples = every, samples
        self.budget: Literal["squared", "norm", "clusters"] = budget
        self.choices = None if choices is None else tuple(choices)
        self.alpha, self.most_changes = alpha, most_changes
        self.bits: dict[str, int] = {}
        self.numels: dict[str, int] = {}
        self.changes = 0
        self._arrived: list[Sample] = []  # not counted yet
        self._names: tuple[str, ...] = ()
        self._sums: list[float] = []
        self._seen = self._counted = 0  # samples since the last decision; finite ones of them

    def check(self, config: Config) -> None:
        """Require a config that can be adapted, before anything travels by it.

        Raises:
            InvalidArgument: its compressor has not all the choices.
            Unsupported: its errors cannot be predicted.
        """
        try:
            for bits in self.choices or (EXACT_BITS,):
                predicted_error(0.0, bits, config)
        except InvalidArgument as error:
            raise InvalidArgument(f"AdaptiveBits.choices is {self.choices}: {error}") from None

    # ---- What is measured when -------------------------------------------------------------------

    def measures(self, step: int) -> bool:
        """Tell whether statistics are taken in a step."""
        return step % (self.every // self.samples) == 0

    def measured_by(self, config: Config) -> Config:
        """Return the config whose statistic is taken of a tensor that travels by `config`.

        Raises:
            Unsupported: its errors cannot be predicted.
        """
        predicted_error(0.0, config.bits, config)
        if self.budget != "clusters" or config.compressor == "levels":
            return config
        return Config(compressor="levels", bucket_size=config.bucket_size)  # whose is the energy

    # ---- What ranks know -------------------------------------------------------------------------

    def arrive(self, sample: Sample) -> None:
        """Take note of averages; steps rise."""
        self._arrived.append(sample)

    def observe(self, step: int, numels: Mapping[str, int], losses: Mapping[str, float]) -> None:
        """Take note of a step's statistics by value, which are equal on all ranks.

        Args:
            step: in which they were taken.
            numels: values of each tensor; those without a loss may be among them.
            losses: of each tensor that is free, as cgx_ops.jax.statistics returns them, averaged.
        """
        names = tuple(sorted(losses))
        counts = tuple(int(numels[name]) for name in names)
        self.arrive(Sample(step, names, counts, tuple(float(losses[name]) for name in names)))

    def advance(self, step: int, config: Config) -> bool:
        """Count what is to be known in a step, and decide where it is time.

        Args:
            step: which begins.
            config: its bits are the uniform ones, its compressor and rounding make the errors.

        Returns:
            Whether bits changed.
        """
        changed = False
        while self._arrived and self._arrived[0].step + LAG <= step:
            changed |= self._count(self._arrived.pop(0), config)
        return changed

    def agree(self, communicator: Communicator) -> None:
        """Require that all ranks have the same settings and bits.

        Collective: every rank calls it, before the first step that uses them.

        Raises:
            MismatchError: on every rank; it names the first setting that differs, or the first
                tensor that does not have the same bits on all of them.
        """
        require_same(
            "ranks have different settings of adaptive bits",
            {name: getattr(self, name) for name in _SETTINGS},
            lambda mine: exchange(mine, "cgx_ops.planner.adaptive", communicator),
            "Give all ranks the same",
        )
        self.plan().agree(communicator)

    # ---- Whose they are --------------------------------------------------------------------------

    @property
    def names(self) -> set[str]:
        """The tensors that have bits, or statistics that are not counted yet."""
        arrived = (name for sample in self._arrived for name in sample.names)
        return {*self.bits, *self._names, *arrived}

    def keep(self, names: Collection[str]) -> None:
        """Drop the bits of all other tensors, and statistics that are of others, too."""
        self.bits = {name: bits for name, bits in self.bits.items() if name in names}
        self.numels = {name: numel for name, numel in self.numels.items() if name in names}
        self._arrived = [each for each in self._arrived if set(each.names) <= set(names)]
        if not set(self._names) <= set(names):
            self._names, self._sums, self._seen, self._counted = (), [], 0, 0

    # ---- What follows ----------------------------------------------------------------------------

    def plan(self) -> Plan:
        """Return the bits in force as a plan of one group: to be saved, or for its rules."""
        names = tuple(sorted(self.bits))
        bits = tuple(self.bits[name] for name in names)
        numels = tuple(self.numels[name] for name in names)
        return Plan(names, numels, bits, (tuple(range(len(names))),) if names else ())

    @property
    def mean_bits(self) -> float:
        """Bits of a value, over all tensors that have some of their own; NaN before there are."""
        total = sum(self.numels.values())
        return sum(self.bits[n] * self.numels[n] for n in self.bits) / total if total else math.nan

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={getattr(self, name)!r}" for name in _SETTINGS)
        return f"AdaptiveBits({settings})"

    def _count(self, sample: Sample, config: Config) -> bool:
        if sample.names != self._names:
            self._names, self._sums = sample.names, [0.0] * len(sample.names)
            self._seen = self._counted = 0
        # A step whose gradients overflowed, or vanished, tells nothing.
        if all(map(math.isfinite, sample.losses)) and any(sample.losses):
            self._counted += 1
            self._sums = [a + b for a, b in zip(self._sums, sample.losses, strict=True)]
        self._seen += 1
        if self._seen < self.samples:
            return False
        counted, sums = self._counted, self._sums
        self._seen, self._counted, self._sums = 0, 0, [0.0] * len(sums)
        if not counted or self.changes == self.most_changes:
            return False
        statistics = [n * s / counted for n, s in zip(sample.numels, sums, strict=True)]
        return self._decide(dict(zip(sample.names, sample.numels, strict=True)), statistics, config)

    def _decide(
        self, numels: Mapping[str, int], statistics: Sequence[float], config: Config
    ) -> bool:
        counts = list(numels.values())
        now = [self.bits.get(name, config.bits) for name in numels]
        if self.budget == "clusters":
            norms = [math.sqrt(s) for s in statistics]
            found = cluster_bits(norms, counts, self.choices or _CGX_CHOICES)
            worth = found != now
        else:
            found = allocate_bits(
                statistics, counts, self.budget,
                config=config, choices=self.choices, alpha=self.alpha,
            )  # fmt: skip

            def lost(bits: Sequence[int]) -> float:
                squared = (
                    predicted_error(s, b, config) for s, b in zip(statistics, bits, strict=True)
                )
                return math.fsum(squared if self.budget == "squared" else map(math.sqrt, squared))

            uniform = lost([config.bits] * len(counts))
            worth = (
                _total(counts, found) <= _SAVES * _total(counts, now)
                or lost(now) > _EXCEEDS * self.alpha * uniform
            )
        if not worth:
            return False
        self.bits, self.numels = dict(zip(numels, found, strict=True)), dict(numels)
        self.changes += 1
        return True


def _total(numels: Sequence[int], bits: Sequence[int]) -> int:
    return sum(n * b for n, b in zip(numels, bits, strict=True))
