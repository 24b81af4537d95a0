"""The command line, `python -m cgx_ops COMMAND`.

info: what this installation supports, and how to add what is missing.
plan: predict the gain of compression for your model (cgx_ops/planner/).
bench: time allreduce among the ranks that mpirun starts (cgx_ops/bench/).
"""

import argparse
import sys
from collections.abc import Iterable
from typing import Any

from rich.table import Table

from cgx_ops._core import binary, library
from cgx_ops._core.text_table import console
from cgx_ops._core.versions import how_to_install, installed, versions
from cgx_ops.bench import allreduce
from cgx_ops.errors import CgxError
from cgx_ops.planner import command as plan

# Framework -> the package whose version must match the build, and the extension module.
_FRAMEWORKS = {"torch": ("torch", "_torch_ops"), "jax": ("jaxlib", "_xla_ffi")}
_MPI_TAKES = {
    True: "CUDA-aware: it accepts GPU memory",
    False: "not CUDA-aware: it accepts host memory only (docs/explanation/gpu.md)",
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    options = parser().parse_args(arguments)
    return options.run(options)


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="python -m cgx_ops", description="Quantized collectives for PyTorch and JAX."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser(
        "info", help="show what this installation supports: bindings, MPI, CPU, CUDA"
    )
    info.set_defaults(run=_info)
    allreduce.add_arguments(
        commands.add_parser("bench", help="time allreduce among the ranks that mpirun starts")
    )
    plan.add_arguments(
        commands.add_parser("plan", help="predict the gain of compression for a model")
    )
    return parser


def _info(_options: argparse.Namespace) -> int:
    try:
        build = library.describe()
    except CgxError as error:
        print(f"python -m cgx_ops info: {error}", file=sys.stderr)
        return 2
    output = console()
    output.print(_table("Bindings", *map(_binding, _FRAMEWORKS)))
    output.print(_versions())
    output.print(
        _table(
            "Machine",
            *_mpi(),
            ("CPU target", build["cpu_target"]),
            ("CPU targets here", ", ".join(build["cpu_targets"])),
        )
    )
    output.print(_table("CUDA", *_cuda(build["cuda"])))
    for kind in ("transports", "compressors", "algorithms", "wires"):
        rows = ((entry["name"], entry["description"]) for entry in build[kind])
        output.print(_table(kind.capitalize(), *rows))
    return 0


def _mpi() -> list[tuple[str, str]]:
    """Return rows that describe the MPI library, or say why it cannot be loaded."""
    try:
        found = library.describe_mpi()
    except CgxError as error:
        return [("MPI library", f"missing: {error}")]
    return [
        ("MPI library", found["library"]),
        ("MPI and GPUs", _MPI_TAKES[found["cuda_aware"]]),
    ]


def _cuda(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Return rows that describe CUDA, and say how to add what is missing."""
    if not found["built"]:
        reason = binary.built_with()["without"]["cuda"]
        remedy = f"with nvcc on PATH run CGX_WITH=cuda {binary.REBUILD}"
        return [("built with", f"no CUDA: {reason}. To add CUDA, {remedy}")]
    driver = found["driver"]
    devices = [
        (f"cuda:{i}", "{name}, compute capability {capability}, {memory_gib} GiB".format(**device))
        for i, device in enumerate(found["devices"])
    ]
    return [
        ("built with", f"CUDA {found['built']}"),
        (
            "driver",
            f"supports CUDA {driver}" if driver else "missing: no NVIDIA driver here",
        ),
        *(devices or [("devices", "none")]),
    ]


def _versions() -> Table:
    rows = ((name, version or "not installed") for name, version in versions().items())
    return _table("Versions", *rows)


def _binding(framework: str) -> tuple[str, str]:
    """Return the framework and whether its binding is usable, without importing either."""
    package, module = _FRAMEWORKS[framework]
    version = installed(package)
    built = binary.built_with().get(framework)
    if version is None:
        problem = f"{package} is not installed: {how_to_install(framework)}"
        return (
            framework,
            f"not usable: {f'built for {package} {built}, but ' * bool(built)}{problem}",
        )
    try:
        binary.require_binding(framework, version)
    except ImportError as error:
        return framework, f"not usable: {error}"
    return framework, (
        f"usable: built for {package} {built}, and {version} is installed (cgx_ops.{module})"
    )


def _table(title: str, *rows: Iterable[str]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, expand=True)
    table.add_column(width=18, no_wrap=True, style="bold")
    table.add_column(ratio=1, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


if __name__ == "__main__":
    sys.exit(main())
