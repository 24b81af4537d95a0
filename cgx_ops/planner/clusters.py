"""CGX's way to bits: layers that are alike share them, found by k-means. No budget is kept."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cgx_ops.errors import InvalidArgument

_ROUNDS = 100  # as in CGX


def cluster_bits(
    norms: Sequence[float], numels: Sequence[int], choices: Sequence[int] = (2, 3, 4)
) -> list[int]:
    """Return the bits of each tensor by its cluster, as CGX assigns them.

    Tensors are points (numel, norm), each coordinate divided by its standard deviation. They fall
    into as many clusters as there are choices; clusters in the order of norm less numel get the
    choices from the fewest bits on, so that large tensors go down and those of large norm up.
    (CGX, Middleware 2022; its code sorts by the norm alone.) Unlike allocate_bits() this knows no
    error: it is here for comparison.

    The start is k-means++ with a fixed seed, so that equal arguments have equal answers.

    Args:
        norms: 2-norm of each tensor's gradient, summed up over steps.
        numels: values of each tensor.
        choices: bits, rising.

    Raises:
        InvalidArgument: lists of different lengths, entries that are not finite, no choice.
    """
    if len(norms) != len(numels) or not all(map(math.isfinite, [*norms, *numels])):
        raise InvalidArgument(
            f"there are {len(norms)} norms and {len(numels)} numels; there must be a finite number "
            "of each for every tensor"
        )
    if not choices:
        raise InvalidArgument("choices is empty; give bits, such as (2, 3, 4)")
    if not numels:
        return []
    points = np.array([numels, norms], np.float64).T
    deviation = points.std(axis=0)
    points /= np.where(deviation > 0, deviation, 1)
    centers = _first_centers(points, len(choices))
    nearest = _nearest(points, centers)
    for _ in range(_ROUNDS):
        for k in range(len(centers)):
            if (nearest == k).any():
                centers[k] = points[nearest == k].mean(axis=0)
        before, nearest = nearest, _nearest(points, centers)
        if (before == nearest).all():
            break
    order = np.lexsort((np.arange(len(centers)), centers[:, 1] - centers[:, 0]))
    bits = np.empty(len(centers), np.int64)
    bits[order] = sorted(choices)[-len(centers) :]  # with few tensors, the most bits
    return bits[nearest].tolist()


def _first_centers(points: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.float64]:
    """Return up to `count` different points, by k-means++: far ones are likelier."""
    random = np.random.default_rng(0)
    centers = points[[0]]
    while len(centers) < count:
        far = _distances(points, centers).min(axis=1)
        if not far.sum():
            break
        centers = np.concatenate([centers, points[[random.choice(len(points), p=far / far.sum())]]])
    return centers


def _nearest(
    points: npt.NDArray[np.float64], centers: npt.NDArray[np.float64]
) -> npt.NDArray[np.int64]:
    return _distances(points, centers).argmin(axis=1)


def _distances(
    points: npt.NDArray[np.float64], centers: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Return squared distances, (points, centers)."""
    return np.square(points[:, None] - centers[None]).sum(axis=2)
