"""The contenders of a float32 allreduce: other libraries' ways, and cgx_ops.

PEERS lists the other ways. Each one is set up as its users would: buffers exist before the call,
hooks of DistributedDataParallel get a bucket as DDP fills it, and calls that overwrite their input
get it back before each batch. A framework is imported only if it is measured.

All contenders are built from `x`, this rank's values (float32, flat). They may overwrite `out`, an
array of the same shape that they share, so that memory does not grow with their number. The
average that torch's hooks return is converted to a sum before the comparison.
"""

import datetime
import functools
import math
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

import cgx_ops
from cgx_ops import Config
from cgx_ops._core.arrays import Array
from cgx_ops._core.exchange import free_address
from cgx_ops._core.tables import COMPRESSORS
from cgx_ops._core.verdicts import EXACT
from cgx_ops.planner.rates import message_bytes

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI

_TIMEOUT = datetime.timedelta(minutes=5)
_POWERSGD_RANK = 4


class MpiRanks:
    """The Ranks (measure.py) of an mpi4py communicator."""

    def __init__(self, comm: "MPI.Intracomm") -> None:
        from mpi4py import MPI

        self.comm, self._max = comm, MPI.MAX

    def barrier(self) -> None:
        """Return once all ranks have called it."""
        self.comm.Barrier()

    def slowest(self, seconds: float) -> float:
        """Return the largest `seconds` of all ranks, on all ranks."""
        return self.comm.allreduce(seconds, self._max)


@dataclass(frozen=True)
class Contender:
    """An allreduce that is ready to run.

    Attributes:
        call: One allreduce; returns when the result is complete.
        result: Copies the sum of the last call.
        wire_bytes: Encoded bytes of this rank's tensor.
        prepare: Restores the input that call() overwrote.
    """

    call: Callable[[], object]
    result: Callable[[], Array]
    wire_bytes: int
    prepare: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Peer:
    """How to build a contender.

    Attributes:
        description: Text for the command's help.
        needs: Module that must be importable; "" for none.
        exact: Whether it sums float32 values exactly.
        build: Builds the contender from x and out, on all ranks.
    """

    description: str
    needs: str
    exact: bool
    build: Callable[[Array, Array], Contender]


# ---- MPI -----------------------------------------------------------------------------------------


def _mpi(x: Array, out: Array) -> Contender:
    from mpi4py import MPI

    return Contender(lambda: MPI.COMM_WORLD.Allreduce(x, out), out.copy, x.nbytes)


