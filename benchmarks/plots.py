"""Draws what reports hold: time by size, speed-up by link, steps by phase, losses by time.

    python benchmarks/plots.py [folder]

Reads the reports (JSON) of the folder and writes PNG files beside them, each if there is something
to draw:

    time_by_size.png      a panel for each allreduce report: contenders as lines, limits dashed
    speedup_by_link.png   over the fastest exact peer, from slow links to shared memory
    steps.png             a panel for each report at 1 Gbit/s whose settings have "phases":
                          {contender: {"compute_s": ..., "communicate_s": ...}}
    step_by_link.png      a training step of DDP by link rate
    convergence.png       loss against wall time of a few methods, a panel for each task and link
    adamw.png             AdamW: held-out loss above exact AdamW's, a panel for each task
    adamw_noise.png       AdamW: the second moment of compressed gradients
    error_by_bytes.png    error of compressors by bits per value, a panel for each kind of values
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # draws to files: no display is needed

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from cgx_ops._core.units import rate_text, size_text
from cgx_ops.bench.report import Report
from cgx_ops.bench.results import Result

RESULTS = Path(__file__).resolve().parent / "results"

# Colors of Okabe and Ito, which differ to every eye; cgx in full lines, what others do in thin.
_STYLE: dict[str, dict[str, Any]] = {
    "mpi": {"color": "#000000", "marker": "s"},
    "gloo": {"color": "#7f7f7f", "marker": "o"},
    "psum": {"color": "#b0b0b0", "marker": "^"},
    "fp16": {"color": "#cc79a7", "marker": "v"},
    "powersgd": {"color": "#56b4e9", "marker": "D"},
    "pertensor": {"color": "#f0e442", "marker": "P"},
    "numpy": {"color": "#8c6d31", "marker": "X"},
    "cgx 32": {"color": "#0072b2", "marker": "s", "linewidth": 2.5},
    "cgx 8 nearest": {"color": "#e69f00", "marker": "o", "linewidth": 2.5},
    "cgx 4 nearest": {"color": "#d55e00", "marker": "o", "linewidth": 2.5},
    "cgx 4 stochastic": {"color": "#d55e00", "marker": "o", "linewidth": 2.5, "linestyle": ":"},
    "cgx 2 nearest": {"color": "#009e73", "marker": "o", "linewidth": 2.5},
}
_LIMITS = ("cgx 32", "cgx 4 nearest")  # whose limits are drawn
_GIGABIT = 125e6  # bytes a second
_STEPS = {  # the contenders of step_by_link.png
    "gloo": ("gloo, exact", "#7f7f7f"),
    "gloo, fp16 hook": ("fp16 hook", "#cc79a7"),
    "gloo, PowerSGD rank 4": ("PowerSGD hook, rank 4", "#56b4e9"),
    "cgx 4 bits": ("cgx_ops, 4 bits", "#d55e00"),
}
_CURVES = {  # the methods of convergence.png
    "gloo": ("gloo, exact", "#7f7f7f", "-"),
    "gloo, fp16": ("gloo, fp16 hook", "#cc79a7", "--"),
    "gloo, PowerSGD": ("gloo, PowerSGD hook", "#56b4e9", "--"),
    "4 bits": ("cgx_ops, 4 bits", "#d55e00", "-"),
    "levels, 2 bits": ("cgx_ops, levels of 2 bits", "#009e73", "-"),
    "PowerSGD": ("cgx_ops, PowerSGD", "#0072b2", "-"),
    "1-bit Adam": ("cgx_ops, 1-bit Adam", "#e69f00", "-"),
    "topk 1 %": ("cgx_ops, topk 1 %", "#000000", ":"),
}
_ERRORS = {  # the families of error_by_bytes.png
    "entropy": ("#000000", "o-"),
    "uniform": ("#d55e00", "s-"),
    "uniform, rotation 32": ("#d55e00", "s:"),
    "levels": ("#0072b2", "v-"),
    "levels, rotation 32": ("#0072b2", "v:"),
    "onebit": ("#cc79a7", "P"),
    "topk, 1-bit values": ("#009e73", "-"),
    "topk, 8-bit values": ("#009e73", ":"),
    "mxfp8": ("#e69f00", "D"),
    "mxfp8_e5m2": ("#e69f00", "d"),
    "mxfp4": ("#56b4e9", "^"),
    "nvfp4": ("#8c6d31", "*"),
}
_PHASES = {"compute_s": ("compute", "#999999"), "communicate_s": ("communicate", "#d55e00")}


def draw(folder: Path) -> list[Path]:
    """Draw all plots that the folder's reports allow; return their paths."""
    reports = [Report.read(path) for path in sorted(folder.glob("*.json"))]
    allreduces = sorted((r for r in reports if r.part == "allreduce"), key=_by_link)
    steps = [report for report in reports if "phases" in report.settings]
    by_link = sorted((r for r in steps if r.part == "DDP step"), key=_by_link)
    trainings = [report for report in reports if report.part == "convergence"]
    trained = max(trainings, key=lambda report: len(report.results), default=None)
    figures: dict[str, Figure | None] = {
        "time_by_size.png": time_by_size(allreduces) if allreduces else None,
        "speedup_by_link.png": speedup_by_link(allreduces) if allreduces else None,
        "steps.png": stacked_steps(
            [r for r in steps if r.settings.get("link_rate", _GIGABIT) == _GIGABIT]
        ),
        "step_by_link.png": step_by_link(by_link),
        "convergence.png": losses(trained) if trained else None,
        "adamw.png": next((adamw(r) for r in reports if r.part == "adamw"), None),
        "adamw_noise.png": next((adamw_noise(r) for r in reports if r.part == "adamw_noise"), None),
        "error_by_bytes.png": next(
            (error_by_bytes(r) for r in reports if r.part == "error_by_bytes"), None
        ),
    }
    written = []
    for name, figure in figures.items():
        if figure is not None:
            figure.savefig(folder / name, dpi=100)
            plt.close(figure)
            written.append(folder / name)
    return written


