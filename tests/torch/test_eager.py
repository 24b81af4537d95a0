"""torch.ops.cgx without a compiler: values, gradients, memory, randomness; ranks are threads."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import reference
import torch
from support import launch
from support import torch_cases as tc
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

from cgx_ops import Communicator, Config

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SIZES = [0, 1, 15, 16, 513, 5000]


def kernel(x: torch.Tensor, seed: int, group: str, **options: Any) -> torch.Tensor:
    """Call the operator below quantized_allreduce with a given seed."""
    op, depth = options.pop("op", "sum"), options.pop("depth", 0)
    call = tc.packed(Config(**{"algorithm": "sra", **options}), op, depth)
    return torch.ops.cgx.quantized_all_reduce(x, torch.tensor(seed), call, group)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("algorithm", ["one_shot", "sra", "ring"])
@pytest.mark.parametrize("n", [1, 3])
def test_nearest_equals_the_oracle(
    dtype: torch.dtype, algorithm: reference.Algorithm, n: int
) -> None:
    cases = [(size, bits, op) for size in SIZES for bits in (2, 4, 8, 32) for op in ("sum", "avg")]

    def rank_program(rank: int, comm: Communicator) -> list[torch.Tensor]:
        return [
            tc.allreduce(
                tc.values(rank, size, dtype),
                bits,
                64,
                op,
                comm.name,
                rounding="nearest",
                config=str(Config(algorithm=algorithm)),
            )
            for size, bits, op in cases
        ]

    results = launch.threads(n, rank_program)
    for i, (size, bits, op) in enumerate(cases):
        want = tc.expected(
            [tc.values(rank, size, dtype) for rank in range(n)],
            bits,
            64,
            op=op,
            algorithm=algorithm,
        )
        for rank in range(n):
            assert tc.same_bits(results[rank][i], want), (rank, size, bits, op)


def test_each_option_reaches_the_core() -> None:
    options: list[dict[str, Any]] = [
        {"gather_bits": 8},
        {"skip_incomplete_buckets": True},
        {"minimal_size": 1001},
        {"minimal_size": 1000},
        {"bucket_size": 7},
    ]

    def rank_program(rank: int, comm: Communicator) -> list[torch.Tensor]:
        x = tc.values(rank, 1000)
        return [
            tc.allreduce(
                x,
                group_name=comm.name,
                config=str(Config(rounding="nearest", algorithm="sra", **o)),
            )
            for o in options
        ]

    results = launch.threads(2, rank_program)
    inputs = [tc.values(rank, 1000) for rank in range(2)]
    for i, o in enumerate(options):
        assert tc.same_bits(results[0][i], tc.expected(inputs, **o)), o
        assert tc.same_bits(results[1][i], results[0][i]), o


@pytest.mark.parametrize("op", ["min", "max", "product"])
def test_exact_only_ops(op: str) -> None:
    results = launch.threads(
        3, lambda rank, comm: tc.allreduce(tc.values(rank, 100), 32, op=op, group_name=comm.name)
    )
    want = tc.expected([tc.values(rank, 100) for rank in range(3)], 32, op=op)
    assert all(tc.same_bits(result, want) for result in results)


def test_stochastic_follows_the_seed_of_each_rank() -> None:
    seeds = [-5, 2**62]
    results = launch.threads(
        2, lambda rank, comm: kernel(tc.values(rank, 3000), seeds[rank], comm.name)
    )
    want = tc.expected(
        [tc.values(rank, 3000) for rank in range(2)], rounding="stochastic", seeds=seeds
    )
    assert tc.same_bits(results[0], want)
    assert tc.same_bits(results[1], want)


def test_any_layout() -> None:
    def rank_program(rank: int, comm: Communicator) -> list[torch.Tensor]:
        x = tc.values(rank, 600).reshape(20, 30)
        views = [x.t(), x[::2, 1:], x[3, 4], x.expand(2, 20, 30), x.to_mkldnn().to_dense()]
        return [tc.allreduce(v, group_name=comm.name, rounding="nearest") for v in views]

    for got, again in zip(*launch.threads(2, rank_program), strict=True):
        assert tc.same_bits(got, again)
        assert got.is_contiguous()
    x = [tc.values(rank, 600).reshape(20, 30) for rank in range(2)]
    got = launch.threads(2, rank_program)[0]
    assert got[2].shape == ()
    assert tc.same_bits(got[2], x[0][3, 4] + x[1][3, 4])
    transposed = [v.t().contiguous() for v in x]
    assert tc.same_bits(got[0], tc.expected(transposed, algorithm="auto"))


# ---- In place ------------------------------------------------------------------------------------


def test_in_place_reduces_in_x() -> None:
    def rank_program(rank: int, comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        x = tc.values(rank, 700)
        want = tc.allreduce(x, group_name=comm.name, rounding="nearest")
        pointer, version = x.data_ptr(), x._version
        assert tc.allreduce_(x, group_name=comm.name, rounding="nearest") is None
        assert (x.data_ptr(), x._version) == (pointer, version + 1)
        assert tc.same_bits(x, want)

        strided = tc.values(rank, 700).reshape(7, 100).t()
        tc.allreduce_(strided, 32, group_name=comm.name)
        assert strided.stride() == (1, 100)
        with torch.inference_mode():
            y = tc.values(rank, 700)
            tc.allreduce_(y, group_name=comm.name, rounding="nearest")
        assert tc.same_bits(y, want)

        # A negative view, whose memory has the values without the sign.
        negative = torch.complex(torch.zeros(5), tc.values(rank, 5)).conj().imag
        assert negative.is_neg()
        smallest = tc.allreduce(negative, 32, op="min", group_name=comm.name)
        tc.allreduce_(negative, 32, op="min", group_name=comm.name)
        assert torch.equal(negative, smallest)
        return x, strided

    (x0, strided0), (x1, strided1) = launch.threads(2, rank_program)
    assert tc.same_bits(x0, x1)
    total = (tc.values(0, 700) + tc.values(1, 700)).reshape(7, 100).t()
    assert torch.equal(strided0, total)
    assert torch.equal(strided1, total)


def test_autograd_detects_in_place_changes() -> None:
    x = torch.arange(20.0, requires_grad=True)
    y = x * 3
    tc.allreduce_(y)
    (y * y).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 18 * x.detach())

    saved = torch.ones(20, requires_grad=True)
    z = torch.ones(20)
    product = saved * z
    tc.allreduce_(z)  # product's gradient needs the old z
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


# ---- Gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["sum", "avg"])
def test_gradient_is_the_same_collective(op: str) -> None:
    def rank_program(rank: int, comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        x = tc.values(rank, 900).requires_grad_()
        y = tc.allreduce(x, 3, 128, op, comm.name, rounding="nearest", config=tc.SRA, name="g")
        y.backward(tc.values(rank, 900, call=1))
        assert x.grad is not None
        return y.detach(), x.grad

    results = launch.threads(2, rank_program)
    for i in range(2):
        inputs = [tc.values(rank, 900, call=i) for rank in range(2)]
        want = tc.expected(inputs, 3, 128, op=op)
        assert all(tc.same_bits(result[i], want) for result in results)


def test_second_derivative() -> None:
    x = torch.arange(1.0, 20.0, requires_grad=True)
    (first,) = torch.autograd.grad((tc.allreduce(x) ** 3).sum(), x, create_graph=True)
    first.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 6 * x.detach())


def test_gradient_noise_is_derived_without_a_draw() -> None:
    gradient = tc.values(0, 2000)
    (seed,) = tc.drawn_seeds(11)
    torch.manual_seed(11)
    x = tc.values(1, 2000).requires_grad_()
    y = tc.allreduce(x)
    state = torch.get_rng_state()
    y.backward(gradient)
    assert torch.equal(torch.get_rng_state(), state)

    # A single rank encodes nothing and cannot show this: the seed of the gradient's noise.
    def rank_program(rank: int, comm: Communicator) -> list[torch.Tensor]:
        return [
            kernel(gradient, seed + rank, comm.name, depth=1),
            kernel(gradient, tc.gradient_seed(seed + rank), comm.name),
            kernel(gradient, seed + rank, comm.name),
        ]

    for by_depth, by_seed, forward in launch.threads(2, rank_program):
        assert tc.same_bits(by_depth, by_seed)
        assert not tc.same_bits(by_depth, forward)


# ---- Randomness ----------------------------------------------------------------------------------


def test_only_stochastic_rounding_draws() -> None:
    x = torch.ones(100)
    state = torch.get_rng_state()
    tc.allreduce(x, rounding="nearest")
    tc.allreduce(x, 32)
    tc.allreduce_(x, rounding="nearest")
    assert torch.equal(torch.get_rng_state(), state)
    tc.allreduce(x)
    assert not torch.equal(torch.get_rng_state(), state)


def test_seeds_follow_manual_seed() -> None:
    first = tc.drawn_seeds(3, 4)
    assert first == tc.drawn_seeds(3, 4)
    assert len(set(first)) == 4
    assert first != tc.drawn_seeds(4, 4)
    assert min(first + tc.drawn_seeds(4, 20)) < -(2**40)  # all 64 bits are used
    assert max(first + tc.drawn_seeds(4, 20)) > 2**40


# ---- torch's checks of operators -----------------------------------------------------------------


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"rounding": "nearest", "bits": 2}, {"bits": 32, "op": "avg"}], ids=str
)
def test_opcheck_public(options: dict[str, Any], requires_grad: bool) -> None:
    x = torch.randn(40, requires_grad=requires_grad)
    opcheck(tc.allreduce.default, (x,), options)
    opcheck(tc.allreduce_.default, (x * 2 if requires_grad else x,), options)


def test_opcheck_parts() -> None:
    call = (torch.randn(40), torch.tensor(7), tc.packed(Config()), "")
    opcheck(torch.ops.cgx.quantized_all_reduce.default, call)
    # A start's result must not be read before the wait, and each call has a new seed, so the check
    # that compares two runs does not apply.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    with waited():
        for overload in ("default", "borrow"):
            start = getattr(torch.ops.cgx.quantized_all_reduce_start, overload)
            opcheck(start, call, test_utils=checks)
    opcheck(torch.ops.cgx.draw_seed.default, (torch.empty(0),), test_utils=checks)


@contextlib.contextmanager
def waited() -> Iterator[None]:
    """Wait for every collective started inside, so that none is left in flight."""

    class Wait(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            if "all_reduce_start" in str(func) and type(result) is torch.Tensor:
                torch.ops._c10d_functional.wait_tensor(result)
            return result

    with Wait():
        yield


def test_dispatch_modes_receive_the_call() -> None:
    seen: list[str] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Record():
        tc.allreduce(torch.ones(30), rounding="nearest")
        tc.allreduce_(torch.ones(30), rounding="nearest")
    assert seen.count("cgx.quantized_all_reduce.default") == 2


def test_start_without_wait_does_not_block_exit() -> None:
    program = (
        "import torch, cgx_ops.torch\n"
        "torch.ops.cgx.quantized_all_reduce_start(\n"
        "    torch.ones(50), None, 'op=sum depth=0 bits=32 name=', '')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
