"""Each function of cgx_ops/jax/_src/runtime/compat.py works with the installed JAX.

After an update of JAX these tests should be the first to fail, and the only ones.
"""

import ast
import inspect
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from support.jax_cases import mesh_of, on_mesh, use_cpu_devices
from support.launch import processes

import cgx_ops.jax
from cgx_ops._core.exchange import free_address
from cgx_ops.jax._src.runtime import compat

use_cpu_devices(8)

MESH = mesh_of((4, 2), ("a", "b"))
PACKAGE = Path(inspect.getfile(cgx_ops.jax)).parent
RUNTIME = PACKAGE / "_src/runtime"


def inside(body: Callable[[jax.Array], Any], mesh: Mesh = MESH, **knobs: Any) -> list[Any]:
    """Return what `body` returns while traced in a shard_map, for a row that varies over "a"."""
    found = []

    def traced(x: jax.Array) -> jax.Array:
        found.append(body(x))
        return x

    jax.eval_shape(
        jax.shard_map(traced, mesh=mesh, in_specs=P("a"), out_specs=P("a"), **knobs), jnp.ones(8)
    )
    return found


# ---- private names -------------------------------------------------------------------------------


def test_private_names_are_in_compat_only() -> None:
    # The docstring of coordinator.py gives the reason.
    files = set(PACKAGE.rglob("*.py")) - {RUNTIME / "compat.py", RUNTIME / "coordinator.py"}
    assert len(files) > 10
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in getattr(node, "names", []) if hasattr(alias, "name")]
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{name}" for name in names]
            elif isinstance(node, ast.Attribute):
                names = [ast.unparse(node)]
            elif not isinstance(node, ast.Import):
                continue
            private = [name for name in names if re.match(r"(jax|jaxlib)\b.*\._(?!_)", name)]
            assert not private, (file.name, private)


def test_all_functions_are_used() -> None:
    """Check that functions for an older JAX are removed with its support."""
    users = "".join(file.read_text() for file in PACKAGE.rglob("*.py"))
    tree = ast.parse((RUNTIME / "compat.py").read_text())
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    for name in names:
        assert f"compat.{name}" in users or name.startswith("_"), name


# ---- types inside shard_map ----------------------------------------------------------------------


def test_varying_axes() -> None:
    assert inside(compat.varying_axes) == [{"a"}]
    assert inside(lambda x: compat.varying_axes(lax.psum(x, "a"))) == [set()]
    assert inside(lambda x: compat.varying_axes(lax.pcast(x, "b", to="varying"))) == [{"a", "b"}]
    assert inside(lambda x: compat.varying_axes(jax.typeof(x))) == [{"a"}]
    assert compat.varying_axes(1.5) == set()


def test_with_varying_axes() -> None:
    def both(x: jax.Array) -> Any:
        aval = compat.with_varying_axes(jax.typeof(x), frozenset("b"))
        return aval.shape, aval.dtype, aval.weak_type, compat.varying_axes(aval)

    assert inside(both) == [((2,), np.float32, False, {"b"})]


@pytest.mark.parametrize("check_vma", [True, False])
def test_types_are_checked(check_vma: bool) -> None:
    assert inside(lambda _: compat.types_are_checked(), check_vma=check_vma) == [check_vma]


def test_zero_tangent() -> None:
    zero = compat.zero_tangent(np.ones(3, np.float32))
    assert type(zero) is type(compat.zero_tangent(2.0))
    assert (zero.aval.shape, zero.aval.dtype) == ((3,), np.float32)


