"""Choose the bits of each tensor while a model trains.

    in some steps       each rank computes the statistic of each free tensor (codec.statistic);
                        ranks average them, exactly, in one small message
    LAG steps later     all ranks have the average, and add it to the mean
    every `every` steps allocate_bits() (or CGX's clusters) computes new bits from the mean; for the
                        compressor "entropy", allocate_rates() computes new rates

A decision depends only on the averages, which are equal on all ranks to the bit, and on the steps.
So ranks do not exchange decisions. agree() compares the initial state of the ranks, and the header
of each collective has a hash of its segments' bits.

AdaptiveBits uses no framework. cgx_ops.torch.ddp passes statistics bucket by bucket. In JAX a
program returns them (cgx_ops.jax.statistics), and its rules are static arguments.
"""

import copy
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
from cgx_ops.planner.rates import allocate_rates, bits_of

LAG = 2  # steps from a statistic to its average, so that no step waits for it
_SAVES = 0.97  # new bits must take at most this share of the old ones,
_EXCEEDS = 1.1  # unless the error of the old ones exceeds this multiple of the budget
_BETTER = 0.95  # new rates must have at most this share of the old ones' error,
_TOTAL = 1.01  # unless the old ones exceed the mean rate by this factor
_CGX_CHOICES = (2, 3, 4)


class Sample(NamedTuple):
    """The statistics of one step, averaged over ranks.

    Attributes:
        step: The step in which they were computed.
        names: The tensors, in an order that is equal on all ranks.
        numels: Values of each tensor.
        losses: The statistic of each tensor, divided by its number of values.
    """

    step: int
    names: tuple[str, ...]
    numels: tuple[int, ...]
    losses: tuple[float, ...]


_SETTINGS = ("every", "samples", "budget", "choices", "alpha", "most_changes")


