"""Sizes, times and rates as text: options of the command line, and cells of tables."""

import argparse
import math
import re

_LONGEST_S = 1e6  # faulthandler takes no wait of many more

# ---- 1. from text --------------------------------------------------------------------------------


def parse_size(text: str) -> int:
    """Return the bytes of "4096", "4KiB", "64MiB" or "1GiB"; a multiple of 4."""
    found = re.fullmatch(r"(\d+)(|KiB|MiB|GiB)", text)
    size = int(found[1]) * 1024 ** ["", "KiB", "MiB", "GiB"].index(found[2]) if found else 0
    if size <= 0 or size % 4:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size: bytes, a multiple of 4 (fp32), as in 4096, 64KiB, 16MiB"
        )
    return size


class NoRate(argparse.ArgumentTypeError, ValueError):
    """Text that is no rate: of an option, which argparse reports, or of an argument in Python."""


def parse_rate(text: str) -> float:
    """Return the bytes a second of "100mbit", "1gbit" or "2.5gbit", as tc writes rates.

    Raises:
        NoRate: it is none; it shows what is.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", text)
    rate = float(found[1]) * 1000 ** ["", "k", "m", "g"].index(found[2]) / 8 if found else 0.0
    if not 0 < rate < math.inf:
        raise NoRate(f"{text!r} is no rate: give a number and a unit, such as 100mbit or 1gbit")
    return rate


def parse_count(text: str) -> int:
    """Return an option that is an integer of at least 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no integer >= 1")
    return int(text)


def parse_seconds(text: str) -> float:
    """Return an option that is a number of seconds, from 0 to eleven days, for argparse."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= _LONGEST_S:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0 to 1000000")
    return seconds


# ---- 2. to text ----------------------------------------------------------------------------------


def size_text(size: int) -> str:
    """Return bytes in powers of 1024: "64 KiB"."""
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
    """Return bytes a second in bits: "100 Mbit/s", "2.5 Gbit/s"."""
    return f"{rate * 8 / 1e9:g} Gbit/s" if rate >= 125e6 else f"{rate * 8 / 1e6:g} Mbit/s"
