"""Rank program: a group of the backend "cgx" that changes its members, from torch 2.14 on.

    RANK=... WORLD_SIZE=5 run_torch_reconfigure.py FOLDER [RECONFIGURATIONS | CHECK...]

The processes share a FileStore in FOLDER. They run the checks below in turn, or those with the
given names. Ranks 2, 3 and 4 are killed in the last one. With RECONFIGURATIONS they only
reconfigure that often, and print what grew.
"""

import contextlib
import datetime
import hashlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed
from chaos.resources import grown, used
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import cgx_ops
from cgx_ops import Config, communicator
from cgx_ops._core import library
from cgx_ops.planner import AdaptiveBits
from cgx_ops.torch import BackendOptions, all_gather, ddp
from cgx_ops.torch.ddp.deep_gradient import hosts

dist: Any = distributed  # torch 2.13 has no annotations of the functions used here
FOLDER = sys.argv[1]
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LIMIT = datetime.timedelta(seconds=60)
BRIEF = datetime.timedelta(seconds=2)
SOON = 10.0  # seconds: an immediate error, on a busy machine
UUIDS = iter(range(1, 2**31))
CPU = torch.device("cpu")
SOAKS = "".join(sys.argv[2:]).isdigit()


def open_store() -> Any:
    """Return the store of all processes."""
    if not SOAKS:  # it outlives every process, but each of them reads it from its beginning
        return dist.FileStore(f"{FOLDER}/store", SIZE)
    address = Path(FOLDER, "address")
    if RANK == 0:
        served = dist.TCPStore("127.0.0.1", 0, SIZE, is_master=True, wait_for_workers=False)
        address.with_suffix(".new").write_text(str(served.port))
        address.with_suffix(".new").rename(address)
        return served
    while not address.exists():
        time.sleep(0.1)
    return dist.TCPStore("127.0.0.1", int(address.read_text()), SIZE, is_master=False)


store = open_store()


def backend() -> Any:
    return dist.get_backend_impl(dist.group.WORLD, CPU)


def meet(what: str, ranks: Sequence[int]) -> None:
    """Wait for these processes."""
    store.set(f"{what} {RANK}", "here")
    store.wait([f"{what} {rank}" for rank in ranks], LIMIT)


def collect(what: object, ranks: Sequence[int]) -> list[str]:
    """Return the handles of these processes, each of which calls it."""
    store.set(f"handle {what} {RANK}", dist._get_reconfigure_handle())
    return [store.get(f"handle {what} {rank}").decode() for rank in ranks]


def connect(uuid: int, ranks: Sequence[int]) -> None:
    """Reconfigure the group to these processes, each of which calls it."""
    assert dist._reconfigure(uuid, collect(uuid, ranks), timeout=LIMIT).wait()


def join(*groups: Sequence[int]) -> None:
    """Reconfigure each group to these processes, in this order. Every process calls it."""
    turn = next(UUIDS)
    for number, ranks in enumerate(groups):
        if RANK not in ranks:
            continue
        connect(turn * 10 + number, ranks)
        assert (dist.get_rank(), dist.get_world_size()) == (list(ranks).index(RANK), len(ranks))


def digest() -> str:
    """Return a hash of all results of a few calls, which depend on this rank and the group only."""
    results = []
    for numel in (0, 1, 17, 511, 513, 100_007):
        values = torch.randn(numel, generator=torch.Generator().manual_seed(dist.get_rank()))
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            tensor = values.to(dtype)
            dist.all_reduce(tensor)
            results.append(tensor.float())
    gathered = [torch.empty(2) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, torch.tensor([1.0, dist.get_rank()]))  # by the inner gloo
    results += gathered
    return hashlib.sha256(torch.cat(results).numpy().tobytes()).hexdigest()


@contextlib.contextmanager
def fails(*texts: str, within: float = SOON) -> Any:
    """Check that the block raises a torch error with these texts, in time."""
    begin = time.monotonic()
    try:
        yield
    except (RuntimeError, ValueError) as error:
        for text in texts:
            assert text in str(error), (text, str(error))
        assert time.monotonic() - begin < within, time.monotonic() - begin
    else:
        raise AssertionError(f"no error with {texts}")