class AdaptiveBits:
    """Bits of each tensor that are decided again every `every` steps, equal on all ranks.

    With the compressor "entropy", tensors get rates instead: their mean, weighted by sizes, is the
    rate of the config, and their error is the least.

    Objects can be pickled; a run that resumes with one gets the same bits. Pass it to
    QuantizedAllreduceState or fsdp.compress() in PyTorch; in JAX call advance() and observe(). The
    arguments are attributes, too.

    Args:
        every: Steps from one decision to the next.
        samples: How many of these steps compute statistics, evenly spaced. It must divide `every`.
        budget: "squared" or "norm", see allocate_bits(); or "clusters": CGX's k-means, without a
            budget. Not for "entropy".
        choices: Bits that tensors may have. None: those of allocate_bits(); (2, 3, 4) for
            "clusters". Not for "entropy".
        alpha: The budget as a multiple of the error of uniform bits. Not for "entropy".
        most_changes: Largest number of changes, after which the bits stay. None: no limit.

    Attributes:
        bits: The current bits, or for "entropy" the rates, by name. Tensors that are not in it have
            those of the config.
        numels: Values of each tensor in `bits`.
        changes: How often the bits have changed.

    Raises:
        InvalidArgument: A value is out of its range.

    Example:
        >>> from cgx_ops import Config
        >>> from cgx_ops.planner import AdaptiveBits
        >>> adaptive = AdaptiveBits(every=2, samples=1)
        >>> adaptive.observe(0, {"a": 1000, "b": 1000}, {"a": 0.001, "b": 1.0})
        >>> adaptive.advance(2, Config(bits=4))  # two steps later
        True
        >>> adaptive.bits["a"] < adaptive.bits["b"]
        True
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
        """Start without a decision; see the class."""
        if samples < 1 or every < samples or every % samples:
            raise InvalidArgument(
                f"every is {every} and samples is {samples}; samples must be at least 1 and divide "
                "every"
            )
        if budget not in ("squared", "norm", "clusters"):
            raise InvalidArgument(
                f"budget is {budget!r}; it must be 'squared', 'norm' or 'clusters'"
            )
        if choices is not None and not choices:
            raise InvalidArgument("choices is empty; give bits from 1 to 8, or None")
        for bits in choices or ():
            Config(bits=bits)  # checks the bits
        if most_changes is not None:
            most_changes = require_integer("most_changes", most_changes, 0, 2**63 - 1)
        allocate_bits([], [], alpha=alpha)  # checks alpha
        self.every, self.samples = every, samples
        self.budget: Literal["squared", "norm", "clusters"] = budget
        self.choices = None if choices is None else tuple(choices)
        self.alpha, self.most_changes = alpha, most_changes
        self.bits: dict[str, float] = {}
        self.numels: dict[str, int] = {}
        self.changes = 0
        self._arrived: list[Sample] = []  # not yet counted
        self._names: tuple[str, ...] = ()
        self._sums: list[float] = []
        self._seen = self._counted = 0  # samples since the last decision; the finite ones

    def check(self, config: Config) -> None:
        """Check that the bits of a config can be adapted.

        Args:
            config: The config of the tensors.

        Raises:
            InvalidArgument: Its compressor does not have all choices, or a setting is not for it.
            Unsupported: Its error cannot be predicted.
        """
        if config.compressor == "entropy":
            self._check_for_rates(config)
        try:
            for bits in self.choices or (EXACT_BITS,):
                predicted_error(0.0, bits, config)
        except InvalidArgument as error:
            raise InvalidArgument(f"AdaptiveBits.choices is {self.choices}: {error}") from None

    # ---- Measurement -----------------------------------------------------------------------------

    def measures(self, step: int) -> bool:
        """Return whether a step computes statistics.

        Args:
            step: The step, from 0.
        """
        return step % (self.every // self.samples) == 0

    def measured_by(self, config: Config) -> Config:
        """Return the config for statistic(), for a tensor that is sent with `config`.

        Args:
            config: The tensor's config.

        Raises:
            Unsupported: Its error cannot be predicted.
        """
        predicted_error(0.0, bits_of(config), config)
        if self.budget != "clusters" or config.compressor == "levels":
            return config
        # The statistic of "levels" is the energy.
        return Config(compressor="levels", bucket_size=config.bucket_size)

    # ---- Statistics ------------------------------------------------------------------------------

    def arrive(self, sample: Sample) -> None:
        """Add the averages of a step. Steps must rise.

        Args:
            sample: The averages.
        """
        self._arrived.append(sample)

    def observe(self, step: int, numels: Mapping[str, int], losses: Mapping[str, float]) -> None:
        """Add the statistics per value of a step, which are equal on all ranks.

        Args:
            step: The step in which they were computed.
            numels: Values of each tensor. Tensors that are not in `losses` are ignored.
            losses: The averaged statistics per value, as cgx_ops.jax.statistics() returns them.
        """
        names = tuple(sorted(losses))
        counts = tuple(int(numels[name]) for name in names)
        self.arrive(Sample(step, names, counts, tuple(float(losses[name]) for name in names)))

    def advance(self, step: int, config: Config) -> bool:
        """Count the statistics that are due in a step, and decide if it is time.

        Args:
            step: The step that begins.
            config: Its bits are the uniform bits, or its rate the mean rate; its compressor and
                rounding determine the errors.

        Returns:
            Whether bits changed.

        Raises:
            InvalidArgument: The settings are not for this config; see check().
        """
        changed = False
        while self._arrived and self._arrived[0].step + LAG <= step:
            changed |= self._count(self._arrived.pop(0), config)
        return changed

    def agree(self, communicator: Communicator) -> None:
        """Check that all ranks have the same settings and bits. Call it before the first step.

        All ranks must call it.

        Args:
            communicator: The ranks.

        Raises:
            MismatchError: They differ. All ranks raise it; the message has the first setting that
                differs, or the first tensor with different bits.
        """
        require_same(
            "ranks have different settings of adaptive bits",
            {name: getattr(self, name) for name in _SETTINGS},
            lambda mine: exchange(mine, "cgx_ops.planner.adaptive", communicator),
            "Use the same settings on all ranks",
        )
        self.plan().agree(communicator)

    # ---- Tensors ---------------------------------------------------------------------------------

    @property
    def names(self) -> set[str]:
        """The tensors that have bits, or statistics that are not counted yet."""
        arrived = (name for sample in self._arrived for name in sample.names)
        return {*self.bits, *self._names, *arrived}

    def keep(self, names: Collection[str]) -> None:
        """Drop the bits and the statistics of all other tensors.

        Args:
            names: The tensors to keep.
        """
        self.bits = {name: bits for name, bits in self.bits.items() if name in names}
        self.numels = {name: numel for name, numel in self.numels.items() if name in names}
        self._arrived = [each for each in self._arrived if set(each.names) <= set(names)]
        if not set(self._names) <= set(names):
            self._names, self._sums, self._seen, self._counted = (), [], 0, 0

    def adopt(self, other: "AdaptiveBits") -> None:
        """Continue from the bits and the statistics of another object, with this one's settings.

        Args:
            other: That of a rank which has seen more averages.
        """
        state = vars(copy.deepcopy(other))
        vars(self).update({name: x for name, x in state.items() if name not in _SETTINGS})

    # ---- Bits ------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """Return the current bits as a plan with one group, to save it or for its rules."""
        names = tuple(sorted(self.bits))
        bits = tuple(self.bits[name] for name in names)
        numels = tuple(self.numels[name] for name in names)
        return Plan(names, numels, bits, (tuple(range(len(names))),) if names else ())

    @property
    def mean_bits(self) -> float:
        """Mean bits per value over the tensors in `bits`; NaN before the first decision."""
        total = sum(self.numels.values())
        return sum(self.bits[n] * self.numels[n] for n in self.bits) / total if total else math.nan

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={getattr(self, name)!r}" for name in _SETTINGS)
        return f"AdaptiveBits({settings})"

    def _count(self, sample: Sample, config: Config) -> bool:
        if sample.names != self._names:
            self._names, self._sums = sample.names, [0.0] * len(sample.names)
            self._seen = self._counted = 0
        # Ignore a step whose gradients overflowed or vanished.
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

    def _check_for_rates(self, config: Config) -> Literal["squared", "norm"]:
        """Return the budget of rates; raise InvalidArgument if a setting is not for "entropy"."""
        if config.bits == EXACT_BITS:
            raise InvalidArgument(
                "AdaptiveBits: compressor is 'entropy' and bits is 32, which sends exact values "
                "without a rate: leave bits out"
            )
        given = "choices" if self.choices is not None else "alpha" if self.alpha != 1 else None
        if given is not None:
            raise InvalidArgument(
                f"AdaptiveBits.{given} is {getattr(self, given)!r}, but compressor 'entropy' has "
                f"rates, whose mean is Config.rate: leave {given} out"
            )
        if self.budget == "clusters":
            raise InvalidArgument(
                "AdaptiveBits.budget is 'clusters', which chooses bits; for compressor 'entropy' "
                "use 'squared' or 'norm'"
            )
        return self.budget

    def _decide(
        self, numels: Mapping[str, int], statistics: Sequence[float], config: Config
    ) -> bool:
        counts = list(numels.values())
        now = [self.bits.get(name, bits_of(config)) for name in numels]

        def lost(bits: Sequence[float]) -> float:
            squared = (predicted_error(s, b, config) for s, b in zip(statistics, bits, strict=True))
            return math.fsum(map(math.sqrt, squared) if self.budget == "norm" else squared)

        found: Sequence[float]
        if config.compressor == "entropy":
            budget = self._check_for_rates(config)
            found = allocate_rates(statistics, counts, budget, config=config)
            worth = lost(found) <= _BETTER * lost(now) or _total(counts, now) > _TOTAL * bits_of(
                config
            ) * sum(counts)
        elif self.budget == "clusters":
            norms = [math.sqrt(s) for s in statistics]
            found = cluster_bits(norms, counts, self.choices or _CGX_CHOICES)
            worth = found != now
        else:
            found = allocate_bits(
                statistics, counts, self.budget,
                config=config, choices=self.choices, alpha=self.alpha,
            )  # fmt: skip
            uniform = lost([config.bits] * len(counts))
            worth = (
                _total(counts, found) <= _SAVES * _total(counts, now)
                or lost(now) > _EXCEEDS * self.alpha * uniform
            )
        if not worth or list(found) == now:
            return False
        self.bits, self.numels = dict(zip(numels, found, strict=True)), dict(numels)
        self.changes += 1
        return True


def _total(numels: Sequence[int], bits: Sequence[float]) -> float:
    return sum(n * b for n, b in zip(numels, bits, strict=True))
