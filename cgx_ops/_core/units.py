"""Parse sizes, times and rates from the command line, and format them for tables."""

import argparse
import math
import re

_LONGEST_S = 1e6  # faulthandler does not accept much longer waits

# ---- 1. from text --------------------------------------------------------------------------------


def parse_size(text: str) -> int:
    """Return the bytes of "4096", "4KiB", "64MiB" or "1GiB". They must be a multiple of 4."""
    found = re.fullmatch(r"(\d+)(|KiB|MiB|GiB)", text)
    size = int(found[1]) * 1024 ** ["", "KiB", "MiB", "GiB"].index(found[2]) if found else 0
    if size <= 0 or size % 4:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a valid size: give bytes as a multiple of 4 (float32 values), "
            "such as 4096, 64KiB or 16MiB"
        )
    return size


class NoRate(argparse.ArgumentTypeError, ValueError):
    """A text is not a valid rate, on the command line (argparse) or as an argument in Python."""


def parse_rate(text: str) -> float:
    """Return the bytes per second of "100mbit", "1gbit" or "2.5gbit" (the notation of `tc`).

    Raises:
        NoRate: The text is not a valid rate.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", text)
    rate = float(found[1]) * 1000 ** ["", "k", "m", "g"].index(found[2]) / 8 if found else 0.0
    if not 0 < rate < math.inf:
        raise NoRate(
            f"{text!r} is not a valid rate: give a number and a unit, such as 100mbit or 1gbit"
        )
    return rate


def parse_count(text: str) -> int:
    """Return an integer >= 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer >= 1")
    return int(text)


def parse_seconds(text: str) -> float:
    """Return a number of seconds from 0 to 1,000,000, for argparse."""
    seconds = _number(text)
    if not 0 <= seconds <= _LONGEST_S:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a valid time: give seconds from 0 to 1000000"
        )
    return seconds


def parse_milliseconds(text: str) -> float:
    """Return the seconds of a number of milliseconds, for argparse."""
    seconds = _number(text) / 1e3
    if not 0 <= seconds <= _LONGEST_S:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a valid time: give milliseconds from 0 to 1000000000"
        )
    return seconds


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


# ---- 2. to text ----------------------------------------------------------------------------------


def size_text(size: int) -> str:
    """Return bytes in the largest unit that divides them: "64 KiB"."""
    power = next(power for power in (3, 2, 1, 0) if size % 1024**power == 0)
    return f"{size // 1024**power} {('bytes', 'KiB', 'MiB', 'GiB')[power]}"


def time_text(seconds: float) -> str:
    """Return a time in three digits: "7.12 us", "36.5 ms", "1.20 s"."""
    unit, factor = next(
        (unit, factor)
        for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6))
        if seconds * factor >= 1 or unit == "us"
    )
    value = seconds * factor
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f} {unit}"


def rate_text(rate: float) -> str:
    """Return bytes per second as bits per second: "100 Mbit/s", "2.5 Gbit/s"."""
    return f"{rate * 8 / 1e9:g} Gbit/s" if rate >= 125e6 else f"{rate * 8 / 1e6:g} Mbit/s"
