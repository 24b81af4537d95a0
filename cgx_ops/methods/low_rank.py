"""PowerSGD for any framework: which tensors are factored, the initial Q, how factors are sent.

A gradient M with n rows and m columns is sent as P (n, r) and Q (m, r) with P Q^T close to M
(Vogels, Karimireddy, Jaggi: PowerSGD, NeurIPS 2019). torch/ddp/power_sgd/ and
jax/_src/transforms/power_sgd.py do the linear algebra with the arrays of their frameworks.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from cgx_ops._core.call import call_seed
from cgx_ops.errors import InvalidArgument, is_number

# The fields of Config for P and Q, by factor_bits. ("half" has a fixed width; its `bits` only mean
# that it is not exact.)
FACTORS: dict[int, dict[str, Any]] = {
    32: {"bits": 32},
    16: {"compressor": "half", "bits": 4, "rounding": "nearest"},
    8: {
        "compressor": "uniform", "bits": 8, "gather_bits": 8, "rounding": "nearest",
        "bucket_size": 512,
    },
}  # fmt: skip


def checked_rate(rate: Any) -> float:
    """Return min_compression_rate, or raise InvalidArgument unless it is above 0."""
    if not is_number(rate) or not rate > 0:
        raise InvalidArgument(f"min_compression_rate is {rate!r}; it must be a number above 0")
    return float(rate)


def checked_factor_bits(bits: Any) -> int:
    """Return factor_bits, or raise InvalidArgument unless it is in FACTORS."""
    if isinstance(bits, bool) or bits not in FACTORS:
        accepted = ", ".join(map(str, FACTORS))
        raise InvalidArgument(f"factor_bits is {bits!r}; it must be one of {accepted}")
    return bits


def rank_of(rows: int, columns: int, rank: int, min_compression_rate: float) -> int:
    """Return the factorization rank, or 0 if the matrix should not be factored.

    The factors must have fewer elements than the matrix by a factor of min_compression_rate.

    Args:
        rows: Rows of the matrix.
        columns: Its columns.
        rank: Largest rank.
        min_compression_rate: Smallest useful ratio of elements.
    """
    rank = min(rows, columns, rank)
    gains = (rows + columns) * rank * min_compression_rate < rows * columns
    return rank if gains else 0


def first_q(seed: int, name: str, draw: int, columns: int, rank: int) -> npt.NDArray[np.float32]:
    """Return the initial Q of a matrix, (columns, rank): Gaussian, equal on all ranks.

    It depends only on the arguments, in all releases of numpy (whose RandomState is frozen).

    Args:
        seed: The user's seed.
        name: Name of the matrix.
        draw: How many were drawn for this matrix before.
        columns: Columns of the matrix.
        rank: Rank of the factors.
    """
    words = np.array([call_seed(seed, f"power_sgd/{name}", draw)]).view(np.uint32)
    return np.random.RandomState(words).standard_normal((columns, rank)).astype(np.float32)
