"""Draw allreduce_speedup.svg from the reports in benchmarks/results.

python docs/images/allreduce_speedup.py
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parents[1] / "benchmarks" / "results"
LINKS = {
    "allreduce-100mbit-2": "100 Mbit/s,\n2 hosts, 16 MiB",
    "allreduce-1gbit-2": "1 Gbit/s,\n2 hosts, 64 MiB",
    "allreduce-1gbit-4": "1 Gbit/s,\n4 hosts, 64 MiB",
    "allreduce-unshaped-2": "unshaped TCP,\n2 hosts, 64 MiB",
    "allreduce-shm-2": "shared memory,\n2 ranks, 64 MiB",
}
CONTENDERS = {
    "fp16": ("fp16 hook", "#b07aa1"),
    "cgx 32": ("cgx, exact", "#9aa5b1"),
    "cgx 8 nearest": ("cgx, 8 bits", "#e0a100"),
    "cgx 4 nearest": ("cgx, 4 bits", "#d9622b"),
    "cgx 2 nearest": ("cgx, 2 bits", "#2f8f6b"),
}
WIDTH = 0.16


def speedups(name: str) -> dict[str, float]:
    """Return the speed-up of each contender at the largest size of a report."""
    results = json.loads((RESULTS / f"{name}.json").read_text())["results"]
    largest = max(result["bytes"] for result in results)
    return {r["contender"]: r["speedup"] for r in results if r["bytes"] == largest}


def main() -> None:
    """Write the figure beside this file."""
    plt.rcParams["svg.hashsalt"] = "cgx_ops"
    figure, axes = plt.subplots(figsize=(7.4, 3.3), layout="constrained")
    found = [speedups(name) for name in LINKS]
    for number, (contender, (label, colour)) in enumerate(CONTENDERS.items()):
        heights = [each[contender] for each in found]
        places = [link + (number - 2) * WIDTH for link in range(len(LINKS))]
        bars = axes.bar(places, heights, WIDTH, color=colour, label=label)
        axes.bar_label(bars, fmt="%.1f", fontsize=7, padding=1)
    axes.axhline(1, color="#52606d", linewidth=0.8)
    axes.set_xticks(range(len(LINKS)), LINKS.values(), fontsize=8)
    axes.set_ylabel("speed-up over the fastest exact peer", fontsize=8)
    axes.legend(ncols=5, loc="upper right", fontsize=8, frameon=False)
    axes.set_ylim(0, 18)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(HERE / "allreduce_speedup.svg", metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    main()