# ---- Checks --------------------------------------------------------------------------------------


def is_not_connected_before() -> None:
    assert dist._supports_reconfigure()
    with fails("is not connected", "_reconfigure"):
        dist.all_reduce(torch.ones(4))
    with fails("is not connected"):
        dist.barrier()
    with fails("is not connected"):
        cgx_ops.init()  # as operators and hooks do
    meet("not connected", range(SIZE))


def shrinks_grows_splits_and_equals_a_fresh_group() -> None:
    join([0, 1, 2])
    fresh = digest() if RANK < 3 else ""
    join(range(SIZE))
    whole = digest()
    join([4, 2, 0])
    others = digest() if RANK in (0, 2, 4) else ""
    join([0, 1], [2, 3, 4])
    if RANK >= 2:
        others = digest()
    join(range(SIZE))
    assert digest() == whole
    join([2, 1, 0], [3], [4])
    if RANK < 3:
        assert digest() == fresh, "not as in a fresh group of three"
        store.set("fresh", fresh)
    assert others in ("", store.get("fresh").decode())


def ends_collectives_in_flight() -> None:
    join(range(SIZE))
    digest()
    handles, uuid = collect("in flight", range(SIZE)), next(UUIDS) * 10
    if RANK == 0:
        time.sleep(0.5)
    elif RANK < 3:
        with fails("it is reconfigured (uuid", "to 4 ranks"):
            dist.all_reduce(torch.ones(1000))
    elif RANK == 3:
        with fails("broadcast"):  # by the inner gloo
            dist.broadcast(torch.ones(10), 0)
    if RANK < 4:
        dist._reconfigure(uuid, handles[3::-1], timeout=LIMIT)
        assert dist.get_rank() == 3 - RANK
        digest()
    meet("ended", range(SIZE))


def ends_own_collectives_in_flight() -> None:
    """All ranks reconfigure; the works of all but rank 0 are in flight."""
    join(range(SIZE))
    fresh = digest()
    join(range(SIZE))
    works = []
    if RANK != 0:
        works.append(dist.all_reduce(torch.ones(1000), async_op=True))
        works.append(dist.broadcast(torch.ones(10), 0, async_op=True))  # by the inner gloo
    meet("own collectives", range(SIZE))
    begin = time.monotonic()
    join(range(SIZE))
    while works:
        with fails():
            works.pop().wait()  # and release it: it keeps the connections of the old gloo open
    assert time.monotonic() - begin < SOON, time.monotonic() - begin
    assert digest() == fresh


def makes_groups_again() -> None:
    """Groups made by new_group, after changes of the default group's members.

    Ranks 3 and 4 make one group less than the others, as do new processes.
    """
    for ranks in (range(SIZE), range(3), range(SIZE)):
        join(ranks)
        if RANK not in ranks:
            continue
        group = dist.new_group()
        tensor = torch.ones(1000)
        dist.all_reduce(tensor, group=group)
        assert (tensor == len(ranks)).all()
        dist.broadcast(tensor, 0, group=group)  # by the inner gloo
        dist.destroy_process_group(group)


def makes_groups_of_equal_names_after_a_split() -> None:
    """Both parts make a group; the calls come in an order that would mix ranks of both."""
    parts = [0, 1], [2, 3], [4]
    join(*parts)
    meet("split", range(SIZE))
    time.sleep(0.5 * (0, 3, 1, 2, 0)[RANK])
    for name in (None, "gloo"):
        group = dist.new_group(backend=name)
        tensor = torch.full((1000,), float(RANK))
        dist.all_reduce(tensor, group=group)
        assert (tensor == sum(next(part for part in parts if RANK in part))).all(), tensor[0]
        dist.destroy_process_group(group)


