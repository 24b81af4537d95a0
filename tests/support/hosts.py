"""benchmarks/hosts.py and the rank program of its tests as modules; they are in no package."""

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "ranks" / "run_hosts.py"


def load(path: Path) -> ModuleType:
    """Import a file that is in no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hosts_py = load(ROOT / "benchmarks" / "hosts.py")
run_hosts = load(PROGRAM)
