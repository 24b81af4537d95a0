"""Run a scenario of the core on a GPU, on each rank; the last line of the output is JSON.

Arguments: the scenario (a function of this file or of cuda_failures.py). With --threads N
it runs on N threads of this process instead of the ranks of mpirun, and prints a line for each.

        results    every case against cgx_run on the CPU, bit for bit
        codec      cgx_quantize, cgx_dequantize and cgx_sum_encoded against the CPU
        large      more than 2^31 bytes, in place
        streams    order on one stream, on several streams, and relative to other work
        graphs     a CUDA graph is recorded once and replayed, or recording raises
        mismatch   ranks whose calls differ
        lost       a rank that is killed, or never calls
        bad        invalid calls raise and leave the communicator usable
        memory     no memory is free when the devices connect
"""

import argparse
import itertools
import json
import sys
from ctypes import byref, c_int64, c_void_p
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from cuda_failures import bad, lost, memory, mismatch
from support import collective_cases, launch
from support.collective_cases import Case
from support.cuda_cases import BITS, DTYPES, ROUNDINGS, SIZES
from support.cuda_core import (
    CONFIG,
    CUDA,
    NUMEL,
    Finding,
    OnGpu,
    Values,
    allreduce,
    check,
    differs,
    enqueue,
    to_gpu,
)

import cgx_ops
from cgx_ops import CgxError, Communicator, Config
from cgx_ops._core import library, structs, tables

# ---- 1. results ----------------------------------------------------------------------------------

BY_SIZE = [
    Case(size, bits, dtype=dtype, rounding=rounding)
    for size, bits, dtype, rounding in itertools.product(SIZES, BITS, DTYPES, ROUNDINGS)
]
SETS = {**collective_cases.SETS, "by_size": BY_SIZE}


def served(case: Case) -> bool:
    """Return whether the GPU supports this case (exceptions: docs/explanation/gpu.md)."""
    whole = case.rotation is not None or case.compressor in ("topk", "randk")
    return (
        case.algorithm not in ("ring", "hierarchical")
        and (not whole or case.bucket_size <= 8192)
        and case.compressor not in ("entropy", "lossless")
        and (case.density or 0) <= 0.25
        and case.value_bits in (None, 16, 32)
    )


def results(comm: Communicator, sets: list[str]) -> Finding:
    """Compare with the CPU. For each case, CPU and GPU collectives alternate."""
    on_gpu = OnGpu(comm.id)
    cases = [case for name in sets for case in SETS[name] if served(case)]
    wrong = [
        str(case)
        for case in cases
        if collective_cases.run(case, on_gpu) != collective_cases.run(case, comm)
    ]
    combinations = list(itertools.product(DTYPES, ("one_shot", "sra"), ROUNDINGS, (0, 3)))
    for dtype, algorithm, rounding, divisor in combinations:
        options = {
            "dtype": tables.DTYPES[dtype],
            "config": Config(algorithm=algorithm, rounding=rounding).native,
            "op": tables.OPS["avg"],
            "divisor": divisor,
        }
        want = layers(comm, dtype, options, "cpu")
        for seeds in ("gpu", "gpu, its seeds too"):
            if layers(comm, dtype, options, seeds) != want:
                wrong.append(f"layers of {options}, {seeds}")
    wire = library.text(comm._info().wire)
    return {"count": len(cases) + 2 * len(combinations), "wrong": wrong, "wire": wire}


# Layers of a DDP bucket: numel, bits, bucket_size.
LAYERS = ((700, 4, 512), (9, 4, 512), (0, 4, 512), (100_003, 8, 64), (5000, 32, 1), (2048, 2, 128))


def layers(comm: Communicator, dtype: str, options: dict[str, Any], where: str) -> list[bytes]:
    """Reduce layers with seeds and residuals in host or device memory; return all results."""
    random = np.random.default_rng(comm.rank)
    scalar = collective_cases.DTYPES[dtype]
    xs = [random.standard_normal(n).astype(scalar) for n, _, _ in LAYERS]
    ys = [np.zeros_like(x) for x in xs]
    lost = [(random.standard_normal(n) / 8).astype(scalar) for n, _, _ in LAYERS]
    seeds = random.integers(-(2**63), 2**63, len(LAYERS), np.int64)
    segments = (structs.Segment * len(LAYERS))(*(structs.Segment(0, n, k, b) for n, b, k in LAYERS))
    collective = structs.Collective(
        comm=comm.id, segments=segments, num_segments=len(LAYERS), occurrence=-1, **options
    )
    if where == "cpu":
        for name, arrays in (("inputs", xs), ("outputs", ys), ("residuals", lost)):
            setattr(collective, name, pointers([a.ctypes.data for a in arrays], arrays))
        collective.seeds = (c_int64 * len(LAYERS))(*seeds)
        library.call("cgx_run", byref(collective))
        return [a.tobytes() for a in ys + lost]
    on_gpu = [[Values(a) for a in arrays] for arrays in (xs, ys, lost)]
    for name, values, arrays in zip(
        ("inputs", "outputs", "residuals"), on_gpu, (xs, ys, lost), strict=True
    ):
        setattr(collective, name, pointers([v.address for v in values], arrays))
    held = Values(seeds)
    if where == "gpu":
        collective.seeds = (c_int64 * len(LAYERS))(*seeds)
    else:
        collective.device_seeds = held.address
    enqueue(collective, None, None)
    found = [v.array().tobytes() for v in on_gpu[1] + on_gpu[2]]
    check(comm)
    return found


