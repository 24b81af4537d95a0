"""The numpy oracle: the exact bits of every collective's result and of the codec.

Written from docs/reference/wire_format.md and docs/explanation/architecture.md, without calling
the library. It is slow and simple on purpose. All arithmetic is fp32 (numpy rounds every
operation); the names follow the documents.

        values         widening, rounding, sums, min and max
        philox         noise: the seeds of segments and blocks, and the lane of an element
    settings       how a segment's values are encoded
        scales         magnitudes and scales of a bucket
        blocks         records of buckets: mxfp8, mxfp8_e5m2, mxfp4, nvfp4
    buckets        records of buckets: uniform, levels, sign, onebit, ternary, qsgd
    rotation       Hadamard, before and after
    sparse         topk, randk
    codec          quantize, dequantize, encoded_bytes
        segments       how each segment is sent, and who owns which part of it
        packing        small segments that are sent as one
        algorithms     who encodes which values, and the order of summation
    collectives    allreduce, reduce_scatter, all_gather, all_to_all
        statistic      the expected quantization error of a tensor, as one number
        bound          error_bound: bound of nearest and shift rounding's difference from exact
        low_rank       PowerSGD, in float64: not bit for bit
        deep_gradient  Deep Gradient Compression, as in the paper
        momenta        CompressedAdamW, SigNUM
    outer_loop     DiLoCo
"""

from .bound import error_bound
from .codec import dequantize, encoded_bytes, quantize
from .collectives import all_gather, all_to_all, allreduce, reduce_scatter
from .deep_gradient import DeepGradient, density_at
from .low_rank import PowerSGD, given_up, given_up_bound
from .momenta import CompressedAdamW, Signum
from .outer_loop import OuterLoop
from .philox import Seeds, noise, seeds_of
from .segments import Segment, is_exact, pick, shards
from .settings import Compressor
from .statistic import statistic
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
    round_to_finite,
    widen,
)

__all__ = [
    "BFLOAT16",
    "EXACT_BITS",
    "FLOAT16",
    "FLOAT32",
    "Algorithm",
    "AnyAlgorithm",
    "CompressedAdamW",
    "Compressor",
    "DeepGradient",
    "Op",
    "OuterLoop",
    "PowerSGD",
    "RoundingMode",
    "Seeds",
    "Segment",
    "Signum",
    "all_gather",
    "all_to_all",
    "allreduce",
    "combine",
    "density_at",
    "dequantize",
    "encoded_bytes",
    "error_bound",
    "given_up",
    "given_up_bound",
    "is_exact",
    "noise",
    "pick",
    "quantize",
    "reduce_in_order",
    "reduce_scatter",
    "round_to",
    "round_to_finite",
    "seeds_of",
    "shards",
    "statistic",
    "widen",
]
