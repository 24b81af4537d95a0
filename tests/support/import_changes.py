"""Print what importing a package changes in this process, as JSON.

    import_changes.py PACKAGE

All modules that the package imports, except those of cgx_ops, are imported first, so that their
own changes are not counted. Then the objects reachable from the modules of ROOTS are compared
before and after: attributes, and elements of containers. "[cgx]" is a key that names an object
of cgx_ops, "[id]" one that is an id, "[]" an index of a list or an element of a set.
"""

import atexit
import contextlib
import functools
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import threading
import types
import warnings
from typing import Any

FRAMEWORKS = {"torch", "jax", "jaxlib", "numpy", "ml_dtypes"}
ROOTS = FRAMEWORKS | {
    "builtins", "copyreg", "faulthandler", "gc", "logging", "multiprocessing", "os", "pickle",
    "signal", "socket", "subprocess", "sys", "threading", "warnings",
}  # fmt: skip
DEPTH = 4  # nesting depth of objects, from a module
# Changes made by every import.
OF_IMPORTS = re.compile(r"sys\.(modules|path_importer_cache)\b|.*__warningregistry__")
LARGEST_KEY = 1 << 20
CONTAINERS = (dict, list, set)


def others_of(package: str) -> list[str]:
    """Return the modules that a package imports, in import order, except those of cgx_ops."""
    program = f"import sys, {package}; print(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    names = ended.stdout.split("\n")[-2].split(" ")
    return [name for name in names if name.split(".")[0] not in ("cgx_ops", "__main__")]


def libraries() -> set[str]:
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[-1].rstrip("\n") for line in maps if "/" in line}
    return {path for path in paths if ".so" in os.path.basename(path)}


def contents(owner: Any) -> dict[Any, Any]:
    """Return a copy of the attributes or elements of an object."""
    if isinstance(owner, dict):
        return dict(owner)
    if isinstance(owner, list):
        return dict(enumerate(owner))
    if isinstance(owner, set):
        return dict.fromkeys(owner)
    return dict(vars(owner))


def is_owner(value: Any) -> bool:
    if isinstance(value, (*CONTAINERS, types.ModuleType)):
        return True
    root = (getattr(type(value), "__module__", None) or "").split(".")[0]
    if isinstance(value, type):
        return value.__module__.split(".")[0] in ROOTS
    return root in FRAMEWORKS and isinstance(getattr(value, "__dict__", None), dict)


class Owners:
    """All objects reachable from the modules of ROOTS, and their contents."""

    def __init__(self) -> None:
        self.held: dict[int, tuple[Any, str, dict[Any, Any]]] = {}
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] in ROOTS and isinstance(module, types.ModuleType):
                self._add(module, name, DEPTH)

    def _add(self, owner: Any, path: str, depth: int) -> None:
        if id(owner) in self.held or owner is self.held:
            return
        held = contents(owner)
        self.held[id(owner)] = owner, path, held
        if depth == 0:
            return
        for key, value in held.items():
            name = path + step(owner, key)
            walked = is_owner(value) and not isinstance(value, types.ModuleType)
            if walked and not OF_IMPORTS.match(name):
                self._add(value, name, depth - 1)

    def changed(self) -> list[str]:
        """Return the names whose values have changed."""
        found = set()
        for owner, path, before in self.held.values():
            after = contents(owner)
            for key in before.keys() | after.keys():
                was, now = (each.get(key, self) for each in (before, after))
                same = was is now or (isinstance(was, (int, str, float)) and was == now)
                if not same and not is_cached(owner, key):
                    found.add(path + step(owner, key))
        return sorted(name for name in found if not OF_IMPORTS.match(name))


def is_cached(owner: Any, key: Any) -> bool:
    """Return whether an attribute is a cached property, which appears when it is first read."""
    kind = inspect.getattr_static(type(owner), key, None) if isinstance(key, str) else None
    return isinstance(kind, functools.cached_property)


def step(owner: Any, key: Any) -> str:
    """Return the part of a path from an object to its element."""
    if isinstance(owner, dict):
        if isinstance(key, int) and key > LARGEST_KEY:
            return "[id]"
        return "[cgx]" if "cgx" in repr(key).lower() else f"[{key!r}]"
    return "[]" if isinstance(owner, CONTAINERS) else f".{key}"


def main(package: str) -> None:
    warnings.simplefilter("ignore")  # deprecated names warn when they are accessed
    for name in others_of(package):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    environment, loaded = dict(os.environ), libraries()
    exits, threads = atexit._ncallbacks(), threading.active_count()
    owners = Owners()
    importlib.import_module(package)
    found = {
        "attributes": owners.changed(),
        "environment": sorted(
            name
            for name in environment.keys() | os.environ.keys()
            if environment.get(name) != os.environ.get(name)
        ),
        "libraries": sorted(libraries() - loaded),
        "exit handlers": atexit._ncallbacks() - exits,
        "threads": threading.active_count() - threads,
    }
    print(json.dumps(found))


main(sys.argv[1])
