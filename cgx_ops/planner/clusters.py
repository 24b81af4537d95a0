"""Choose bits as CGX does: similar layers, found by k-means, share them. There is no budget."""

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

    Tensors are points (numel, norm); each coordinate is divided by its standard deviation. k-means
    finds as many clusters as there are choices. Clusters are sorted by norm minus numel and get the
    choices in rising order, so large tensors get fewer bits, and tensors with a large norm more.
    (CGX, Middleware 2022; its code sorts by the norm alone.) Unlike allocate_bits(), this function
    considers no error; it is here for comparison. k-means++ starts with a fixed seed, so equal
    arguments have equal results.

    Args:
        norms: 2-norm of each tensor's gradient, summed over steps.
        numels: Values of each tensor.
        choices: Bits, in rising order.

    Raises:
        InvalidArgument: The lists have different lengths, an entry is not finite, or there is no
            choice.

    Example:
        >>> from cgx_ops.planner import cluster_bits
        >>> cluster_bits([1.0, 1.0, 9.0], [10_000_000, 1000, 1000])
        [2, 3, 4]
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
    """Return up to `count` different points by k-means++: far ones are more likely."""
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
    """Return squared distances, of shape (points, centers)."""
    return np.square(points[:, None] - centers[None]).sum(axis=2)
