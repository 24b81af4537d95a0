"""Create matplotlib figures that are written to files. matplotlib is imported on first use."""

from pathlib import Path
from typing import TYPE_CHECKING

from cgx_ops.errors import InvalidArgument, Unsupported

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The colors of Okabe and Ito, which color-blind readers can tell apart.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#000000")


def new_figure(path: str | Path, width: float, height: float) -> "Figure":
    """Return an empty figure for `path`; it needs no display.

    Args:
        path: The file that the figure will be saved to. Its ending is the format.
        width: Inches.
        height: Inches.

    Raises:
        InvalidArgument: The file name has no ending, or one that matplotlib cannot write.
        Unsupported: matplotlib is not installed.
    """
    ending = Path(path).suffix
    if not ending:  # matplotlib would append one and write to another file
        raise InvalidArgument(
            f"the file name {str(path)!r} has no ending: end it with .png, .svg or .pdf"
        )
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise Unsupported(
            f"matplotlib, which draws {path}, is not installed: pip install matplotlib"
        ) from None
    figure = Figure(figsize=(width, height), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    if ending[1:].lower() not in canvas.get_supported_filetypes():
        raise InvalidArgument(
            f"matplotlib cannot write the format {ending!r} of the file name {str(path)!r}: "
            "end it with .png, .svg or .pdf"
        )
    return figure
