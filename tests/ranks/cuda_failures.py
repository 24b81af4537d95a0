"""Failure scenarios of run_cuda_core.py: mismatched ranks, lost ranks, bad calls, out of memory."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from ctypes import byref
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from support.cuda_core import CONFIG, CUDA, NUMEL, Finding, allreduce, check, differs, enqueue

from cgx_ops import CgxError, Communicator, Config
from cgx_ops._core import library, structs


def failure(call: Callable[[], object]) -> list[str] | None:
    """Return an error's type and text, or None if there was no error."""
    try:
        call()
    except CgxError as error:
        return [type(error).__name__, str(error)]
    return None


def outcome(comm: Communicator, y: torch.Tensor) -> Finding:
    """Return the errors of a failed collective and the next call, and whether the output is NaN."""
    error = failure(lambda: check(comm, finish=True))
    return {
        "error": error,
        "nan": bool(torch.isnan(y).all().item()),
        "next": failure(lambda: allreduce(comm, y, y, CONFIG)),
    }


# How the last rank's call differs, keyed by the word that the error must contain.
DISAGREEMENTS: dict[str, tuple[Config, dict[str, Any]]] = {
    "bits": (replace(CONFIG, bits=3), {}),
    "bucket_size": (replace(CONFIG, bucket_size=64), {}),
    "rounding": (replace(CONFIG, rounding="nearest"), {}),
    "gather_bits": (replace(CONFIG, gather_bits=8), {}),
    "algorithm": (replace(CONFIG, algorithm="one_shot"), {}),
    "op": (CONFIG, {"op": "avg"}),
    "dtype": (CONFIG, {"dtype": torch.bfloat16}),
    "numel": (CONFIG, {"numel": NUMEL + 512}),
}


def mismatch(comm: Communicator) -> Finding:
    """Return each mismatch's outcome. A mismatch ends its communicator, so each has its own."""
    outcomes = {
        word: disagreement(comm, f"odd {index}", *disagreeing)
        for index, (word, disagreeing) in enumerate(DISAGREEMENTS.items())
    }
    whole = comm.allreduce(np.ones(100, np.float32), config=Config(bits=32))
    return {"outcomes": outcomes, "whole": bool((whole == comm.size).all())}


def disagreement(comm: Communicator, name: str, config: Config, options: dict[str, Any]) -> Finding:
    """Return the outcome if the last rank uses this config and these options."""
    own = comm.split(0, name=name)
    assert own is not None
    ready = torch.ones(NUMEL, device="cuda")
    allreduce(own, ready, ready, CONFIG)
    check(own, finish=True)
    if comm.rank != comm.size - 1:
        config, options = CONFIG, {}
    dtype = options.get("dtype", torch.float32)
    x = torch.ones(options.get("numel", NUMEL), dtype=dtype, device="cuda")
    y = torch.zeros_like(x)
    immediate = failure(lambda: allreduce(own, x, y, config, options.get("op", "sum")))
    found = {"immediate": immediate, **outcome(own, y)}
    own.close()
    return found


def lost(comm: Communicator, how: str, timeout: float) -> Finding:
    """Return the errors of the other ranks if the last rank is killed, or never calls."""
    x, y = torch.ones(4_000_000, device="cuda"), torch.zeros(4_000_000, device="cuda")
    allreduce(comm, x, y, CONFIG)
    check(comm, finish=True)
    last = comm.rank == comm.size - 1
    if last and how == "absent":
        time.sleep(timeout + 5)
        os._exit(0)
    if last:
        threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    with contextlib.suppress(CgxError):
        while True:
            y.zero_()
            allreduce(comm, x, y, CONFIG, timeout=timeout)
            check(comm, finish=True)
    return outcome(comm, y)


def bad(comm: Communicator) -> Finding:
    """Return the error of each bad call (made by all ranks), and whether the next call succeeds."""
    x, y = torch.ones(NUMEL, device="cuda"), torch.zeros(NUMEL, device="cuda")
    host = torch.ones(NUMEL)
    # the tensor is freed, so this pointer is invalid
    freed = torch.ones(2**26, device="cuda").data_ptr()
    torch.cuda.empty_cache()

    def call(source: int | None, result: int | None, **fields: Any) -> Callable[[], None]:
        segment = structs.Segment(0, NUMEL, 512, 4)
        fields = {"segments": (structs.Segment * 1)(segment), "num_segments": 1, **fields}
        collective = structs.Collective(comm=comm.id, occurrence=-1, **fields)
        return lambda: enqueue(collective, source, result)

    def on(device: int, function: str) -> Callable[[], None]:
        segments = (structs.Segment * 1)(structs.Segment(0, NUMEL, 512, 4))
        collective = structs.Collective(
            comm=comm.id, segments=segments, num_segments=1, occurrence=-1,
            input=x.data_ptr(), output=y.data_ptr(), device=device,
        )  # fmt: skip
        return lambda: library.call(function, byref(collective))

    ring, nested = Config(algorithm="ring").native, Config(algorithm="hierarchical").native
    calls = {
        "input on the host": call(host.data_ptr(), y.data_ptr()),
        "output on the host": call(x.data_ptr(), host.data_ptr()),
        "freed": call(freed, y.data_ptr()),
        "null": call(None, y.data_ptr()),
        "ring": call(x.data_ptr(), y.data_ptr(), config=ring),
        "bits": call(
            x.data_ptr(), y.data_ptr(),
            segments=(structs.Segment * 1)(structs.Segment(0, NUMEL, 512, 9)),
        ),
        "cgx_run of a GPU's memory": on(CUDA, "cgx_run"),
        "cgx_enqueue for the CPU": on(0, "cgx_enqueue"),
    }  # fmt: skip
    if torch.cuda.device_count() > 1:
        other = torch.ones(NUMEL, device="cuda:1")
        calls["another device"] = call(x.data_ptr(), other.data_ptr())
    errors = {name: failure(bad_call) for name, bad_call in calls.items()}
    call(x.data_ptr(), y.data_ptr(), config=nested)()  # on a single host this works, as on the CPU
    want = comm.allreduce(np.ones(NUMEL, np.float32), config=Config(rounding="nearest"))
    allreduce(comm, x, y, Config(rounding="nearest"))
    return {"errors": errors, "whole": not differs(y, want)}


@contextlib.contextmanager
def full_memory(comm: Communicator) -> Iterator[None]:
    """Hold all of the GPU's memory on rank 0. All ranks enter and leave together."""
    meet = np.zeros(16, np.float32)
    comm.allreduce(meet, config=Config(bits=32))
    held, size = [], 2**33
    while comm.rank == 0 and size >= 2**21:
        try:
            held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.cuda.OutOfMemoryError:
            size //= 2
    comm.allreduce(meet, config=Config(bits=32))
    try:
        yield
    finally:
        comm.allreduce(meet, config=Config(bits=32))
        held.clear()
        torch.cuda.empty_cache()
        comm.allreduce(meet, config=Config(bits=32))


def memory(comm: Communicator) -> Finding:
    """Return the error of a first collective without free memory, and whether a later one works."""
    x, y = torch.ones(2**26, device="cuda"), torch.zeros(2**26, device="cuda")
    poor = comm.split(0, name="poor")
    assert poor is not None
    with full_memory(comm):
        error = failure(lambda: allreduce(poor, x, y, CONFIG, timeout=20))
        error = error or failure(lambda: check(poor, finish=True))
    rich = comm.split(0, name="rich")
    assert rich is not None
    allreduce(rich, x, y, Config(bits=32))
    check(rich, finish=True)
    return {"error": error, "later": bool((y == comm.size).all().item())}
