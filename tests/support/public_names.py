"""The public names: those in `__all__` of the modules that users import."""

import importlib
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

MODULES = [
    "cgx_ops",
    "cgx_ops.planner",
    "cgx_ops.torch",
    "cgx_ops.torch.averaging",
    "cgx_ops.torch.ddp",
    "cgx_ops.torch.diloco",
    "cgx_ops.torch.fsdp",
    "cgx_ops.torch.optim",
    "cgx_ops.jax",
]


def public_names() -> list[str]:
    """Return all public names, such as "cgx_ops.Config"."""
    modules = [importlib.import_module(name) for name in MODULES]
    return [f"{module.__name__}.{name}" for module in modules for name in names_of(module)]


def names_of(module: ModuleType) -> list[str]:
    """Return the names that a module exports, without Python's own (`__version__`)."""
    return [name for name in module.__all__ if not name.startswith("__")]


def find(path: str) -> Any:
    """Return the object of a public name."""
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)


def members_of(owner: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties that a class of this project defines."""
    for name, value in vars(owner).items():
        if name.startswith("_"):
            continue
        value = getattr(value, "__func__", value)  # classmethod, staticmethod
        if inspect.isfunction(value) or isinstance(value, property):
            yield name, value
