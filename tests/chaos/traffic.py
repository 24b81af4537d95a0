"""The traffic: a table of kinds. Each is a function that a member runs, and its calls.

Every call is a Case of collective_cases.py, so the oracle computes each result from the case, the
ranks and their hosts. A function calls member.step() before each call (a fault may occur there) and
member.step(started=True) between starting and waiting.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from support import collective_cases
from support.collective_cases import Case

from cgx_ops import Communicator, Request

if TYPE_CHECKING:
    from chaos.member import Member

# Every compressor, short and in shards, with a residual if error feedback converges.
_COMPRESSED = [
    case
    for row in collective_cases.of_compressors()
    for case in (
        Case(5003, bucket_size=100, **row),
        Case(40_000, bucket_size=512, op="avg", **row),
        Case(5003, bucket_size=100, feedback=True, **row),
    )
    if not case.feedback or collective_cases.converges(case)
]
_SMALL = (
    Case(1, 32, rounding="nearest"),
    Case(17, 4, 64, rounding="nearest"),
    Case(513, 2, 64, rounding="nearest", op="avg"),
    Case(3000, 8, 128, "float16", "nearest"),
    Case(3000, 32, dtype="bfloat16", rounding="nearest", op="max"),
    Case(5003, 4, 512, rounding="nearest", algorithm="sra"),
    Case(5003, 3, 100, rounding="nearest", algorithm="ring"),
    Case(20_000, 4, 512, "bfloat16", "nearest", op="avg", algorithm="one_shot"),
    Case(40_000, 2, 128, rounding="nearest", gather_bits=8, algorithm="sra"),
    Case(50_000, 32, rounding="nearest"),
    Case(50_000, 4, 512, rounding="nearest", algorithm="hierarchical"),
    Case(1234, 8, 100, rounding="nearest", verb="reduce_scatter"),
    Case(1234, 4, 100, rounding="nearest", verb="all_gather"),
    Case(9000, 8, rounding="nearest", verb="reduce_scatter", algorithm="hierarchical"),
    Case(9000, 4, rounding="nearest", verb="all_gather", algorithm="hierarchical"),
    Case(1234, 4, 100, rounding="nearest", verb="all_to_all", splits="uneven"),
    Case(
        8000,
        rounding="nearest",
        segments=((0, 700, 4, 512), (700, 9, 4, 512), (709, 1000, 8, 64), (2000, 5000, 32, 1)),
    ),
    *_COMPRESSED,
)
_LARGE = (
    Case(1 << 20, 4, 512, rounding="nearest", algorithm="one_shot"),
    Case(1 << 19, 4, 512, rounding="nearest", algorithm="sra"),
    Case(1 << 19, 32, rounding="nearest", algorithm="sra"),
    Case(1 << 19, 8, 512, rounding="nearest", algorithm="ring"),
    Case(1 << 19, 32, rounding="nearest", algorithm="one_shot"),
)
_EXACT = (Case(200_000, 32, rounding="nearest"), Case(200_000, 32, rounding="nearest", op="avg"))
# The cases for the bindings and for the check at the end of a round.
_PLAIN = (
    Case(100, 4, 64, rounding="nearest"),
    Case(5003, 8, 512, rounding="nearest"),
    Case(40_000, 4, 512, rounding="nearest"),
    Case(40_000, 4, 512, "bfloat16", rounding="nearest"),
)
USABLE = _PLAIN[2]
LOOPBACK = "127.0.0.1"
LARGEST = _LARGE[0]
SIZES = sorted({case.size for case in (*_SMALL, *_EXACT, *_LARGE)})


@dataclass(frozen=True)
class Kind:
    """A row of the table.

    starts: whether it has steps between starting and waiting; framework: the import that a worker
    needs; needs_store: whether the referee must serve a store.
    """

    run: Callable[[Member, random.Random], None]
    weight: float
    starts: bool = False
    framework: str = "numpy"
    needs_store: bool = False


@functools.lru_cache(maxsize=64)
def _inputs(case: Case, rank: int, size: int) -> Any:
    """Return inputs that must not change; the library gets copies."""
    made = collective_cases.inputs(case, rank, size)
    if made.nbytes <= _WATCHED:
        _watched[(case, rank, size)] = made, digest(made)
    return made


_WATCHED = 1 << 16  # bytes of an array, at most
_watched: dict[tuple[Case, int, int], tuple[Any, str]] = {}


def changed_inputs() -> list[str]:
    """Return the names of the arrays of this process that have changed."""
    return [
        f"{case} of rank {rank} of {size} begins with {made.ravel()[:3].tolist()}"
        for (case, rank, size), (made, right) in _watched.items()
        if digest(made) != right
    ]


def prepare(
    case: Case, comm: Communicator, *, asynchronous: bool = False, **options: Any
) -> Callable[[], Any]:
    """Return a call of the library on a fresh copy of the input."""
    options |= collective_cases.options_of(case, comm)
    function = getattr(comm, case.verb + ("_async" if asynchronous else ""))
    arguments = [_inputs(case, comm.rank, comm.size).copy()]
    residual = collective_cases.residual_of(case, comm.rank, comm.size)
    if residual is None:
        return lambda: function(arguments.pop(), **options)

    def begun_or_done() -> Any:
        given = function(arguments.pop(), residual=residual, **options)
        if asynchronous:
            return _Keeping(given, residual)
        return collective_cases.result_of(given, residual)

    return begun_or_done


@dataclass(frozen=True)
class _Keeping:
    """A call in flight with a residual, which is part of its result."""

    request: Request
    residual: Any

    def wait(self) -> Any:
        return collective_cases.result_of(self.request.wait(), self.residual)


def call(case: Case, comm: Communicator, **options: Any) -> Any:
    return prepare(case, comm, **options)()


# ---- numpy ---------------------------------------------------------------------------------------


def _in_order(member: Member, rng: random.Random) -> None:
    for case in rng.choices(_SMALL, k=6):
        member.step()
        member.attempt(case, lambda case=case: call(case, member.comm, timeout=member.timeout))


def _started(member: Member, rng: random.Random, cases: tuple[Case, ...], count: int) -> None:
    """Start some calls, then wait for them in another order."""
    chosen = [case for case in rng.choices(cases, k=count) if case.verb == "allreduce"]
    order = rng.sample(range(len(chosen)), len(chosen))
    names = [f"{number}" if rng.random() < 0.5 else "" for number in range(len(chosen))]
    starts = [
        prepare(case, member.comm, asynchronous=True, name=name, timeout=member.timeout)
        for case, name in zip(chosen, names, strict=True)
    ]
    member.step()
    requests, begins = {}, {}
    for number, start in enumerate(starts):
        begins[number] = member.clock()
        requests[number] = member.attempt(None, start)
        if number == 0:
            member.step(started=True)
    for number in order:
        member.attempt(chosen[number], requests.pop(number).wait, begin=begins[number])


def _asynchronous(member: Member, rng: random.Random) -> None:
    _started(member, rng, _SMALL, 8)


def _exact(member: Member, rng: random.Random) -> None:
    _started(member, rng, _EXACT, 6)


def _large(member: Member, rng: random.Random) -> None:
    _started(member, rng, _LARGE, 2)


def _threads(member: Member, rng: random.Random) -> None:
    """Call from three threads, each with different names."""
    plans = [rng.choices(_SMALL, k=4) for _ in range(3)]
    member.step()

    def run(number: int) -> None:
        for index, case in enumerate(plans[number]):
            name = f"thread {number} call {index}"
            if not member.attempt_on_thread(
                case, lambda case=case, name=name: call(
                    case, member.comm, name=name, timeout=member.timeout
                ),
            ):  # fmt: skip
                return

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(3)]
    for thread in threads:
        thread.start()
        member.threads.append(thread)
    member.step(started=True)
    for thread in threads:
        thread.join()
    member.stop_if_failed()


def _groups(member: Member, rng: random.Random) -> None:
    """Create groups, use them, close them."""
    for number in range(2):
        ranks = sorted(rng.sample(range(member.size), rng.randint(1, member.size)))
        split = rng.random() < 0.5
        case = rng.choice(_SMALL)
        name = f"{member.name} pass {member.passes} group {number}"
        member.step()
        color = int(member.rank in ranks)
        if not split and not color:
            continue
        member.names.append(name)
        if split:
            group = member.attempt(
                None, lambda name=name, color=color: member.comm.split(color, name=name)
            )
            ranks = [rank for rank in range(member.size) if (rank in ranks) == bool(color)]
        else:
            group = member.attempt(
                None, lambda name=name, ranks=ranks: member.comm.group(ranks, name=name)
            )
        member.step(started=True)
        member.attempt(
            case, lambda case=case, group=group: call(case, group, timeout=member.timeout),
            ranks=tuple(ranks),
        )  # fmt: skip
        member.attempt(None, group.close)


# ---- torch ---------------------------------------------------------------------------------------


def _to_torch(case: Case, rank: int, size: int) -> Any:
    import torch

    x = _inputs(case, rank, size)
    exact = torch.from_numpy(x.astype(np.float32))  # torch has no bfloat16 from numpy
    return exact.to(getattr(torch, case.dtype))


def _from_torch(case: Case, x: Any) -> Any:
    return x.float().numpy().astype(collective_cases.DTYPES[case.dtype])


def _torch_operators(member: Member, rng: random.Random) -> None:
    import torch

    operators = torch.ops.cgx
    for case in rng.choices(_PLAIN, k=4):
        x = _to_torch(case, member.rank, member.size)
        member.step()
        member.attempt(
            case,
            lambda case=case, x=x: _from_torch(case, operators.quantized_allreduce(
                x, bits=case.bits, bucket_size=case.bucket_size, op=case.op,
                group_name=member.comm.name, rounding="nearest",
            )),
        )  # fmt: skip


def _torch_backend(member: Member, rng: random.Random) -> None:
    """Make a default process group over the referee's store, reduce in flight, destroy it."""
    import torch.distributed

    dist: Any = torch.distributed
    if member.passes:  # once per round
        return
    member.step()
    options = {
        "rank": member.rank,
        "world_size": member.size,
        "timeout": datetime.timedelta(seconds=member.timeout),
    }
    cases = [dataclasses.replace(case, bits=32) for case in rng.choices(_PLAIN, k=4)]
    try:
        # Group names are numbered, on this rank only if creating one has failed before.
        dist.distributed_c10d._world.group_count = 0

        def make() -> None:
            store = dist.TCPStore(
                LOOPBACK, member.store_port, member.size, timeout=options["timeout"]
            )
            dist.init_process_group("cgx", store=store, **options)

        member.attempt(None, make, making=True)
        started = []
        for case in cases:
            x = _to_torch(case, member.rank, member.size)
            member.step()
            begin = member.clock()
            work = member.attempt(None, lambda x=x: dist.all_reduce(x, async_op=True))
            started.append((case, x, work, begin))
        member.step(started=True)
        for case, x, work, begin in started:

            def wait(case: Case = case, x: Any = x, work: Any = work) -> Any:
                work.wait()
                return _from_torch(case, x)

            member.attempt(case, wait, begin=begin)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


