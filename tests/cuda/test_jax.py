"""JAX on CUDA: lowering and handlers without a GPU, everything else with one.

Without a GPU, programs are lowered for CUDA on meshes of CPU devices, and XLA:CPU runs the handlers
(tests/cpp/cuda_handlers_on_cpu.cc). Most cases are in ranks/run_cuda_jax.py.
"""

import importlib
import re
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from support import launch
from support.cuda_cases import WIRES, needs_jax_gpu, on_one_gpu
from support.jax_cases import mesh_of, normal, on_mesh, use_cpu_devices
from support.rank_checks import Launch, RankCheck, listed, rank_checks

from cgx_ops import Communicator, Config
from cgx_ops._core import library
from cgx_ops.jax import all_gather_q, all_to_all_q, allreduce_q, initialize, psum_q, psum_scatter_q
from cgx_ops.jax._src.collectives import mesh_groups
from cgx_ops.jax._src.collectives.primitive import Settings
from cgx_ops.jax._src.runtime import handlers

use_cpu_devices(8)

ROOT = Path(__file__).parents[2]


def lowered(body: Any, *operands: Any, platform: str = "cuda", devices: Any = None) -> str:
    step = on_mesh(mesh_of((8,), ("d",), devices), body)
    program = step.jitted.trace(*step.spread(operands))
    return program.lower(lowering_platforms=(platform,)).as_text()


def custom_calls(text: str) -> list[str]:
    return [line for line in text.splitlines() if "custom_call @cgx_" in line]


# ---- lowering ------------------------------------------------------------------------------------


def exchanged(x: Any, axis: str, **options: Any) -> Any:
    return all_to_all_q(x, axis, 0, 0, **options)


@pytest.mark.parametrize(
    ("reduce", "target"),
    [
        (psum_q, "cgx_psum_q"),
        (psum_scatter_q, "cgx_psum_scatter_q"),
        (all_gather_q, "cgx_all_gather_q"),
        (exchanged, "cgx_all_to_all_q"),
    ],
)
def test_a_collective_is_one_custom_call(reduce: Any, target: str) -> None:
    (call,) = custom_calls(lowered(lambda v: reduce(v, "d", bits=3), normal(0, 8, 8, 600)))
    assert f"@{target}(" in call
    assert 'config = "bits=3 ' in call
    assert "config_of = dense<0> : tensor<1xi64>" in call
    assert "devices = dense<[0, 1, 2, 3, 4, 5, 6, 7]> : tensor<8xi64>" in call
    assert "has_side_effect = true" in call
    # There is no partition id, which would be in GPU memory. Seeds remain in GPU memory.
    assert "tensor<ui32>" not in call
    assert "tensor<1x2xui32>" in call


def test_seeds_of_all_leaves_are_one_operand() -> None:
    key = jax.random.key(1)
    x, y = normal(1, 8, 3, 500), normal(2, 8, 700)

    def body(v: jax.Array, w: jax.Array) -> Any:
        return jax.vmap(lambda u: psum_q(u, "d", key=key))(v), psum_q([w, 2 * w], "d", key=key)

    calls = custom_calls(lowered(body, x, y))
    assert [re.findall(r"tensor<\d+x2xui32>", call) for call in calls] == [
        ["tensor<3x2xui32>"],
        ["tensor<2x2xui32>"],
    ]


def test_devices_are_those_of_the_mesh() -> None:
    devices = jax.devices()[::-1]
    (call,) = custom_calls(lowered(lambda v: psum_q(v, "d"), normal(3, 8, 600), devices=devices))
    assert "devices = dense<[7, 6, 5, 4, 3, 2, 1, 0]>" in call


def test_a_call_on_cpu_has_no_devices() -> None:
    (call,) = custom_calls(lowered(lambda v: psum_q(v, "d"), normal(4, 8, 600), platform="cpu"))
    assert "devices =" not in call
    assert "tensor<ui32>" in call


def test_allreduce_q_is_one_ordered_custom_call() -> None:
    comm = Communicator.local(2)[0]
    program = jax.jit(lambda v: allreduce_q([v, v], comm)).trace(jnp.zeros(600))
    (call,) = custom_calls(program.lower(lowering_platforms=("cuda",)).as_text())
    assert "@cgx_allreduce_q(" in call
    assert "!stablehlo.token" in call
    assert "tensor<2x2xui32>" in call


def test_registration() -> None:
    assert set(handlers._register_cuda()) == {
        f"cgx_{name}" for name in (*mesh_groups.MeshGroups.functions.values(), "allreduce_q")
    }
    assert set(handlers._register_cuda()) <= set(handlers.targets())


# ---- errors on all processes ---------------------------------------------------------------------


@pytest.mark.parametrize("platform", ["rocm", "tpu"])
def test_other_platforms(platform: str) -> None:
    wanted = f"runs on CPU and CUDA devices, not on {platform}.*JAX_PLATFORMS=cuda"
    with pytest.raises(NotImplementedError, match=f"psum_q {wanted}"):
        lowered(lambda v: psum_q(v, "d"), normal(5, 8, 600), platform=platform)
    comm = Communicator.local(2)[0]
    program = jax.jit(lambda v: allreduce_q(v, comm)).trace(jnp.zeros(600))
    with pytest.raises(NotImplementedError, match=f"allreduce_q {wanted}"):
        program.lower(lowering_platforms=(platform,))


