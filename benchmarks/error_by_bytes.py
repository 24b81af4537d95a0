"""Error against real bytes of every compressor, on random values and on captured gradients.

    PYTHONPATH=examples/methods python benchmarks/gradients.py
    PYTHONPATH=examples/methods python benchmarks/error_by_bytes.py [--json FILE] [--docs PAGE]

1. Values: samples of three distributions, and the gradients that gradients.py saved.
2. Points: bits per value and squared error over the squared signal, for each config of a family.
   Blocks of BLOCK values are encoded separately. Compressors of variable length count what they
   wrote, without the LENGTH_BYTES before each block that quantize() adds.
3. Curves: a family at any number of bits is the straight line between its two nearest points, in
   the logarithm of the error. Configs that another one of the family beats in both are left out. A
   family has no error below its first point, and beyond its last point it has that one's. In the
   tables, families other than `entropy` may use HEADER_BITS more.

`randk` (its error is 1 - density), `sign` (a vote without a scale) and `lossless` (no error) are
left out.
"""

import argparse
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import documents
import gradients
import numpy as np
import numpy.typing as npt

from cgx_ops import Config, dequantize, quantize
from cgx_ops._core import tables
from cgx_ops._core.text_table import Table
from cgx_ops.bench.report import Report
from cgx_ops.config import Compressor

Floats = npt.NDArray[np.float32]

BLOCK = 65536  # values
BLOCKS = 16  # of each distribution
LENGTH_BYTES = 4
BITS = (0.5, 1, 2, 3, 4)  # of the tables
HEADER_BITS = 1 / 32  # per value: a bf16 for each 512 values
ENTROPY = "entropy"

# The errors at BITS of an entropy-coded uniform quantizer, simulated with the best dead zone and
# one shift of the reconstruction.
SIMULATED: dict[str, tuple[float, ...]] = {
    "Gauss": (0.617, 0.349, 0.090, 0.0224, 0.0056),
    "Laplace": (0.487, 0.262, 0.073, 0.0190, 0.0048),
    "t3": (0.373, 0.209, 0.060, 0.0152, 0.0038),
}

_RATES = (0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.25, 4.5, 5, 6, 7, 8)
_BUCKETS = (128, 512, 2048)
_DENSITIES = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.18, 0.27, 0.4, 0.6)


def _of_bits(bits: Sequence[int], **options: Any) -> list[Config]:
    return [Config(b, size, **options) for b, size in itertools.product(bits, _BUCKETS)]


def _of_buckets(compressor: Compressor, **options: Any) -> list[Config]:
    return [Config(bucket_size=size, compressor=compressor, **options) for size in _BUCKETS]


FAMILIES: dict[str, list[Config]] = {
    ENTROPY: [Config(compressor="entropy", rate=rate) for rate in _RATES],
    "entropy, shift": [Config(compressor="entropy", rate=r, rounding="shift") for r in _RATES],
    "uniform": _of_bits(range(1, 9), rounding="nearest"),
    "uniform, rotation 32": _of_bits(range(1, 9), rounding="nearest", rotation=32),
    "uniform, stochastic": _of_bits(range(1, 9), rounding="stochastic"),
    "uniform, shift": _of_bits(range(1, 9), rounding="shift"),
    "levels": _of_bits(range(1, 5), compressor="levels"),
    "levels, rotation 32": _of_bits(range(1, 5), compressor="levels", rotation=32),
    "onebit": _of_buckets("onebit"),
    "ternary": _of_buckets("ternary") + _of_buckets("ternary", clip=True),
    "qsgd": _of_bits(range(2, 9), compressor="qsgd"),
    "half": [Config(compressor="half")],
    **{
        f"topk, {value_bits}-bit values": [
            Config(compressor="topk", density=density, bucket_size=size, value_bits=value_bits)
            for density, size in itertools.product(_DENSITIES, (4096, BLOCK))
        ]
        for value_bits in (1, 4, 8, 16)
    },
    "mxfp8": [Config(compressor="mxfp8")],
    "mxfp8_e5m2": [Config(compressor="mxfp8_e5m2")],
    "mxfp4": [Config(compressor="mxfp4")],
    "nvfp4": [Config(compressor="nvfp4", bucket_size=size) for size in (*_BUCKETS, BLOCK)],
}


