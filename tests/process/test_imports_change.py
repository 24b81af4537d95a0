"""The list of changes that importing each package makes to the process.

docs/guides/torch/backend.md explains it.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import launch

import cgx_ops

PROGRAM = Path(launch.__file__).with_name("import_changes.py")
SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "localhost",
}
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=512"}

ENV_HANDLER = "torch.distributed.rendezvous._rendezvous_handlers['env']"
ATTRIBUTES = {
    "cgx_ops": set[str](),
    "cgx_ops.torch": {
        # The operators; those with an effect, which dead-code elimination keeps.
        "torch.ops.cgx",
        "torch.ops._dir[]",
        "torch.jit._builtins._builtin_table[id]",
        "torch.fx.node._side_effectful_functions[]",
        # The backend.
        "torch.distributed.distributed_c10d.Backend.CGX",
        "torch.distributed.distributed_c10d.Backend._plugins[cgx]",
        "torch.distributed.distributed_c10d.Backend.backend_capability[cgx]",
        "torch.distributed.distributed_c10d.Backend.backend_list[]",
        "torch.distributed.distributed_c10d.Backend.backend_type_map[cgx]",
        # Config and Rules are constants in compiled functions; functions have overloads.
        "torch._library.opaque_object._OPAQUE_TYPES_BY_NAME[cgx]",
        "torch.fx.operator_schemas._type_eval_globals['_overload_registry'][cgx]",
        # The types of states, for torch.load().
        "torch._weights_only_unpickler._marked_safe_globals_set",
    },
    "cgx_ops.jax": {
        # The primitives, and the effect that orders them.
        "jax._src.effects.control_flow_allowed_effects._effect_types[]",
        "jax._src.effects.custom_derivatives_allowed_effects._effect_types[]",
        "jax._src.effects.lowerable_effects._effect_types[]",
        "jax._src.effects.ordered_effects._effect_types[]",
        "jax._src.effects.remat_allowed_effects._effect_types[]",
        "jax._src.interpreters.ad.primitive_jvps[cgx]",
        "jax._src.interpreters.ad.primitive_transposes[cgx]",
        "jax._src.interpreters.batching.fancy_primitive_batchers[cgx]",
        "jax._src.interpreters.mlir._lowerings[cgx]",
        "jax._src.interpreters.mlir._platform_specific_lowerings['cpu'][cgx]",
        "jax._src.interpreters.mlir._platform_specific_lowerings['cuda'][cgx]",
        "jax._src.interpreters.mlir._uncacheable_primitives[]",
        # The token of that effect, which recovers after a failed launch.
        "jax._src.dispatch.RuntimeTokenSet.get_token_input",
    },
}
LIBRARIES = {
    "cgx_ops": {"libcgx", "_numpy_ops"},
    "cgx_ops.torch": {"libcgx", "_numpy_ops", "_torch_ops"},
    "cgx_ops.jax": {"libcgx", "_numpy_ops"},
}
# Modules that are there with a framework; tests/torch and tests/jax are packages for Python, too.
INSTALLED = {"cgx_ops.torch": "torch.nn", "cgx_ops.jax": "jax.numpy"}
EXIT_HANDLERS = {"cgx_ops": 1, "cgx_ops.torch": 1, "cgx_ops.jax": 2}


def changes(package: str, launcher: str = "", **env: str) -> dict[str, Any]:
    """Return what importing a package changes in a process that a launcher started."""
    if "." in package:
        pytest.importorskip(INSTALLED[package])
    if launcher == "mpirun":
        (output,) = launch.mpirun(1, PROGRAM, package, env=env, timeout=300)
    else:
        variables = {"srun": SRUN, "torchrun": TORCHRUN}.get(launcher, {})
        path = {"PYTHONPATH": launch.python_path()}
        ended = subprocess.run(
            [sys.executable, PROGRAM, package], env={**os.environ, **path, **variables, **env},
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        output = ended.stdout
    return json.loads(output.splitlines()[-1])


@pytest.mark.parametrize(
    "launcher",
    ["", *(pytest.param(x, marks=pytest.mark.slow) for x in ("mpirun", "srun", "torchrun"))],
)
@pytest.mark.parametrize("package", ATTRIBUTES)
def test_what_an_import_changes(package: str, launcher: str) -> None:
    found = changes(package, launcher)
    wrapped = package == "cgx_ops.torch" and launcher in ("mpirun", "srun")
    assert set(found["attributes"]) == ATTRIBUTES[package] | ({ENV_HANDLER} if wrapped else set())
    assert found["environment"] == []
    assert found["exit handlers"] == EXIT_HANDLERS[package]
    assert found["threads"] == 0


@pytest.mark.parametrize("package", ATTRIBUTES)
def test_which_libraries_an_import_loads(package: str) -> None:
    """Its own, and those of the C library that they need."""
    loaded = [Path(path) for path in changes(package)["libraries"]]
    own = {path for path in loaded if path.parent == Path(cgx_ops.__file__).parent}
    assert {path.name.split(".")[0] for path in own} == LIBRARIES[package]
    rest = {path.name for path in set(loaded) - own}
    assert all(re.match(r"lib(c|dl|m|pthread|rt|util)\.so", name) for name in rest), rest


def test_threads_for_many_devices_of_jax() -> None:
    """XLA reads the variable when its backend starts; the other one marks it as ours."""
    found = changes("cgx_ops.jax", **DEVICES)
    assert found["environment"] == ["PJRT_NPROC", "_CGX_PJRT_NPROC"]


# ---- later than the import -----------------------------------------------------------------------

TRACES = """
import torch, torch.distributed as dist, cgx_ops.torch
from torch._subclasses.fake_tensor import FakeTensorMode
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(9)
torch.ops.cgx.quantized_allreduce(x)
assert torch.compiler.config.cache_key_tag == "of the user;"
with FakeTensorMode() as mode:
    torch.ops.cgx.quantized_allreduce(mode.from_tensor(x), carrier="{carrier}")
assert torch.compiler.config.cache_key_tag.startswith("of the user;cgx_ops:")
tag = torch.compiler.config.cache_key_tag
with cgx_ops.torch.compress_collectives():
    assert torch.compiler.config.cache_key_tag is tag
"""

GROUPS = """
import torch, torch.distributed as dist, cgx_ops.torch
from torch.nn.modules.module import _global_module_registration_hooks as hooks
before = dist.monitored_barrier
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
assert dist.monitored_barrier is before and not hooks
for _ in range(2):
    dist.new_group(backend="cgx")
    assert dist.monitored_barrier.__wrapped__ is before and len(hooks) == 1
"""


@pytest.mark.parametrize("carrier", ["native", pytest.param("c10d", marks=pytest.mark.slow)])
def test_the_first_trace_keys_the_caches(carrier: str) -> None:
    run(TRACES.format(carrier=carrier), TORCH_COMPILE_CACHE_KEY_TAG="of the user;")


def test_the_first_group_prepares_the_backend() -> None:
    run(GROUPS)


def run(program: str, **env: str) -> None:
    pytest.importorskip("torch.nn")
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], env={**os.environ, **env},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
