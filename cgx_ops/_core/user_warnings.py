"""Warn the user of the package: each text once per process, at the user's own line."""

import os
import sys
import warnings
from pathlib import Path

_PACKAGE = f"{Path(__file__).resolve().parents[1]}{os.sep}"
_shown: set[str] = set()


def warn_once(text: str) -> None:
    """Issue a UserWarning, unless this process has already shown the text.

    Args:
        text: The text. The warning points to the nearest caller outside cgx_ops.
    """
    if text in _shown:
        return
    _shown.add(text)
    frame, level = sys._getframe(), 1
    while frame.f_code.co_filename.startswith(_PACKAGE) and frame.f_back:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


def forget() -> None:
    """Show every text again from now on. For tests."""
    _shown.clear()
