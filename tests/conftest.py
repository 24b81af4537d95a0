"""What every test shares: the header's lines. Deadlines and markers are in pyproject.toml."""

import cgx_ops
from cgx_ops import _native


def pytest_report_header() -> list[str]:
    """Show which libraries are tested."""
    build = _native.describe()
    bindings = [name for name in ("torch", "jax") if name in _native.built_with()]
    return [
        f"cgx_ops: {cgx_ops.__version__}, bindings: {', '.join(bindings) or 'none'}",
        f"MPI: {build['mpi']}",
        f"CPU target: {build['cpu_target']} of {', '.join(build['cpu_targets'])}",
    ]
