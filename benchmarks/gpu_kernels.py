"""The kernels on one GPU beside a copy: bandwidth, counting every byte read and written once.

    python benchmarks/gpu_kernels.py [--numel N] [--json FILE]

    quantize     values -> message
    dequantize   message -> values
    sum of N     N messages -> the message of their sum
    own + 2      values and 2 messages -> the message of their sum: the owner of a shard in sra,
                 with 3 ranks (cgx_carried_reduce)
    torch        the quantizer of 4 bits that one writes in PyTorch, compiled: values -> the same
                 numbers (minimum, step, levels in pairs), in three tensors

A round times all of them in turn, between CUDA events, a few calls each (the median over rounds).
The copy is torch's, of the values, on the device.
"""

import argparse
import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import gpu_calls
import torch
from gpu_calls import Codec, Enqueue, Owner

from cgx_ops import Config
from cgx_ops._core.text_table import Table
from cgx_ops._core.units import time_text
from cgx_ops.bench.measure import Summary
from cgx_ops.bench.report import Report

NUMEL = 2**28  # 1 GiB of fp32
TINY = 2**14  # with --tiny
BITS = (2, 4, 8)
BUCKET = 512
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
COPY, TORCH, OWNER = "copy", "torch", "own + 2"
MESSAGES = (8, 2)
_CALLS, _ROUNDS = 3, 15
_HEAD_START = 500_000  # cycles in which the host puts a sample's calls on the stream


@dataclass(frozen=True)
class Kernel:
    """What is timed.

    Attributes:
        dtype: of the values: of DTYPES.
        operation: as in the table at the top.
        bits: of a value in a message; 32 for a copy.
        rounding: "-" where nothing is rounded.
    """

    dtype: str
    operation: str
    bits: int
    rounding: str


@dataclass(frozen=True)
class Result(Kernel):
    """A kernel's time.

    Attributes:
        bytes: read and written.
        seconds: of a call; the median over rounds.
        lower: first quartile of the same.
        upper: third quartile.
        rounds: how many.
        of_copy: its bytes a second over the copy's.
    """

    bytes: int
    seconds: float
    lower: float
    upper: float
    rounds: int
    of_copy: float


# ---- What takes part -----------------------------------------------------------------------------


