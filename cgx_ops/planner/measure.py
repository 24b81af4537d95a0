"""The constants of the model, for a communicator's own route.

  1. time: rounds of collectives on synthetic buffers, in two sizes. Encoded ones tell what codecs
     cost; exact ones of as many bytes, alone and several in flight, what the link costs, and what
     processor time it takes to move them
  2. fit: the least time of each over the rounds, as a constant and a slope
  3. agree: the largest of each constant over the ranks, by one exact collective

What several messages in flight take each occupies the link. What one takes beyond that is latency,
during which others travel. To call latency occupation would merge far too much.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cgx_ops._core.codec import dequantize, encoded_bytes, quantize
from cgx_ops._core.tables import EXACT_BITS
from cgx_ops.communicator import Communicator
from cgx_ops.config import Config
from cgx_ops.errors import InvalidArgument
from cgx_ops.planner.model import Costs

_SECONDS = 0.6  # after which no round begins,
_FEWEST_ROUNDS, _MOST_ROUNDS = 3, 30  # but for the first ones: a single one may be disturbed
_VALUES = (32 * 1024, 512 * 1024)  # of the messages: 17 and 264 KB in 4 bits
_IN_FLIGHT = 6
_NAME = "cgx_ops.planner"

_EXACT = Config(bits=EXACT_BITS)


def measure(
    communicator: Communicator, config: Config | None = None, *, spare_processors: bool = False
) -> Costs:
    """Return what messages cost among these ranks, the same on all of them.

    Collective: every rank calls it, while nothing else runs on the communicator. It takes about a
    second, more on links below 100 Mbit/s: in 4 bits a round moves 2.3 MB, and there are three.

    Args:
        communicator: whose route is measured, with the algorithm that the config chooses.
        config: how values travel; None: Config(). Values are float32.
        spare_processors: whether gradients are computed elsewhere, on a GPU or on processors that
            neither encode nor send, so that messages take nothing from the backward pass.

    Returns:
        Costs, of which link_per_byte is of the bytes of encoded_bytes(). In 32 bits the time to sum
        is with the link's, and encoding and decoding are free.

    Raises:
        CgxError: see Communicator.
    """
    config = Config() if config is None else config
    rounds = _timed_rounds(communicator, config)
    costs = _fitted(np.min(rounds, axis=0), communicator.size, config)
    if spare_processors:
        costs = replace(costs, processor_fixed=0.0, processor_per_value=0.0)
    worst = largest(communicator, astuple(costs))
    return Costs(*worst.tolist())


def ready_times(
    communicator: Communicator,
    arrivals: npt.ArrayLike,
    *,
    begins: npt.ArrayLike | None = None,
) -> list[float]:
    """Return when each tensor's gradient is ready, the same on all ranks.

    Collective. Warm-up steps are not to be among the arrivals.

    Args:
        communicator: of the ranks that will share a plan.
        arrivals: seconds, shape (steps, tensors): when each gradient was there, in any clock that
            runs through a step.
        begins: seconds, shape (steps,): when each backward pass began, in that clock. None: with
            its first arrival, which changes no plan, but the times that finish() foresees.

    Returns:
        For each tensor, seconds after the begin of its step: the median over steps, the largest
        over ranks.

    Raises:
        InvalidArgument: another shape, no step, or times that are not finite.
        MismatchError: ranks have different numbers of tensors.
    """
    times = np.asarray(arrivals, np.float64)
    if times.ndim != 2 or not times.size or not np.isfinite(times).all():
        raise InvalidArgument(
            f"arrivals have shape {times.shape}; they must be finite times of (steps, tensors)"
        )
    first = times.min(axis=1) if begins is None else np.asarray(begins, np.float64)
    if first.shape != times.shape[:1] or not (first <= times.min(axis=1)).all():
        raise InvalidArgument(
            f"begins have shape {first.shape}; there must be one for each of {len(times)} steps, "
            "no later than its first arrival"
        )
    return largest(communicator, np.median(times - first[:, None], axis=0)).tolist()


# ---- 1. time -------------------------------------------------------------------------------------


class _Times(NamedTuple):
    """Seconds, each for the smaller and the larger size.

    Attributes:
        compute: of an encoded collective, inside the algorithm on this rank.
        encode: of the codec alone.
        decode: of the codec alone.
        alone: of an exact collective of as many bytes.
        together: of each of several of those in flight.
        moving: of the processor, by each of those in flight.
    """

    compute: tuple[float, float]
    encode: tuple[float, float]
    decode: tuple[float, float]
    alone: tuple[float, float]
    together: tuple[float, float]
    moving: tuple[float, float]


def _timed_rounds(communicator: Communicator, config: Config) -> list[_Times]:
    """Time rounds until all ranks, together, find that it is enough."""
    random = np.random.default_rng(0)
    buffers = [random.standard_normal(count).astype(np.float32) for count in _VALUES]
    same_bytes = [
        np.ones(math.ceil(encoded_bytes(count, config) / 4), np.float32) for count in _VALUES
    ]
    exact = config.with_own(bits=EXACT_BITS)

    def reduce(buffer: npt.NDArray[np.float32], how: Config, count: int = 1) -> None:
        requests = [
            communicator.allreduce_async(buffer, config=how, name=f"{_NAME}/{i}")
            for i in range(count)
        ]
        for request in requests:
            request.wait()

    def compute(buffer: npt.NDArray[np.float32]) -> float:
        before = communicator.stats().compute_seconds
        reduce(buffer, config)
        return communicator.stats().compute_seconds - before

    def both(
        function: Callable[[npt.NDArray[np.float32]], float], of: Sequence[npt.NDArray[np.float32]]
    ) -> tuple[float, float]:
        return function(of[0]), function(of[1])

    def codec(encodes: bool) -> Callable[[npt.NDArray[np.float32]], float]:
        def timed(buffer: npt.NDArray[np.float32]) -> float:
            data = quantize(buffer, config)
            if encodes:
                return _seconds(lambda: quantize(buffer, config))
            return _seconds(lambda: dequantize(data, buffer.size, config=config))

        return timed

    def together() -> tuple[tuple[float, float], tuple[float, float]]:
        found = []
        for buffer in same_bytes:
            processor = time.process_time()
            seconds = _seconds(lambda buffer=buffer: reduce(buffer, exact, _IN_FLIGHT))
            found.append((seconds / _IN_FLIGHT, (time.process_time() - processor) / _IN_FLIGHT))
        (small, small_moving), (large, large_moving) = found
        return (small, large), (small_moving, large_moving)

    for buffer in (buffers[0], same_bytes[0]):  # connections, and memory that is taken once
        reduce(buffer, config)
        reduce(buffer, exact, _IN_FLIGHT)
    rounds: list[_Times] = []
    start = time.perf_counter()
    while len(rounds) < _MOST_ROUNDS:
        rounds.append(
            _Times(
                both(compute, buffers),
                both(codec(encodes=True), buffers),
                both(codec(encodes=False), buffers),
                both(lambda buffer: _seconds(lambda: reduce(buffer, exact)), same_bytes),
                *together(),
            )
        )
        enough = largest(communicator, [time.perf_counter() - start])[0] > _SECONDS
        if enough and len(rounds) >= _FEWEST_ROUNDS:
            break
    return rounds


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


# ---- 2. fit --------------------------------------------------------------------------------------


def _fitted(least: npt.NDArray[np.float64], ranks: int, config: Config) -> Costs:
    """Return the costs that explain the least times, shape (kinds of _Times, sizes)."""
    times = _Times(*least)
    sizes = [encoded_bytes(count, config) for count in _VALUES]
    # Several in flight wait once for the latency: k * together = latency + k * occupied.
    occupied = [
        max(0.0, (_IN_FLIGHT * each - one) / (_IN_FLIGHT - 1))
        for one, each in zip(times.alone, times.together, strict=True)
    ]
    link_fixed, link_per_byte = _line(sizes, occupied)
    latency = max(0.0, times.alone[0] - occupied[0])
    codec_fixed, codec_per_value = (
        _line(_VALUES, times.compute) if config.bits != EXACT_BITS else (0.0, 0.0)
    )
    # A rank encodes its values, adds up its shard of those of the others, decodes the result.
    encode = _line(_VALUES, times.encode)[1]
    decode = _line(_VALUES, times.decode)[1] * (2 - 1 / ranks)
    share = encode / (encode + decode) if encode + decode else 0.5
    moving_fixed, moving_per_value = _line(_VALUES, times.moving)
    return Costs(
        encode_fixed=codec_fixed / 2,
        encode_per_value=codec_per_value * share,
        link_fixed=link_fixed,
        link_per_byte=link_per_byte,
        decode_fixed=codec_fixed / 2,
        decode_per_value=codec_per_value * (1 - share),
        latency=latency,
        processor_fixed=codec_fixed + moving_fixed,
        processor_per_value=codec_per_value + moving_per_value,
    )


def _line(at: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Return the constant and the slope, each >= 0, of a line through two points."""
    slope = max(0.0, (seconds[1] - seconds[0]) / (at[1] - at[0]))
    return max(0.0, seconds[0] - slope * at[0]), slope


# ---- 3. agree ------------------------------------------------------------------------------------


def largest(communicator: Communicator, values: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return each value's largest over the ranks, rounded to float32: the same on all of them."""
    mine = np.asarray(values, np.float32)
    return communicator.allreduce(mine, "max", _EXACT, name=f"{_NAME}/agree").astype(np.float64)
