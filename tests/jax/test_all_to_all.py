"""all_to_all_q, bit for bit as the oracle, and in shapes and derivatives as jax.lax.all_to_all.

1. values: devices, sizes, dtypes, meshes, keys
2. shapes
3. compressors
4. transformations
5. errors
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from support.jax_cases import (
    Values,
    exchange_expected,
    has_part_in,
    mesh_of,
    normal,
    on_mesh,
    processes_of,
    ranks_of,
    same_bits,
    seed_of,
    use_cpu_devices,
)
from support.jax_compressor_cases import AT, CASES, KEY, MESH, N, config_of, numpy_result
from support.jax_mesh_cases import MESHES, MeshCase

from cgx_ops import Config
from cgx_ops.jax import all_to_all_q

use_cpu_devices(8)

pytestmark = [pytest.mark.timeout(120), pytest.mark.mpirun]
both_modes = pytest.mark.parametrize(
    "check_vma", [True, pytest.param(False, marks=pytest.mark.exhaustive)]
)

BF16 = ml_dtypes.bfloat16
CALL = "all_to_all over d: "


def run(body: Callable[..., Any], *operands: Any, check_vma: bool = False, size: int = 8) -> Any:
    """Apply body on some devices; results have a row for each."""
    mesh = mesh_of((size,), ("d",), jax.devices()[:size])
    if not has_part_in(mesh):
        pytest.skip("this process has no device of the mesh")
    if is_uneven(range(size)):
        pytest.skip("processes need equal numbers of a group's devices")
    return jax.tree.map(np.asarray, on_mesh(mesh, body, check_vma)(*operands))


def is_uneven(group: Sequence[int]) -> bool:
    """Return whether processes have different numbers of these jax.devices()."""
    return len(set(map(len, ranks_of(processes_of(group))))) > 1


def exchange(x: Any, **options: Any) -> Any:
    return all_to_all_q(x, "d", 0, 0, **options)


def exact(x: Any) -> Any:
    return lax.all_to_all(x, "d", 0, 0)


# ---- 1. values -----------------------------------------------------------------------------------


@both_modes
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_sizes_dtypes_and_keys(size: int, check_vma: bool) -> None:
    x, key = normal(1, size, size, 513), jax.random.key(3)
    cases = [
        (numel, dtype, given)
        for numel in (0, 1, 17, 511, 512, 513)
        for dtype in (np.float32, np.float16, BF16)
        for given in (None, key)
    ]

    def body(v: jax.Array) -> Any:
        return [
            exchange(v[:, :numel].astype(dtype), key=given, bits=3) for numel, dtype, given in cases
        ]

    results = run(body, x, check_vma=check_vma, size=size)
    for (numel, dtype, given), got in zip(cases, results, strict=True):
        rows = x[:, :, :numel].astype(dtype)
        seeds = None if given is None else [seed_of(key, call=CALL)] * size
        rounding = "nearest" if given is None else "stochastic"
        want = exchange_expected(rows, bits=3, seeds=seeds, rounding=rounding)
        assert same_bits(got, want), (numel, dtype, given)


@pytest.mark.exhaustive
def test_large_blocks() -> None:
    """Check blocks of many chunks, which do not end at a bucket."""
    at = [0, len(jax.devices()) - 1]  # in different processes, if there are several
    mesh = mesh_of((2,), ("d",), [jax.devices()[place] for place in at])
    if not has_part_in(mesh):
        pytest.skip("this process has no device of the mesh")
    x = normal(15, 2, 2, 2**20 + 7)
    assert same_bits(on_mesh(mesh, exchange)(x), exchange_expected(x, at=at))


@pytest.mark.parametrize("case", MESHES, ids=lambda case: case.name)
def test_meshes(case: MeshCase) -> None:
    """Check every order of devices, with the same key and with a different key on each device.

    Within a process that has several devices of a group, blocks are exact.
    """
    size, count = len(case.groups[0]), len(case.devices)
    x = normal(2, count, size, 700)

    def body(v: jax.Array, device: jax.Array) -> Any:
        keys = KEY, jax.random.key(device)
        return [all_to_all_q(v, case.axes, 0, 0, key=key) for key in (None, *keys)]

    program = on_mesh(case.mesh, body)
    operands = x, np.arange(count, dtype=np.int32)
    devices = [[case.devices[place] for place in group] for group in case.groups]
    if any(map(is_uneven, devices)):
        with pytest.raises(NotImplementedError, match="the numbers must be equal"):
            program(*operands)
        return
    call = f"all_to_all over {','.join(case.axes)}: "
    equal, different = ([seed_of(key, call=call) for key in keys] for keys in (
        [KEY] * count, map(jax.random.key, range(count))
    ))  # fmt: skip
    for got, seeds in zip(program(*operands), (None, equal, different), strict=True):
        for group, at in zip(case.groups, devices, strict=True):
            want = exchange_expected(
                x[group], at=at,
                seeds=None if seeds is None else [seeds[place] for place in group],
                rounding="nearest" if seeds is None else "stochastic",
            )  # fmt: skip
            assert same_bits(got[group], want), group
            for members in ranks_of(processes_of(at)):
                for r in members:
                    assert same_bits(want[r, members], x[group][members, r])


def test_trees_and_names() -> None:
    """Check that each leaf has separate noise, and a name other noise."""
    x = {"a": normal(3, 8, 8, 600), "b": normal(4, 8, 8, 30, 20)}
    got = run(lambda v: exchange(v, key=KEY, name="dispatch"), x)
    for leaf, (name, rows) in enumerate(x.items()):
        seeds = [seed_of(KEY, leaf, call=f"{CALL}dispatch")] * 8
        assert same_bits(got[name], exchange_expected(rows, seeds=seeds, rounding="stochastic"))


# ---- 2. shapes -----------------------------------------------------------------------------------


def exchanged(x: Values, split: int, concat: int, tiled: bool, **knobs: Any) -> Values:
    """Return the oracle's result for arrays x[r], as jax.lax.all_to_all shapes it."""
    size, split = len(x), split % (x.ndim - 1)
    parts = [np.split(row, size, split) for row in x]
    blocks = exchange_expected(np.array(parts), **knobs)
    if tiled:
        return np.array([np.concatenate(list(received), concat) for received in blocks])
    received = blocks.squeeze(split + 2)
    return np.array([np.stack(list(row), concat) for row in received])


