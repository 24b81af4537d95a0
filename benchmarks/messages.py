"""What an MPI message costs two ranks: a part for the message, a part for each byte.

    mpirun -n 2 python benchmarks/messages.py [--json FILE]
    python benchmarks/hosts.py --hosts 2 -- python benchmarks/messages.py

Rank 0 sends windows of messages, which rank 1 takes and answers once. The two work at the same
time, on a core each, so the time of a message is the processor time that it costs either. Two
lengths, a header's and a chunk's of cgx, tell the parts. Links must not be slower: give no --rate.
"""

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from mpi4py import MPI

from cgx_ops._core.text_table import Table
from cgx_ops._core.units import size_text, time_text
from cgx_ops.bench.measure import Summary, Timed, measure
from cgx_ops.bench.peers import MpiRanks
from cgx_ops.bench.report import Report

LENGTHS = (128, 32 << 10)
_WINDOW = 64  # messages under way
_ROUNDS = 21


@dataclass(frozen=True)
class Message:
    """Seconds of a message of so many bytes: the median over rounds, and the quartiles."""

    bytes: int
    seconds: float
    lower: float
    upper: float


def send_window(buffers: list[np.ndarray], answer: np.ndarray) -> None:
    """Move a window of messages from rank 0 to rank 1, and one byte back."""
    world = MPI.COMM_WORLD
    if world.rank == 0:
        MPI.Request.Waitall([world.Isend(buffer, 1) for buffer in buffers])
        world.Recv(answer, 1)
    else:
        MPI.Request.Waitall([world.Irecv(buffer, 0) for buffer in buffers])
        world.Send(answer, 0)


def measure_messages() -> list[Message]:
    answer = np.zeros(1, np.uint8)
    timed = {}
    for length in LENGTHS:
        buffers = [np.zeros(length, np.uint8) for _ in range(_WINDOW)]
        timed[str(length)] = Timed(lambda b=buffers: send_window(b, answer))
    found = measure(timed, MpiRanks(MPI.COMM_WORLD), rounds=_ROUNDS)
    summaries = [Summary.of(found[str(length)]) for length in LENGTHS]
    return [
        Message(length, *(value / _WINDOW for value in (each.median, each.lower, each.upper)))
        for length, each in zip(LENGTHS, summaries, strict=True)
    ]


def parts(messages: list[Message]) -> tuple[float, float]:
    """Return the seconds of a message, and those of a byte in it."""
    short, long = messages
    byte = max(0.0, (long.seconds - short.seconds) / (long.bytes - short.bytes))
    return max(0.0, short.seconds - byte * short.bytes), byte


def read(report: str | Path) -> tuple[float, float]:
    """Return the parts() that a report of this program holds."""
    return parts([Message(**record) for record in Report.read(report).results])


def main() -> None:
    parser = argparse.ArgumentParser(description="What an MPI message costs two ranks")
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    options = parser.parse_args()
    if MPI.COMM_WORLD.size != 2:
        raise SystemExit("messages.py is for 2 ranks: mpirun -n 2 python benchmarks/messages.py")
    messages = measure_messages()
    if MPI.COMM_WORLD.rank != 0:
        return
    message, byte = parts(messages)
    table = Table(
        "an MPI message, processor time at either end",
        ["bytes", "time", "quartiles"],
        [
            [
                size_text(each.bytes),
                time_text(each.seconds),
                f"{time_text(each.lower)} - {time_text(each.upper)}",
            ]
            for each in messages
        ],
        notes=[f"A message costs {time_text(message)} and {byte * 1e9:.3f} ns a byte."],
    )
    table.print()
    if options.json:
        settings = {"message_seconds": message, "byte_seconds": byte}
        records = [asdict(each) for each in messages]
        Report("messages", settings, records, [table]).write(options.json)


if __name__ == "__main__":
    main()
