"""Draw the measured times of allreduces by message size, one line per contender."""

from collections.abc import Sequence
from pathlib import Path

from cgx_ops._core.picture import COLOURS, new_figure
from cgx_ops._core.units import size_text
from cgx_ops.bench.results import Result

_MARKERS = "osv^DPX<>*"


def draw(path: str | Path, title: str, results: Sequence[Result]) -> None:
    """Draw the median time of each contender, with its quartiles as error bars.

    Thick lines are this library's, thin dashed lines are other libraries'.

    Args:
        path: The file to write. Its ending is the format: .png, .svg, .pdf.
        title: The title of the plot.
        results: The results to draw.

    Raises:
        InvalidArgument: The file name does not end with a format that matplotlib can write.
        Unsupported: matplotlib is not installed.
    """
    figure = new_figure(path, 9, 6)
    axes = figure.add_subplot(xscale="log", yscale="log")
    for index, name in enumerate(dict.fromkeys(result.contender for result in results)):
        found = {result.bytes: result for result in results if result.contender == name}
        sizes = sorted(found)
        own = name.startswith("cgx")
        colour = COLOURS[index % len(COLOURS)]
        rows = [found[size] for size in sizes]
        below = [1e3 * (row.seconds - row.lower) for row in rows]
        above = [1e3 * (row.upper - row.seconds) for row in rows]
        axes.errorbar(
            sizes, [1e3 * row.seconds for row in rows], [below, above], label=name, color=colour,
            marker=_MARKERS[index % len(_MARKERS)], markersize=4, capsize=2, elinewidth=0.8,
            linewidth=2.0 if own else 1.0, linestyle="-" if own else "--",
        )  # fmt: skip
    sizes = sorted({result.bytes for result in results})
    axes.set_xticks(sizes, [size_text(size) for size in sizes], rotation=30)
    axes.minorticks_off()
    axes.set_xlabel("bytes of the tensor (float32)")
    axes.set_ylabel("ms (median of the slowest rank; bars: quartiles)")
    axes.grid(alpha=0.3)
    axes.set_title(title)
    figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=150)
