"""The torch.distributed backend "cgx": allreduce by the core, all else by an inner gloo or NCCL.

    import cgx_ops.torch
    torch.distributed.init_process_group("cgx")

Under mpirun (MPI between hosts), and under torchrun, srun or multiprocessing without MPI (TCP
between hosts); ranks of one host share memory. The communicator of a group has the group's name:
`cgx_ops.Communicator.find(group.group_name)`.

Every allreduce of float32, float16 or bfloat16 tensors with sum, avg, min, max or product goes to
the core: of CPU tensors, and of CUDA tensors where cgx_ops is built with CUDA. It is compressed
only if all of this holds:

  - the group's Config has bits < 32 (`CGX_COMPRESSION_QUANTIZATION_BITS`, or BackendOptions);
  - it is a sum or an average of at least max(16, minimal_size) elements;
  - it synchronises gradients: it starts while autograd accumulates the gradient of a leaf (DDP's
    reducer and hooks on parameters do) or in the callbacks at the end of backward (DDP with
    static_graph), and no DistributedDataParallel over the group has a communication hook of the
    user's; or it is inside `with compressed():`, or the group was made with compress="all";
  - it is not inside `with uncompressed():`.

The callbacks of an allreduce's future count as being where it was started.

cgx_ops.torch.ddp registers its hook automatically with a DistributedDataParallel over a group with
bits < 32; the hook reduces layer by layer. So statistics of SyncBatchNorm, softmax over ranks,
metrics and tensor parallelism stay exact. The logger "cgx_ops.torch.backend" says at level DEBUG
what was decided and why. Exact means `none` of the core: the full values travel.

Phases of making a group: ranks compare their options over the Store; their communicator, over the
Store too; inner backends; both joined.
"""

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist

from cgx_ops import Communicator, Config, _torch_ops
from cgx_ops._core import environment
from cgx_ops._core.consistency import Gather, require_same
from cgx_ops._core.tables import EXACT_BITS
from cgx_ops.autotune import require_choice, verdict_of
from cgx_ops.config import check_config
from cgx_ops.errors import InvalidArgument, checked_seed
from cgx_ops.torch._compat import parallel
from cgx_ops.torch.backend import groups
from cgx_ops.torch.graph.work import devices

NAME = "cgx"

_log = logging.getLogger(__name__)
# The options of the default group, which its sub-groups inherit.
_world_options: "BackendOptions | None" = None
# Those of each group, by its name; groups that were split off have those of the default group.
_options: "dict[str, BackendOptions]" = {}
# What the binding knows of each group's.
_native_options: dict[str, _torch_ops.Options] = {}
_AUTOMATIC = {
    "gradients": _torch_ops.Automatic.GRADIENTS,
    "all": _torch_ops.Automatic.EVERYTHING,
}
# What _torch_ops.exchange_scope() was told last on each thread.
_thread = threading.local()


@dataclass(frozen=True)
class BackendOptions:
    """What a group compresses and how: the pg_options of init_process_group and new_group.

    Without pg_options, a sub-group has those of the default group, and the default group
    BackendOptions().

    Attributes:
        config: how values travel; by default Config.from_env(), which is exact unless CGX_*
            variables set bits or a compressor.
        compress: "gradients", or "all": every sum and average of floats, as CGX does.
        seed: of the noise.
        transport: "SHM", "MPI", "TCP", or "AUTO", the best that connects the ranks; "NCCL" carries
            messages between GPUs, and is "AUTO" between processes. None: COMMUNICATOR_TYPE, else
            "AUTO". Groups that are split off ignore it.
        auto_bits: choose bits by the size of each message (cgx_ops.bits_for), instead of
            config.bits. Making the group measures for up to a second; groups that are split off
            use the result of their parent. None: CGX_AUTO_BITS, if config is Config.from_env().
    """

    config: Config = field(default_factory=Config.from_env)
    compress: Literal["gradients", "all"] = "gradients"
    seed: int = 0
    transport: Literal["AUTO", "SHM", "MPI", "TCP", "NCCL"] | None = None
    auto_bits: bool | None = None
    _timeout: ClassVar[None] = None  # init_device_mesh asks for it: the group's own default

    def __post_init__(self) -> None:
        if not isinstance(self.config, Config):
            raise InvalidArgument(f"BackendOptions.config is {self.config!r}; give a Config")
        if self.compress not in ("gradients", "all"):
            raise InvalidArgument(
                f"BackendOptions.compress is {self.compress!r}; it must be 'gradients' or 'all'"
            )
        checked_seed(self.seed)
        if self.transport not in (None, *environment.TRANSPORTS):
            raise InvalidArgument(
                f"BackendOptions.transport is {self.transport!r}; it must be None or one of "
                f"{', '.join(environment.TRANSPORTS)}"
            )
        if self.auto_bits is None:
            from_env = self.config == Config.from_env()
            object.__setattr__(self, "auto_bits", from_env and environment.auto_bits(os.environ))
        if self.auto_bits:
            require_choice(self.config)


