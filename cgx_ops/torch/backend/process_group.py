"""The torch.distributed backend "cgx".

cgx_ops runs every allreduce (sum, avg, min, max, product) of float32, float16 and bfloat16 tensors.
CUDA tensors need a build with CUDA. It also runs all_to_all_single, of CUDA tensors only inside
`compressed()`, and there send and recv of CPU tensors. An inner gloo or NCCL backend runs all other
collectives. The communicator of a group has the group's name:
`cgx_ops.Communicator.find(group.group_name)`.

An allreduce is compressed only if all of the following hold; otherwise it is exact:

- The Config has fewer than 32 bits: that of the `compressed()` block, else the group's
  (`CGX_COMPRESSION_QUANTIZATION_BITS` or BackendOptions).
- It is a sum or an average of at least max(16, minimal_size) elements.
- It synchronizes gradients, it is inside a `compressed()` block, or the group has compress="all".
- It is not inside an `uncompressed()` block.

An allreduce synchronizes gradients if it starts while autograd accumulates the gradient of a leaf,
as in DDP's reducer and in hooks on parameters. It also does if it starts in the callbacks at the
end of backward, as in DDP with static_graph. It does not if a DistributedDataParallel over the
group has a communication hook of the user's. The callbacks of an allreduce's future count as the
place where it was started.

So SyncBatchNorm statistics, softmax over ranks, metrics and tensor parallelism stay exact. The
logger "cgx_ops.torch.backend" logs each decision and its reason at level DEBUG.
"""

import contextlib
import datetime
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist

from cgx_ops import Communicator, Config, _torch_ops
from cgx_ops._core import environment, library
from cgx_ops._core.tables import EXACT_BITS
from cgx_ops.autotune import require_choice, verdict_of
from cgx_ops.config import check_config
from cgx_ops.errors import InvalidArgument, checked_seed
from cgx_ops.torch._compat import parallel
from cgx_ops.torch.backend import make
from cgx_ops.torch.backend.groups import NAME, is_ours
from cgx_ops.torch.graph.work import devices

_log = logging.getLogger(__name__)
# The options of the default group, which its sub-groups inherit.
_world_options: "BackendOptions | None" = None
# Whether the default group may lose ranks and continue, and so all other groups.
_world_elastic = False
# By name; a group that still exists after another one took its name is not listed.
_groups: "weakref.WeakValueDictionary[str, _Group]" = weakref.WeakValueDictionary()
_AUTOMATIC = {
    "gradients": _torch_ops.Automatic.GRADIENTS,
    "all": _torch_ops.Automatic.EVERYTHING,
}
# The current scope of each thread, as last passed to _torch_ops.exchange_scope().
_thread = threading.local()