def ends_gloo_calls_of_destroyed_groups() -> None:
    """Also while the program keeps a group, as a DeviceMesh does."""
    join(range(SIZE))
    kept = [dist.new_group(timeout=LIMIT) for _ in range(2)]
    end = [dist.destroy_process_group, lambda group: group._get_backend(CPU).abort()]
    for turn, (group, leave) in enumerate(zip(kept, end, strict=True)):
        dist.all_reduce(torch.ones(1000), group=group)
        meet(f"whole {turn}", range(SIZE))
        if RANK == 0:
            time.sleep(0.3)
            leave(group)
            with fails("destroyed on this rank"):
                dist.barrier(group)
        else:
            with fails("broadcast"):
                dist.broadcast(torch.ones(10), 0, group=group)
            leave(group)
        meet(f"left {turn}", range(SIZE))


def torch_has_the_new_ranks() -> None:
    join(range(SIZE))
    for ranks in ([0, 1, 2], [4, 3, 2, 1, 0]):
        join(ranks)
        if RANK not in ranks:
            continue
        numbers = [*range(len(ranks))]
        assert dist.get_process_group_ranks(dist.group.WORLD) == numbers
        assert DeviceMesh.from_group(dist.group.WORLD, "cpu").mesh.tolist() == numbers
        state = ddp.QuantizedAllreduceState(dist.new_group(), config=Config(bits=4))
        layer = torch.nn.Linear(64, 64, bias=False)
        model = DistributedDataParallel(layer)
        model.register_comm_hook(state, ddp.quantized_allreduce_hook)
        (model(torch.ones(1, 64)).sum() * (RANK + 1)).backward()
        mean = sum(rank + 1 for rank in ranks) / len(ranks)
        assert layer.weight.grad is not None and (layer.weight.grad == mean).all()


def ends_averages_between_hosts() -> None:
    """Deep Gradient Compression's communicators: ranks of a host, first ranks of all hosts."""
    os.environ["CGX_HOST_ID"] = "aabbb"[RANK]
    join(range(SIZE))
    layer, state = torch.nn.Linear(64, 64), ddp.DeepGradientState(density=0.1)

    def made() -> DistributedDataParallel:
        model = DistributedDataParallel(layer)
        model.register_comm_hook(state, ddp.deep_gradient_hook)
        return model

    model = made()
    for _ in range(2):  # in the second step DDP makes its last collectives of gloo
        model(torch.ones(1, 64)).sum().backward()
    parts = hosts.hosts_of(cgx_ops.init())
    assert parts is not None and parts.local.size == (2 if RANK < 2 else 3)
    handles, uuid = collect("between hosts", range(SIZE)), next(UUIDS) * 10
    if RANK == 0:
        time.sleep(0.5)
    else:
        with fails("the members of its process group change"):
            model(torch.ones(1, 64)).sum().backward()
    dist._reconfigure(uuid, handles, timeout=LIMIT)
    assert parts.local.closed
    made()(torch.ones(1, 64)).sum().backward()
    del os.environ["CGX_HOST_ID"]


def hooks_follow_a_gloo_group() -> None:
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo", rank=RANK, world_size=SIZE, store=store, timeout=LIMIT, enable_reconfigure=True
    )
    hooks_follow_the_members()
    dist.destroy_process_group()
    start()


def recovers_after_abort_and_timeout() -> None:
    join(range(SIZE))
    digest()
    backend().abort()
    assert str(backend().get_error()) == "ErrorType.SUCCESS"
    with fails("is not connected"):
        dist.all_reduce(torch.ones(4))
    join(range(SIZE))
    meet("after abort", range(SIZE))
    if RANK != 1:  # rank 1 is late
        backend().set_timeout(datetime.timedelta(seconds=1))
        with fails("rank 1 has not started it", within=1 + SOON):
            dist.all_reduce(torch.ones(4))
        backend().set_timeout(LIMIT)
    join([0, 2, 3, 4])
    if RANK != 1:
        digest()
    join(range(SIZE))
    digest()


