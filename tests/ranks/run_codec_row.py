"""Rank program: test a codec of variable message length through every API.

The codec (tests/cpp/pairs_codec.h) sends each value of magnitude 1/2 or more exactly, with its
index; CONFIG selects it. A sum therefore adds the values that each rank sends, in rank order.
A rank's residual is the rest of its values.
"""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import checks
import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from jax import NamedSharding, lax
from jax.sharding import PartitionSpec as P
from support.jax_cases import mesh_of, use_cpu_devices

import cgx_ops.jax
import cgx_ops.torch
from cgx_ops import Config, Rules
from cgx_ops.torch import ddp

use_cpu_devices(1)
cgx_ops.jax.initialize()
RANK, SIZE = cgx_ops.rank(), cgx_ops.size()
CONFIG = Config(3, rounding="nearest", algorithm="one_shot")
NUMELS = (0, 1, 17, 511, 512, 513, 2**20 + 7)
Float32s = npt.NDArray[np.float32]


def values(rank: int, numel: int, call: int = 0) -> Float32s:
    return np.random.default_rng([rank, numel, call]).standard_normal(numel).astype(np.float32)


def sent(x: Float32s) -> Float32s:
    """Return the values that a rank sends; the others become zero."""
    return np.where((np.abs(x) >= 0.5) | (x.size < 16), x, np.float32(0))


def mean(xs: Iterable[Float32s]) -> Float32s:
    """Return the exact mean: sum in rank order, in fp32."""
    first, *others = xs
    total = first.copy()
    for x in others:
        total += x
    return total / np.float32(1 + len(others))


def mean_of_sent(xs: Iterable[Float32s]) -> Float32s:
    return mean([sent(x) for x in xs])


def by_numpy() -> None:
    for numel in NUMELS:
        xs = [values(rank, numel) for rank in range(SIZE)]
        residual = np.zeros(numel, np.float32)
        y = cgx_ops.allreduce(xs[RANK], "avg", CONFIG, residual=residual)
        assert np.array_equal(y, mean_of_sent(xs)), numel
        assert np.array_equal(residual, xs[RANK] - sent(xs[RANK])), numel


def by_torch_operators() -> None:
    """Test the eager and compiled operators, with feedback, and over gloo."""
    options: dict[str, Any] = {"config": str(CONFIG), "op": "avg"}
    reduce: Any = torch.ops.cgx.quantized_allreduce

    def step(x: torch.Tensor, **where: Any) -> torch.Tensor:
        return reduce(x + 0, **options, **where)

    calls = [
        step,
        torch.compile(step, fullgraph=True),
        lambda x: step(x, carrier="c10d"),
    ]
    feedback: Any = torch.ops.cgx.quantized_allreduce_with_feedback
    for numel in (17, 5000):
        xs = [values(rank, numel) for rank in range(SIZE)]
        x = torch.from_numpy(xs[RANK])
        for call in calls:
            assert np.array_equal(call(x).numpy(), mean_of_sent(xs)), (numel, call)
        y, residual = feedback(x, torch.zeros_like(x), **options)
        assert np.array_equal(y.numpy(), mean_of_sent(xs))
        assert np.array_equal(residual.numpy(), xs[RANK] - sent(xs[RANK]))


def by_the_ddp_hook() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(100, 40)
    inputs = [10 * torch.from_numpy(values(rank, 800)).reshape(8, 100) for rank in range(SIZE)]

    def gradients(of: Any, rank: int) -> list[Float32s]:
        of.zero_grad()
        of(inputs[rank]).square().sum().backward()
        return [parameter.grad.numpy().reshape(-1).copy() for parameter in of.parameters()]

    alone = [gradients(model, rank) for rank in range(SIZE)]
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    wrapped.register_comm_hook(
        ddp.QuantizedAllreduceState(config=CONFIG), ddp.quantized_allreduce_hook
    )
    got = gradients(wrapped, RANK)
    assert np.array_equal(got[0], mean_of_sent([weight for weight, _ in alone]))
    assert np.array_equal(got[1], mean([bias for _, bias in alone])), "biases travel exact"


def by_jax() -> None:
    """Test psum_q with both carriers, and two steps of average_gradients with feedback."""
    mesh = mesh_of((SIZE,), ("d",))
    spread = NamedSharding(mesh, P("d"))

    def on_devices(rows: Float32s) -> jax.Array:
        return jax.make_array_from_callback(rows.shape, spread, lambda index: rows[index])

    carriers: tuple[Any, ...] = ("native", "xla")
    for carrier in carriers:
        for numel in (17, 5000):
            rows = np.stack([values(rank, numel) for rank in range(SIZE)])
            reduce = jax.shard_map(
                partial(cgx_ops.jax.pmean_q, axis_name="d", config=CONFIG, carrier=carrier),
                mesh=mesh, in_specs=P("d"), out_specs=P(),
            )  # fmt: skip
            y = np.asarray(jax.jit(reduce)(on_devices(rows)).addressable_data(0))[0]
            assert np.array_equal(y, mean_of_sent(rows)), (carrier, numel)

    optimizer = cgx_ops.jax.average_gradients(
        "d", config=CONFIG, rules=Rules(exact_vectors=False), mesh=mesh
    )
    state = optimizer.init(jnp.zeros(5000))
    specs = cgx_ops.jax.state_specs(optimizer, jnp.zeros(5000), "d")

    def body(state: Any, rows: jax.Array) -> Any:
        gradient = rows[0]
        return optimizer.update(lax.pcast(gradient, (), to="varying"), state)

    step = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(specs, P("d")), out_specs=(P(), specs)))
    residuals = np.zeros((SIZE, 5000), np.float32)
    for call in range(2):
        rows = np.stack([values(rank, 5000, call) for rank in range(SIZE)])
        updates, state = step(state, on_devices(rows))
        given: Float32s = rows + residuals
        assert np.array_equal(np.asarray(updates.addressable_data(0)), mean_of_sent(given)), call
        residuals = given - np.stack([sent(each) for each in given])
        mine = np.asarray(state.residual.addressable_data(0))[0]
        assert np.array_equal(mine, residuals[RANK]), call


assert "with_pairs" in str(Path(cgx_ops.__file__)), cgx_ops.__file__
dist.init_process_group("cgx")
checks.run(checks.named(by_numpy, by_torch_operators, by_the_ddp_hook, by_jax))
dist.destroy_process_group()
