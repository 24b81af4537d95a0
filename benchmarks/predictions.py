"""Predictions of the cost model for up to 4,096 ranks.

    rule_table()   the fastest algorithm by size, and what `auto` loses beside it
    draw()         times by ranks; the fastest algorithm by ranks and size

Each rank has one core.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")  # draws to a file: no display is needed

import matplotlib.pyplot as plt
import numpy as np
from cost_model import (
    EAGER_BYTES,
    EXACT,
    HEADER_BYTES,
    Constants,
    Machine,
    Ranks,
    predict,
    wire_bytes,
)
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from cgx_ops._core.text_table import Table
from cgx_ops._core.units import parse_rate, rate_text, size_text, time_text

RATES = ("1gbit", "10gbit")
PER_HOST = (1, 8)
RANKS = tuple(2**power for power in range(1, 13))
GRID = tuple(1 << power for power in range(11, 31))  # bytes of fp32: 2 KiB to 1 GiB
_FINE = tuple(sorted({round(2 ** (quarter / 4)) * 2048 for quarter in range(77)}))  # the same
_MODEL_BYTES = 100_000_000 // 2048 * 2048  # whole buckets
_NESTED_LINK_BYTES = 32 * 1024  # kLinkBytes of csrc/algorithm/table.cc
_CANDIDATES = ("one_shot", "sra", "hierarchical")  # for 4 bits; ring's error grows with the ranks


def ranks_of(size: int, per_host: int) -> Ranks:
    """Return `size` ranks on hosts of `per_host`, or fewer on one."""
    return Ranks(max(1, size // per_host), min(size, per_host))


def auto(size: int, ranks: Ranks) -> str:
    """Return what csrc/algorithm/table.cc takes for `size` bytes of fp32 at 4 bits."""
    nested = ranks.hosts > 1 and ranks.per_host > 1
    most = EAGER_BYTES
    if nested:
        pairs = ranks.per_host * (ranks.size - ranks.per_host)  # of ranks on one host's link
        most = min(max(_NESTED_LINK_BYTES // pairs, HEADER_BYTES), most)
    if wire_bytes(size // 4, 4) <= most:
        return "one_shot"
    return "hierarchical" if nested else "sra"


def times(size: int, ranks: Ranks, constants: Constants) -> dict[str, float]:
    """Return the seconds of each candidate, 4 bits; of hierarchical, where it is not sra."""
    nested = ranks.hosts > 1 and ranks.per_host > 1
    names = _CANDIDATES if nested else _CANDIDATES[:2]
    return {name: predict(name, size, 4, ranks, constants) for name in names}


def rule_table(machine: Machine) -> Table:
    """Return what is fastest by size, and what auto loses at worst, for numbers of ranks."""
    rows = []
    for rate, per_host in itertools.product(RATES, PER_HOST):
        constants = machine.constants(parse_rate(rate), math.inf)
        for count in (2, 4, 16, 64, 512, 4096):
            ranks = ranks_of(count, per_host)
            if per_host > 1 and ranks.hosts == 1:
                continue  # as one host, whatever its link
            found = {size: times(size, ranks, constants) for size in _FINE}
            best = [min(each, key=lambda name, t=each: t[name]) for each in found.values()]
            losses = {
                size: each[auto(size, ranks)] / min(each.values()) for size, each in found.items()
            }
            worst = max(_FINE, key=lambda size: losses[size])
            ends = [
                f"{name} to {_encoded_text(_FINE[at - 1])}"
                for name, at in _runs(best)
                if at < len(best)
            ]
            where = f"{auto(worst, ranks)} at {_encoded_text(worst)}"
            rows.append(
                [
                    rate_text(parse_rate(rate)),
                    f"{ranks.hosts:,} x {ranks.per_host}",
                    ", ".join([*ends, best[-1]]),
                    f"{losses[worst]:.2f}",
                    where if losses[worst] > 1.01 else "",
                ]
            )
    headers = 2 * (RANKS[-1] - 1) * machine.far_message
    return Table(
        "what auto should take at 4 bits, by encoded size: it takes one_shot to "
        f"{size_text(EAGER_BYTES)}, then sra; on hosts of several ranks one_shot while their link "
        f"carries {size_text(_NESTED_LINK_BYTES)}, then hierarchical",
        ["link", "hosts x ranks", "fastest by the model", "auto / best", "at worst"],
        rows,
        text_columns=3,
        sections=[i for i in range(1, len(rows)) if rows[i][0] != rows[i - 1][0]],
        notes=[
            "Encoded sizes from 264 bytes to 132 MiB; each rank has one core.",
            "Headers go from everyone to everyone: with a rank a host they alone take "
            f"{time_text(headers)} of processor time on each of {RANKS[-1]:,} ranks.",
        ],
    )


def _runs(names: Sequence[str]) -> list[tuple[str, int]]:
    """Return each run of equal names, with the index behind its end."""
    ends = [i for i in range(1, len(names)) if names[i] != names[i - 1]]
    return [(names[end - 1], end) for end in [*ends, len(names)]]


def _encoded_text(size: int) -> str:
    encoded = wire_bytes(size // 4, 4)
    unit, factor = next(
        (unit, factor)
        for unit, factor in (("MB", 10**6), ("kB", 10**3), ("B", 1))
        if encoded >= factor
    )
    return f"{encoded / factor:.3g} {unit}"


# ---- The plot ------------------------------------------------------------------------------------

_STYLE: dict[str, tuple[str, dict[str, Any]]] = {
    "one_shot": ("one_shot, 4 bits", {"color": "#e69f00", "marker": "v"}),
    "sra": ("sra, 4 bits", {"color": "#0072b2", "marker": "o"}),
    "hierarchical": ("hierarchical, 4 bits", {"color": "#d55e00", "marker": "D"}),
}
_EXACT_STYLE: dict[str, tuple[str, dict[str, Any]]] = {
    "ring": ("cgx ring, exact", {"color": "#56b4e9", "marker": "s"}),
    "MPI ring": ("MPI ring", {"color": "#000000", "linestyle": "-"}),
    "MPI recursive doubling": ("MPI recursive doubling", {"color": "#000000", "linestyle": ":"}),
    "MPI Rabenseifner": ("MPI Rabenseifner", {"color": "#000000", "linestyle": "--"}),
}


def draw(machine: Machine, samples: int) -> Figure:
    """Draw times by ranks above, the fastest algorithm by ranks and size below.

    samples: how many the machine's constants were fitted to.
    """
    panels = list(itertools.product(RATES, PER_HOST))
    figure, axes = plt.subplots(
        2, len(panels), figsize=(5 * len(panels), 9.5), layout="constrained", sharey="row"
    )
    for column, (rate, per_host) in zip(axes.T, panels, strict=True):
        constants = machine.constants(parse_rate(rate), math.inf)
        ranks = "1 rank" if per_host == 1 else f"{per_host} ranks"
        column[0].set_title(f"{rate_text(parse_rate(rate))}, {ranks} a host")
        _draw_times(column[0], per_host, constants)
        _draw_fastest(column[1], per_host, constants)
    axes[0, 0].set_ylabel(f"seconds, {_MODEL_BYTES / 1e6:.0f} MB of fp32")
    axes[1, 0].set_ylabel("bytes of fp32; fastest at 4 bits")
    handles, labels = axes[0, -1].get_legend_handles_labels()
    handles += [Patch(color=style["color"]) for _, style in _STYLE.values()]
    labels += [f"{name} is fastest" for name in _STYLE]
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    figure.suptitle(
        "Allreduce predicted from one machine's constants (TCP; each rank has a core), "
        f"fitted to {samples} runs of 2 and 4 ranks"
    )
    return figure


def _draw_times(panel: Axes, per_host: int, constants: Constants) -> None:
    for bits, styles in ((4, _STYLE), (EXACT, _EXACT_STYLE)):
        for name, (label, style) in styles.items():
            points = [
                (count, predict(name, _MODEL_BYTES, bits, ranks, constants))
                for count in RANKS
                if (ranks := ranks_of(count, per_host)).hosts > 1
                and not (name == "hierarchical" and per_host == 1)
            ]
            if points:
                panel.plot(*zip(*points, strict=True), label=label, markersize=4, **style)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_ylim(1e-2, 60)
    panel.set_xlim(RANKS[0] / math.sqrt(2), RANKS[-1] * math.sqrt(2))  # as the map below
    panel.set_xticks(RANKS[1::2], [f"{size:,}" for size in RANKS[1::2]])
    panel.grid(alpha=0.3)


def _draw_fastest(panel: Axes, per_host: int, constants: Constants) -> None:
    cells = np.zeros((len(GRID), len(RANKS)), int)
    for (row, size), (column, count) in itertools.product(enumerate(GRID), enumerate(RANKS)):
        found = times(size, ranks_of(count, per_host), constants)
        cells[row, column] = _CANDIDATES.index(min(found, key=lambda name: found[name]))
    colors = ListedColormap([_STYLE[name][1]["color"] for name in _CANDIDATES])
    panel.imshow(cells, colors, origin="lower", aspect="auto", vmin=0, vmax=len(_CANDIDATES) - 1)
    edge = sum(wire_bytes(size // 4, 4) <= EAGER_BYTES for size in GRID) - 0.5
    panel.axhline(edge, color="white", linewidth=2, linestyle="--")
    panel.text(len(RANKS) - 0.7, edge + 0.15, "auto: one_shot below", color="white", ha="right")
    panel.set_xticks(range(1, len(RANKS), 2), [f"{size:,}" for size in RANKS[1::2]])
    labels = range(0, len(GRID), 2)
    panel.set_yticks(labels, [size_text(GRID[i]) for i in labels])
    panel.set_xlabel("ranks")
