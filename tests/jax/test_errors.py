"""The errors of psum_q and other collectives; the process remains usable afterwards."""

import functools
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.jax_cases import (
    SRA,
    expected,
    mesh_of,
    normal,
    on_mesh,
    same_bits,
    use_cpu_devices,
    with_config,
)

from cgx_ops import CgxError, _xla_ffi
from cgx_ops._core import launchers
from cgx_ops.jax import all_gather_q, all_to_all_q, pmean_q, psum_q, psum_scatter_q
from cgx_ops.jax._src.runtime.launching import _Ticket, _Tickets

use_cpu_devices(8)

pytestmark = pytest.mark.timeout(120)


def run(body: Callable[..., Any], x: Any) -> Any:
    return jax.block_until_ready(on_mesh(mesh_of((8,), ("d",)), body)(x))


@functools.wraps(all_to_all_q)
def exchange(x: Any, axis_name: Any, **given: Any) -> Any:
    return all_to_all_q(x, axis_name, 0, 0, **given)


@pytest.fixture(autouse=True)
def usable_afterwards() -> Any:
    yield
    x = normal(0, 8, 1000)
    assert same_bits(run(lambda v: psum_q(v, "d", config=SRA), x)[0], expected(x))


@pytest.mark.parametrize(
    ("reduce", "exact"),
    [
        (psum_q, "jax.lax.psum"),
        (pmean_q, "jax.lax.pmean"),
        (psum_scatter_q, "jax.lax.psum_scatter"),
        (all_gather_q, "jax.lax.all_gather"),
        (exchange, "jax.lax.all_to_all"),
    ],
)
@pytest.mark.parametrize(
    ("dtype", "remedy"),
    [
        (np.int32, "exactly with EXACT, or cast it to float32"),
        (np.uint8, "float32"),
        (np.bool_, "exactly with EXACT,"),
        (np.complex64, "real and imaginary"),
        (jnp.float8_e4m3fn, "float32"),
    ],
)
def test_dtypes(reduce: Any, exact: str, dtype: Any, remedy: str) -> None:
    x = {"w": np.zeros((8, 8, 100), dtype)}
    name, remedy = np.dtype(dtype).name, re.escape(remedy.replace("EXACT", exact))
    with pytest.raises(TypeError, match=rf"{reduce.__name__}: x\['w'\] has dtype {name}.*{remedy}"):
        run(lambda v: reduce(v, "d"), x)


def test_float64() -> None:
    with jax.enable_x64(True):
        with pytest.raises(TypeError, match=r"float64.*cast it to float32"):
            run(lambda v: psum_q(v, "d"), np.zeros((8, 100)))
        x = normal(1, 8, 1000)
        assert same_bits(run(lambda v: psum_q(v, "d", config=SRA), x)[0], expected(x))


@pytest.mark.parametrize("where", [lambda f: f, jax.jit])
def test_unbound_axis(where: Any) -> None:
    with pytest.raises(NameError, match=r"unbound axis name: 'nowhere'.*jax\.shard_map"):
        where(lambda v: psum_q(v, "nowhere"))(np.ones(4, np.float32))
    with pytest.raises(NameError, match="'e'"):
        run(lambda v: psum_q(v, ("d", "e")), np.ones((8, 100), np.float32))


def test_an_axis_named_twice() -> None:
    with pytest.raises(ValueError, match="named twice"):
        run(lambda v: psum_q(v, ("d", "d")), np.ones((8, 100), np.float32))


