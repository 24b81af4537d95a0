"""Draw the timeline of a step: compute, encode, link and decode, one color per message.

The lanes are those of the model. If a program timed the messages, a lane below them shows how long
each one was in flight. Nothing finer is measured: the statistics do not separate the encoding, the
sending and the decoding of one message.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from cgx_ops._core.picture import COLOURS, new_figure
from cgx_ops.planner.model import Passage

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_OF_GROUPS = COLOURS[:-1]  # black has another meaning
_HEIGHT = 0.7  # of a lane
_Bars = dict[str, list[tuple[float, float]]]  # by lane: the begin and the end of each message


def draw(
    path: str | Path,
    title: str,
    predicted: Sequence[Passage],
    measured: Sequence[tuple[float, float]] = (),
    *,
    exact: Sequence[Passage] = (),
) -> None:
    """Draw a step to a file.

    Args:
        path: The file to write. Its ending is the format: .png, .svg, .pdf.
        title: The title of the picture.
        predicted: The messages of the compressed step, as timeline() returns them; at least one.
        measured: The start and the end of each message in seconds from the start of the backward
            pass. Empty: the picture says that nothing is measured.
        exact: The messages of the same step in 32 bits. If given, a panel above shows them on the
            same axis.

    Raises:
        InvalidArgument: The file name does not end with a format that matplotlib can write.
        Unsupported: matplotlib is not installed.
    """
    compressed = _lanes(predicted)
    if measured:
        compressed["in flight, measured"] = list(measured)
    panels = {"exact (32 bits)": _lanes(exact)} if exact else {}
    panels["compressed"] = compressed
    heights = [len(bars) for bars in panels.values()]
    figure = new_figure(path, 11, 1 + 0.55 * sum(heights) + 0.4 * (len(panels) - 1))
    all_axes = figure.subplots(len(panels), sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    for axes, (name, bars) in zip(all_axes, panels.items(), strict=True):
        _bars(axes, bars)
        ends = {"predicted": (bars["decode, predicted"][-1][1], "dashed")}
        if measured and name == "compressed":
            ends["measured"] = max(end for _, end in measured), "dotted"
        for end, style in ends.values():
            axes.axvline(1e3 * end, color="black", linestyle=style)
        labels = ", ".join(
            f"{kind} {1e3 * end:.1f} ms ({style})" for kind, (end, style) in ends.items()
        )
        axes.set_title(f"{name}: {labels}", loc="left", fontsize="medium")
    all_axes[-1].set_xlim(left=0)
    all_axes[-1].set_xlabel("ms from the start of the backward pass")
    figure.suptitle(title if measured else f"{title} (predicted; nothing is measured here)")
    figure.savefig(path, dpi=150)


def _lanes(messages: Sequence[Passage]) -> _Bars:
    """Return the bars of each lane, from top to bottom."""
    ready = [0.0, *(message.ready for message in messages)]
    lanes = {
        "compute": [(begin, max(begin, end)) for begin, end in pairwise(ready)],
        "encode": [message.encode for message in messages],
        "link": [message.link for message in messages],
        "decode": [message.decode for message in messages],
    }
    return {f"{name}, predicted": bars for name, bars in lanes.items()}


def _bars(axes: "Axes", lanes: _Bars) -> None:
    for lane, messages in enumerate(lanes.values()):
        for index, (begin, end) in enumerate(messages):
            axes.broken_barh(
                [(1e3 * begin, 1e3 * (end - begin))], (lane - _HEIGHT / 2, _HEIGHT),
                facecolor=_OF_GROUPS[index % len(_OF_GROUPS)], edgecolor="white", linewidth=0.4,
            )  # fmt: skip
    axes.set_yticks(range(len(lanes)), list(lanes))
    axes.invert_yaxis()