@dataclass(frozen=True)
class BackendOptions:
    """Options of a process group of the backend "cgx": what it compresses, and how.

    Pass it as `pg_options` to `init_process_group` or `new_group`. Without pg_options a new group
    inherits the options of the default group, and the default group has `BackendOptions()`.

    Args:
        config: compressor, bits and the other settings. Default: `Config.from_env()`, which is
            exact unless `CGX_*` variables set bits or a compressor.
        compress: "gradients" (default) compresses only allreduces that synchronize gradients; "all"
            compresses every sum and average of floats, as CGX does.
        seed: seed of random rounding, 0 or more; the same on all ranks.
        transport: "SHM", "MPI", "TCP", "NCCL" (messages between GPUs) or "AUTO", the best one that
            connects the ranks. None: the variable COMMUNICATOR_TYPE, else "AUTO". Groups that are
            split off ignore it.
        auto_bits: choose the bits from the size of each message (`cgx_ops.bits_for`) instead of
            `config.bits`. Creating the group then measures for up to a second; groups that are
            split off reuse the result. None: the variable CGX_AUTO_BITS if `config` is
            `Config.from_env()`, else False.

    Each argument is also an attribute.

    Raises:
        InvalidArgument: an argument is out of range or has the wrong type, or `auto_bits` cannot
            choose for this config.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from cgx_ops import Config
        >>> from cgx_ops.torch import BackendOptions
        >>> options = BackendOptions(Config(bits=4))
        >>> dist.init_process_group(
        ...     "cgx", pg_options=options, store=dist.HashStore(), rank=0, world_size=1
        ... )  # under mpirun or torchrun: init_process_group("cgx", pg_options=options)
        >>> dist.get_backend()
        'cgx'
        >>> dist.destroy_process_group()
    """

    config: Config = field(default_factory=Config.from_env)
    compress: Literal["gradients", "all"] = "gradients"
    seed: int = 0
    transport: Literal["AUTO", "SHM", "MPI", "TCP", "NCCL"] | None = None
    auto_bits: bool | None = None
    _timeout: ClassVar[None] = None  # read by init_device_mesh; None: the group's default

    def __post_init__(self) -> None:
        if not isinstance(self.config, Config):
            raise InvalidArgument(f"BackendOptions.config is {self.config!r}; it must be a Config")
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
    """Compress all_reduce, all_to_all_single, send and recv that this thread starts inside.

    For all_reduce this applies to sums and averages only. Reduce-scatters and all-gathers of
    torch.distributed stay exact: `cgx_ops.torch.reduce_scatter`, `all_gather` and `fsdp.compress`
    compress them.

    Both ranks of a message must be inside; else both raise MismatchError. The block applies to the
    calling thread only. On the CPU, backward runs hooks on the thread that called it, so they are
    inside. For a CUDA model, backward runs hooks on an autograd thread, which is outside.

    Args:
        config: compressor, bits and the other settings. None: those of the group's BackendOptions.
        seed: seed of random rounding, used together with `config`. DDP communication hooks use the
            seed of their state.

    Yields:
        Nothing.

    Raises:
        TypeError: `config` is not a Config.
        InvalidArgument: `seed` is out of range.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from cgx_ops import Config
        >>> from cgx_ops.torch import compressed
        >>> dist.init_process_group("cgx", store=dist.HashStore(), rank=0, world_size=1)
        >>> x = torch.ones(1000)
        >>> with compressed(Config(bits=8)):
        ...     dist.all_reduce(x)
        >>> dist.destroy_process_group()
    """
    check_config(config)
    compression = None if config is None else _compression(config, checked_seed(seed))
    with _scope(_torch_ops.Scope(_torch_ops.ScopeKind.COMPRESSED, compression), config):
        yield


@contextlib.contextmanager
def uncompressed() -> Iterator[None]:
    """Send everything that this thread starts inside the block exact, including gradients.

    Yields:
        Nothing.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from cgx_ops.torch import uncompressed
        >>> dist.init_process_group("cgx", store=dist.HashStore(), rank=0, world_size=1)
        >>> loss = torch.tensor([0.25])
        >>> with uncompressed():
        ...     dist.all_reduce(loss)
        >>> loss
        tensor([0.2500])
        >>> dist.destroy_process_group()
    """
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
    """Return this thread's innermost compressed() or uncompressed() block.

    Returns:
        The Config given to compressed(), "uncompressed", or None: no block, or compressed() without
        a config.
    """
    return getattr(_thread, "scope", None)


class _Group:
    """The options of a group. Its backend owns it, because it keeps `related`.

    Attributes:
        options: as the user gave them; groups that are split off have those of their origin.
        native: the binding's.
    """

    def __init__(self, options: BackendOptions, native: _torch_ops.Options) -> None:
        self.options, self.native = options, native
        _groups[native.group_name] = self

    def related(
        self, store: parallel.Store, rank: int, size: int, options: _torch_ops.Options
    ) -> _torch_ops.Backend:
        """Make the backend of a group that is split off or merged from this one."""
        related = _Group(self.options, options).related
        return make.connected(store, rank, size, options, related, elastic=_world_elastic)


def options_of(group: dist.ProcessGroup) -> BackendOptions | None:
    """Return the options of a group over the backend "cgx"; None for any other group."""
    if not is_ours(group):
        return None
    return _groups[group.group_name].options


def leave_gradients_to_hooks(group: dist.ProcessGroup) -> None:
    """Stop a group from compressing gradients automatically; compress="all" is unaffected.

    For groups whose DDP model has a communication hook of the user's: it decides itself how
    gradients are sent. It may run on several threads, because torch runs a future's callbacks
    wherever the future is completed.
    """
    options = _groups[group.group_name].native
    if options.automatic == _torch_ops.Automatic.GRADIENTS:
        options.automatic = _torch_ops.Automatic.NOTHING


def register(prepare: Callable[[], object]) -> None:
    """Register the backend with torch.distributed. Call once per process.

    Args:
        prepare: called once, before the first group is created.
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
    """Return the binding's form of a Config."""
    return _torch_ops.Compression(str(config), seed)