def pointers(addresses: list[int], arrays: list[Any]) -> Any:
    """Return the addresses as a C array; null for arrays without elements."""
    named = zip(addresses, arrays, strict=True)
    return (c_void_p * len(arrays))(*(at if a.size else None for at, a in named))


def codec(_comm: Communicator) -> Finding:
    """Return differences from the CPU's messages, decoded values and sums of three messages."""
    wrong = []
    cases = list(itertools.product(SIZES, BITS, DTYPES, ROUNDINGS))
    for size, bits, dtype, rounding in cases:
        native = structs.Codec(
            config=Config(bits, 512, rounding).native,
            dtype=tables.DTYPES[dtype],
            seed=size,
            rank=1,
            first_index=1024,
            stream=torch.cuda.current_stream().cuda_stream,
        )
        count, written = c_int64(), c_int64()
        library.call("cgx_encoded_bytes", byref(native), size, byref(count))
        x = np.random.default_rng(bits).standard_normal((3, size)).astype(np.float32)
        x = x.astype(collective_cases.DTYPES[dtype])
        found = []
        for device, place in ((0, OnHost), (CUDA, Values)):
            native.device = device
            values = [place(row) for row in x]
            messages = place(np.zeros((3, count.value), np.uint8))
            decoded, total = place(np.zeros_like(x[0])), place(np.zeros(count.value, np.uint8))
            for row, value in enumerate(values):
                at = messages.address + row * count.value
                arguments = (value.address, size, at, byref(written))
                library.call("cgx_quantize", byref(native), *arguments)
                assert written.value == count.value
            every = (messages.address, 3, count.value, size, total.address)
            library.call("cgx_sum_encoded", byref(native), *every)
            arguments = (total.address, count.value, size, decoded.address)
            library.call("cgx_dequantize", byref(native), *arguments)
            found.append([held.array().tobytes() for held in (messages, total, decoded)])
        if found[0] != found[1]:
            wrong.append(f"{size} {dtype}, {bits} bits, {rounding}")
    return {"count": len(cases), "wrong": wrong}


class OnHost:
    """Host counterpart of Values, which live on the GPU."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array.copy()
        self.address = self._array.ctypes.data

    def array(self) -> np.ndarray:
        return self._array


def large(comm: Communicator) -> Finding:
    """Reduce 537 million fp32 values in place."""
    pattern = np.random.default_rng(comm.rank).standard_normal(2**20 + 7).astype(np.float32)
    x = np.resize(pattern, 2**29 + 1000)
    config = Config(bits=4, algorithm="sra")
    want = comm.allreduce(x, config=config, seed=1)
    OnGpu(comm.id).allreduce(x, config=config, seed=1, out=x)
    return bool(np.array_equal(x.view(np.int32), want.view(np.int32)))


# ---- 2. streams and graphs -----------------------------------------------------------------------

LONG = 2_000_000_000  # cycles that keep the GPU busy: about a second


def values(comm: Communicator, step: int) -> np.ndarray:
    """Return a rank's input for a step."""
    random = np.random.default_rng([comm.rank, step])
    return random.standard_normal(NUMEL).astype(np.float32)


