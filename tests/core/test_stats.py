"""Stats: exact counts and bytes, and times as far as they hold on any machine."""

import dataclasses
import math
import pickle
import subprocess
import sys
import threading
import time
from ctypes import byref

import numpy as np
import pytest
from support import launch
from support.launch import threads

import cgx_ops
from cgx_ops import Closed, Communicator, Config, DeadlineExceeded, InvalidArgument, Segment, Stats
from cgx_ops._core import library, structs

HEADER = 208  # docs/reference/control_messages.md, without name and payload
BUCKET = 4 + 4 + 512 * 4 // 8  # 4 bits: minimum, step, levels
FOUR_BITS = Config(bits=4, bucket_size=512, algorithm="sra")
COUNTS = ("collectives", "bytes_in", "bytes_plain", "bytes_sent")


def _counts(comm: Communicator) -> tuple[int, ...]:
    stats = comm.stats()
    return tuple(getattr(stats, name) for name in COUNTS)


def test_every_call_adds_exactly_its_bytes() -> None:
    buckets = 30  # of the tensor: 10 per rank
    values = np.ones(512 * buckets, np.float32)
    halves = values.astype(np.float16)
    blocks = values.reshape(3, -1)
    exact = Config(bits=32, algorithm="sra")
    one_shot = Config(bits=4, algorithm="one_shot")
    exact_shot = Config(bits=32, algorithm="one_shot")
    some = [Segment(0, 512), Segment(1024, 10)]
    size = values.nbytes
    # The call, bytes_in, bytes_plain, bytes_sent without headers. Each of 2 peers gets its 10
    # buckets, and the 10 that this rank has reduced.
    calls = [
        (lambda c: c.allreduce(values, config=FOUR_BITS), size, size * 4 // 3, 40 * BUCKET),
        (lambda c: c.allreduce(values, config=exact), size, size * 4 // 3, size * 4 // 3),
        (lambda c: c.allreduce(halves, config=FOUR_BITS), size // 2, size * 2 // 3, 40 * BUCKET),
        (lambda c: c.allreduce_async(values, config=FOUR_BITS).wait(), size, size * 4 // 3,
         40 * BUCKET),
        (lambda c: c.reduce_scatter(blocks, config=FOUR_BITS), size, size * 2 // 3, 20 * BUCKET),
        (lambda c: c.all_gather(blocks[0], FOUR_BITS), size // 3, size * 2 // 3, 20 * BUCKET),
        # Everything goes to all ranks inside the header; 10 elements are exact.
        (lambda c: c.allreduce(values, config=one_shot, segments=some), 4 * 522, 4 * 522 * 4 // 3,
         2 * (BUCKET + 4 * 10)),
        (lambda c: c.allreduce(values[:0], config=FOUR_BITS), 0, 0, 0),
        # The 7 values of all ranks are 7, not 6 divided by the ranks.
        (lambda c: c.allreduce(values[:7], config=exact_shot), 28, 28 * 4 // 3, 2 * 28),
    ]  # fmt: skip

    def run(_rank: int, comm: Communicator) -> None:
        assert _counts(comm) == (0, 0, 0, 0)
        for number, (call, *bytes_of_it) in enumerate(calls):
            before = _counts(comm)
            call(comm)
            bytes_of_it[2] += 2 * HEADER
            added = tuple(np.subtract(_counts(comm), before))
            assert added == (1, *bytes_of_it), f"call {number}"
        # The header includes the name.
        before = comm.bytes_sent
        comm.allreduce(values[:0], config=FOUR_BITS, name="eleven char")
        assert comm.bytes_sent - before == 2 * (HEADER + 11)

    threads(3, run)


def test_ratio() -> None:
    stats = Stats("a", 1, 2, "shm", 3, 1_500_000, 1_500_000, 200_000, 0.25, 1.5, 1.25, 0)
    assert stats.ratio == 7.5
    assert str(stats) == (
        "a, rank 1 of 2 (shm): 3 collectives, 1.5 MB in, 200.0 kB sent instead of 1.5 MB "
        "(ratio 7.50); agree 0.250 s, move 1.500 s, compute 1.250 s"
    )
    nothing = dataclasses.replace(stats, bytes_sent=0, bytes_plain=0)
    assert math.isnan(nothing.ratio)
    assert "1.5 MB in, 0 bytes sent; agree" in str(nothing)
    assert pickle.loads(pickle.dumps(stats)) == stats

    def run(_rank: int, comm: Communicator) -> float:
        comm.allreduce(np.ones(2**20, np.float32), config=FOUR_BITS)
        return comm.stats().ratio

    for ratio in threads(2, run):
        assert ratio == 2**22 / (2**11 * BUCKET + HEADER)


def test_times_of_successive_calls_add_up() -> None:
    values = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)

    def run(_rank: int, comm: Communicator) -> None:
        before = comm.stats()
        assert before.agree_seconds == before.move_seconds == before.compute_seconds == 0
        begin = time.monotonic()
        for _ in range(10):
            comm.allreduce(values, config=FOUR_BITS)
        passed = time.monotonic() - begin
        after = comm.stats()
        assert after.agree_seconds > 0
        assert after.move_seconds > 0
        # Intervals of one call do not overlap, and lie inside of the call.
        assert 0 < after.compute_seconds < after.agree_seconds + after.move_seconds < passed

    threads(2, run)


def test_waiting_for_a_late_rank_counts_as_agree() -> None:
    values = np.ones(100_000, np.float32)
    late = 0.2
    started = threading.Event()

    def run(rank: int, comm: Communicator) -> None:
        begin = time.monotonic()
        if rank == 0:
            request = comm.allreduce_async(values, config=FOUR_BITS)
            started.set()
            request.wait()
            assert comm.stats().agree_seconds >= late
            # No rank can compute before the headers match: only little is encoded earlier.
            assert comm.stats().compute_seconds <= time.monotonic() - begin - late
        else:
            assert started.wait(30)
            time.sleep(late)
            begin = time.monotonic()
            comm.allreduce(values, config=FOUR_BITS)
            stats = comm.stats()
            assert stats.agree_seconds + stats.move_seconds <= time.monotonic() - begin

    threads(2, run)


def test_failed_calls_count_as_sent_only() -> None:
    def run(rank: int, comm: Communicator) -> None:
        values = np.ones(1000, np.float32)
        comm.allreduce(values, config=FOUR_BITS)
        before = comm.stats()
        if rank == 0:
            with pytest.raises(DeadlineExceeded):
                comm.allreduce(values, config=FOUR_BITS, timeout=0.2)
            after = comm.stats()  # a failed communicator still returns statistics
            assert comm.closed
            assert after == dataclasses.replace(before, bytes_sent=before.bytes_sent + HEADER)

    threads(2, run)


def test_making_communicators_is_not_counted() -> None:
    def run(_rank: int, comm: Communicator) -> None:
        with comm.group([1, 0], name=f"{comm.name.split('/')[0]}-group") as child:
            child.allreduce(np.ones(5, np.float32), config=FOUR_BITS)
            assert child.stats().collectives == 1
            assert child.stats().bytes_in == 20
        assert (comm.stats().collectives, comm.stats().bytes_in) == (0, 0)
        assert comm.stats().bytes_sent > 0

    threads(2, run)


def test_one_rank_copies() -> None:
    values = np.ones(2**20, np.float32)
    with Communicator.local(1, "copies")[0] as comm:
        comm.allreduce(values, config=FOUR_BITS)
        comm.allreduce_async(values, config=FOUR_BITS).wait()
        stats = comm.stats()
        assert _counts(comm) == (2, 2 * values.nbytes, 0, 0)
        assert stats.transport == "self"
        assert stats.move_seconds > 0
        assert stats.agree_seconds == stats.compute_seconds == 0


def test_stats_lists_every_communicator_of_the_process() -> None:
    cgx_ops.init()
    ours = Communicator.local(2, "listed")
    with Communicator.local(1, "last")[0]:
        everything = cgx_ops.stats()
        names = [name for name in everything if name != "carrier"]  # created by other tests
        assert names[0] == "world"
        assert names[-3:] == ["listed/0", "listed/1", "last/0"]
        for comm in ours:
            assert everything[comm.name] == comm.stats()
            assert (everything[comm.name].rank, everything[comm.name].size) == (comm.rank, 2)
    for comm in ours:
        comm.close()
    assert not {"listed/0", "listed/1", "last/0"} & cgx_ops.stats().keys()
    with pytest.raises(Closed):
        ours[0].stats()


def test_stats_starts_nothing() -> None:
    code = "import cgx_ops; print(cgx_ops.stats()); cgx_ops.init(); print(*cgx_ops.stats())"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["no", "communicators", "world"]


def test_listing_while_others_make_and_close() -> None:
    stop = threading.Event()
    seen: set[str] = set()

    def list_them() -> None:
        while not stop.is_set():
            for name, entry in cgx_ops.stats().items():
                assert entry.name == name
                seen.add(name)

    failures: list[BaseException] = []

    def guarded() -> None:
        try:
            list_them()
        except BaseException as error:
            failures.append(error)

    watcher = threading.Thread(target=guarded)
    watcher.start()
    deadline = time.monotonic() + 20
    made = 0
    while made < 300 or (not any("made" in name for name in seen) and time.monotonic() < deadline):
        Communicator.local(1, f"made {made} " + "long name " * 40)[0].close()
        made += 1
    stop.set()
    watcher.join(20)
    assert not watcher.is_alive()
    assert not failures
    assert any(name.startswith("made") for name in seen)


def test_name_of_the_world_is_reserved() -> None:
    """Check that the first owner keeps the name; nothing replaces it while it is open."""
    cgx_ops.init()
    with pytest.raises(InvalidArgument, match="'world' exists"):
        Communicator.create(0, 1, lambda blob: [blob], "world")


def test_shorter_struct_of_an_older_caller_is_filled() -> None:
    world = cgx_ops.init()
    world.allreduce(np.ones(100, np.float32), config=FOUR_BITS)
    appended = structs.CommInfo.bytes_in.offset
    older = structs.CommInfo(bytes_in=-1, agree_ns=-2, bytes_plain=-3)
    older.struct_size = appended
    library.call("cgx_comm_info", world.id, byref(older))
    assert (older.size, older.collectives) == (1, world.collectives)
    assert (older.struct_size, older.bytes_in, older.agree_ns) == (appended, -1, -2)
    assert older.bytes_plain == -3
    for size in (0, appended - 8, structs.CommInfo().struct_size + 8):
        older.struct_size = size
        with pytest.raises(InvalidArgument, match=f"struct_size is {size}.*different versions"):
            library.call("cgx_comm_info", world.id, byref(older))


def test_ranks_of_a_job() -> None:
    for output in launch.mpirun(2, "run_stats.py", timeout=60):
        assert "world, rank " in output