@dataclass(frozen=True)
class Point:
    """A config on values: bits per value, and |x - Q(x)|^2 / |x|^2."""

    values: str
    family: str
    config: str
    bits: float
    error: float


# ---- 1. values and 2. points ---------------------------------------------------------------------


def distributions(blocks: int) -> dict[str, Floats]:
    """Return samples of the distributions by name."""
    random, numel = np.random.default_rng(0), blocks * BLOCK
    return {
        "Gauss": random.standard_normal(numel, np.float32),
        "Laplace": random.laplace(size=numel).astype(np.float32),
        "t3": random.standard_t(3, numel).astype(np.float32),
    }


def measure(x: Floats, config: Config) -> tuple[float, float]:
    """Return the bits per value and the squared error over the squared signal."""
    framing = 0 if tables.COMPRESSORS[config.compressor]["fixed_length"] else LENGTH_BYTES
    length, squared = 0, 0.0
    for first in range(0, x.size, BLOCK):
        block = x[first : first + BLOCK]
        data = quantize(block, config, first_index=first)
        found = dequantize(data, block.size, config=config, first_index=first)
        length += len(data) - framing
        squared += float(np.sum((block - found).astype(np.float64) ** 2))
    return 8 * length / x.size, squared / float(np.sum(x.astype(np.float64) ** 2))


def options_of(config: Config) -> str:
    """Return the fields of a config that have no default values."""
    default = asdict(Config())
    return " ".join(f"{k}={v}" for k, v in asdict(config).items() if v != default[k])


def measure_all(values: dict[str, Floats]) -> list[Point]:
    return [
        Point(name, family, options_of(config), *measure(x, config))
        for name, x in values.items()
        for family, configs in FAMILIES.items()
        for config in configs
    ]


# ---- 3. curves -----------------------------------------------------------------------------------


class Curve:
    """The error of one family on one set of values."""

    def __init__(self, points: list[Point]) -> None:
        self.points = list[Point]()
        for point in sorted(points, key=lambda point: (point.bits, point.error)):
            if not self.points or point.error < self.points[-1].error:
                self.points.append(point)

    def record(self) -> dict[str, Any]:
        """Return the points for a report, with four digits."""
        return {
            "values": self.points[0].values,
            "family": self.points[0].family,
            "configs": [point.config for point in self.points],
            "bits": [float(f"{point.bits:.4g}") for point in self.points],
            "errors": [float(f"{point.error:.4g}") for point in self.points],
        }

    def error_at(self, bits: float) -> float | None:
        """Return the error at some bits per value; None if all points have more."""
        before = [point for point in self.points if point.bits <= bits]
        after = [point for point in self.points if point.bits > bits]
        if not before:
            return None
        left = before[-1]
        if not after:
            return left.error
        part = (bits - left.bits) / (after[0].bits - left.bits)
        return left.error ** (1 - part) * after[0].error ** part


Curves = dict[str, dict[str, Curve]]  # by values, then by family


def curves_of(points: list[Point]) -> Curves:
    found: dict[str, dict[str, list[Point]]] = {}
    for point in points:
        found.setdefault(point.values, {}).setdefault(point.family, []).append(point)
    return {
        values: {family: Curve(mine) for family, mine in families.items()}
        for values, families in found.items()
    }


def best_other(curves: dict[str, Curve], bits: float) -> tuple[float, str]:
    """Return the least error of the compressors other than entropy, and its family."""
    errors = [
        (error, family)
        for family, curve in curves.items()
        if not family.startswith(ENTROPY)
        and (error := curve.error_at(bits + HEADER_BITS)) is not None
    ]
    return min(errors)


def exceptions(curves: Curves) -> list[tuple[Point, float]]:
    """Return points of other compressors below the curve of entropy, and its error there."""
    found = list[tuple[Point, float]]()
    for families in curves.values():
        entropy = families[ENTROPY]
        for family, curve in families.items():
            for point in curve.points:
                error = entropy.error_at(point.bits)
                within = point.bits <= entropy.points[-1].bits
                other = not family.startswith(ENTROPY)
                if other and within and error is not None and point.error < error:
                    found.append((point, error))
    return found


