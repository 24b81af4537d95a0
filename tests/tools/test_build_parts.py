"""The parts of a build, for frameworks installed with CUDA, without it, or not at all."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cgx_ops import __main__
from cgx_ops._core import binary

ROOT = Path(__file__).parents[2]
# Runs setup.py up to its call of setup(). Arguments: the folder of the frameworks, and the missing
# ones.
CHOOSE = """
import functools, importlib.metadata, json, runpy, setuptools, sys

folder, *missing = sys.argv[1:]
metadata = importlib.metadata
metadata.distributions = functools.partial(metadata.distributions, path=[folder])
sys.modules.update(dict.fromkeys(missing))
sys.argv = ["setup.py"]
setuptools.setup = lambda **_: None
made = runpy.run_path("setup.py")
print(json.dumps([made["BUILT"], made["summary"](made["BUILT"])]))
"""


@dataclass
class Environment:
    """The environment of a build.

    torch_cuda: torch.version.cuda; plugins: packages of JAX for GPUs; missing: modules; nvcc: the
    toolkit's version.
    """

    folder: Path
    torch_cuda: str | None = None
    plugins: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    nvcc: str = "13.0"

    def choose(self, parts: str = "") -> subprocess.CompletedProcess[str]:
        """Run setup.py with CGX_WITH=parts."""
        self._write("torch/__init__.py", "raise AssertionError('a build need not import torch')")
        self._write("torch/version.py", f"__version__ = '2.13.1'; cuda = {self.torch_cuda!r}")
        self._write("jaxlib/__init__.py", "raise AssertionError('a build need not import JAX')")
        for package in ("jaxlib", *self.plugins):
            metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.10.9\n"
            self._write(f"{package.replace('-', '_')}-0.10.9.dist-info/METADATA", metadata)
        nvcc = self._write(
            "bin/nvcc", f"#!/bin/sh\necho Cuda compilation tools, release {self.nvcc}, V\n"
        )
        nvcc.chmod(0o755)
        return subprocess.run(
            [sys.executable, "-c", CHOOSE, self.folder, *self.missing],
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": str(self.folder),
                "CUDA_HOME": str(self.folder),
                "CGX_WITH": parts,
            },
            capture_output=True,
            text=True,
            timeout=60,
        )

    def built(self, parts: str = "") -> tuple[dict[str, Any], str]:
        """Return the contents of _build.json, and the summary."""
        done = self.choose(parts)
        assert done.returncode == 0, done.stderr
        return tuple(json.loads(done.stdout))

    def _write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path


@pytest.mark.parametrize(
    ("torch_cuda", "plugin", "parts"),
    [
        ("13.0", "", ""),
        ("12.6", "", "torch"),
        (None, "jax-cuda13-plugin", ""),
        (None, "jax_cuda12_plugin", "torch,jax"),
        (None, "", "cuda"),
        (None, "", "torch, jax, cuda"),
    ],
)
def test_cuda_is_built(torch_cuda: str | None, plugin: str, parts: str, tmp_path: Path) -> None:
    """Check that CUDA is built for a framework that uses it, or if CGX_WITH names it."""
    environment = Environment(tmp_path, torch_cuda, (plugin,) if plugin else ())
    built, summary = environment.built(parts)
    assert built["cuda"] == "13.0"
    assert "  cuda    13.0\n" in summary


@pytest.mark.parametrize(
    ("torch_cuda", "plugin", "parts", "reason"),
    [
        (None, "", "", "no torch or JAX that uses CUDA is installed"),
        (None, "", "torch,jax", "CGX_WITH does not name cuda"),
        ("13.0", "", "jax", "no torch or JAX that uses CUDA"),
        (None, "jax-cuda13-plugin", "torch", "no torch or JAX that uses CUDA"),
        ("13.0", "jax-cuda13-plugin", "none", "CGX_WITH is none"),
    ],
)
def test_cuda_is_left_out(
    torch_cuda: str | None, plugin: str, parts: str, reason: str, tmp_path: Path
) -> None:
    """Check that CUDA is left out if no framework uses it, even if there is an nvcc."""
    environment = Environment(tmp_path, torch_cuda, (plugin,) if plugin else ())
    built, summary = environment.built(parts)
    assert "cuda" not in built
    assert reason in built["without"]["cuda"]
    assert f"  cuda    left out: {built['without']['cuda']}\n" in summary


def test_old_toolkit_is_left_out_or_raises(tmp_path: Path) -> None:
    environment = Environment(tmp_path, torch_cuda="12.6", nvcc="12.4")
    built, summary = environment.built()
    assert "has CUDA 12.4; cgx_ops needs 12.5 or newer" in built["without"]["cuda"]
    assert built["without"]["cuda"] in summary
    refused = environment.choose("torch,cuda")
    assert refused.returncode == 1
    assert "12.5 or newer. CGX_WITH requires it." in refused.stderr


def test_a_missing_framework_is_in_the_summary(tmp_path: Path) -> None:
    built, summary = Environment(tmp_path, missing=("jaxlib",)).built()
    assert built["torch"] == "2.13.1"
    assert built["without"]["jax"] == "jaxlib is not installed"
    assert "  torch   2.13.1\n" in summary
    assert "  jax     left out: jaxlib is not installed\n" in summary
    assert summary.splitlines()[-1].strip().startswith("pip install --force-reinstall")
    built, summary = Environment(tmp_path, missing=("torch", "jaxlib")).built()
    assert built["without"].keys() == {"torch", "jax", "cuda"}
    assert "  torch   left out: torch is not installed\n" in summary


def test_complete_build_misses_nothing(tmp_path: Path) -> None:
    built, summary = Environment(tmp_path, torch_cuda="13.0").built("torch,jax,cuda")
    assert built["without"] == {}
    assert len(summary.splitlines()) == 6
    assert f"  mpi     {built['mpi']}\n" in summary
    assert "left out" not in summary


def test_framework_in_cgx_with_is_required(tmp_path: Path) -> None:
    refused = Environment(tmp_path, missing=("jaxlib",)).choose("torch,jax")
    assert refused.returncode == 1
    assert refused.stderr == (
        "cgx_ops: cannot build jax: jaxlib is not installed. CGX_WITH requires it.\n"
    )


def test_info_shows_why_cuda_was_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binary, "built_with", lambda: {"without": {"cuda": "no nvcc on PATH"}})
    ((_, text),) = __main__._cuda({"built": None})
    assert text.startswith("no CUDA: no nvcc on PATH. To add CUDA, with nvcc on PATH run CGX_WITH=")