def test_carrier_xla() -> None:
    with pytest.raises(NotImplementedError, match=r"carrier='xla' supports only CPU.*'native'"):
        lowered(lambda v: psum_q(v, "d", carrier="xla"), normal(6, 8, 600))


def test_mesh_without_devices() -> None:
    mesh = AbstractMesh((8,), ("d",), axis_types=(AxisType.Auto,))
    step = jax.shard_map(
        lambda v: psum_q(v, "d"), mesh=mesh, in_specs=P("d"), out_specs=P(), check_vma=False
    )
    x = jax.ShapeDtypeStruct((8, 600), jnp.float32)
    with pytest.raises(RuntimeError, match=r"devices of the mesh.*jax\.sharding\.Mesh"):
        jax.jit(step).trace(x).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize(
    ("processes", "counts"), [([0, 0, 1, 1], "[2, 2] GPUs in its 2"), ([0, 1, 1], "[1, 2] GPUs")]
)
def test_several_gpus_in_each_of_several_processes(processes: list[int], counts: str) -> None:
    groups = np.arange(len(processes))[None]
    settings = Settings("allreduce", "sum", mesh_groups.MeshGroups(("d",), 4), (Config(),), "")
    with pytest.raises(NotImplementedError, match=re.escape(counts)) as error:
        mesh_groups._check_spread(settings, groups, processes)
    assert "a process for each GPU" in str(error.value)
    for fine in ([0] * 4, [3, 1, 2]):
        mesh_groups._check_spread(settings, np.arange(len(fine))[None], fine)
    by_process = np.array([[0, 1], [2, 3]])
    mesh_groups._check_spread(settings, by_process, [0, 0, 1, 1])
    mesh_groups._check_spread(settings, by_process.T, [0, 0, 1, 1])


@pytest.mark.parametrize(
    ("gpus", "hosts", "seen"),
    [(2, "aabb", "0101"), (1, "aab", "000"), (4, "aaa", "012"), (2, "aaaa", "0101")],
)
def test_processes_share_the_gpus_of_their_host(
    monkeypatch: pytest.MonkeyPatch, gpus: int, hosts: str, seen: str
) -> None:
    module = importlib.import_module(initialize.__module__)
    monkeypatch.setattr(library, "describe", lambda: {"cuda": {"devices": [{}] * gpus}})
    chosen: list[int] = []
    monkeypatch.setattr(module.compat, "choose_gpu", chosen.append)
    for rank in range(len(hosts)):
        module._choose_gpu(list(hosts), rank)
    assert chosen == list(map(int, seen))


# ---- handlers without a GPU ----------------------------------------------------------------------


@pytest.fixture(scope="session")
def handlers_on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("library") / "handlers_on_cpu.so"
    compiler = str(sysconfig.get_config_var("CXX")).split()[0]
    command = [compiler, "-std=c++20", "-shared", "-fPIC", "-o", library]
    command += ["-I", ROOT / "cgx_ops/csrc/include", "-isystem", jax.ffi.include_dir()]
    command += [ROOT / "tests/cpp/cuda_handlers_on_cpu.cc"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return library


PROGRAM = "run_cuda_jax.py"
NAMES = listed(PROGRAM)
CASES = (
    "values", "keys", "halves", "exchanges", "examples", "residuals", "permuted", "sizes",
    "bits_and_dtypes", "trees", "gradients", "two_programs",
)  # fmt: skip
MANY_PROGRAMS = ("sizes", "bits_and_dtypes")  # take as long as all others
# Checks that need a GPU: "alone" (of one rank, and XLA:CPU's mesh has four) and "late" (whose
# results are late, too). On XLA:CPU, threads may start independent calls in different orders.


@rank_checks(
    Launch(1, PROGRAM, *CASES, "failure", names=NAMES, by=launch.processes, timeout=250),
    Launch(2, PROGRAM, "in_order", "mismatch", names=NAMES, timeout=250),
    Launch(2, PROGRAM, *CASES, names=NAMES, timeout=250, marks=[pytest.mark.slow]),
)  # fmt: skip
def test_handlers(check: RankCheck, handlers_on_cpu: Path) -> None:
    env = {"LD_PRELOAD": str(handlers_on_cpu), "CGX_TIMEOUT": "60"}
    check.passes("--on-cpu", handlers_on_cpu, env=env)


# ---- on a GPU ------------------------------------------------------------------------------------


def on(ranks: int, wire: str, *names: str, kills: bool = False) -> Launch:
    return Launch(
        ranks, PROGRAM, *names, names=NAMES, by=on_one_gpu, wire=wire, kills=kills, timeout=120
    )


ONE_BY_ONE = [name for name in CASES if name not in MANY_PROGRAMS]
ONE_BY_ONE += ["in_order", "independent_calls"]

# A group of one sends nothing: it uses JAX's own operations, without a custom call.
ALONE = Launch(
    1, PROGRAM, "alone", names=NAMES, by=launch.processes,
    env={"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
)  # fmt: skip


@needs_jax_gpu
@rank_checks(
    *(
        on(n, wire, *names)
        for n in (4, 2)
        for wire in WIRES
        for names in (ONE_BY_ONE, MANY_PROGRAMS)
    ),
    *(on(2, wire, "mismatch") for wire in WIRES),
    *(on(2, wire, "late", kills=True) for wire in WIRES),
    ALONE,
)
def test_on_one_gpu(check: RankCheck) -> None:
    check.passes()