def hooks_follow_the_members() -> None:
    """Averages of DDP hooks, with states that store something about the ranks.

    One state is loaded, with residuals of a rank that then changes.
    """
    feedback = Config(bits=4, rounding="nearest", error_feedback=True)
    loaded = ddp.QuantizedAllreduceState(config=feedback)
    states = [
        loaded,
        ddp.QuantizedAllreduceState(config=Config(bits=4)),
        ddp.QuantizedAllreduceState(config=Config(bits=4), carrier="c10d"),
        ddp.QuantizedAllreduceState(config=Config(bits=4), adaptive=AdaptiveBits()),
    ]
    counters = len(communicator._calls)
    for groups in ([range(SIZE)], [[0, 1, 2], [3], [4]], [range(SIZE)], [[4, 2, 0], [3, 1]]):
        join(*groups)
        mine = next(each for each in groups if RANK in each)
        for state in states:
            layer = torch.nn.Linear(64, 64, bias=False)
            model = DistributedDataParallel(layer)
            model.register_comm_hook(state, ddp.quantized_allreduce_hook)
            for _ in range(3):
                layer.weight.grad = None
                (model(torch.ones(1, 64)).sum() * (RANK + 1)).backward()
                assert layer.weight.grad is not None
                mean = sum(rank + 1 for rank in mine) / len(mine)
                assert (layer.weight.grad == mean).all(), (state.carrier, layer.weight.grad, mean)
        loaded.load_state_dict(loaded.state_dict())
    assert len(communicator._calls) <= counters + 1, "counters of old communicators"


def compiled_sizes_do_not_change() -> None:
    """A graph for another number of ranks raises; it would write beyond its output."""

    @torch.compile(backend="aot_eager")
    def gather(x: torch.Tensor) -> torch.Tensor:
        return all_gather(x, config=Config(bits=8))

    join(range(SIZE))
    assert gather(torch.ones(1024)).shape == (SIZE * 1024,)
    join([0, 1, 2], [3, 4])
    with fails("members have changed"):
        gather(torch.ones(1024))
    torch._dynamo.reset()
    assert gather(torch.ones(1024)).shape == (dist.get_world_size() * 1024,)


def an_abort_of_another_thread_ends_only_the_old_group() -> None:
    join(range(SIZE))
    digest()
    aborting = threading.Thread(target=backend().abort)
    aborting.start()
    with contextlib.suppress(RuntimeError):  # the abort may come while the group connects, or last
        join(range(SIZE))
        aborting.join()
        digest()
    aborting.join()
    join(range(SIZE))
    digest()


def refuses_bad_input() -> None:
    join(range(SIZE))
    before = digest()
    stale = dist._get_reconfigure_handle()
    join(range(SIZE))
    with fails("ended with an earlier reconfiguration"):
        dist._reconfigure(next(UUIDS) * 10, [stale], timeout=LIMIT)
    assert digest() == before, "a refused call ended the group"
    uuid = next(UUIDS) * 10
    other = dist._get_reconfigure_handle()
    store.set(f"stale {RANK}", stale if RANK == 2 else other)
    listed = [store.get(f"stale {rank}").decode() for rank in range(SIZE)]
    with fails("ended with an earlier reconfiguration"):  # on every rank
        dist._reconfigure(uuid, listed, timeout=LIMIT)
    with fails("already used"):
        dist._reconfigure(20, [dist._get_reconfigure_handle()], timeout=LIMIT)
    join(range(SIZE))
    assert digest() == before


def refuses_another_config() -> None:
    """A newcomer with other options; each process has another group for each."""
    ours = BackendOptions(Config(bits=4), compress="all", seed=3)
    for text, theirs in (
        ("rank 0 has bits 4, rank 3 has 8", replace(ours, config=Config(bits=8))),
        ("rank 0 has seed 3, rank 3 has 5", replace(ours, seed=5)),
    ):
        dist.destroy_process_group()
        start(theirs if RANK == 3 else ours)
        with fails(text, "BackendOptions"):
            join(range(SIZE))
    dist.destroy_process_group()
    start()
    join(range(SIZE))
    digest()


def refuses_another_version() -> None:
    """A newcomer with another version of cgx_ops: the others continue without it."""
    join([0, 1, 2, 4], [3])
    before, version = digest(), library.version
    dist.destroy_process_group()
    if RANK == 3:
        setattr(library, "version", lambda: "99.1")  # noqa: B010
    start()
    with fails(f"rank 0 has cgx_ops {version()}, rank 3 has 99.1"):
        join(range(SIZE))
    join([0, 1, 2, 4], [3])
    assert digest() == before
    dist.destroy_process_group()
    setattr(library, "version", version)  # noqa: B010
    start()