def _results(report: Report) -> list[Result]:
    return [Result.of(record) for record in report.results]


def _by_link(report: Report) -> tuple[bool, float, int]:
    """Order reports from the slowest link to shared memory, then by ranks."""
    settings = report.settings
    return settings["hosts"] == 1, settings["link_rate"] or math.inf, settings["ranks"]


def _link_name(report: Report) -> str:
    settings = report.settings
    if settings["hosts"] == 1:
        return f"{settings['transport']}, {settings['ranks']} ranks"
    rate = settings["link_rate"]
    link = "unshaped TCP" if rate is None else rate_text(rate)
    return f"{link}, {settings['hosts']} hosts"


def time_by_size(reports: Sequence[Report]) -> Figure:
    """Draw a panel for each report of allreduce."""
    columns = min(len(reports), 4)
    rows = math.ceil(len(reports) / columns)
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(4.6 * columns, 4.2 * rows + 0.8),
        layout="constrained",
        squeeze=False,
    )
    for panel, report in zip(axes.flat, reports, strict=False):
        results = _results(report)
        for name, style in _STYLE.items():
            mine = [result for result in results if result.contender == name]
            sizes = [result.bytes for result in mine]
            if mine:
                seconds = [result.seconds for result in mine]
                panel.plot(sizes, seconds, label=name, markersize=4, **style)
            if mine and name in _LIMITS:
                limits = [result.limit_seconds for result in mine]
                label = f"limit of {name.split(' ')[1]} bits"
                panel.plot(sizes, limits, "--", color=style["color"], linewidth=1, label=label)
        _label_sizes(panel, sorted({result.bytes for result in results}))
        panel.set_title(_link_name(report))
        panel.grid(alpha=0.3)
    for panel in axes.flat[len(reports) :]:
        panel.axis("off")
    for panel in axes[:, 0]:
        panel.set_ylabel("seconds")
    _legend(figure, axes.flat)
    figure.suptitle("Allreduce of fp32: median time of the slowest rank")
    return figure


