"""The numpy oracle: what every collective and the codec must give, to the bit.

Written from docs/wire_format.md and docs/design.md, and never by calling the library. Slow and
plain on purpose. All arithmetic is fp32 (numpy rounds every operation); the names follow the
documents.

    values         widening, rounding, sums, min and max
    philox         noise: the seeds of segments and blocks, and the lane an element gets
    codec          quantize, dequantize, encoded_bytes
    collectives    allreduce, reduce_scatter, all_gather
    bound          error_bound: how far nearest and shift rounding may be from the exact result
"""

from .bound import error_bound
from .codec import dequantize, encoded_bytes, quantize
from .collectives import (
    Segment,
    all_gather,
    allreduce,
    pick,
    reduce_scatter,
    shards,
    travels_exact,
)
from .philox import Seeds, noise, seeds_of
from .values import (
    BFLOAT16,
    EXACT_BITS,
    FLOAT16,
    FLOAT32,
    Algorithm,
    AnyAlgorithm,
    Op,
    RoundingMode,
    combine,
    reduce_in_order,
    round_to,
    widen,
)

__all__ = [
    "BFLOAT16",
    "EXACT_BITS",
    "FLOAT16",
    "FLOAT32",
    "Algorithm",
    "AnyAlgorithm",
    "Op",
    "RoundingMode",
    "Seeds",
    "Segment",
    "all_gather",
    "allreduce",
    "combine",
    "dequantize",
    "encoded_bytes",
    "error_bound",
    "noise",
    "pick",
    "quantize",
    "reduce_in_order",
    "reduce_scatter",
    "round_to",
    "seeds_of",
    "shards",
    "travels_exact",
    "widen",
]