def survives_kills() -> None:
    """Rank 4 is killed while all reduce; rank 3, then rank 2, while all reconfigure."""
    join([0, 1])
    fresh = digest() if RANK < 2 else ""
    join(range(SIZE))
    digest()
    meet("kill", range(SIZE))
    if RANK == 4:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    with fails("rank 4"):
        while True:
            dist.all_reduce(torch.ones(300_000))
    for victim, delay in ((3, 0.005), (2, 0.02)):
        uuid = next(UUIDS) * 10
        handles = collect(uuid, range(victim + 1))
        if victim == RANK:
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        # gloo tries to connect four times.
        with fails(within=10 * BRIEF.total_seconds() + SOON):
            dist._reconfigure(uuid, handles, timeout=BRIEF)
            while True:
                dist.all_reduce(torch.ones(300_000))
    join([0, 1])
    assert digest() == fresh


CHECKS: tuple[Callable[[], None], ...] = (
    is_not_connected_before,
    shrinks_grows_splits_and_equals_a_fresh_group,
    ends_collectives_in_flight,
    ends_own_collectives_in_flight,
    recovers_after_abort_and_timeout,
    hooks_follow_the_members,
    hooks_follow_a_gloo_group,
    torch_has_the_new_ranks,
    ends_gloo_calls_of_destroyed_groups,
    ends_averages_between_hosts,
    compiled_sizes_do_not_change,
    an_abort_of_another_thread_ends_only_the_old_group,
    refuses_bad_input,
    refuses_another_config,
    makes_groups_of_equal_names_after_a_split,
    makes_groups_again,
    refuses_another_version,
    survives_kills,
)


# ---- The program ---------------------------------------------------------------------------------


def start(options: BackendOptions | None = None) -> None:
    default = BackendOptions(Config(bits=4, rounding="stochastic"), compress="all", seed=3)
    dist.init_process_group(
        "cgx", rank=RANK, world_size=SIZE, store=store, timeout=LIMIT, enable_reconfigure=True,
        pg_options=options or default,
    )  # fmt: skip


def soak(reconfigurations: int) -> None:
    """Reconfigure often, to all ranks and to all but the last one in turn, with a DDP hook."""
    before: dict[str, int] = {}
    after: dict[str, int] = {}
    layer = torch.nn.Linear(64, 64)
    state = ddp.QuantizedAllreduceState(config=Config(bits=2, compressor="levels"))
    for turn in range(reconfigurations):
        join(range(SIZE if turn % 2 == 0 else SIZE - 1))
        if turn % 2 == 0 or RANK < SIZE - 1:
            dist.all_reduce(torch.ones(1000))
            model = DistributedDataParallel(layer)
            model.register_comm_hook(state, ddp.quantized_allreduce_hook)
            model(torch.ones(1, 64)).sum().backward()
            del model
        if turn >= reconfigurations // 4 and turn % 2 == 0 and turn % 50 == 0:
            time.sleep(0.1)  # the old gloo ends on another thread
            after = used()
            before = before or after
    meet("soaked", range(SIZE))
    changes = ", ".join(f"{name} {before[name]} to {after[name]}" for name in after)
    print(
        f"rank {RANK}: {reconfigurations} reconfigurations; "
        f"growth: {grown(before, after) or 'none'}; {changes}; "
        f"{store.num_keys()} keys in the store",
        flush=True,
    )


def main() -> None:
    start()
    if SOAKS:
        soak(int(sys.argv[2]))
    else:
        for check in CHECKS:
            if sys.argv[2:] and check.__name__ not in sys.argv[2:]:
                continue
            begin = time.monotonic()
            check()
            print(f"{check.__name__}: ok, {time.monotonic() - begin:.1f} s", flush=True)
    dist.destroy_process_group()
    print("OK", flush=True)


if __name__ == "__main__":
    main()