@contextlib.contextmanager
def compressed(config: Config | None = None, *, seed: int = 0) -> Iterator[None]:
    """Compress the sums and averages that this thread starts inside, whatever they are for.

    It holds for the calling thread. On the CPU, backward runs its hooks on the thread that called
    it, so they are inside too; of a CUDA model it runs them on a thread of autograd's, outside.

    Args:
        config: how values travel; None: as the group's BackendOptions say.
        seed: of the noise, with a config; communication hooks use the seed of their state.
    """
    check_config(config)
    compression = None if config is None else _compression(config, checked_seed(seed))
    with _scope(_torch_ops.Scope(_torch_ops.ScopeKind.COMPRESSED, compression), config):
        yield


@contextlib.contextmanager
def uncompressed() -> Iterator[None]:
    """Send everything that this thread starts inside exact, gradients too."""
    with _scope(_torch_ops.Scope(_torch_ops.ScopeKind.UNCOMPRESSED), "uncompressed"):
        yield


@contextlib.contextmanager
def _scope(
    scope: _torch_ops.Scope, seen: Config | Literal["uncompressed"] | None
) -> Iterator[None]:
    outer, outer_seen = _torch_ops.exchange_scope(scope), current_scope()
    _thread.scope = seen
    try:
        yield
    finally:
        _torch_ops.exchange_scope(outer)
        _thread.scope = outer_seen


def current_scope() -> Config | Literal["uncompressed"] | None:
    """Return what compressed() (a Config, if given one) or uncompressed() says on this thread."""
    return getattr(_thread, "scope", None)


def options_of(group: dist.ProcessGroup) -> BackendOptions | None:
    """Return the options of a group that torch.distributed has over the backend "cgx", or None."""
    if NAME not in (parallel.backends_of(group) or ""):
        return None
    return _options.get(group.group_name, _world_options)


def leave_gradients_to_hooks(group: dist.ProcessGroup) -> None:
    """Have a group compress nothing automatically from now on, unless it compresses all.

    A communication hook of the user's says itself what becomes of gradients, on several threads:
    torch runs the callbacks of a future wherever it is completed.
    """
    options = _native_options[group.group_name]
    if options.automatic == _torch_ops.Automatic.GRADIENTS:
        options.automatic = _torch_ops.Automatic.NOTHING


def register(prepare: Callable[[], object]) -> None:
    """Make the backend known to torch.distributed. Call once per process.

    Args:
        prepare: called once, before the first group is made.
    """

    @functools.cache
    def prepare_once() -> None:
        parallel.allow_monitored_barrier(NAME)
        prepare()

    def create(asked: Any, pg_options: Any) -> _torch_ops.Backend:
        prepare_once()
        return _create(asked, pg_options)

    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])


def _compression(config: Config, seed: int) -> _torch_ops.Compression:
    """Return what the binding knows of a Config."""
    return _torch_ops.Compression(str(config), seed)


def _by_size(config: Config, seed: int, communicator: Communicator) -> _torch_ops.Compression:
    """Return what the binding knows of auto_bits in a group. Collective: it measures."""
    exact = config.with_own(bits=EXACT_BITS)
    larger = [
        (numel, element_bytes, _compression(config.with_own(bits=bits), seed))
        for element_bytes, thresholds in verdict_of(communicator, config).larger.items()
        for numel, bits in thresholds
    ]
    return _torch_ops.Compression(str(exact), seed, larger)


