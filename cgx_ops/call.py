"""One collective call on arrays: its arguments checked, and turned into a cgx_collective_t."""

import ctypes
import functools
import hashlib
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from cgx_ops import _native
from cgx_ops.config import Config
from cgx_ops.errors import InvalidArgument

Op = Literal["sum", "avg", "min", "max", "product"]
Verb = Literal["allreduce", "reduce_scatter", "all_gather"]


@dataclass(frozen=True)
class Segment:
    """A run of elements with its own compression: one tensor of a fused message.

    Attributes:
        offset: its first element, counted from the start of the array (or of a rank's block).
        numel: how many elements.
        bits: as Config.bits; None: the call's Config decides.
        bucket_size: as Config.bucket_size; None: the call's Config decides.
    """

    offset: int
    numel: int
    bits: int | None = None
    bucket_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("offset", "numel"):
            value = operator.index(getattr(self, name))
            if not 0 <= value < 2**63:
                raise InvalidArgument(f"Segment.{name} is {value}; it must be an integer >= 0")


@functools.lru_cache(maxsize=4096)  # checking takes longer than quantizing a small layer
def with_segment(config: Config, bits: int | None, bucket_size: int | None) -> Config:
    """Return how a segment travels: config's settings where its own are None."""
    own = config if bits is None else replace(config, bits=bits)
    return own if bucket_size is None else replace(own, bucket_size=bucket_size)


def call_seed(seed: int, name: str, occurrence: int) -> int:
    """Return the seed of one call's noise: the n-th of this name, from 0, under Config.seed."""
    digest = hashlib.blake2b(f"{seed}/{occurrence}/{name}".encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little", signed=True)


class Call:
    """The arguments of one collective, checked."""

    def __init__(
        self,
        verb: Verb,
        op: Op,
        config: Config | None,
        name: str,
        segments: Sequence[Segment] | None,
        seed: int | None,
        timeout: float | None,
    ) -> None:
        if op not in _native.OPS:
            raise InvalidArgument(f"op is {op!r}; it must be one of {', '.join(_native.OPS)}")
        if timeout is not None and not timeout > 0:
            raise InvalidArgument(f"timeout is {timeout!r}; it must be seconds > 0, or None")
        self.verb, self.op, self.name, self.segments = verb, op, name, segments
        self.config = Config.from_env() if config is None else config
        self.timeout = timeout
        self.seed = None if seed is None else replace(self.config, seed=seed).seed

    def collective(
        self, comm: int, count: int, dtype: int, source: int, result: int, block: int
    ) -> _native.Collective:
        """Return the call as a cgx_collective_t on contiguous memory.

        comm: the communicator's id. count: how often it saw this name before. dtype: a
        cgx_dtype_t. source, result: addresses, of `block` elements a rank.
        """
        segments = self.native_segments(block)
        config = self.config
        return _native.Collective(
            comm=comm,
            verb=_native.VERBS[self.verb],
            dtype=dtype,
            op=_native.OPS[self.op],
            algorithm=_native.ALGORITHMS[config.algorithm],
            rounding=_native.ROUNDINGS[config.rounding],
            gather_bits=config.gather_bits or 0,
            skip_incomplete_buckets=config.skip_incomplete_buckets,
            minimal_size=config.minimal_size,
            seed=call_seed(config.seed, self.name, count) if self.seed is None else self.seed,
            input=source,
            output=result,
            block_numel=block,
            segments=segments,
            num_segments=len(segments),
            name=_native.encode(self.name),
            occurrence=-1,
            timeout_s=self.timeout or 0.0,
        )

    def native_segments(self, block: int) -> ctypes.Array[_native.Segment]:
        """Return the segments as an array of cgx_segment_t."""
        given = [Segment(0, block)] if self.segments is None else self.segments
        result = (_native.Segment * len(given))()
        for native, segment in zip(result, given, strict=True):
            own = with_segment(self.config, segment.bits, segment.bucket_size)
            native.offset, native.numel = segment.offset, segment.numel
            native.bits, native.bucket_size = own.bits, own.bucket_size
        return result
