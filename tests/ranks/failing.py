"""Helper for calls that must raise, in rank programs."""

from collections.abc import Callable


def fails(error: type[Exception], words: str, call: Callable[[], object]) -> None:
    """Check that a call raises this exception, and that its text contains these words."""
    try:
        call()
    except error as raised:
        assert words in str(raised), raised
    else:
        raise AssertionError(f"no {error.__name__} with {words!r}")