def _label_sizes(panel: Axes, sizes: list[int]) -> None:
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(sizes, [size_text(size).replace("iB", "") for size in sizes])


def _legend(figure: Figure, panels: Any, columns: int = 7) -> None:
    """Put one legend for all panels below them, in the order of _STYLE."""
    handles = {}
    for panel in panels:
        found, labels = panel.get_legend_handles_labels()
        handles |= dict(zip(labels, found, strict=True))
    order = [*_STYLE, *handles]
    handles = {label: handles[label] for label in sorted(handles, key=order.index)}
    figure.legend(
        handles.values(), handles, loc="outside lower center", ncols=columns, frameon=False
    )


def speedup_by_link(reports: Sequence[Report]) -> Figure:
    """Draw each contender's speed-up at the largest size, a group of bars for each report."""
    names = [name for name in _STYLE if name not in ("mpi", "gloo", "psum")]
    width = 0.85 / len(names)
    figure, panel = plt.subplots(figsize=(2.4 * len(reports) + 2, 5), layout="constrained")
    groups = []
    for place, report in enumerate(reports):
        results = _results(report)
        largest = max(result.bytes for result in results)
        groups.append(f"{_link_name(report)}\n{size_text(largest)}")
        found = {r.contender: r.speedup for r in results if r.bytes == largest}
        for index, name in enumerate(names):
            speedup = found.get(name)
            if speedup is not None:
                x = place + (index - (len(names) - 1) / 2) * width
                pattern = "//" if "linestyle" in _STYLE[name] else None
                color = _STYLE[name]["color"]
                bars = panel.bar(x, speedup, width, color=color, hatch=pattern, label=name)
                panel.bar_label(bars, [f"{speedup:.1f}"], padding=2, fontsize=8)
    panel.axhline(1, color="#7f7f7f", linewidth=1, zorder=0)
    panel.set_xticks(range(len(groups)), groups)
    panel.set_ylabel("times faster than the fastest exact peer")
    panel.set_title("Allreduce of fp32: speed-up by link")
    _legend(figure, [panel])
    return figure


def step_by_link(reports: Sequence[Report]) -> Figure | None:
    """Draw the time of a DDP step: a group of bars for each link rate, one for each contender."""
    if not reports:
        return None
    figure, panel = plt.subplots(figsize=(8, 4.2), layout="constrained")
    width = 0.8 / len(_STEPS)
    for place, report in enumerate(reports):
        seconds = {result["contender"]: result["seconds"] for result in report.results}
        for index, (name, (label, color)) in enumerate(_STEPS.items()):
            x = place + (index - (len(_STEPS) - 1) / 2) * width
            milliseconds = 1e3 * seconds[name]
            bars = panel.bar(x, milliseconds, width, color=color, label=label)
            panel.bar_label(bars, [f"{milliseconds:.0f}"], padding=2, fontsize=9)
        compute = 1e3 * report.results[0]["compute_s"]
        span = (place - 0.45, place + 0.45)
        panel.plot(span, (compute, compute), "k--", linewidth=1, label="computation alone")
    panel.set_yscale("log")
    panel.margins(y=0.12)
    panel.set_xticks(range(len(reports)), [rate_text(r.settings["link_rate"]) for r in reports])
    panel.set_xlabel("link of each host")
    panel.set_ylabel("milliseconds a step")
    millions = reports[0].settings["parameters"] / 1e6
    panel.set_title(f"A DDP step of {millions:.0f} million parameters on 2 hosts")
    _legend(figure, [panel], columns=3)
    return figure


