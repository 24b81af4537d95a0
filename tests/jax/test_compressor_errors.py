"""Errors about compressors, raised while a call is traced, and their texts."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.compressor_cases import DISAGREE
from support.jax_allreduce_cases import on_ranks
from support.jax_cases import SRA, mesh_of, normal, on_mesh, use_cpu_devices, with_config
from support.jax_compressor_cases import CASES

from cgx_ops import Communicator, Config, Rules
from cgx_ops._core.tables import COMPRESSORS
from cgx_ops.jax import (
    all_gather_q,
    all_to_all_q,
    allreduce_q,
    average_gradients,
    compress_grads,
    diloco,
    pmean_q,
    psum_q,
    psum_scatter_q,
    value_and_grad,
)

use_cpu_devices(8)

pytestmark = pytest.mark.timeout(120)

KEY = jax.random.key(1)
MESH = mesh_of((8,), ("d",))


def trace(body: Callable[..., Any], *operands: Any, check_vma: bool = False) -> None:
    """Trace a program without compiling or running it."""
    operands = operands or (np.ones((8, 8, 100), np.float32),)
    jax.eval_shape(on_mesh(MESH, body, check_vma).eager, *operands)


CALLS: dict[str, Callable[..., Any]] = {
    "psum_q": lambda v, **given: psum_q(v, "d", **given),
    "pmean_q": lambda v, **given: pmean_q(v, "d", **given),
    "psum_scatter_q": lambda v, **given: psum_scatter_q(v, "d", **given),
    "all_gather_q": lambda v, **given: all_gather_q(v, "d", **given),
    "all_to_all_q": lambda v, **given: all_to_all_q(v, "d", 0, 0, **given),
    "allreduce_q": lambda v, **given: allreduce_q(v, Communicator.local(2)[0], **given),
    "value_and_grad": lambda v, **given: value_and_grad(jnp.sum, "d", **given)(v),
    "average_gradients": lambda v, **given: average_gradients("d", **given).init(v),
    "compress_grads": lambda v, **given: compress_grads(v, "d", **given),
}
# The other calls raise for the shard_map of trace().
TRACED = [name for name in CALLS if name not in ("allreduce_q", "compress_grads")]
WITHOUT_RULES = ("psum_scatter_q", "all_gather_q", "all_to_all_q")
WITH_RULES = [name for name in CALLS if name not in WITHOUT_RULES]

BAD: list[tuple[dict[str, Any], str]] = [
    ({"compressor": "gzip"}, "compressor is 'gzip'; it must be one of 'uniform', 'levels'"),
    ({"compressor": 4}, "compressor is 4"),
    ({"compressor": "topk", "density": 0}, "density is 0; it must be .*more than 0 and at most 1"),
    ({"compressor": "topk", "density": 1.5}, "density is 1.5"),
    ({"compressor": "topk", "density": -0.1}, "density is -0.1"),
    ({"compressor": "topk", "density": float("nan")}, "density is nan"),
    ({"compressor": "topk", "value_bits": 12}, "value_bits is 12"),
    ({"compressor": "levels", "rotation": 48}, "rotation is 48; it must be .*power of two"),
    ({"compressor": "ternary", "clip": 2, "key": KEY}, "clip is 2"),
    ({"density": 0.1}, "density is 0.1, which compressor='uniform' does not support: .*topk"),
    ({"compressor": "levels", "bits": 5}, "bits is 5; with compressor='levels' .*from 1 to 4"),
    ({"compressor": "onebit", "bits": 2}, "bits is 2; compressor='onebit' has a fixed width"),
    ({"compressor": "levels", "value_bits": 8}, "value_bits is 8, which compressor='levels'"),
    ({"compressor": "topk", "rotation": 32}, "rotation is 32, which compressor='topk'"),
    ({"compressor": "onebit", "clip": True}, "clip is True, which compressor='onebit'"),
    ({"compressor": "ternary"}, "'ternary' with rounding='stochastic' is random.*give key="),
    ({"compressor": "qsgd"}, "compressor='qsgd' with rounding='stochastic' is random"),
    ({"compressor": "randk"}, "'randk' draws which values are sent.*equal on all devices"),
]  # fmt: skip


@pytest.mark.parametrize(("knobs", "said"), BAD, ids=lambda value: str(value)[:40])
def test_knobs(knobs: dict[str, Any], said: str) -> None:
    for call in CALLS.values():
        with pytest.raises(ValueError, match=said):
            trace(lambda v, c=call: c(v, **with_config(**knobs)))


def test_traced_arguments() -> None:
    for call in CALLS.values():
        for name in ("bits", "bucket_size", "compressor", "rounding"):
            with pytest.raises(TypeError, match=f"{name} must be a static Python value"):
                trace(lambda v, c=call, n=name: c(v, **{n: v[0]}))
    with pytest.raises(ValueError, match=r"Config\.density is "):
        trace(lambda v: psum_q(v, "d", config=Config(compressor="topk", density=v[0])))
    with pytest.raises(ValueError, match=r"the rule 'w': Config\.bits is "):
        trace(lambda v: psum_q(v, "d", rules=Rules([("w", v[0])])))


@pytest.mark.parametrize("name", CALLS)
def test_configs(name: str) -> None:
    """Test invalid configs, and invalid keywords beside a config."""

    def refused(error: type[Exception], said: str, **given: Any) -> None:
        with pytest.raises(error, match=said):
            trace(lambda v: CALLS[name](v, **given))

    refused(
        ValueError,
        rf"{name}: config is Rules.*; calls with several tensors take rules=",
        config=Rules(),
    )
    refused(ValueError, f"{name}: config is 'bits=4'; it must be a cgx_ops.Config", config="bits=4")
    refused(ValueError, f"{name}: Config.bits is '4'; it must be", config=Config(bits=2), bits="4")
    refused(ValueError, f"{name}: bits is 5; with", config=Config(compressor="levels"), bits=5)
    refused(TypeError, "unexpected keyword argument 'density'", density=0.1)
    refused(
        ValueError, f"{name}: .*rounding='shift' is random, .*give key=.*'near", rounding="shift"
    )
    if name in TRACED:
        trace(lambda v: CALLS[name](v, key=KEY, rounding="shift"))


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({"density": 0.1}, "density is 0.1, which compressor='uniform' does not support"),
        ({"rounding": "shift"}, "rounding='shift' is random, and there is no key"),
        ({"compressor": "ternary"}, "rounding='stochastic' is random"),
        ({"compressor": "randk"}, "'randk' draws which values are sent"),
    ],
    ids=str,
)
def test_rules(rule: Any, said: str) -> None:
    """Check rules of existing leaves; another rule may set the missing option."""
    for name in WITH_RULES:
        if name in TRACED:
            with pytest.raises(ValueError, match=f"{name}: .*{said}"):
                trace(lambda v, c=CALLS[name]: c(v, rules=Rules([("", rule)], exact_vectors=False)))
        with pytest.raises(TypeError, match=rf"{name}: rules is .* give cgx_ops.Rules\("):
            trace(lambda v, c=CALLS[name]: c(v, rules={"nothing": rule}))
        with pytest.raises(
            TypeError, match=rf"{name}: rules is None; .* Rules\(exact_vectors=False"
        ):
            trace(lambda v, c=CALLS[name]: c(v, rules=None))
    rules = Rules([("w", {"density": 0.1}), ("", {"compressor": "topk"})], exact_vectors=False)
    trace(lambda v: psum_q({"w": v}, "d", rules=rules))


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("sign", "a vote has no magnitude.*compressor='levels' with bits=1"),
        ("ternary", "without clip=True its error is larger than the signal"),
        ("qsgd", "the squared error of 4 bits in buckets of 512 .*smaller buckets"),
    ],
)
def test_feedback_that_does_not_converge(case: str, said: str) -> None:
    config = Config(**CASES[case])
    for reduce in (psum_q, pmean_q):
        name = rf"{reduce.__name__}: x\['w'\]: error feedback .*'{case}': {said}"
        with pytest.raises(ValueError, match=name):
            trace(lambda v, f=reduce: f({"w": v}, "d", key=KEY, residual={"w": v}, config=config))
    with pytest.raises(ValueError, match=f"error feedback.*'{case}': {said}"):
        Config(error_feedback=True, **CASES[case])
    average_gradients("d", key=KEY, config=Config(**CASES[case]))
    # Leaves without residuals do not raise.
    trace(lambda v: psum_q([v], "d", key=KEY, residual=[None], config=Config(**CASES[case])))


@pytest.mark.parametrize("exact", [{"bits": 32}, {"compressor": "lossless"}])
def test_residuals_of_exact_calls(exact: dict[str, Any]) -> None:
    for reduce in (psum_q, pmean_q):
        with pytest.raises(ValueError, match=rf"{reduce.__name__}: a residual with bits=32"):
            trace(lambda v, f=reduce: f({"w": v}, "d", key=KEY, residual={"w": v}, **exact))
    x = np.ones(100, np.float32)
    with pytest.raises(ValueError, match="allreduce_q: a residual with bits=32"):
        CALLS["allreduce_q"](x, residual=x, **exact)
    # One leaf with an error is enough.
    rules = Rules([("0", exact)], exact_vectors=False)
    trace(lambda v: psum_q([v, v], "d", key=KEY, residual=[v, v], rules=rules))


@pytest.mark.parametrize("make", [average_gradients, functools.partial(diloco, sync_every=2)])
def test_feedback_of_exact_transformations(make: Callable[..., Any]) -> None:
    tree, on = {"kernel": np.ones((8, 4)), "bias": np.ones(8)}, {"mesh": MESH}
    feedback = Config(error_feedback=True)
    with pytest.raises(ValueError, match="error_feedback=True, but all leaves are sent exact"):
        make("d", config=feedback, rules=Rules([("kernel", 32)]), **on).init(tree)
    make("d", config=feedback, **on).init(tree)
    make("d", bits=32, **on).init(tree)
    # feedback was not requested explicitly
    make("d", rules=Rules([("kernel", 32)]), **on).init(tree)


def test_different_keys_for_random_indices() -> None:
    """Check that types detect the difference if they are checked, otherwise the core."""
    keys, x = jax.random.split(KEY, 8), normal(1, 8, 8, 100)

    def call(v: jax.Array, key: jax.Array, reduce: Any = psum_q, **knobs: Any) -> Any:
        return reduce(v, "d", key=key, compressor="randk", **knobs)

    for reduce in (psum_q, psum_scatter_q, all_gather_q):
        said = rf"{reduce.__name__}: compressor='randk' needs the same key.*varies over \['d'\]"
        with pytest.raises(ValueError, match=said):
            trace(lambda v, key, f=reduce: call(v, key, f), x, keys, check_vma=True)
    for knobs in (
        {}, {"carrier": "xla", "config": SRA},
        {"carrier": "xla", "config": Config(algorithm="one_shot")},
    ):  # fmt: skip
        program = on_mesh(MESH, functools.partial(call, **knobs))
        with pytest.raises(
            jax.errors.JaxRuntimeError, match=r"the seed of the random indices .* against"
        ):
            jax.block_until_ready(program(x, keys))
        program(x, jnp.stack([KEY] * 8))


@pytest.mark.parametrize("what", DISAGREE)
def test_mismatched_ranks(what: str) -> None:
    """Check that every rank gets an error with both values, and the communicator remains usable."""
    ours, theirs, said = DISAGREE[what]
    ours, theirs = ({k: v for k, v in c.items() if k != "rounding"} for c in (ours, theirs))
    keys = [KEY] * 3
    if what == "rounding":  # the key shows the rounding
        ours, theirs, said = {}, {}, "rounding nearest against stochastic"
        keys = [None, None, KEY]

    def body(rank: int, comm: Communicator) -> str:
        x, knobs = normal(rank, 1000), theirs if rank == 2 else ours
        with pytest.raises(jax.errors.JaxRuntimeError) as caught:
            jax.block_until_ready(allreduce_q(x, comm, key=keys[rank], **with_config(**knobs)))
        jax.block_until_ready(allreduce_q(x, comm, bits=8))
        return str(caught.value)

    assert all(said in text for text in on_ranks(3, body))


@pytest.mark.parametrize("compressor", [n for n, row in COMPRESSORS.items() if row["device"]])
def test_gpus(compressor: Any) -> None:
    """Check that the error for GPUs comes from the table of compressors, with the reason."""
    program = on_mesh(MESH, lambda v: psum_q(v, "d", compressor=compressor))
    traced = program.jitted.trace(jax.ShapeDtypeStruct((8, 600), jnp.float32))
    why = COMPRESSORS[compressor]["device"]
    said = re.escape(f"psum_q with compressor={compressor!r} on GPUs: {why}")
    with pytest.raises(NotImplementedError, match=said):
        traced.lower(lowering_platforms=("cuda",))
    traced.lower(lowering_platforms=("cpu",))
    comm = Communicator.local(2)[0]
    traced = jax.jit(lambda v: allreduce_q(v, comm, compressor=compressor)).trace(jnp.zeros(600))
    said = f"allreduce_q with compressor={compressor!r} on GPUs"
    with pytest.raises(NotImplementedError, match=said):
        traced.lower(lowering_platforms=("cuda",))