def test_axes() -> None:
    def found(x: jax.Array) -> Any:
        under_vmap = []

        def example(row: jax.Array) -> jax.Array:
            under_vmap.append((compat.axis_size("i"), compat.is_shard_map_axis("i")))
            return row

        jax.vmap(example, axis_name="i")(jnp.ones((3, 5)))
        return compat.axis_size("a"), compat.is_shard_map_axis("a"), under_vmap

    assert inside(found) == [(4, True, [(3, False)])]
    assert inside(lambda _: compat.axis_size("c")) == [None]
    assert compat.axis_size("a") is None
    assert inside(lambda _: compat.automatic_axes()) == [()]
    assert inside(lambda _: compat.automatic_axes(), axis_names={"a"}) == [("b",)]
    with_one = mesh_of((4, 1), ("a", "b"))
    assert inside(lambda _: compat.automatic_axes(), with_one, axis_names={"a"}) == [()]
    assert compat.automatic_axes() == ()


# ---- lowerings -----------------------------------------------------------------------------------


def test_where_a_lowering_happens() -> None:
    found: list[Any] = []
    probe_p = Primitive("cgx_test_probe")
    probe_p.def_abstract_eval(lambda x: x)

    def lower(ctx: Any, x: Any) -> list[Any]:
        mesh = compat.mesh_of(ctx)
        plain = compat.plain(ctx.avals_in[0])
        assert (plain.shape, plain.dtype, compat.varying_axes(plain)) == (
            (2, 1),
            np.float32,
            set(),
        )
        found.append((compat.module_name(ctx), compat.next_index(ctx), mesh.axis_names))
        return [x]

    mlir.register_lowering(probe_p, lower, cacheable=False)

    def probed(x: jax.Array) -> jax.Array:
        return probe_p.bind(probe_p.bind(x))

    def program() -> Any:
        # A separate function each time, because JAX caches lowerings.
        mapped = jax.shard_map(
            lambda x: probed(x), mesh=MESH, in_specs=P("a", "b"), out_specs=P("a", "b"),
            check_vma=False,
        )  # fmt: skip
        return jax.jit(mapped)

    for _ in range(2):
        program().lower(jnp.ones((8, 2)))
    name = found[0][0]
    assert name.startswith("jit_")
    assert found == 2 * [(name, 0, ("a", "b")), (name, 1, ("a", "b"))]


def test_small_values() -> None:
    scalar = compat.scalar_u32()
    assert (scalar.shape, scalar.dtype) == ((), np.uint32)
    with mlir.make_ir_context():
        assert re.search(r"handle = \d+, type = \d+", str(compat.collective_channel()))


# ---- ordered effects -----------------------------------------------------------------------------


class Order(compat.Effect):
    pass


compat.register_ordered_effect(Order)
ORDER = Order()


def test_effects_in_order() -> None:
    """Check that each call takes the token of the one before it, also in loops."""
    call_p = Primitive("cgx_test_in_order")
    call_p.def_effectful_abstract_eval(lambda x: (x, {ORDER}))

    def lower(ctx: Any, x: Any) -> Any:
        rule = jax.ffi.ffi_lowering("cgx_test_no_such_target", has_side_effect=True)
        return compat.lower_in_order(ctx, ORDER, rule, ctx.avals_in, x)

    mlir.register_lowering(call_p, lower, platform="cpu")
    twice = jax.jit(lambda x: call_p.bind(call_p.bind(x)))
    calls = re.findall(
        r"(%\w+):2 = stablehlo.custom_call @cgx_test_no_such_target\((%\S+), %\S+\)",
        twice.lower(jnp.ones(3)).as_text(),
    )
    (first, token), (_, next_token) = calls
    assert (token, next_token) == ("%arg0", f"{first}#0")
    looped = jax.jit(lambda x: lax.fori_loop(0, 3, lambda _, v: call_p.bind(v), call_p.bind(x)))
    text = looped.lower(jnp.ones(3)).as_text()
    assert text.count("@cgx_test_no_such_target(") == 2
    assert re.search(r"stablehlo.while\(.* : !stablehlo.token", text)


def test_tokens_of_launches() -> None:
    """Check that a token is passed on, moved to another device, or dropped after a failure."""

    class Failed:
        def block_until_ready(self) -> None:
            raise jax.errors.JaxRuntimeError("the launch failed")

    tokens: Any = compat.dispatch.RuntimeTokenSet()
    here, there = jax.devices()[:2]
    token = tokens.get_token_input(ORDER, [here])
    assert tokens.get_token_input(ORDER, [here]) is token
    assert tokens.get_token_input(ORDER, [there])._buf.devices() == {there}
    tokens.current_tokens[ORDER] = Failed()
    tokens.get_token_input(ORDER, [here]).block_until_ready()