def stacked_steps(reports: Sequence[Report]) -> Figure | None:
    """Draw a training step of each contender, divided into its phases."""
    if not reports:
        return None
    figure, axes = plt.subplots(
        1, len(reports), figsize=(6.5 * len(reports), 4.5), layout="constrained", squeeze=False
    )
    for panel, report in zip(axes.flat, reports, strict=True):
        phases = report.settings["phases"]
        names = list(phases)[::-1]  # the first on top
        left = [0.0] * len(names)
        for key, (label, color) in _PHASES.items():
            seconds = [phases[name][key] for name in names]
            panel.barh(names, seconds, left=left, color=color, label=label)
            left = [a + b for a, b in zip(left, seconds, strict=True)]
        for name, total in zip(names, left, strict=True):
            panel.annotate(f" {total:.2f}", (total, name), va="center")
        panel.margins(x=0.12)
        panel.set_xlabel("seconds a step")
        panel.set_title(report.part)
    _legend(figure, axes.flat)
    return figure


def losses(report: Report) -> Figure:
    """Draw losses against the seconds of training: a row for each task, a panel for each link.

    Draws the methods of _CURVES, on the smallest number of hosts.
    """
    count = min(outcome["hosts"] for outcome in report.results)
    mine = [o for o in report.results if o["hosts"] == count and o["method"] in _CURVES]
    tasks = list(dict.fromkeys(o["task"] for o in mine))
    rates = list(dict.fromkeys(o["rate"] for o in mine))
    figure, axes = plt.subplots(
        len(tasks),
        len(rates),
        figsize=(4.8 * len(rates), 3.2 * len(tasks) + 0.8),
        sharey="row",
        layout="constrained",
        squeeze=False,
    )
    for task, row in zip(tasks, axes, strict=True):
        for rate, panel in zip(rates, row, strict=True):
            for outcome in (o for o in mine if (o["task"], o["rate"]) == (task, rate)):
                curve = zip(*outcome["curve"], strict=True)
                label, color, style = _CURVES[outcome["method"]]
                panel.loglog(*curve, style, color=color, linewidth=2, label=label)
            for axis in (panel.xaxis, panel.yaxis):
                axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axis.set_major_formatter("{x:g}")
                axis.set_minor_locator(NullLocator())
            panel.set_title(f"{task}, {rate}")
            panel.grid(alpha=0.3)
        row[0].set_ylabel("held-out loss, nats")
    for panel in axes[-1]:
        panel.set_xlabel("seconds of training")
    _legend(figure, axes.flat, columns=4)
    figure.suptitle(f"Held-out loss against wall time, {count} hosts")
    return figure


def adamw(report: Report) -> Figure:
    """Draw how much more than exact AdamW methods lose: a panel for each task, a row a method."""
    rates = report.settings["best"]
    figure, axes = plt.subplots(
        1, len(rates), figsize=(4.6 * len(rates) + 2, 5), layout="constrained", squeeze=False
    )
    panels: list[Axes] = list(axes[0])
    methods = list(dict.fromkeys(each["method"] for each in report.results))
    names = [name for name in methods if name != "exact"][::-1]  # the first on top
    for panel, (task, best) in zip(panels, rates.items(), strict=True):
        for rate, color, shift, label in (
            (best, "#0072b2", 0.15, "best rate of exact AdamW"),
            (best / 3, "#d55e00", -0.15, "a third of it"),
        ):
            losses_of = {
                (each["method"], each["seed"]): each["loss"]
                for each in report.results
                if (each["task"], each["rate"]) == (task, rate)
            }
            for place, name in enumerate(names):
                more = [
                    loss - losses_of["exact", seed]
                    for (method, seed), loss in losses_of.items()
                    if method == name and ("exact", seed) in losses_of and math.isfinite(loss)
                ]
                if not more and any(method == name for method, _ in losses_of):
                    panel.text(
                        0.01, place + 1.5 * shift, "diverges", color=color, va="center", size=8
                    )
                if more:
                    y, mean = place + shift, sum(more) / len(more)
                    panel.plot(more, [y] * len(more), "|", color=color, markersize=7)
                    panel.plot([mean], [y], "o", color=color, label=label)
        panel.axvline(0, color="#7f7f7f", linewidth=1, zorder=0)
        panel.set_xscale("symlog", linthresh=0.05)
        panel.set_xticks([-0.03, 0, 0.03, 0.1, 0.3, 1], ["-0.03", "0", "0.03", "0.1", "0.3", "1"])
        panel.minorticks_off()
        panel.set_yticks(range(len(names)), names if panel is panels[0] else [""] * len(names))
        panel.set_title(f"{task}, rate {best:g}")
        panel.set_xlabel("held-out loss above exact AdamW, nats")
        panel.grid(alpha=0.3)
    _legend(figure, panels, columns=2)
    figure.suptitle("AdamW with compressed gradients: mean (dots) and seeds (ticks)")
    return figure


