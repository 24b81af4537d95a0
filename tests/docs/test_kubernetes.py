"""The manifests of examples/kubernetes/ are YAML, and set variables that exist."""

from pathlib import Path
from typing import Any

import pytest

from cgx_ops._core import variables

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).resolve().parents[2]
MANIFESTS = sorted((ROOT / "examples/kubernetes").glob("*.yaml"))


def _containers(node: Any) -> list[dict[str, Any]]:
    """Return all containers in a manifest."""
    if isinstance(node, list):
        return [found for each in node for found in _containers(each)]
    if not isinstance(node, dict):
        return []
    return node.get("containers", []) + [c for value in node.values() for c in _containers(value)]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_manifest(path: Path) -> None:
    manifest = yaml.safe_load(path.read_text())
    assert manifest["kind"] in ("PyTorchJob", "JobSet")
    containers = _containers(manifest["spec"])
    assert containers
    for container in containers:
        assert "torchrun" in container["command"]
        names = {each["name"] for each in container["env"]}
        assert {name for name in names if name.startswith("CGX_")} <= variables.NAMES
        for argument in container["command"]:
            assert "$(" not in argument or argument.split("$(")[1].rstrip(")") in names


def test_the_guide_includes_every_manifest() -> None:
    page = (ROOT / "docs/guides/kubernetes.md").read_text()
    assert MANIFESTS
    for path in MANIFESTS:
        assert f"{{literalinclude}} ../../examples/kubernetes/{path.name}" in page