def _create(asked: Any, pg_options: Any) -> _torch_ops.Backend:
    """Make the backend of a group; every rank of the group calls it."""
    global _world_options
    default = not asked.global_ranks_in_group
    if pg_options is None and not default and _default_group_is_ours():
        pg_options = _world_options
    if pg_options is None:
        pg_options = BackendOptions()
    if not isinstance(pg_options, BackendOptions):
        raise TypeError(
            f"pg_options is {type(pg_options).__name__}; the backend cgx takes a "
            "cgx_ops.torch.BackendOptions"
        )
    if default:
        _world_options = pg_options
        _options.clear()
    _options[asked.group_id] = pg_options
    config = pg_options.config
    if (
        default
        and config.bits != EXACT_BITS
        and torch.cuda.is_available()
        and "cuda" not in devices()
    ):
        _log.warning(
            "cgx_ops was built without CUDA: allreduces of CUDA tensors travel exact, by NCCL. To "
            "compress them build it again with nvcc on PATH or in CUDA_HOME"
        )
    automatic = _AUTOMATIC[pg_options.compress]
    auto = pg_options.auto_bits
    if auto and torch.cuda.is_available():
        _log.warning(
            "auto_bits is measured among CPUs: allreduces of CUDA tensors travel exact. To "
            "compress them leave it out and give Config(bits=)"
        )
    at_first = config.with_own(bits=EXACT_BITS) if auto else config
    options = _torch_ops.Options(_compression(at_first, pg_options.seed), automatic, asked.timeout)
    options.group_name = asked.group_id
    options.global_ranks_in_group = asked.global_ranks_in_group
    made = _make(
        asked.store, asked.group_rank, asked.group_size, options, pg_options.transport, pg_options
    )  # fmt: skip
    if auto and asked.group_size > 1:
        options.set_compression(
            _by_size(config, pg_options.seed, Communicator.find(asked.group_id))
        )
    return made


def _default_group_is_ours() -> bool:
    return dist.is_initialized() and NAME in str(dist.get_backend_config())


def _make(
    store: parallel.Store,
    rank: int,
    size: int,
    options: _torch_ops.Options,
    transport: str | None = None,
    chosen: BackendOptions | None = None,
) -> _torch_ops.Backend:
    """Make a backend. Collective over the group's ranks.

    chosen: compared across ranks; None: they have those of another group.
    """
    name, timeout = options.group_name, options._timeout
    _native_options[name] = options
    store = groups.own_store(store, name, rank)
    gather = groups.store_allgather(store, rank, size, name, timeout)
    if chosen is not None:
        _require_alike(name, chosen, gather)
    comm = groups.connect(gather, rank, size, name, timeout, transport)
    try:
        inner = _inner(store, rank, size, options)
        cuda = "cuda" in devices()
        related = functools.partial(_make_related, name)
        return _torch_ops.Backend(rank, size, comm.id, inner, cuda, options, related)
    except BaseException:
        comm.close()
        raise


def _make_related(
    origin: str, store: parallel.Store, rank: int, size: int, options: _torch_ops.Options
) -> _torch_ops.Backend:
    """Make the backend of a group that is split off another or merged from it, with its options."""
    if origin in _options:
        _options[options.group_name] = _options[origin]
    return _make(store, rank, size, options)


def _require_alike(name: str, options: BackendOptions, gather: Gather) -> None:
    """Raise on every rank if ranks would compress differently.

    They could wait for each other: some by the hook of DistributedDataParallel, others without.
    """
    require_same(
        f"the backend cgx, group '{name}'",
        asdict(options.config) | {"compress": options.compress, "auto_bits": options.auto_bits},
        gather,
        "Give all ranks the same BackendOptions and the same variables CGX_*; mpirun passes a "
        "variable on to other hosts if it is named: mpirun -x CGX_COMPRESSION_QUANTIZATION_BITS",
        error=dist.DistBackendError,
    )


def _inner(
    store: parallel.Store, rank: int, size: int, options: _torch_ops.Options
) -> dict[str, Any]:
    """Make what moves everything but the core's allreduces, by kind of device."""
    timeout = options._timeout
    gloo = dist.ProcessGroupGloo(parallel.PrefixStore("gloo", store), rank, size, timeout=timeout)
    inner: dict[str, Any] = {"cpu": gloo}
    if torch.cuda.is_available() and dist.is_nccl_available():
        nccl_options = dist.ProcessGroupNCCL.Options()
        nccl_options._timeout = timeout
        nccl_store = parallel.PrefixStore("nccl", store)
        inner["cuda"] = dist.ProcessGroupNCCL(nccl_store, rank, size, nccl_options)
    for backend in inner.values():
        backend.options.group_name = options.group_name
        backend.options.global_ranks_in_group = options.global_ranks_in_group
    return inner