@both_modes
@pytest.mark.parametrize("tiled", [True, False])
def test_shapes_are_those_of_lax(tiled: bool, check_vma: bool) -> None:
    """Compare exact results with lax, and those of 4 bits with the oracle."""
    size, x = 4, []
    for split in range(3):
        shape = [3, 5, 7]
        shape[split] = 2 * size if tiled else size
        x.append(normal(5 + split, size, *shape))
    axes = [(split, concat) for split in range(3) for concat in range(3)]
    axes += [(-1, 0), (0, -1), (-3, -2)]

    def body(*v: jax.Array) -> Any:
        pairs, how = [(v[split % 3], split, concat) for split, concat in axes], {"tiled": tiled}
        return (
            [all_to_all_q(y, "d", *at, bits=32, **how) for y, *at in pairs],
            [lax.all_to_all(y, "d", split % 3, concat % 3, **how) for y, split, concat in pairs],
            [all_to_all_q(y, "d", *at, **how) for y, *at in pairs],
        )

    ours, theirs, quantized = run(body, *x, check_vma=check_vma, size=size)
    for place, (split, concat) in enumerate(axes):
        assert same_bits(ours[place], theirs[place]), (split, concat)
        want = exchanged(x[split % 3], split, concat, tiled)
        assert same_bits(quantized[place], want), (split, concat)


