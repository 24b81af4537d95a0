"""What PowerSGD is in any framework: which tensors gain by it, where it starts, how factors travel.

A gradient M of n rows and m columns is sent as P (n, r) and Q (m, r), of which P Q^T is nearly M
(Vogels, Karimireddy, Jaggi: PowerSGD, NeurIPS 2019). torch/ddp/power_sgd/ and
jax/_src/transforms/power_sgd.py do the linear algebra, each in its framework's arrays.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from cgx_ops._core.call import call_seed
from cgx_ops.errors import InvalidArgument, is_number

# How P and Q travel, by factor_bits: fields of Config. ("half" has a width of its own; its bits say
# only that it is not exact.)
FACTORS: dict[int, dict[str, Any]] = {
    32: {"bits": 32},
    16: {"compressor": "half", "bits": 4, "rounding": "nearest"},
    8: {
        "compressor": "uniform", "bits": 8, "gather_bits": 8, "rounding": "nearest",
        "bucket_size": 512,
    },
}  # fmt: skip


def checked_rate(rate: Any) -> float:
    """Return a min_compression_rate, which is a number above 0."""
    if not is_number(rate) or not rate > 0:
        raise InvalidArgument(f"min_compression_rate is {rate!r}; it must be a number above 0")
    return float(rate)


def checked_factor_bits(bits: Any) -> int:
    """Return factor_bits, of which there are a few."""
    if isinstance(bits, bool) or bits not in FACTORS:
        accepted = ", ".join(map(str, FACTORS))
        raise InvalidArgument(f"factor_bits is {bits!r}; it must be one of {accepted}")
    return bits


def rank_of(rows: int, columns: int, rank: int, min_compression_rate: float) -> int:
    """Return the rank in which a matrix travels; 0 where it gains too little, or is no matrix.

    Its factors must have more than min_compression_rate times fewer elements than it has.
    """
    rank = min(rows, columns, rank)
    gains = (rows + columns) * rank * min_compression_rate < rows * columns
    return rank if gains else 0


def first_q(seed: int, name: str, draw: int, columns: int, rank: int) -> npt.NDArray[np.float32]:
    """Return the Q that a matrix starts with, (columns, rank): Gaussian, equal on all ranks.

    It follows from the arguments alone, in every release of numpy (whose RandomState is frozen).

    Args:
        seed: the user's.
        name: of the matrix.
        draw: how many were drawn for it before.
        columns: of the matrix.
        rank: of the factors.
    """
    words = np.array([call_seed(seed, f"power_sgd/{name}", draw)]).view(np.uint32)
    return np.random.RandomState(words).standard_normal((columns, rank)).astype(np.float32)
