"""A bootstrap for tests: an allgather among processes that share a folder."""

import itertools
import time
from collections.abc import Callable
from pathlib import Path


def allgather_by_files(
    folder: Path, rank: int, size: int, name: str = "", deadline_s: float = 30
) -> Callable[[bytes], list[bytes]]:
    """Return the bootstrap for Communicator.create(); each round uses separate files."""
    rounds = itertools.count()

    def allgather(blob: bytes) -> list[bytes]:
        step, deadline = f"{name}{next(rounds)}", time.monotonic() + deadline_s
        partial = folder / f"partial {name}{rank}"
        partial.write_bytes(blob)
        partial.rename(folder / f"{step} {rank}")
        blobs = []
        for peer in range(size):
            while not (folder / f"{step} {peer}").exists():
                assert time.monotonic() < deadline, f"rank {peer} is missing in step {step}"
                time.sleep(0.01)
            blobs.append((folder / f"{step} {peer}").read_bytes())
        return blobs

    return allgather
