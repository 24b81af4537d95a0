"""cgx_ops.torch.graph.work.start: Works and their futures; ranks are threads of this process."""

import pickle
import threading
import time
from typing import Any

import pytest
import reference
import torch
import torch.distributed as dist
from support import launch
from support import torch_cases as tc

import cgx_ops
from cgx_ops import Communicator, Config, InvalidArgument, Segment, Unsupported
from cgx_ops.torch.backend import errors
from cgx_ops.torch.graph.work import start

NEAREST = Config(bits=4, rounding="nearest", algorithm="sra")


def test_each_verb_equals_the_oracle() -> None:
    segments = [
        Segment(0, 500, NEAREST.with_own(bits=2)),
        Segment(500, 1500, NEAREST.with_own(bucket_size=64)),
    ]
    n = 3

    def rank_program(rank: int, comm: Communicator) -> list[torch.Tensor]:
        x = tc.values(rank, 2000)
        whole = tc.values(rank, n * 2000)
        outputs = [x.clone(), torch.empty(2000), torch.empty(n * 2000)]
        inputs = [outputs[0], whole, x]
        works = [
            start(comm, verb, source, output, NEAREST, segments=segments)
            for verb, source, output in zip(
                ("allreduce", "reduce_scatter", "all_gather"), inputs, outputs, strict=True
            )
        ]
        for work in works:
            work.wait()
        return outputs

    ranks = launch.threads(n, rank_program)
    want = [reference.Segment(0, 500, 2, 512), reference.Segment(500, 1500, 4, 64)]
    xs = [tc.to_numpy(tc.values(rank, 2000)) for rank in range(n)]
    wholes = [tc.to_numpy(tc.values(rank, n * 2000)) for rank in range(n)]
    reduced = reference.allreduce(xs, want, algorithm="sra", rounding="nearest")
    scattered = reference.reduce_scatter(wholes, want, rounding="nearest")
    gathered = reference.all_gather(xs, want, rounding="nearest")
    for rank, outputs in enumerate(ranks):
        assert tc.same_bits(outputs[0], torch.from_numpy(reduced))
        assert tc.same_bits(outputs[1], torch.from_numpy(scattered[rank]))
        assert tc.same_bits(outputs[2], torch.from_numpy(gathered))


def test_callbacks_of_futures_may_block() -> None:
    """A callback that waits for another collective would block a thread that moves messages."""

    def rank_program(rank: int, comm: Communicator) -> None:
        x, y = torch.full((5000,), float(rank + 1)), torch.ones(100)

        def again(future: torch.futures.Future[Any]) -> torch.Tensor:
            (first,) = future.value()
            start(comm, "allreduce", y, y, Config(bits=32), name="second").wait()
            return first * y[0]

        work = start(comm, "allreduce", x, x, Config(bits=32), name="first")
        chained = work.get_future().then(again)
        assert torch.equal(chained.wait(), torch.full((5000,), 6.0))
        assert work.is_completed()
        assert work.get_future().done()
        work.wait()

    launch.threads(2, rank_program)


def test_start_returns_before_a_late_peer_calls() -> None:
    called = threading.Event()

    def rank_program(rank: int, comm: Communicator) -> None:
        x = torch.ones(1000)
        if rank == 1:
            assert called.wait(30)
        work = start(comm, "allreduce", x, x, Config(bits=32))
        if rank == 0:
            future = work.get_future()
            time.sleep(0.01)
            assert not work.is_completed()
            assert not future.done()
            called.set()
            future.wait()
        work.wait()
        assert torch.equal(x, torch.full((1000,), 2.0))

    launch.threads(2, rank_program)


def test_thousands_of_futures_race_with_waits() -> None:
    def rank_program(rank: int, comm: Communicator) -> None:
        for i in range(1000):
            x = torch.full((64,), float(rank))
            work = start(comm, "allreduce", x, x, Config(bits=32))
            future = work.get_future().then(lambda f: f.value()[0][0].item())
            if i % 2 == rank:
                work.wait()
            assert future.wait() == 1.0

    launch.threads(2, rank_program)


def test_future_is_readable_after_wait() -> None:
    def rank_program(rank: int, comm: Communicator) -> None:
        for i in range(300):
            x = torch.full((64,), float(rank))
            work = start(comm, "allreduce", x, x, Config(bits=32))
            early = work.get_future() if i % 2 else None
            work.wait()
            for future in filter(None, (early, work.get_future())):
                assert future.done()
                assert future.value()[0][0].item() == 1.0

    launch.threads(2, rank_program)


def test_dropped_work_completes_without_a_wait() -> None:
    dropped = threading.Event()

    def rank_program(rank: int, comm: Communicator) -> None:
        x = torch.full((100_000,), float(rank + 1))
        if rank == 0:
            start(comm, "allreduce", x, x, Config(bits=32))  # its Work is dropped immediately
            del x
            dropped.set()
            return
        assert dropped.wait(30), "dropping the Work waited for this rank"
        start(comm, "allreduce", x, x, Config(bits=32)).wait()
        assert torch.equal(x, torch.full((100_000,), 3.0))

    launch.threads(2, rank_program)