def streams(comm: Communicator) -> Finding:
    """Return the names of the checks that failed."""
    wrong = []
    steps = range(6)
    wants = [comm.allreduce(2 * values(comm, step), config=CONFIG, seed=step) for step in steps]
    given = [torch.from_numpy(values(comm, step)).pin_memory() for step in steps]
    y = torch.empty(NUMEL, device="cuda")
    allreduce(comm, torch.zeros_like(y), y, CONFIG)  # connects

    def steps_on(step: int, busy: bool) -> torch.Tensor:
        """Copy, double, reduce and add one on the current stream; return without waiting."""
        if busy:
            torch.cuda._sleep(LONG)
        x = given[step].to("cuda", non_blocking=True) * 2
        result = torch.full_like(x, torch.nan)
        allreduce(comm, x, result, CONFIG, seed=step)
        x.fill_(torch.nan)  # overwrites the input on the stream after the collective
        return result + 1

    steps_on(0, busy=True)  # loads the kernels, for which the host waits
    torch.cuda.synchronize()
    for name, stream in (
        ("default stream", torch.cuda.default_stream()),
        ("side stream", torch.cuda.Stream()),
        ("stream of another priority", torch.cuda.Stream(priority=-1)),
    ):
        with torch.cuda.stream(stream):
            first = torch.cuda.Event()
            torch.cuda._sleep(LONG)
            first.record()
            result = steps_on(0, busy=False)
            if first.query():
                wrong.append(f"{name}: the host waited for the device")
            if differs(result, wants[0] + np.float32(1)):
                wrong.append(name)

    # Alternate between two streams, each with work queued before: collectives run in call order.
    sides = [torch.cuda.Stream(), torch.cuda.Stream()]
    found = []
    for step in steps:
        with torch.cuda.stream(sides[step % 2]):
            found.append(steps_on(step, busy=step == 0))
    for step in steps:
        with torch.cuda.stream(sides[step % 2]):
            if differs(found[step], wants[step] + np.float32(1)):
                wrong.append(f"two streams, step {step}")

    # Use several communicators of the same ranks at the same time, each on its own stream.
    copies = [comm.split(0, name=f"copy {i}") for i in range(3)]
    found = []
    for step, copy in enumerate(copies):
        assert copy is not None
        with torch.cuda.stream(sides[step % 2]):
            x = given[step].to("cuda", non_blocking=True) * 2
            found.append(torch.full_like(x, torch.nan))
            allreduce(copy, x, found[-1], CONFIG, seed=step)
    torch.cuda.synchronize()
    wrong += [f"communicator {i}" for i, y in enumerate(found) if differs(y, wants[i])]
    for copy in copies:
        assert copy is not None
        check(copy, finish=True)
        copy.close()
    check(comm, finish=True)
    return wrong


def graphs(comm: Communicator) -> Finding:
    """Return the error if recording raises, else the failures during replays."""
    seeds = torch.zeros(1, dtype=torch.int64, device="cuda")
    x, y = torch.zeros(NUMEL, device="cuda"), torch.zeros(NUMEL, device="cuda")
    allreduce(comm, x, y, CONFIG)  # connects
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            allreduce(comm, x * 2, y, CONFIG, device_seeds=seeds)
            z = y + 1
            allreduce(comm, z, z, CONFIG, seed=7)
    except CgxError as error:
        refused = [type(error).__name__, str(error)]
        return {"refused": refused, "wrong": replays(comm, None, x, y, y, seeds)}
    return {"refused": None, "wrong": replays(comm, graph, x, y, z, seeds)}


def replays(
    comm: Communicator,
    graph: torch.cuda.CUDAGraph | None,
    x: torch.Tensor,
    y: torch.Tensor,
    z: torch.Tensor,
    seeds: torch.Tensor,
) -> list[str]:
    """Replay with new inputs and seeds, and make unrecorded calls in between."""
    wrong = []
    for step in range(5):
        given = values(comm, step)
        if graph is not None:
            want = comm.allreduce(2 * given, config=CONFIG, seed=step)
            then = comm.allreduce(want + np.float32(1), config=CONFIG, seed=7)
            x.copy_(torch.from_numpy(given))
            seeds.fill_(step)
            graph.replay()
            if differs(y, want) or differs(z, then):
                wrong.append(f"replay {step}")
        plain = comm.allreduce(given, config=CONFIG, seed=step)
        own = torch.from_numpy(given).cuda()
        allreduce(comm, own, own, CONFIG, seed=step)
        if differs(own, plain):
            wrong.append(f"call {step}")
    check(comm, finish=True)
    return wrong


# ---- The program ---------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser()
    scenario = parser.add_subparsers(dest="scenario", required=True)
    for function in (codec, large, streams, graphs, mismatch, bad, memory):
        scenario.add_parser(function.__name__).set_defaults(run=function)
    every = scenario.add_parser("results")
    every.add_argument("--threads", type=int, default=0)
    every.add_argument("sets", nargs="+", choices=SETS)
    every.set_defaults(run=lambda comm: results(comm, options.sets))
    gone = scenario.add_parser("lost")
    gone.add_argument("how", choices=("kill", "absent"))
    gone.add_argument("timeout", type=float)
    gone.set_defaults(run=lambda comm: lost(comm, options.how, options.timeout))
    options = parser.parse_args()

    if threads := getattr(options, "threads", 0):

        def on_thread(_rank: int, comm: Communicator) -> Finding:
            with torch.cuda.stream(torch.cuda.Stream()):
                # All ranks allocate pinned memory before one waits for others on the GPU.
                to_gpu(np.zeros(1))
                comm.allreduce(np.zeros(1, np.float32))
                return options.run(comm)

        for found in launch.threads(threads, on_thread, timeout=600):
            print(json.dumps(found))
    else:
        print(json.dumps(options.run(cgx_ops.init())), flush=True)


main()
