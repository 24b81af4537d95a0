"""Measure the constants of the model on a communicator's own route.

  1. Time: rounds of collectives on synthetic buffers of two sizes. Encoded ones give the costs of
     the codec. Exact ones with as many bytes, alone and several in flight, give the costs of the
     link and the processor time to move the bytes.
  2. Fit: a constant and a slope through the minimum over the rounds.
  3. Agree: the largest of each constant over the ranks, by one exact collective.

The time per message with several in flight is the occupation of the link. The rest of the time of
a single message is latency, in which other messages can travel. If latency counted as occupation,
plans would merge far too much.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cgx_ops._core.codec import dequantize, quantize
from cgx_ops._core.tables import EXACT_BITS
from cgx_ops.communicator import Communicator
from cgx_ops.config import Config
from cgx_ops.errors import InvalidArgument
from cgx_ops.planner.model import Costs
from cgx_ops.planner.rates import message_bytes

_SECONDS = 0.6  # no round starts after this time,
_FEWEST_ROUNDS, _MOST_ROUNDS = 3, 30  # except the first three: one alone may be disturbed
_VALUES = (32 * 1024, 512 * 1024)  # per message: 17 and 264 KB in 4 bits
_IN_FLIGHT = 6
_NAME = "cgx_ops.planner"

_EXACT = Config(bits=EXACT_BITS)


def measure(
    communicator: Communicator, config: Config | None = None, *, spare_processors: bool = False
) -> Costs:
    """Return the costs of messages among these ranks, equal on all ranks.

    All ranks must call it, while nothing else uses the communicator. It takes about a second, and
    more on links below 100 Mbit/s: it needs at least three rounds of 2.3 MB (in 4 bits).

    Args:
        communicator: The ranks. Their route is measured with the algorithm of the config.
        config: The compression of float32 values; None: `Config()`.
        spare_processors: Whether a GPU, or other processors than those that encode and send,
            compute the gradients. If so, messages do not delay the backward pass.

    Returns:
        The costs. `link_per_byte` refers to encoded bytes. In 32 bits, encoding and decoding cost
        nothing, and the sum is part of the link's costs.

    Raises:
        CgxError: See Communicator.

    Example:
        >>> from cgx_ops import Communicator, Config
        >>> from cgx_ops.planner import measure
        >>> [comm] = Communicator.local(1)  # in training: cgx_ops.init()
        >>> costs = measure(comm, Config(bits=4))
        >>> costs.encode_per_value >= 0
        True
        >>> comm.close()
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
    """Return when each tensor's gradient is ready, equal on all ranks. All ranks must call it.

    Args:
        communicator: The ranks that will share a plan.
        arrivals: Array of shape (steps, tensors): when each gradient was ready, in seconds of any
            clock. Leave out warm-up steps.
        begins: Array of shape (steps,): when each backward pass began, in seconds of the same
            clock. None: at its first arrival. This changes the times that finish() predicts, but no
            plan.

    Returns:
        Seconds after the begin of the backward pass, for each tensor: the median over steps, the
        largest over ranks.

    Raises:
        InvalidArgument: A shape is wrong, there is no step, or a time is not finite.
        MismatchError: The ranks have different numbers of tensors.

    Example:
        >>> from cgx_ops import Communicator
        >>> from cgx_ops.planner import ready_times
        >>> [comm] = Communicator.local(1)
        >>> ready_times(comm, [[2.5, 1.25], [12.5, 11.25]], begins=[1.0, 11.0])
        [1.5, 0.25]
        >>> comm.close()
    """
    times = np.asarray(arrivals, np.float64)
    if times.ndim != 2 or not times.size or not np.isfinite(times).all():
        raise InvalidArgument(
            f"arrivals have shape {times.shape}; they must be finite times, (steps, tensors)"
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
    """Seconds of one round, each for the smaller and the larger buffer.

    Attributes:
        compute: Time of an encoded collective inside the algorithm on this rank.
        encode: Time of encoding alone.
        decode: Time of decoding alone.
        alone: Time of one exact collective with as many bytes.
        together: Time per exact collective with several in flight.
        moving: Processor time of each of those.
    """

    compute: tuple[float, float]
    encode: tuple[float, float]
    decode: tuple[float, float]
    alone: tuple[float, float]
    together: tuple[float, float]
    moving: tuple[float, float]


def _timed_rounds(communicator: Communicator, config: Config) -> list[_Times]:
    """Time rounds until all ranks have enough."""
    random = np.random.default_rng(0)
    buffers = [random.standard_normal(count).astype(np.float32) for count in _VALUES]
    same_bytes = [
        np.ones(math.ceil(message_bytes(count, config) / 4), np.float32) for count in _VALUES
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

    for buffer in (buffers[0], same_bytes[0]):  # opens connections and allocates memory
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
    """Return the costs that explain the shortest times, of shape (kinds of _Times, sizes)."""
    times = _Times(*least)
    sizes = [message_bytes(count, config) for count in _VALUES]
    # Several in flight have the latency only once: k * together = latency + k * occupied.
    occupied = [
        max(0.0, (_IN_FLIGHT * each - one) / (_IN_FLIGHT - 1))
        for one, each in zip(times.alone, times.together, strict=True)
    ]
    link_fixed, link_per_byte = _line(sizes, occupied)
    latency = max(0.0, times.alone[0] - occupied[0])
    codec_fixed, codec_per_value = (
        _line(_VALUES, times.compute) if config.bits != EXACT_BITS else (0.0, 0.0)
    )
    # A rank encodes its values, sums its shard of the others' values, and decodes the result.
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
    """Return the constant and the slope, both >= 0, of the line through two points."""
    slope = max(0.0, (seconds[1] - seconds[0]) / (at[1] - at[0]))
    return max(0.0, seconds[0] - slope * at[0]), slope


# ---- 3. agree ------------------------------------------------------------------------------------


def largest(communicator: Communicator, values: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return the largest of each value over the ranks, rounded to float32."""
    mine = np.asarray(values, np.float32)
    return communicator.allreduce(mine, "max", _EXACT, name=f"{_NAME}/agree").astype(np.float64)