# ---- tables --------------------------------------------------------------------------------------

_COLUMNS = ["1 bit" if bits == 1 else f"{bits:g} bits" for bits in BITS]


def table_of_entropy(curves: Curves) -> Table:
    """Return the error of entropy on all values; deviations from the simulation in brackets."""

    def cell(values: str, place: int) -> str:
        error = curves[values][ENTROPY].error_at(BITS[place])
        if error is None:
            return "-"
        if values not in SIMULATED:
            return f"{error:#.3g}"
        return f"{error:#.3g} ({100 * (error / SIMULATED[values][place] - 1):+.1f} %)"

    rows = [[values, *(cell(values, i) for i in range(len(BITS)))] for values in curves]
    notes = ["In brackets: difference from the simulation of an ideal coder."]
    return Table("Error of entropy", ["values", *_COLUMNS], rows, notes=notes)


def table_of_others(curves: Curves) -> Table:
    """Return the best other compressor on all values, relative to entropy."""

    def cell(values: str, bits: float) -> str:
        mine = curves[values][ENTROPY].error_at(bits)
        error, family = best_other(curves[values], bits)
        return f"{error / mine:.2f} {family}" if mine else "-"

    rows = [[values, *(cell(values, bits) for bits in BITS)] for values in curves]
    return Table("Best other compressor", ["values", *_COLUMNS], rows)


def tables_of_families(curves: Curves) -> list[Table]:
    """Return the errors of all families: a table for each distribution, one for all gradients."""
    captured = [values for values in curves if values not in SIMULATED]
    groups = {values: [values] for values in curves if values in SIMULATED}
    groups |= {f"geometric mean of {len(captured)} gradients": captured} if captured else {}

    def cell(group: list[str], family: str, bits: float) -> str:
        more = 0 if family.startswith(ENTROPY) else HEADER_BITS
        errors = [curves[values][family].error_at(bits + more) for values in group]
        known = [error for error in errors if error is not None]
        return f"{statistics.geometric_mean(known):#.3g}" if len(known) == len(group) else "-"

    bound = ["Shannon's bound, Gauss", *(f"{4**-bits:#.3g}" for bits in BITS)]
    return [
        Table(
            f"Error at equal bytes: {name}",
            ["compressor", *_COLUMNS],
            [[family, *(cell(group, family, b) for b in BITS)] for family in FAMILIES] + [bound],
        )
        for name, group in groups.items()
    ]


def table_of_exceptions(curves: Curves) -> Table:
    rows = [
        [point.values, point.config, f"{point.bits:.3f}", f"{point.error:.3g}", f"{error:.3g}"]
        for point, error in exceptions(curves)
    ]
    columns = ["values", "config", "bits", "error", "entropy's error"]
    return Table("Configs with less error than entropy at their bits", columns, rows, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description="Error against bytes of every compressor")
    parser.add_argument("--blocks", type=int, default=BLOCKS, help="of each distribution")
    parser.add_argument(
        "--gradients", type=Path, default=gradients.FOLDER, help="what gradients.py saved"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    parser.add_argument(
        "--docs", type=Path, metavar="PAGE", help="also put two tables between the page's markers"
    )
    options = parser.parse_args()
    points = measure_all({**distributions(options.blocks), **gradients.load(options.gradients)})
    curves = curves_of(points)
    first = [table_of_entropy(curves), table_of_others(curves)]
    all_tables = [*first, *tables_of_families(curves), table_of_exceptions(curves)]
    for table in all_tables:
        table.print()
    if options.json:
        rows = [curve.record() for families in curves.values() for curve in families.values()]
        Report("error_by_bytes", {"block": BLOCK}, rows, all_tables).write(options.json)
    if options.docs:
        names = ("entropy-errors", "other-errors")
        bodies = map(documents.body_of, first)
        documents.insert(options.docs, dict(zip(names, bodies, strict=True)))


if __name__ == "__main__":
    main()
