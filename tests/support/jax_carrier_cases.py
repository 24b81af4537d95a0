"""Helpers of the carrier="xla" tests and their rank program: calls and expected results."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import ml_dtypes
import numpy as np
import numpy.typing as npt
import reference

from cgx_ops import Rules
from cgx_ops.config import Algorithm
from cgx_ops.jax import pmean_q, psum_q
from cgx_ops.jax._src.collectives.options import Carrier
from support.jax_cases import normal, seed_of, with_config

Values = npt.NDArray[Any]
BF16 = ml_dtypes.bfloat16


@dataclass(frozen=True)
class Case:
    """A reduction over an axis. `keys`: devices have no keys, equal keys or different ones."""

    numel: int
    bits: int = 4
    dtype: Any = np.float32
    op: Literal["sum", "avg"] = "sum"
    algorithm: Algorithm = "sra"
    keys: Literal["none", "equal", "different"] = "none"
    bucket_size: int = 512
    gather_bits: int | None = None
    skip_incomplete_buckets: bool = False
    minimal_size: int = 0
    # All devices have the same large values, so that errors exceed the range of fp16.
    large: bool = False

    def knobs(self) -> dict[str, Any]:
        names = ("bits", "bucket_size", "algorithm", "gather_bits")
        names += ("skip_incomplete_buckets", "minimal_size")
        knobs = {name: getattr(self, name) for name in names}
        # A call with bits=32 accepts no residual; a single leaf may be exact.
        return knobs if self.bits != 32 else {**knobs, "bits": 4, "rules": Rules([("", 32)])}

    def inputs(self, devices: int) -> Values:
        """Return each device's values, one row per device."""
        if self.large:
            row = 16000 * normal(self.numel, self.numel).clip(-4, 4)
            return np.tile(row.astype(self.dtype), (devices, 1))
        return normal(self.numel, devices, self.numel, dtype=self.dtype)

    def seeds(self, devices: int) -> Values:
        """Return the integers from which each device's key is made."""
        return np.arange(devices, dtype=np.int32) * (self.keys == "different") + 7

    def residuals(self, devices: int) -> Values:
        """Return each device's residual before the call, one row per device."""
        return normal(self.numel + 1, devices, self.numel, dtype=self.dtype) / self.dtype(8)

    def operands(self, devices: int) -> tuple[Values, Values, Values]:
        """Return the arguments of `call`, one row per device."""
        return self.inputs(devices), self.residuals(devices), self.seeds(devices)

    def call(
        self, x: jax.Array, residual: jax.Array, seed: jax.Array, axes: Any, carrier: Carrier
    ) -> Any:
        """Reduce on a device; return (result, residual)."""
        key = None if self.keys == "none" else jax.random.key(seed)
        reduce = {"sum": psum_q, "avg": pmean_q}[self.op]
        return reduce(
            x, axes, key=key, carrier=carrier, residual=residual, **with_config(**self.knobs())
        )

    def expected(
        self, group: Sequence[int], processes: Sequence[int], axes: Any = "d"
    ) -> tuple[Values, Values]:
        """Return the result of a group of devices along `axes`, and each device's residual.

        processes: the process of each device. If several processes have several devices in the
        group, each process is one rank, with the exact fp32 sums of its devices' values and
        residuals, and the first one's seed.
        """
        x, old, seeds = self.operands(len(processes))
        ranks: dict[int, list[int]] = {}
        for device in group:
            ranks.setdefault(processes[device], []).append(device)
        if len(ranks) in (1, len(group)):
            ranks = {device: [device] for device in group}
            rows, lost = [x[device] for device in group], [old[device].copy() for device in group]
        else:
            rows, lost = (
                [
                    reference.reduce_in_order("sum", [reference.widen(y[d]) for d in rank])
                    for rank in ranks.values()
                ]
                for y in (x, old)
            )
        call = f"allreduce over {','.join(axes)}: "
        keys = [seed_of(jax.random.key(seeds[rank[0]]), call=call) for rank in ranks.values()]
        result = reference.allreduce(
            rows,
            [reference.Segment(0, self.numel, self.bits, self.bucket_size)],
            op=self.op,
            algorithm=self.algorithm,
            rounding="nearest" if self.keys == "none" else "stochastic",
            seeds=None if self.keys == "none" else keys,
            gather_bits=self.gather_bits or 0,
            skip_incomplete_buckets=self.skip_incomplete_buckets,
            minimal_size=self.minimal_size,
            divisor=len(group),
            residuals=lost,
        )
        residuals = np.zeros((len(group), self.numel), self.dtype)
        for rank, new in zip(ranks.values(), lost, strict=True):
            residuals[list(group).index(rank[0])] = reference.round_to_finite(
                new.astype(np.float32), np.dtype(self.dtype)
            )
        return rounded(result, self.dtype), residuals


def rounded(x: Values, dtype: npt.DTypeLike) -> Values:
    """Round fp32 to another dtype, or return it unchanged."""
    return x if x.dtype == dtype else reference.round_to(x, np.dtype(dtype))


CASES = [
    *(Case(numel) for numel in (1, 17, 511, 512, 513, 20000)),
    *(Case(5000, bits, bucket_size=100, op="avg") for bits in (2, 4, 8, 32)),
    *(Case(3001, dtype=dtype, op="avg", keys="different") for dtype in (np.float16, BF16)),
    *(Case(3001, algorithm="one_shot", keys=keys) for keys in ("none", "equal", "different")),
    *(Case(numel, algorithm="auto", keys="equal") for numel in (700, 40000)),
    Case(1000, 2, bucket_size=64, gather_bits=8, skip_incomplete_buckets=True),
    Case(3000, 2, dtype=np.float16, op="avg", large=True),
    Case(1000, minimal_size=1001),
]