def _by_size(config: Config, seed: int, communicator: Communicator) -> _torch_ops.Compression:
    """Return the binding's form of auto_bits in a group. Collective: it measures."""
    exact = config.with_own(bits=EXACT_BITS)
    larger = [
        (numel, element_bytes, _compression(config.with_own(bits=bits), seed))
        for element_bytes, thresholds in verdict_of(communicator, config).larger.items()
        for numel, bits in thresholds
    ]
    return _torch_ops.Compression(str(exact), seed, larger)


def _create(asked: Any, pg_options: Any) -> _torch_ops.Backend:
    """Create the backend of a group; called on every rank of the group."""
    global _world_options, _world_elastic
    default = not asked.global_ranks_in_group
    if pg_options is None and not default and _default_group_is_ours():
        pg_options = _world_options
    if pg_options is None:
        pg_options = BackendOptions()
    if not isinstance(pg_options, BackendOptions):
        raise TypeError(
            f"pg_options is {type(pg_options).__name__}; with the backend cgx it must be "
            "cgx_ops.torch.BackendOptions"
        )
    if default:
        _world_options, _world_elastic = pg_options, False
    compresses = pg_options.config.bits != EXACT_BITS
    if default and compresses and torch.cuda.is_available() and "cuda" not in devices():
        _log.warning(
            "cgx_ops was built without CUDA: NCCL sends allreduces of CUDA tensors uncompressed. "
            "To compress them, rebuild cgx_ops with nvcc on PATH or in CUDA_HOME"
        )
    if pg_options.auto_bits and torch.cuda.is_available():
        _log.warning(
            "auto_bits is measured with CPU tensors only: allreduces of CUDA tensors are sent "
            "exact. To compress them, leave auto_bits out and set Config(bits=...)"
        )
    options = native_options(pg_options, asked.group_id, asked.timeout)
    options.global_ranks_in_group = asked.global_ranks_in_group
    if getattr(asked, "enable_reconfigure", False):  # from torch 2.14 on
        group, chosen = _Group(pg_options, options), _chosen(pg_options, options)
        _world_elastic = _world_elastic or default
        return make.unconnected(asked.store, asked.group_rank, options, group.related, chosen)
    return make_backend(
        asked.store, asked.group_rank, asked.group_size, options, pg_options, elastic=_world_elastic
    )


def native_options(
    chosen: BackendOptions, name: str, timeout: datetime.timedelta
) -> _torch_ops.Options:
    """Return the binding's options of a new group, which is exact at first with auto_bits."""
    config = chosen.config.with_own(bits=EXACT_BITS) if chosen.auto_bits else chosen.config
    automatic = _AUTOMATIC[chosen.compress]
    options: Any = _torch_ops.Options(_compression(config, chosen.seed), automatic, timeout)
    options.group_name = name
    return options


def make_backend(
    store: parallel.Store,
    rank: int,
    size: int,
    options: _torch_ops.Options,
    chosen: BackendOptions,
    noise_rank: int | None = None,
    elastic: bool = False,
) -> _torch_ops.Backend:
    """Create the backend of a group. Collective over its ranks.

    Args:
        store: the group's store.
        rank: this rank in the group.
        size: number of ranks.
        options: the binding's options, from native_options().
        chosen: the options that they are made from; ranks compare them.
        noise_rank: as in Communicator.create; None: the rank in the job.
        elastic: as in Communicator.create.
    """
    return make.connected(
        store, rank, size, options, _Group(chosen, options).related, _chosen(chosen, options),
        noise_rank=noise_rank, elastic=elastic,
    )  # fmt: skip


def _chosen(chosen: BackendOptions, options: _torch_ops.Options) -> make.Chosen:
    return make.Chosen(
        compared={"cgx_ops": library.version()}
        | asdict(chosen.config)
        | {"compress": chosen.compress, "auto_bits": chosen.auto_bits, "seed": chosen.seed},
        transport=chosen.transport,
        measure=functools.partial(_measure, chosen, options) if chosen.auto_bits else None,
    )


def _measure(chosen: BackendOptions, options: _torch_ops.Options) -> None:
    """Set the bits by size of a group with auto_bits. Collective."""
    communicator = Communicator.find(options.group_name)
    if communicator.size > 1:
        options.set_compression(_by_size(chosen.config, chosen.seed, communicator))


def _default_group_is_ours() -> bool:
    return dist.is_initialized() and NAME in str(dist.get_backend_config())
