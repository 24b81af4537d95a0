"""Imports between the packages of cgx_ops follow ALLOWED, and no modules import in a circle.

docs/explanation/architecture.md has the same table.
"""

from pathlib import Path

import pytest
from support.import_graph import Graph, Modules, floors, joined

PACKAGE = Path(__file__).parents[2] / "cgx_ops"
MODULES = Modules(PACKAGE)
GRAPH = MODULES.graph()
MAX_LEVEL = 8

# The packages that each package may import, besides itself. "core" is _core/ and the public modules
# beside it, such as config.py and communicator.py, since these import each other.
_SHARED = {"core", "planner", "methods"}
_TORCH = {"torch._compat", "torch.graph", "torch.backend"}
_JAX = {"jax.runtime", "jax.collectives"}
ALLOWED = {
    "core": set[str](),
    "methods": {"core"},
    "planner": {"core"},
    "bench": {"core", "planner", "jax.runtime"},
    "command line": {"core", "planner", "bench"},
    "torch._compat": set(),
    "torch.graph": {"core", "planner", "torch._compat"},
    "torch.backend": {"core", "torch._compat", "torch.graph"},
    "torch.averaging": _SHARED | _TORCH,
    "torch.ddp": _SHARED | _TORCH | {"torch.averaging"},
    "torch.fsdp": _SHARED | _TORCH | {"torch.averaging"},
    "torch.optim": _SHARED | _TORCH | {"torch.averaging"},
    "torch.diloco": _SHARED | _TORCH | {"torch.averaging"},
    "torch.integrations": {
        "core",
        "torch._compat",
        "torch.backend",
        "torch.averaging",
        "torch.ddp",
    },
    "torch": {"core", "torch.averaging", "torch.ddp"} | _TORCH,
    "jax.runtime": {"core"},
    "jax.collectives": {"core", "planner", "jax.runtime"},
    "jax.gradients": _SHARED | _JAX,
    "jax.transforms": _SHARED | _JAX,
    "jax.diloco": _SHARED | _JAX | {"jax.transforms"},
    "jax": {"core", "jax.gradients", "jax.transforms", "jax.diloco"} | _JAX,
}


def _package(name: str) -> str:
    """Return the package of a module, such as torch.ddp of cgx_ops.torch.ddp.power_sgd.hook."""
    first, *rest = name.replace(".jax._src", ".jax").split(".")[1:] or ["_core"]
    if first in ("torch", "jax"):
        return ".".join((first, *rest[:1]))
    if first == "__main__":
        return "command line"
    is_folder = (PACKAGE / first).is_dir() and first != "_core"
    return first if is_folder else "core"


PACKAGES = {name: _package(name) for name in MODULES.paths}


def _below(folder: str) -> Graph:
    """Return the graph of the modules in a folder."""
    inside = {name for name in GRAPH if name.startswith(f"{folder}.")}
    return {name: GRAPH[name] & inside for name in inside}


def test_every_package_is_listed_and_has_modules() -> None:
    assert set(PACKAGES.values()) == ALLOWED.keys()
    assert MODULES.faces
    for package in MODULES.faces:
        assert any(name.startswith(f"{package}.") for name in MODULES.paths), f"{package} is empty"


def test_packages_import_only_allowed_packages() -> None:
    for package, imported in joined(GRAPH, PACKAGES).items():
        assert imported <= ALLOWED[package], f"{package} imports {imported - ALLOWED[package]}"
    floors(ALLOWED)  # raises if the table has a circle


def test_no_modules_import_each_other_in_a_circle() -> None:
    floors(GRAPH)


@pytest.mark.parametrize("folder", ["cgx_ops.torch", "cgx_ops.jax"])
def test_there_are_few_levels(folder: str) -> None:
    packages = {name: of for name, of in PACKAGES.items() if name.startswith(f"{folder}.")}
    assert max(floors(joined(_below(folder), packages)).values()) <= MAX_LEVEL
    for package in set(packages.values()):
        within = {name: GRAPH[name] for name in packages if packages[name] == package}
        inside = {name: imported & within.keys() for name, imported in within.items()}
        assert max(floors(inside).values()) <= MAX_LEVEL, package


@pytest.mark.parametrize(
    ("imports", "circle"),
    [({"a": "b", "b": "c", "c": ""}, False), ({"a": "b", "b": "c", "c": "a"}, True)],
)
def test_a_circle_is_found(imports: dict[str, str], circle: bool) -> None:
    graph = {name: set(other) for name, other in imports.items()}
    if circle:
        with pytest.raises(AssertionError, match="a circle: a -> b -> c -> a"):
            floors(graph)
    else:
        assert floors(graph) == {"c": 1, "b": 2, "a": 3}