@pytest.mark.parametrize("knob", ["bits", "bucket_size", "compressor", "rounding"])
def test_traced_knobs(knob: str) -> None:
    with pytest.raises(TypeError, match=f"{knob} must be a static Python value"):
        run(lambda v: psum_q(v, "d", **{knob: v[0].astype(int)}), np.ones((8, 100), np.float32))


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("bits", 0),
        ("bits", 9),
        ("bits", 16),
        ("bits", 4.0),
        ("bits", "4"),
        ("bucket_size", 0),
        ("bucket_size", -512),
        ("gather_bits", 0),
        ("intra_bits", 9),
        ("minimal_size", -1),
        ("algorithm", "tree"),
        ("skip_incomplete_buckets", 2),
    ],
)
def test_knobs_out_of_range(knob: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{knob} is {re.escape(repr(value))}"):
        run(lambda v: psum_q(v, "d", **with_config(**{knob: value})), np.ones((8, 100), np.float32))


@pytest.mark.parametrize(
    ("key", "error", "said"),
    [
        (7, TypeError, "7, not a PRNG key"),
        (np.float32(7), TypeError, "not a PRNG key"),
        (np.zeros(2, np.int32), TypeError, "not a PRNG key"),
        (np.zeros(3, np.uint32), ValueError, r"shape \(3,\); a raw key has shape \(2,\)"),
        (np.zeros((), np.uint32), ValueError, r"shape \(\); a raw key has shape \(2,\)"),
        (jax.random.split(jax.random.key(0), 3), ValueError, r"3 keys, of shape \(3,\)"),
    ],
)
@pytest.mark.parametrize("reduce", [psum_q, psum_scatter_q, all_gather_q, exchange])
def test_invalid_keys(reduce: Any, key: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=f"{reduce.__name__}: key is .*{said}"):
        run(lambda v: reduce(v, "d", key=key), np.ones((8, 8, 100), np.float32))


def test_axes_of_vmap() -> None:
    x = np.ones((3, 100), np.float32)
    with pytest.raises(NotImplementedError, match=r"'i' belongs to a vmap.*jax\.lax\.psum"):
        jax.vmap(lambda v: psum_q(v, "i"), axis_name="i")(x)
    with pytest.raises(NotImplementedError, match="'i' belongs to a vmap"):
        run(
            lambda v: jax.vmap(lambda u: psum_q(u, ("d", "i")), axis_name="i")(v),
            np.ones((8, 3, 100), np.float32),
        )


def test_partially_automatic_shard_map() -> None:
    mesh = mesh_of((4, 2), ("d", "m"))
    partial = jax.shard_map(
        lambda v: psum_q(v, "d"), mesh=mesh, in_specs=P("d"), out_specs=P(), axis_names={"d"}
    )
    with pytest.raises(NotImplementedError, match=r"'m'.*axis_names"):
        jax.jit(partial)(np.ones((4, 100), np.float32))


def test_other_platforms() -> None:
    program = on_mesh(mesh_of((8,), ("d",)), lambda v: psum_q(v, "d"))
    with pytest.raises(NotImplementedError, match="CPU and CUDA devices, not on tpu"):
        program.jitted.trace(jax.ShapeDtypeStruct((8, 100), jnp.float32)).lower(
            lowering_platforms=("tpu",)
        )


def test_predicate_that_differs_between_devices() -> None:
    """Let a predicate differ between devices: the waiting ones get an error, the next run works."""
    x = normal(2, 8, 1000)
    run(lambda v: psum_q(v, "d"), x)  # registers the handlers, which sets the default deadline
    _xla_ffi.set_local_timeout(2.0)
    try:
        # XLA reports one of the devices' errors: a deadline, or that another device gave up.
        said = r"(DEADLINE_EXCEEDED|UNAVAILABLE).*psum_q 'jit_on_device/.*rank 7 has not started it"
        with pytest.raises(jax.errors.JaxRuntimeError, match=said):
            run(
                lambda v: jax.lax.cond(
                    jax.lax.axis_index("d") < 7, lambda u: psum_q(u, "d"), lambda u: u, v
                ),
                x,
            )
    finally:
        _xla_ffi.set_local_timeout(20.0)


def test_any_exception_of_a_handler_is_an_error() -> None:
    """Pass attributes that no release writes: more leaves than configs."""
    script = """
import jax, numpy as np
from cgx_ops.jax._src.runtime import handlers
target = handlers.target("psum_q")
attributes = dict.fromkeys(("named", "op", "verb", "feedback", "group_size"), np.int64(0))
attributes |= {"groups": np.zeros(1, np.int64), "group_size": np.int64(1), "call": "a call",
               "config": "bits=4", "config_of": np.zeros(1, np.int64),
               "batches": np.ones(2, np.int64)}
call = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct((4,), np.float32))
try:
    print(jax.jit(lambda x: call(x, **attributes))(np.ones(4, np.float32)))
except Exception as error:
    assert "INTERNAL" in str(error), error
    print("an error")
"""
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, timeout=100, capture_output=True, text=True)
    assert ended.stdout == "an error\n", ended


@pytest.mark.parametrize("text", ["ten", "0", "-3", "nan", "inf"])
def test_bad_timeout(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("CGX_TIMEOUT", text)
    with pytest.raises(ValueError, match=f"CGX_TIMEOUT is '{text}'; it must be a number"):
        launchers.timeout()


@pytest.mark.parametrize(("text", "seconds"), [("", 7.0), ("2.5", 2.5), ("1e300", 1e6)])
def test_timeout(monkeypatch: pytest.MonkeyPatch, text: str, seconds: float) -> None:
    """Check that a timeout above the operating system's limit is reduced to it."""
    monkeypatch.setenv("CGX_TIMEOUT", text)
    assert launchers.timeout(default=7.0) == seconds


def test_launching_block_that_waits_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CGX_TIMEOUT", "0.05")
    says = "block 2 of cgx_ops.jax.launching waited for block 1"
    with pytest.raises(CgxError, match=says), _Tickets().turn(_Ticket(2, 1)):
        pass