def test_back_and_forth() -> None:
    """Check that an exchange of exact bits along swapped axes returns the input."""
    x = normal(8, 8, 16, 3)

    def body(v: jax.Array) -> jax.Array:
        there = all_to_all_q(v, "d", 0, 1, tiled=True, bits=32)
        return all_to_all_q(there, "d", 1, 0, tiled=True, bits=32)

    assert same_bits(run(body, x), x)


# ---- 3. compressors ------------------------------------------------------------------------------


def test_compressors() -> None:
    """Compare with numpy's results, of which the oracle's tests are in numpy/."""
    if not has_part_in(MESH) or len(set(processes_of(AT))) not in (1, N):
        pytest.skip("other processes' devices, or several of one process, which is one rank")
    x = normal(9, N, N, 700)
    configs = {name: config_of(name) for name in CASES if "gather_bits" not in CASES[name]}

    def body(v: jax.Array) -> Any:
        return {name: exchange(v, key=KEY, config=config) for name, config in configs.items()}

    got = on_mesh(MESH, body)(x)
    for name, config in configs.items():
        want = numpy_result("all_to_all", x, config, call=CALL, at=AT)
        assert all(map(same_bits, got[name], want)), name
    assert same_bits(got["lossless"], x.swapaxes(0, 1))


# ---- 4. transformations --------------------------------------------------------------------------


@both_modes
def test_vmap(check_vma: bool) -> None:
    """Check that an example has the bits of a call alone, with one key for each or without."""
    x, keys = normal(10, 8, 3, 8, 600), jax.random.split(KEY, 3)

    def body(v: jax.Array) -> Any:
        with_keys = jax.vmap(lambda u, key: exchange(u, key=key))(v, keys)
        nested = jax.vmap(jax.vmap(exchange))(v.reshape(3, 1, 8, 600))
        last = jax.vmap(exchange, in_axes=2, out_axes=1)(jnp.moveaxis(v, 0, 2))
        return jax.vmap(exchange)(v), nested[:, 0], jnp.moveaxis(last, 1, 0), with_keys

    *plain, keyed = run(body, x, check_vma=check_vma)
    for i in range(3):
        want = exchange_expected(x[:, i])
        assert all(same_bits(rows[:, i], want) for rows in plain)
        seeds = [seed_of(keys[i], call=CALL)] * 8
        want = exchange_expected(x[:, i], seeds=seeds, rounding="stochastic")
        assert same_bits(keyed[:, i], want)


def test_one_key_for_all_examples() -> None:
    """Check that equal examples have different noise."""
    x = normal(11, 8, 1, 8, 600).repeat(2, axis=1)
    got = run(jax.vmap(partial(exchange, key=KEY, bits=2)), x)
    assert not np.array_equal(got[:, 0], got[:, 1])


@both_modes
def test_derivatives_are_those_of_lax(check_vma: bool) -> None:
    x, t = normal(12, 8, 16, 80), normal(13, 8, 16, 80)

    def derivatives(f: Any, v: jax.Array, s: jax.Array) -> Any:
        def loss(u: jax.Array) -> jax.Array:
            return (f(u) * jnp.cos(s.reshape(f(u).shape))).sum()

        value, tangent = jax.jvp(f, (v,), (s,))
        transposed = jax.linear_transpose(f, v)(jnp.sin(exact_at(s)))[0]
        return value, (
            tangent,
            jax.grad(loss)(v),
            transposed,
            jax.vmap(jax.grad(square(f)))(v[None]),
        )

    def square(f: Any) -> Callable[[jax.Array], jax.Array]:
        return lambda u: (f(lax.stop_gradient(u)) + f(u)).sum()

    def exact_at(v: jax.Array) -> jax.Array:
        return lax.all_to_all(v, "d", 1, 0, tiled=True)

    def ours(v: jax.Array) -> jax.Array:
        return all_to_all_q(v, "d", 1, 0, tiled=True)

    value, got = run(partial(derivatives, ours), x, t, check_vma=check_vma)
    other, want = run(partial(derivatives, exact_at), x, t, check_vma=check_vma)
    assert all(map(same_bits, got, want))
    assert all(np.abs(rows).max() > 0 for rows in got)
    assert value.shape == other.shape
    assert not np.array_equal(value, other)