def adamw_noise(report: Report) -> Figure:
    """Draw sqrt(v) over the exact one, by the size of the exact v: a line for each codec."""
    styles = {
        "8 bits": "#7f7f7f",
        "4 bits": "#d55e00",
        "2 bits": "#e69f00",
        "2 bits rotated levels": "#56b4e9",
        "2 bits rotated levels, feedback": "#0072b2",
        "1 bit rotated levels, feedback": "#009e73",
    }
    figure, panel = plt.subplots(figsize=(8, 4.2), layout="constrained")
    for name, color in styles.items():
        fifths = [each["fifths"] for each in report.results if each.get("codec") == name]
        if fifths:
            means = [sum(column) / len(fifths) for column in zip(*fifths, strict=True)]
            panel.plot(range(5), means, "o-", color=color, label=name)
            panel.annotate(f" {name}", (0, means[0]), xytext=(-4, 0), ha="right", va="center",
                           textcoords="offset points", fontsize=9, color=color)  # fmt: skip
    panel.axhline(1, color="#7f7f7f", linewidth=1, zorder=0)
    panel.set_xlim(-2.2, 4.2)
    panel.set_yscale("log")
    panel.set_yticks([0.8, 1, 1.5, 2, 3], ["0.8", "1", "1.5", "2", "3"])
    panel.minorticks_off()
    panel.set_xticks(range(5), ["smallest", "", "middle", "", "largest"])
    panel.set_xlabel("fifths of the parameters, by exact sqrt(v)")
    panel.set_ylabel("sqrt(v) over the exact one")
    panel.set_title("Adam's second moment of compressed gradients")
    panel.grid(alpha=0.3)
    return figure


def error_by_bytes(report: Report) -> Figure:
    """Draw the error of each family of _ERRORS by real bits per value, and Shannon's bound."""
    curves = {(curve["values"], curve["family"]): curve for curve in report.results}
    kinds = list(dict.fromkeys(kind for kind, _ in curves))
    columns = min(len(kinds), 3)
    rows = math.ceil(len(kinds) / columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(4 * columns, 2.9 * rows + 0.8), sharex=True, sharey=True,
        layout="constrained", squeeze=False,
    )  # fmt: skip
    for panel, kind in zip(axes.flat, kinds, strict=False):
        for family, (color, style) in _ERRORS.items():
            curve = curves.get((kind, family), {"bits": [], "errors": []})
            size = 4 if "-" in style or ":" in style else 8  # points without a line are few
            panel.plot(
                curve["bits"], curve["errors"], style, color=color, markersize=size, label=family
            )
        bound = [0.2 * 1.1**i for i in range(40)]
        panel.plot(bound, [4**-bits for bits in bound], "k--", linewidth=1, label="Shannon, Gauss")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_ylim(3e-6, 1.5)
        panel.set_xlim(0.22, 9)
        panel.set_xticks([0.25, 0.5, 1, 2, 4, 8], ["0.25", "0.5", "1", "2", "4", "8"])
        panel.set_title(kind)
        panel.grid(alpha=0.3)
    for panel in axes.flat[len(kinds) :]:
        panel.axis("off")
    for panel in axes[-1]:
        panel.set_xlabel("bits per value, as sent")
    for panel in axes[:, 0]:
        panel.set_ylabel("squared error / signal")
    _legend(figure, axes.flat, columns=5)
    figure.suptitle("Error at equal bytes")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description="Plots of the reports in a folder.")
    parser.add_argument("folder", nargs="?", type=Path, default=RESULTS)
    for path in draw(parser.parse_args().folder):
        print(path)


if __name__ == "__main__":
    main()
