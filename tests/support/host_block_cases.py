"""Cases of reduce_scatter, all_gather and all_to_all on several hosts (collective_cases.py).

CASES   "all": sizes x bits x intra_bits x dtypes x ops, every compressor, the features;
"sample": a fifth of them, without large ones; "all_to_all": every 11th of ALL_TO_ALL, and two
large cases
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from support.collective_cases import (
    ALL_TO_ALL,
    DTYPES,
    DTYPES_IN_TURN,
    ROUNDINGS,
    Case,
    converges,
    of_compressors,
    packed,
)

BOTH = ("reduce_scatter", "all_gather")


def _cases() -> list[Case]:
    layers = ((0, 700, 4, 512), (700, 9, 4, 512), (709, 1000, 8, 64), (2000, 5000, 32, 1))
    dtypes = itertools.cycle(DTYPES_IN_TURN)
    cases: list[Case] = []

    def add(size: int, verbs: Sequence[str] = BOTH, **knobs: Any) -> None:
        for verb in verbs:
            options = {"dtype": next(dtypes), "algorithm": "hierarchical", "verb": verb, **knobs}
            cases.append(Case(size, **options))

    scatter = ("reduce_scatter",)
    for size, op in itertools.product((0, 1, 17, 511, 512, 513), ("sum", "avg")):
        for dtype in DTYPES:
            add(size, bits=4, bucket_size=64, dtype=dtype, op=op)
            add(size, scatter, bits=4, bucket_size=64, dtype=dtype, op=op, intra_bits=8)
        add(size, bits=32, op=op)
    for bits, rounding in itertools.product((1, 2, 8), ROUNDINGS):
        add(1003, bits=bits, bucket_size=100, rounding=rounding, intra_bits=3)
    for dtype, op in itertools.product(DTYPES, ("min", "max", "product")):
        add(700, scatter, bits=32, dtype=dtype, op=op)
    for dtype, op in itertools.product(DTYPES, ("sum", "avg", "max")):
        add(20_000, scatter, bits=32, dtype=dtype, op=op, special="large")
    for special in ("nan", "inf", "huge", "tiny", "zeros", "constant"):
        add(600, bits=4, bucket_size=64, special=special, intra_bits=8)
    each: dict[str, Any]
    for each in ({}, {"skip_incomplete_buckets": True}, {"minimal_size": 1000}):
        add(8000, segments=layers, intra_bits=8, **each)
        add(8000, segments=layers[::-1], op="avg", rounding="nearest", **each)
    for dtype, op in itertools.product(DTYPES, ("sum", "avg")):
        add(1300, scatter, rounding="nearest", feedback=True, dtype=dtype, op=op)
        add(8000, scatter, rounding="nearest", feedback=True, dtype=dtype, op=op, segments=layers)
    for row in of_compressors():
        add(1003, bucket_size=64, op="avg", **row)
        add(600, bucket_size=64, special="zeros", **row)
        fed_back = Case(1003, feedback=True, **row)
        if converges(fed_back):
            add(1003, scatter, bucket_size=64, feedback=True, **row)
        if row["compressor"] in ("levels", "qsgd"):
            add(1003, scatter, bucket_size=64, intra_bits=4, **row)
    for row in packed():
        add(op="avg", **row)
        if converges(Case(feedback=True, **row)):
            add(verbs=scatter, feedback=True, **row)
    # Other algorithms, several messages, and several blocks of codecs without fixed length. The
    # last six, which are slow, are not in the sample.
    for algorithm in ("one_shot", "ring", "sra", "by_hosts"):
        add(1003, algorithm=algorithm)
    for size in (500, 1600, 2400, 5000, 20_000):
        add(size, algorithm="auto")
    add(20_000, compressor="lossless")
    add(70_000, compressor="entropy", rounding="nearest")
    add(2**20 + 7, intra_bits=8, dtype="float32", op="avg", algorithm="auto")
    return cases


_ALL = _cases()
# 5 and 11 divide no argument's number of values. The last six of _ALL, and five of ALL_TO_ALL,
# are large.
CASES = {
    "all": _ALL,
    "sample": _ALL[:-6:5],
    "all_to_all": [*ALL_TO_ALL[:-5:11], ALL_TO_ALL[-5], ALL_TO_ALL[-1]],
}
