"""Calls that must raise, in programs of ranks."""

from collections.abc import Callable


def fails(error: type[Exception], words: str, call: Callable[[], object]) -> None:
    """Check that a call raises, and that the error's text has these words."""
    try:
        call()
    except error as raised:
        assert words in str(raised), raised
    else:
        raise AssertionError(f"no {error.__name__} with {words!r}")
