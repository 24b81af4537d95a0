"""The benchmark of errors at equal bytes: points, curves, tables and the captured gradients."""

import json
import sys
from pathlib import Path

import error_by_bytes
import gradients
import numpy as np
import plots
import pytest
import torch
from error_by_bytes import Curve, Point

from cgx_ops import Config
from cgx_ops.bench.report import Report


def curve(*points: tuple[float, float], family: str = "levels") -> Curve:
    return Curve([Point("Gauss", family, "", bits, error) for bits, error in points])


def test_error_between_points() -> None:
    found = curve((4, 1e-4), (2, 1e-2), (3, 0.5), (1, 1))
    assert [point.bits for point in found.points] == [1, 2, 4]  # 3 bits are worse than 2
    assert found.error_at(0.9) is None
    assert found.error_at(2) == pytest.approx(1e-2)
    assert found.error_at(3) == pytest.approx(1e-3)
    assert found.error_at(9) == 1e-4


def test_exceptions_are_points_below_the_curve_of_entropy() -> None:
    entropy = curve((1, 0.25), (3, 0.01), family="entropy")
    other = curve((0.5, 0.9), (1, 0.26), (2, 0.04), (3, 0.02), (4, 1e-3))
    families = {"entropy": entropy, "levels": other, "half": curve((16, 1e-6))}
    assert error_by_bytes.best_other(families, 2 - error_by_bytes.HEADER_BITS) == (0.04, "levels")
    found = error_by_bytes.exceptions({"Gauss": families})
    assert [(point.bits, error) for point, error in found] == [(2, pytest.approx(0.05))]
    assert error_by_bytes.table_of_exceptions({"Gauss": families}).rows == [
        ["Gauss", "", "2.000", "0.04", "0.05"]
    ]


def test_measured_bytes_and_error() -> None:
    x = np.random.default_rng(0).standard_normal(error_by_bytes.BLOCK + 512, np.float32)
    bits, error = error_by_bytes.measure(x, Config(2, compressor="levels"))
    assert bits == 2 + 16 / 512
    assert error == pytest.approx(0.1175, rel=0.02)  # Lloyd and Max
    bits, error = error_by_bytes.measure(x, Config(compressor="topk", density=0.5, bucket_size=512))
    assert bits > 16
    kept = np.sort((x.reshape(-1, 512) ** 2).astype(float), axis=1)[:, :256]
    assert error == pytest.approx(kept.sum() / np.sum(x.astype(float) ** 2))


def test_length_of_variable_blocks_excludes_the_framing() -> None:
    x = np.ones(2 * error_by_bytes.BLOCK, np.float32)
    config = Config(compressor="entropy", rate=1)
    assert error_by_bytes.measure(x, config) == (8 * 2 * 5 / x.size, 0)  # a kind and the value


def test_capture_has_the_matrices_of_a_step() -> None:
    task = gradients.gpt()
    first = dict(gradients.captured(task, [1, 3]))
    torch.manual_seed(0)
    matrices = [p.numel() for p in task.model().parameters() if p.dim() > 1]
    assert {gradient.size for gradient in first.values()} == {sum(matrices)}
    assert not np.array_equal(first[1], first[3])
    again = dict(gradients.captured(task, [1]))
    np.testing.assert_array_equal(again[1], first[1])


def test_benchmark_writes_report_tables_and_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(1)
    for step in (100, 10):
        gradient = random.laplace(size=5000).astype(np.float32)
        np.save(tmp_path / f"model-{step}.npy", gradient)
    page, report = tmp_path / "page.md", tmp_path / "report.json"
    names = ("entropy-errors", "other-errors")
    page.write_text("".join(f"<!-- begin {name} -->\n<!-- end {name} -->\n" for name in names))
    families = {name: configs[:3] for name, configs in error_by_bytes.FAMILIES.items()}
    monkeypatch.setattr(error_by_bytes, "FAMILIES", families)
    arguments = ["--blocks", "1", "--gradients", tmp_path, "--json", report, "--docs", page]
    monkeypatch.setattr(sys, "argv", ["error_by_bytes.py", *map(str, arguments)])
    error_by_bytes.main()
    results = json.loads(report.read_text())["results"]
    kinds = list(dict.fromkeys(curve["values"] for curve in results))
    assert kinds == ["Gauss", "Laplace", "t3", "model, step 10", "model, step 100"]
    assert [curve["family"] for curve in results] == [*families] * len(kinds)
    for curve in results:
        assert len(curve["configs"]) == len(curve["bits"]) == len(curve["errors"]) > 0
        assert all(0 < bits < 17 for bits in curve["bits"])
        assert all(0 < error < 1000 for error in curve["errors"])
    for kind in kinds:
        assert page.read_text().count(f"| {kind} |") == 2
    assert len(Report.read(report).tables) == 2 + 4 + 1  # three distributions, and the gradients
    (drawn,) = plots.draw(tmp_path)
    assert drawn.name == "error_by_bytes.png"
    assert drawn.read_bytes().startswith(b"\x89PNG")