# ---- the runtime ---------------------------------------------------------------------------------


def test_compilations_are_reported() -> None:
    events: list[str] = []

    def tripled(x: jax.Array) -> jax.Array:
        return x * 3.25

    compat.call_around_compile(events.append, lambda: events.append("end"))
    program = jax.jit(tripled)
    program.lower(jnp.ones(7))
    assert len(events) == 2 * events.count("end")
    del events[:]
    x = np.ones(7, np.float32)
    program(x)
    program(x)
    assert events == ["jit_tripled", "end"]


def test_backends_started() -> None:
    """Check before any backend starts: see ranks/run_jax_compat.py."""
    jax.devices()
    assert compat.backends_started()


def test_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not compat.cluster_is_detected()
    assert compat.detected_place("here:1", 4, 2, 10) == ("here:1", 4, 2)
    variables = {"JOB_ID": "1", "STEP_NODELIST": "here", "NTASKS": "3", "PROCID": "2", "LOCALID": 2}
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    assert compat.cluster_is_detected()
    options = [f"jax_{kind}_visible_devices" for kind in ("cuda", "rocm")]
    before = [jax.config.values[option] for option in options]
    address, size, rank = compat.detected_place(None, None, None, 10)
    assert [jax.config.values[option] for option in options] == ["2", "2"]
    assert str(address).startswith("here:")
    assert (size, rank) == (3, 2)
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "there:5")
    assert compat.detected_place(None, None, None, 10) == ("there:5", 3, 2)
    for option, value in zip(options, before, strict=True):
        jax.config.update(option, value)


def test_execution_stream() -> None:
    """Check that a program waits for an earlier one of about a second on the same stream."""
    x = np.ones(4096, np.float32)
    long = jax.jit(lambda x: lax.fori_loop(0, 50_000, lambda _, y: jnp.sin(y * 2 + 1), x * 2))
    short = jax.jit(lambda x: (x * 2).sum())
    short(x).block_until_ready()
    with compat.execution_stream(1):
        first = long(x)
    short(x).block_until_ready()
    assert not first.is_ready()
    first.block_until_ready()


@pytest.mark.timeout(120)
def test_processes() -> None:
    """Test connect, gather_from_processes and leave_distributed."""
    address = "{}:{}".format(*free_address([""]))
    environment = {"CGX_TIMEOUT": "60"}
    for output in processes(3, "run_jax_compat.py", address, env=environment, timeout=100):
        assert "ok" in output.splitlines()


def test_losing_the_coordinator_aborts() -> None:
    """Check that losing the coordinator aborts the process, as with JAX's own start."""
    service = [sys.executable, "-P", RUNTIME / "coordinator.py", "127.0.0.1", "0", "1", "60"]
    with subprocess.Popen(service, stdout=subprocess.PIPE, text=True) as coordinator:
        assert coordinator.stdout is not None
        port = coordinator.stdout.readline().split()[0]
        code = f"""
import os, time
from cgx_ops.jax._src.runtime import compat
compat.connect("127.0.0.1:{port}", 1, 0, 30)
os.kill({coordinator.pid}, 9)
time.sleep(60)
"""
        command = [sys.executable, "-c", code]
        result = subprocess.run(command, capture_output=True, timeout=90, check=False)
    assert result.returncode == -signal.SIGABRT, result.stderr
    assert b"coordination service" in result.stderr


def test_a_checked_program_runs() -> None:
    """Check the helper on which all other tests rely."""
    rows = on_mesh(MESH, lambda x: lax.psum(x, ("a", "b")), check_vma=True)(np.ones((8, 3)))
    assert np.array_equal(rows, np.full((8, 3), 8))