@both_modes
def test_gradients_in_few_bits(check_vma: bool) -> None:
    """Check blocks that return to their senders, their noise, and second derivatives."""
    x, upward = normal(20, 8, 16, 80), normal(21, 8, 2, 640)
    eight = Config(8)

    def body(v: jax.Array, c: jax.Array) -> Any:
        def ours(u: Any, key: Any = None, bits: int = 4) -> Any:
            return all_to_all_q(
                u, "d", 0, 1, tiled=True, bits=bits, grad_config=eight, key=key, name="there"
            )

        value, back = jax.vjp(ours, v)
        _, back_with_noise = jax.vjp(partial(ours, key=KEY), {"a": v})
        _, again = jax.vjp(lambda u: back(u)[0], c)
        _, of_example = jax.vjp(jax.vmap(ours), v[None])
        noisy = back_with_noise({"a": c})[0]["a"]
        return value, back(c)[0], of_example(c[None])[0][0], noisy, again(v)[0]

    value, plain, of_example, noisy, again = run(body, x, upward, check_vma=check_vma)
    assert same_bits(value, exchanged(x, 0, 1, True))
    want = exchanged(upward, 1, 0, True, bits=8)
    assert same_bits(plain, want) and same_bits(of_example, want)
    seeds = [seed_of(jax.random.fold_in(KEY, 1), call=f"{CALL}there")] * 8
    knobs = {"bits": 8, "seeds": seeds, "rounding": "stochastic"}
    assert same_bits(noisy, exchanged(upward, 1, 0, True, **knobs))
    assert same_bits(again, exchanged(x, 0, 1, True, bits=8))


def test_invalid_settings_of_gradients() -> None:
    x = normal(22, 8, 8, 12)
    with pytest.raises(ValueError, match=r"all_to_all_q: grad_config is 8; it must be a .*Config"):
        run(partial(exchange, grad_config=8), x)
    with pytest.raises(ValueError, match=r"all_to_all_q: compressor='randk' .*there is no key"):
        run(partial(exchange, grad_config=Config(compressor="randk", density=0.1)), x)
    with pytest.raises(TypeError, match="int32"):
        run(partial(exchange, grad_config=Config(8)), x.astype(np.int32))


@both_modes
def test_scan(check_vma: bool) -> None:
    x = normal(14, 8, 4, 8, 600)
    got = run(lambda v: lax.scan(lambda c, u: (c, exchange(u)), 0, v)[1], x, check_vma=check_vma)
    for i in range(4):
        assert same_bits(got[:, i], exchange_expected(x[:, i]))


def test_without_jit() -> None:
    x = normal(15, 8, 8, 600)
    assert same_bits(on_mesh(mesh_of((8,), ("d",)), exchange).eagerly(x), exchange_expected(x))


# ---- 5. errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("split", "concat", "tiled", "said"),
    [
        (2, 0, False, r"split_axis is 2; it must be from -2 to 1"),
        (-3, 0, True, r"split_axis is -3"),
        (0, 2, True, r"concat_axis is 2; it must be from -2 to 1"),
        (1, 0, False, r"dimension 1 of \(8, 12\) has size 12.*it must be 8, or tiled=True"),
        (1, 0, True, r"dimension 1 of \(8, 12\) has size 12.*it must be a multiple of 8"),
    ],
)
def test_dimensions(split: int, concat: int, tiled: bool, said: str) -> None:
    with pytest.raises(ValueError, match=f"all_to_all_q: {said}"):
        run(lambda v: all_to_all_q(v, "d", split, concat, tiled=tiled), normal(16, 8, 8, 12))


def test_other_carriers() -> None:
    with pytest.raises(TypeError, match=r"all_to_all_q\(\) got an unexpected .*'carrier'"):
        run(partial(exchange, carrier="xla"), normal(17, 8, 8, 12))