def _numpy(x: Array, _out: Array, bits: int = 4, bucket: int = 512) -> Contender:
    """Quantize in numpy, gather the bytes of all ranks, decode and add in numpy."""
    from mpi4py import MPI

    world, levels = MPI.COMM_WORLD, 2**bits - 1
    buckets = math.ceil(x.size / bucket)
    padded = np.zeros((buckets, bucket), np.float32)
    record = np.dtype([("low", "f4"), ("step", "f4"), ("codes", "u1", bucket // 2)])
    mine, everyone = np.empty(buckets, record), np.empty((world.size, buckets), record)
    total = np.empty_like(padded)

    def call() -> None:
        padded.reshape(-1)[: x.size] = x
        low = padded.min(axis=1, keepdims=True)
        step = (padded.max(axis=1, keepdims=True) - low) / levels
        codes = np.rint((padded - low) / np.where(step == 0, 1, step)).astype(np.uint8)
        mine["low"], mine["step"] = low[:, 0], step[:, 0]
        mine["codes"] = codes[:, ::2] | codes[:, 1::2] << 4
        world.Allgather(mine.view(np.uint8), everyone.view(np.uint8))
        total.fill(0)
        for theirs in everyone:
            low, step = theirs["low"][:, None], theirs["step"][:, None]
            total[:, ::2] += low + step * (theirs["codes"] & 15)
            total[:, 1::2] += low + step * (theirs["codes"] >> 4)

    return Contender(call, lambda: total.reshape(-1)[: x.size].copy(), mine.nbytes)


# ---- torch ---------------------------------------------------------------------------------------


@functools.cache
def _gloo_group() -> Any:
    """Return torch.distributed with a gloo group of all ranks."""
    import torch
    import torch.distributed as dist
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    hosts = world.allgather(platform.node())
    if "OMP_NUM_THREADS" not in os.environ:
        neighbours = hosts.count(hosts[world.rank])
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // neighbours))
    host, port = world.bcast(free_address(hosts))
    dist.init_process_group(
        "gloo", f"tcp://{host}:{port}", _TIMEOUT, rank=world.rank, world_size=world.size
    )
    return dist


def _gloo(x: Array, out: Array) -> Contender:
    import torch

    dist = _gloo_group()
    source, values = torch.from_numpy(x), torch.from_numpy(out)
    return Contender(
        lambda: dist.all_reduce(values),
        out.copy,
        x.nbytes,
        lambda: values.copy_(source),
    )


@dataclass
class _Bucket:
    """The attributes of DDP's GradBucket that hooks use, for one matrix."""

    values: "torch.Tensor"
    shape: tuple[int, int]

    def buffer(self) -> "torch.Tensor":
        return self.values

    def gradients(self) -> list["torch.Tensor"]:
        return [self.values.view(self.shape)]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def _hook(
    x: Array,
    out: Array,
    hook: Callable[[Any, Any], Any],
    state: object,
    wire_bytes: int,
) -> Contender:
    import torch

    dist = _gloo_group()
    bucket = _Bucket(torch.from_numpy(out), _matrix(x.size))
    source, found = torch.from_numpy(x), [bucket.values]

    def call() -> None:
        found[0] = hook(state, bucket).wait()

    def result() -> Array:
        average = cast("torch.Tensor", found[0]).numpy()
        return average.reshape(-1) * np.float32(dist.get_world_size())

    return Contender(call, result, wire_bytes, lambda: bucket.values.copy_(source))


def _matrix(numel: int) -> tuple[int, int]:
    """Return the most square shape with so many values, like the weights of a layer."""
    rows = next(rows for rows in range(math.isqrt(numel), 0, -1) if numel % rows == 0)
    return rows, numel // rows


def _fp16(x: Array, out: Array) -> Contender:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
        fp16_compress_hook,
    )

    return _hook(x, out, fp16_compress_hook, None, x.nbytes // 2)


def _bf16(x: Array, out: Array) -> Contender:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
        bf16_compress_hook,
    )

    return _hook(x, out, bf16_compress_hook, None, x.nbytes // 2)


def _powersgd(x: Array, out: Array) -> Contender:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    _gloo_group()
    state = powerSGD_hook.PowerSGDState(
        None,
        _POWERSGD_RANK,
        start_powerSGD_iter=2,
        use_error_feedback=True,
        warm_start=True,
    )
    state.iter = state.start_powerSGD_iter  # the first iterations are exact
    factors = 4 * _POWERSGD_RANK * sum(_matrix(x.size))
    compressed = factors * state.min_compression_rate < x.nbytes
    return _hook(x, out, powerSGD_hook.powerSGD_hook, state, factors if compressed else x.nbytes)


def _pertensor(x: Array, out: Array) -> Contender:
    return _hook(x, out, quantization_hooks().quantization_pertensor_hook, None, x.size)


@functools.cache
def quantization_hooks() -> Any:
    """Return torch's module of these hooks, patched to run over gloo.

    The hooks expect all_gather's future to hold one list per input, as with NCCL. gloo's future
    holds the list itself, and the hooks would fail with an IndexError.
    """
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks

    def all_gather(*arguments: Any, **options: Any) -> Any:
        future = cast(Any, dist.all_gather(*arguments, **options)).get_future()
        return SimpleNamespace(get_future=lambda: future.then(lambda done: [done.value()]))

    module: Any = quantization_hooks
    module.dist = SimpleNamespace(all_gather=all_gather, get_rank=dist.get_rank, group=dist.group)
    return module


# ---- JAX -----------------------------------------------------------------------------------------


@functools.cache
def _jax_mesh() -> Any:
    """Return a mesh with one CPU device per rank."""
    import jax

    from cgx_ops.jax import initialize

    jax.config.update("jax_platforms", "cpu")
    initialize()
    return jax.make_mesh((jax.device_count(),), ("rank",), (jax.sharding.AxisType.Auto,))


def _psum(x: Array, _out: Array) -> Contender:
    import jax

    mesh = _jax_mesh()
    spec = jax.P("rank")
    values = jax.make_array_from_process_local_data(jax.NamedSharding(mesh, spec), x)
    program = jax.jit(
        jax.shard_map(
            lambda v: jax.lax.psum(v, "rank"),
            mesh=mesh,
            in_specs=spec,
            out_specs=jax.P(),
        )
    )
    found = [program(values)]

    def call() -> None:
        found[0] = jax.block_until_ready(program(values))

    return Contender(call, lambda: np.array(found[0].addressable_data(0)), x.nbytes)


# ---- The table -----------------------------------------------------------------------------------

PEERS = {
    "mpi": Peer("MPI_Allreduce of mpi4py", "", True, _mpi),
    "gloo": Peer("torch.distributed.all_reduce over gloo", "torch", True, _gloo),
    "psum": Peer("jax.lax.psum over XLA's gloo, jitted", "cgx_ops.jax", True, _psum),
    "fp16": Peer("DDP's fp16_compress_hook over gloo", "torch", False, _fp16),
    "bf16": Peer("DDP's bf16_compress_hook over gloo", "torch", False, _bf16),
    "powersgd": Peer("DDP's powerSGD_hook, rank 4, over gloo", "torch", False, _powersgd),
    "pertensor": Peer("DDP's quantization_pertensor_hook over gloo", "torch", False, _pertensor),
    "numpy": Peer(
        "4 bits in numpy, gathered by mpi4py: a simple implementation", "", False, _numpy
    ),
}


def cgx(x: Array, out: Array, config: Config) -> Contender:
    """Return the contender cgx_ops.allreduce() among all ranks."""
    varies = config.bits != EXACT and not COMPRESSORS[config.compressor]["fixed_length"]
    is_measured = varies and not config.is_short(x.size)
    size = len(cgx_ops.quantize(x, config)) if is_measured else message_bytes(x.size, config)
    return Contender(lambda: cgx_ops.allreduce(x, config=config, out=out), out.copy, size)


def cgx_name(config: Config) -> str:
    """Return the contender's name; configs that send differently have different names.

    Examples: "cgx 4 nearest", "cgx 32", "cgx levels 2", "cgx topk density=0.01".
    """
    own = {
        field.name: value
        for field in fields(config)
        if (value := getattr(config, field.name)) != field.default
    }
    if "compressor" not in own:
        own["bits"] = config.bits
    if config.bits == EXACT:  # exact values are not rounded
        own.pop("rounding", None)
    known = [str(own.pop(name)) for name in ("compressor", "bits", "rounding") if name in own]
    return " ".join(["cgx", *known, *(f"{name}={value}" for name, value in own.items())])