_COMPILE = 30.0  # seconds allowed for XLA's compilation, which waits for no other rank
# ---- JAX -----------------------------------------------------------------------------------------


def _jax(member: Member, rng: random.Random) -> None:
    import jax

    from cgx_ops.jax import allreduce_q

    for case in rng.choices(_PLAIN, k=3):
        x = jax.numpy.asarray(_inputs(case, member.rank, member.size))

        def reduce(x: Any, case: Case = case) -> Any:
            return allreduce_q(x, member.comm, bits=case.bits, bucket_size=case.bucket_size)

        member.step()
        compiled = member.attempt(
            None, lambda reduce=reduce, x=x: jax.jit(reduce).lower(x).compile(), deadline=_COMPILE
        )
        member.step()
        member.attempt(case, lambda compiled=compiled, x=x: np.asarray(compiled(x)))


KINDS: dict[str, Kind] = {
    "calls in order": Kind(_in_order, 3),
    "asynchronous": Kind(_asynchronous, 4, starts=True),
    "exact": Kind(_exact, 2, starts=True),
    "large": Kind(_large, 4, starts=True),
    "threads": Kind(_threads, 2, starts=True),
    "groups": Kind(_groups, 3, starts=True),
    "torch operators": Kind(_torch_operators, 0.6, framework="torch"),
    "torch backend": Kind(_torch_backend, 0.6, starts=True, framework="torch", needs_store=True),
    "jax": Kind(_jax, 0.6, framework="jax"),
}


@functools.cache
def expected(
    case: Case,
    hosts: tuple[int, ...] | None,
    size: int,
    members: tuple[int, ...] | None,
) -> list[str]:
    """Return the digest of the oracle's result, by rank. members: see messages.Outcome."""
    # otherwise the noise does not depend on the members
    draws = collective_cases.config_of(case).is_random
    return collective_cases.expected(case, size, hosts, members if draws else None)


def digest(result: Any) -> str:
    return collective_cases.digest(cast(Any, result))