def quantize_in_torch(buckets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return minimum, step and levels of 4 bits, two in a byte, of each row; rounds to nearest."""
    values = buckets.float()
    low, high = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
    step = (high - low) / 15
    inverse = torch.where(step > 0, 1 / step, 0)
    levels = ((values - low) * inverse + 0.5).clamp(max=15).to(torch.uint8)
    return low, step, levels[:, ::2] | levels[:, 1::2] << 4


def kernels(dtype: str, numel: int) -> dict[Kernel, tuple[int, Enqueue]]:
    """Return the bytes that each moves, and its call."""
    values = torch.randn(numel, device="cuda", dtype=DTYPES[dtype])
    other = torch.empty_like(values)
    found: dict[Kernel, tuple[int, Enqueue]] = {
        Kernel(dtype, COPY, 32, "-"): (2 * values.nbytes, lambda: other.copy_(values))
    }
    for bits in BITS:
        codecs = {
            rounding: Codec(values.dtype, Config(bits=bits, bucket_size=BUCKET, rounding=rounding))
            for rounding in ("nearest", "stochastic")
        }
        size = codecs["nearest"].encoded_bytes(numel)
        messages = torch.empty((max(MESSAGES), size), dtype=torch.uint8, device="cuda")
        message = torch.empty(size, dtype=torch.uint8, device="cuda")
        for row in messages:
            codecs["nearest"].quantize(values, row)()
        for rounding, codec in codecs.items():
            found[Kernel(dtype, "quantize", bits, rounding)] = (
                values.nbytes + size,
                codec.quantize(values, message),
            )
        for count, (rounding, codec) in itertools.product(MESSAGES, codecs.items()):
            found[Kernel(dtype, f"sum of {count}", bits, rounding)] = (
                (count + 1) * size,
                codec.reduce(messages[:count], numel, message),
            )
        found[Kernel(dtype, "dequantize", bits, "-")] = (
            size + values.nbytes,
            codecs["nearest"].dequantize(messages[0], other),
        )
    config = Config(bits=4, bucket_size=BUCKET, rounding="nearest", algorithm="sra")
    owner = Owner(3, numel, values.dtype, config)
    found[Kernel(dtype, OWNER, 4, "nearest")] = owner.bytes, owner.reduce()
    buckets = values.view(-1, BUCKET)
    compiled = torch.compile(quantize_in_torch, fullgraph=True, dynamic=False)
    moved = found[Kernel(dtype, "quantize", 4, "nearest")][0]
    found[Kernel(dtype, TORCH, 4, "nearest")] = (
        moved,
        lambda: compiled(buckets),
    )
    return found


# ---- Times ---------------------------------------------------------------------------------------


def sample(enqueue: Enqueue) -> float:
    """Return the seconds of a call on the device."""
    return gpu_calls.seconds_on_device(enqueue, _CALLS, _HEAD_START)


def measure(found: Mapping[Kernel, tuple[int, Enqueue]], rounds: int) -> list[Result]:
    """Return the results, in the order given; the first is the copy."""
    for _, enqueue in found.values():  # compiles, and loads
        sample(enqueue)
    samples: dict[Kernel, list[float]] = {kernel: [] for kernel in found}
    for _ in range(rounds):
        for kernel, (_, enqueue) in found.items():
            samples[kernel].append(sample(enqueue))
    summaries = {kernel: Summary.of(seconds) for kernel, seconds in samples.items()}
    rates = {kernel: found[kernel][0] / each.median for kernel, each in summaries.items()}
    copy = next(iter(rates.values()))
    return [
        Result(
            **asdict(kernel),
            bytes=found[kernel][0],
            seconds=each.median,
            lower=each.lower,
            upper=each.upper,
            rounds=each.rounds,
            of_copy=rates[kernel] / copy,
        )
        for kernel, each in summaries.items()
    ]


def table_of(results: list[Result], gpu: str) -> Table:
    """Return a row for each kernel."""
    rows = [
        [
            each.dtype,
            each.operation,
            str(each.bits),
            each.rounding,
            time_text(each.seconds),
            f"{each.bytes / each.seconds / 1e9:.0f}",
            f"{each.of_copy:.0%}",
        ]
        for each in results
    ]
    return Table(
        f"kernels, {gpu}",
        ["dtype", "operation", "bits", "rounding", "time", "GB/s", "of copy"],
        rows,
        text_columns=4,
        sections=[i for i in range(1, len(rows)) if rows[i][0] != rows[i - 1][0]],
        notes=[
            "GB/s: bytes read and written. Of copy: that over the copy's. Buckets of "
            f"{BUCKET}; torch: a quantizer in PyTorch by torch.compile, in the same bytes."
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="The kernels on one GPU, beside a copy")
    parser.add_argument("--numel", type=int, default=NUMEL, help=f"values (default {NUMEL})")
    parser.add_argument("--tiny", action="store_true", help="check only that everything runs")
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    options = parser.parse_args()
    numel, rounds = (TINY, 1) if options.tiny else (options.numel, _ROUNDS)
    results: list[Result] = []
    for dtype in DTYPES:
        results += measure(kernels(dtype, numel), rounds)
        torch.cuda.empty_cache()
    found = gpu_calls.settings()
    table = table_of(results, found["gpu"])
    table.print()
    if options.json:
        report = Report("gpu kernels", {**found, "numel": numel},
                        [asdict(each) for each in results], [table])  # fmt: skip
        report.write(options.json)


if __name__ == "__main__":
    main()
