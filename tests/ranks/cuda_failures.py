"""What run_cuda_core.py has of failures: ranks that disagree or are lost, bad calls, no memory."""

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
    """Return an error's kind and text; None if there was none."""
    try:
        call()
    except CgxError as error:
        return [type(error).__name__, str(error)]
    return None


def outcome(comm: Communicator, y: torch.Tensor) -> Finding:
    """Return what a failed collective says, now and next, and whether its output is NaN."""
    error = failure(lambda: check(comm, finish=True))
    return {
        "error": error,
        "nan": bool(torch.isnan(y).all().item()),
        "next": failure(lambda: allreduce(comm, y, y, CONFIG)),
    }


# What the last rank does otherwise, by the word that the error must hold.
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
    """Return each disagreement's outcome; a communicator for each, since it ends one."""
    outcomes = {
        word: disagreement(comm, f"odd {index}", *disagreeing)
        for index, (word, disagreeing) in enumerate(DISAGREEMENTS.items())
    }
    whole = comm.allreduce(np.ones(100, np.float32), config=Config(bits=32))
    return {"outcomes": outcomes, "whole": bool((whole == comm.size).all())}


def disagreement(comm: Communicator, name: str, config: Config, options: dict[str, Any]) -> Finding:
    """Return the outcome where the last rank has these."""
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
    at_once = failure(lambda: allreduce(own, x, y, config, options.get("op", "sum")))
    found = {"at once": at_once, **outcome(own, y)}
    own.close()
    return found


def lost(comm: Communicator, how: str, timeout: float) -> Finding:
    """Return what the others see of a last rank that is killed at work, or never calls."""
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
    """Return the error of each bad call, which all ranks make, and whether the next one is well."""
    x, y = torch.ones(NUMEL, device="cuda"), torch.zeros(NUMEL, device="cuda")
    host = torch.ones(NUMEL)
    freed = torch.ones(2**26, device="cuda").data_ptr()  # its tensor is gone, and so is the memory
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
    call(x.data_ptr(), y.data_ptr(), config=nested)()  # where there is one host: as on the CPU
    want = comm.allreduce(np.ones(NUMEL, np.float32), config=Config(rounding="nearest"))
    allreduce(comm, x, y, Config(rounding="nearest"))
    return {"errors": errors, "whole": not differs(y, want)}


@contextlib.contextmanager
def full_memory(comm: Communicator) -> Iterator[None]:
    """Hold all of the GPU's memory on rank 0; all ranks enter and leave together."""
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
    """Return the error of a first collective that finds no memory, and whether one works later."""
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