def test_failures_reach_wait_and_future() -> None:
    def rank_program(rank: int, comm: Communicator) -> None:
        x = torch.ones(1000 + rank)
        work = start(comm, "allreduce", x, x, Config(bits=4))
        with pytest.raises(errors.MismatchError, match="numel 1000 against 1001"):
            work.get_future().wait()
        with pytest.raises(errors.MismatchError, match="numel 1000 against 1001"):
            work.wait()

    launch.threads(2, rank_program)


@pytest.mark.parametrize(
    "kind", [cgx_ops.MismatchError, cgx_ops.DeadlineExceeded, cgx_ops.PeerFailed, cgx_ops.Closed,
             cgx_ops.SystemFailure],
)  # fmt: skip
def test_errors_belong_to_torch_and_cgx(kind: type[cgx_ops.CgxError]) -> None:
    error = errors.as_backend_error(kind("why"), "because")
    assert isinstance(error, dist.DistBackendError)
    assert isinstance(error, kind)
    assert str(error) == "because"
    assert str(pickle.loads(pickle.dumps(error))) == "because"


def test_other_errors_of_the_core_are_backend_errors() -> None:
    assert type(errors.as_backend_error(cgx_ops.CgxError(), "x")) is dist.DistBackendError


def test_missing_peer_raises_a_torch_error() -> None:
    def rank_program(rank: int, comm: Communicator) -> None:
        if rank == 1:
            return
        x = torch.ones(1000)
        work = start(comm, "allreduce", x, x, Config(bits=4), timeout=0.3)
        with pytest.raises(errors.DeadlineExceeded, match="rank 1 has not started it"):
            work.wait()

    launch.threads(2, rank_program)


def test_profiler_shows_bits_and_bytes() -> None:
    def rank_program(rank: int, comm: Communicator) -> None:
        if rank == 1:
            start(comm, "allreduce", torch.ones(4096), torch.ones(4096), NEAREST).wait()
            torch.ops.cgx.quantized_allreduce(torch.ones(4096), 4, 512, "sum", comm.name)
            return
        with torch.profiler.profile(record_shapes=True) as profile:
            start(comm, "allreduce", torch.ones(4096), torch.ones(4096), NEAREST).wait()
            torch.ops.cgx.quantized_allreduce(torch.ones(4096), 4, 512, "sum", comm.name)
        # With two ranks, each sends half of its values, then the reduced other half; or, with
        # one_shot, all values. A record of 512 values is 8 + 256 bytes.
        payload = 4096 // 512 * 264
        names = [event.name for event in profile.events() or []]
        assert names.count(f"cgx:all_reduce 4 bits, 16384 -> {payload} bytes") == 2, names

    launch.threads(2, rank_program)


def test_profiler_shows_compressors() -> None:
    """Check each compressor's name; bits are shown for compressors without another name."""
    layers = [
        Segment(0, 1000, Config(compressor="topk")),
        Segment(1000, 1000, Config(compressor="half")),
        Segment(2000, 1000, Config(bits=32)),
        Segment(3000, 1096, Config(bits=8)),
    ]

    def calls(comm: Communicator) -> None:
        x = torch.ones(4096)
        start(comm, "allreduce", x, x, NEAREST, segments=layers).wait()
        torch.ops.cgx.quantized_allreduce(x, compressor="topk", group_name=comm.name)

    def rank_program(rank: int, comm: Communicator) -> None:
        if rank == 1:
            calls(comm)
            return
        with torch.profiler.profile(record_shapes=True) as profile:
            calls(comm)
        names = [event.name for event in profile.events() or []]
        for how in ("8/32 bits/half/topk", "topk"):
            assert any(name.startswith(f"cgx:all_reduce {how}, ") for name in names), names

    launch.threads(2, rank_program)


@pytest.mark.parametrize(
    ("tensors", "error", "words"),
    [
        ((torch.ones(8, dtype=torch.float64),) * 2, Unsupported, "input is torch.float64"),
        ((torch.ones(8), torch.ones(8).half()), Unsupported, "output is torch.float16"),
        ((torch.ones(8).to_sparse(),) * 2, Unsupported, "dense tensor on the CPU"),
        ((torch.ones(4, 4).t(),) * 2, InvalidArgument, "input is not contiguous"),
        ((torch.ones(8, dtype=torch.cfloat).conj().imag,) * 2, InvalidArgument, "negative view"),
        ((torch.ones(8), torch.ones(9)), InvalidArgument, "input has 8 elements, output 9"),
    ],
)
def test_bad_tensors_raise(
    tensors: tuple[torch.Tensor, torch.Tensor], error: type[Exception], words: str
) -> None:
    (comm,) = Communicator.local(1)
    with pytest.raises(error, match=words):
        start(comm, "allreduce", *tensors, NEAREST)


def test_rejected_start_draws_no_indices() -> None:
    config = Config(compressor="randk", density=0.5)

    def run(rank: int, comm: Communicator) -> torch.Tensor:
        x = tc.values(rank, 100)
        if rank == 0:
            with pytest.raises(InvalidArgument, match="residual"):
                start(comm, "allreduce", x, x, config, residuals=[torch.zeros(99)])
        start(comm, "allreduce", x, x, config).wait()
        return x

    first, second = launch.threads(2, run)
    assert tc.same_bits(first, second)


def test_program_exits_while_a_callback_runs() -> None:
    for output in launch.mpirun(2, "run_torch_exit.py", env=tc.ENVIRONMENT, timeout=100):
        assert output == "slow_callback\n"
