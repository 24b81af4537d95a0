"""A step's timeline as a picture: compute, encode, link, decode, a colour for each message.

Lanes are the model's; below them, where a program has timed it, how long each message was in flight
from its start to its end. Statistics do not tell encoding, link and decoding of one message apart,
so nothing finer is measured.
"""

from collections.abc import Sequence
from pathlib import Path

from cgx_ops.errors import InvalidArgument, Unsupported
from cgx_ops.planner.model import Passage

_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")  # Okabe and Ito
_HEIGHT = 0.7  # of a lane


def draw(
    path: str | Path,
    title: str,
    predicted: Sequence[Passage],
    measured: Sequence[tuple[float, float]] = (),
) -> None:
    """Draw a step to a file, whose name says the format: .png, .svg, .pdf.

    Args:
        path: of the file.
        title: of the picture.
        predicted: its messages, as timeline() returns them: at least one.
        measured: when each of them was started and when its result was there, in seconds from the
            start of the backward pass. None: the picture says that nothing is measured.

    Raises:
        InvalidArgument: the file's name ends with no format.
        Unsupported: there is no matplotlib.
    """
    if not Path(path).suffix:  # matplotlib would write to another file
        raise InvalidArgument(f"{path} does not say its format: end it with .png, .svg or .pdf")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise Unsupported(
            "the timeline is drawn by matplotlib, which is not installed: pip install matplotlib"
        ) from None

    # By lane, the begin and the end of each message in it.
    begins = [0.0, *(message.ready for message in predicted)]
    lanes = {
        "compute": [
            (begin, max(begin, m.ready)) for begin, m in zip(begins, predicted, strict=False)
        ],
        "encode": [m.encode for m in predicted],
        "link": [m.link for m in predicted],
        "decode": [m.decode for m in predicted],
    }
    names = [f"{name}, predicted" for name in lanes]
    bars = list(lanes.values())
    if measured:
        names.append("in flight, measured")
        bars.append(list(measured))
    figure = Figure(figsize=(11, 1 + 0.55 * len(bars)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for lane, messages in enumerate(bars):
        for number, (begin, end) in enumerate(messages):
            axes.broken_barh(
                [(1e3 * begin, 1e3 * (end - begin))], (lane - _HEIGHT / 2, _HEIGHT),
                facecolor=_COLOURS[number % len(_COLOURS)], edgecolor="white", linewidth=0.4,
            )  # fmt: skip
    ends = {"predicted": predicted[-1].decode[1]}
    if measured:
        ends["measured"] = max(end for _, end in measured)
    for name, end in ends.items():
        style = "--" if name == "predicted" else ":"
        axes.axvline(1e3 * end, color="black", linestyle=style, label=f"{name}: {1e3 * end:.1f} ms")
    axes.set_yticks(range(len(bars)), names)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("ms from the start of the backward pass")
    axes.set_title(title if measured else f"{title} (predicted; nothing is measured here)")
    figure.legend(loc="outside lower right", ncols=2, fontsize="small")
    figure.savefig(path, dpi=150)
