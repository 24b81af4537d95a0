"""Collectives that are compared with the oracle, on every transport and CPU target.

A case determines one call; its inputs follow from the case and the rank. Ranks print a digest
of each result (tests/ranks/run_collectives.py); the test computes the oracle's once.

        MATRIX    bits x dtype x rounding x bucket_size x size, with sra and one_shot
        SAMPLE    a seventh of it, with every pair of values of two arguments
    FEATURES  verbs, ops, algorithms, gather_bits, minimal_size, incomplete buckets, many segments,
              special values
        COMPRESSORS  every compressor with its settings: algorithms x ops x sizes, and the features
    ALL_TO_ALL  every compressor: sizes x equal, unequal and empty blocks, and the features
    LARGE_ALL_TO_ALL  blocks of several messages, which every rank sends to every rank
    HIERARCHICAL  several hosts: bits x intra_bits x dtype x op x size, and the features
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import ml_dtypes
import numpy as np
import numpy.typing as npt
import reference

from cgx_ops import Communicator, Config, InvalidArgument, Segment
from cgx_ops._core import tables
from cgx_ops.config import Algorithm, Compressor, Rounding

DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}
SIZES = (0, 1, 15, 16, 17, 511, 512, 513, 100_003)
BUCKETS = (1, 7, 64, 512, 1000)
ROUNDINGS: tuple[Rounding, ...] = ("nearest", "stochastic", "shift")


@dataclass(frozen=True)
class Case:
    """One collective. segments: (offset, numel, bits, bucket_size); size is that of a block.

    splits: how the blocks of an all_to_all differ in size; see sizes_of_blocks().
    feedback: an allreduce or reduce_scatter with a residual, whose new values are part of the
    result.
    """

    size: int
    bits: int = 4
    bucket_size: int = 512
    dtype: str = "float32"
    rounding: Rounding = "stochastic"
    verb: str = "allreduce"
    op: str = "sum"
    algorithm: Algorithm = "auto"
    gather_bits: int = 0
    intra_bits: int = 0
    minimal_size: int = 0
    skip_incomplete_buckets: bool = False
    segments: tuple[tuple[int, int, int, int], ...] = ()
    special: str = ""
    compressor: Compressor = "uniform"
    density: float | None = None
    value_bits: int | None = None
    rotation: int | None = None
    clip: bool = False
    rate: float | None = None
    feedback: bool = False
    splits: str = ""

    def seed(self, rank: int) -> int:
        """Return the seed of a rank's noise: 64 bits that differ between ranks and cases.

        Random indices come from one seed on all ranks.
        """
        rank = 0 if self.compressor == "randk" else rank
        # Not str(self): after Ctrl-C inside of it, as in tests/chaos, a dataclass treats every
        # later call as a recursion and returns "...".
        text = cast(Any, Case.__repr__).__wrapped__(self)
        digest = hashlib.blake2b(f"{text}/{rank}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)


_SHIFTED: tuple[tuple[int, Algorithm], ...] = ((17, "one_shot"), (513, "sra"), (5003, "sra"))
MATRIX = [
    Case(size, bits, bucket_size, dtype, rounding, algorithm=algorithm)
    for bits, dtype, rounding, bucket_size, size in itertools.product(
        range(1, 9), DTYPES, ("nearest", "stochastic"), BUCKETS, SIZES
    )
    for algorithm in (("sra",) if size == SIZES[-1] else ("sra", "one_shot"))
] + [  # shift differs from nearest only in each bucket's header, so fewer sizes are enough
    Case(size, bits, bucket_size, dtype, "shift", algorithm=algorithm)
    for bits, dtype, bucket_size, (size, algorithm) in itertools.product(
        range(1, 9), DTYPES, BUCKETS, _SHIFTED
    )
]


def _features() -> list[Case]:
    layers = ((0, 700, 4, 512), (700, 9, 4, 512), (709, 1000, 8, 64), (2000, 5000, 32, 1))
    cases = [
        Case(size, bits, 64, dtype, op=op, algorithm=algorithm)
        for size, (bits, op), dtype, algorithm in itertools.product(
            (33, 3000),
            ((4, "sum"), (3, "avg"), (32, "sum"), (32, "avg"), (32, "min"), (32, "max")),
            DTYPES,
            ("auto", "one_shot", "sra", "ring"),
        )
    ]
    cases += [Case(2000, 32, op="product", dtype=dtype) for dtype in DTYPES]
    cases += [
        Case(size, bits, 100, dtype, verb=verb, op=op)
        for size, bits, dtype, verb, op in itertools.product(
            (0, 5, 1234), (2, 8, 32), DTYPES, ("reduce_scatter", "all_gather"), ("sum", "avg")
        )
    ]
    for verb in ("allreduce", "reduce_scatter", "all_gather"):
        cases += [
            Case(8000, verb=verb, segments=layers),
            Case(8000, verb=verb, segments=layers[::-1], dtype="float16", rounding="nearest"),
            Case(8000, verb=verb, segments=layers, skip_incomplete_buckets=True),
            Case(8000, verb=verb, segments=layers, minimal_size=1000),
            Case(8000, verb=verb, segments=layers, rounding="shift"),
            Case(64 * 300, verb=verb, segments=tuple((64 * i, 60, 4, 16) for i in range(300))),
        ]
    cases += [
        Case(size, bits, 128, dtype, gather_bits=8, algorithm=algorithm)
        for size, bits, dtype, algorithm in itertools.product(
            (300, 40_000), (4, 2), DTYPES, ("sra", "ring")
        )
    ]
    cases += [
        Case(
            5000,
            3,
            128,
            dtype,
            "shift",
            gather_bits=g,
            skip_incomplete_buckets=skip,
            op="avg",
            algorithm=a,
        )
        for dtype, g, skip, a in itertools.product(
            DTYPES, (0, 8), (False, True), ("sra", "ring", "one_shot")
        )
    ]
    cases += [
        Case(size, 5, 64, dtype, skip_incomplete_buckets=True, algorithm=algorithm)
        for size, dtype, algorithm in itertools.product(
            (63, 1000, 1024), DTYPES, ("one_shot", "sra", "ring")
        )
    ]
    cases += [Case(size, minimal_size=100) for size in (99, 100, 101)]
    # A bucket larger than any message, and a message larger than the exact values.
    cases += [Case(300_000, bucket_size=1 << 20), Case(5000, 8, 1, "float16", algorithm="sra")]
    cases += [
        Case(1500, bits, 64, dtype, special=special, algorithm=algorithm)
        for bits, dtype, special, algorithm in itertools.product(
            (1, 4, 8), DTYPES, ("nan", "inf", "huge", "tiny", "zeros", "constant"), ("sra", "ring")
        )
    ]
    cases += [
        Case(40_000, 32, dtype=dtype, op=op, algorithm="ring", special="large")
        for dtype, op in itertools.product(DTYPES, ("sum", "avg", "min", "max", "product"))
    ]
    cases += [
        Case(5000, bits, 3, rounding="shift", special="lowest", algorithm="sra", verb=verb)
        for bits, verb in itertools.product((1, 5), ("allreduce", "all_gather"))
    ]
    cases += [
        Case(1500, bits, 64, dtype, "shift", special=special, algorithm="sra")
        for bits, dtype, special in itertools.product(
            (1, 4, 8), DTYPES, ("nan", "inf", "huge", "tiny", "zeros", "constant")
        )
    ]
    return cases


def of_compressors() -> Iterator[dict[str, Any]]:
    """Yield each compressor with its settings."""
    yield from ({"compressor": "levels", "bits": bits} for bits in range(1, 5))
    yield from ({"compressor": "qsgd", "bits": bits} for bits in (2, 4, 8))
    names: tuple[Compressor, ...] = ("sign", "onebit", "ternary")
    yield from ({"compressor": name} for name in names)
    yield {"compressor": "ternary", "clip": True}
    yield {"compressor": "lossless"}
    for rate, rounding in ((None, "nearest"), (0.5, "nearest"), (3.4, "shift")):
        yield {"compressor": "entropy", "rate": rate, "rounding": rounding}
    yield from (
        {"compressor": "half", "rounding": rounding} for rounding in ("nearest", "stochastic")
    )
    formats: tuple[Compressor, ...] = ("mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4")
    for name, rounding in zip(formats, ("nearest", "stochastic") * 2, strict=True):
        yield {"compressor": name, "rounding": rounding}
    yield {"compressor": "nvfp4", "rotation": 16}
    for density, value_bits in ((None, None), (0.05, 16), (0.1, 1), (0.3, 4), (1.0, 2), (0.001, 8)):
        yield {"compressor": "topk", "density": density, "value_bits": value_bits}
    yield from ({"compressor": "randk", "density": density} for density in (None, 0.2, 1.0))
    rotated: tuple[tuple[Compressor, int], ...] = (("levels", 2), ("uniform", 3), ("onebit", 4))
    for (name, bits), rotation in zip(rotated, (32, 2, 256), strict=True):
        yield {"compressor": name, "bits": bits, "rotation": rotation}


# Seven, so that other alternating options occur with each of them.
DTYPES_IN_TURN = ("float32", "float16", "bfloat16", "float32", "bfloat16", "float16", "float32")


def packed() -> Iterator[dict[str, Any]]:
    """Yield compressors without fixed length, and small segments that share their messages.

    There are gaps between segments. Others are empty, exact, or longer than a block of `lossless`.
    """
    small = ((3, 700), (703, 9), (712, 0), (720, 1000), (1720, 17_000), (18_720, 80), (18_800, 16))
    segments = tuple((offset, numel, 32 if numel == 80 else 4, 512) for offset, numel in small)
    for row in of_compressors():
        if row["compressor"] in ("lossless", "entropy"):
            yield {"size": 18_900, "segments": segments, **row}


def _hierarchical() -> list[Case]:
    layers = ((0, 700, 4, 512), (700, 9, 4, 512), (709, 1000, 8, 64), (2000, 50_000, 32, 1))
    cases = [
        Case(size, bits, 64, dtype, op=op, algorithm="hierarchical", intra_bits=intra)
        for size, (bits, intra), dtype, op in itertools.product(
            (0, 1, 17, 511, 512, 513, 5003),
            ((4, 0), (4, 8), (2, 2), (32, 0)),
            DTYPES,
            ("sum", "avg"),
        )
    ]
    cases += [
        Case(2003, bits, 100, dtype, rounding, algorithm="hierarchical", intra_bits=intra)
        for bits, dtype, rounding, intra in itertools.product(
            range(1, 9), DTYPES, ("nearest", "shift"), (0, 3)
        )
    ]
    cases += [
        Case(3000, 32, dtype=dtype, op=op, algorithm="hierarchical")
        for dtype, op in itertools.product(DTYPES, ("min", "max", "product"))
    ]
    cases += [
        Case(1500, bits, 64, dtype, special=special, algorithm="hierarchical", intra_bits=intra)
        for bits, dtype, special, intra in itertools.product(
            (1, 8), DTYPES, ("nan", "inf", "huge", "tiny", "zeros", "constant"), (0, 8)
        )
    ]
    large: dict[str, Any] = {"algorithm": "hierarchical", "special": "large"}
    cases += [
        Case(60_000, 32, dtype=dtype, op=op, **large)
        for dtype, op in itertools.product(DTYPES, ("sum", "avg", "min", "max", "product"))
    ]
    cases += [
        Case(60_000, segments=layers, dtype=dtype, op="avg", skip_incomplete_buckets=skip, **large)
        for dtype, skip in itertools.product(DTYPES, (False, True))
    ]
    for dtype in DTYPES:
        options: dict[str, Any] = {"dtype": dtype, "algorithm": "hierarchical", "intra_bits": 8}
        cases += [
            Case(5000, 2, 128, op="avg", gather_bits=8, **options),
            Case(1000, 5, 64, skip_incomplete_buckets=True, **options),
            Case(60_000, segments=layers, **options),
            Case(60_000, segments=layers[::-1], minimal_size=1000, **options),
        ]
    dtypes = itertools.cycle(DTYPES_IN_TURN)
    for row in of_compressors():
        row |= {"algorithm": "hierarchical", "bucket_size": 64}
        cases += [Case(2003, dtype=next(dtypes), op=op, **row) for op in ("sum", "avg")]
        cases += [Case(1000, dtype=next(dtypes), special=each, **row) for each in ("nan", "zeros")]
        if row["compressor"] in ("levels", "qsgd"):
            cases.append(Case(1500, dtype=next(dtypes), intra_bits=4, **row))
    cases += [Case(dtype=next(dtypes), algorithm="hierarchical", **row) for row in packed()]
    # Algorithms selected by size, and by the hosts. These five are in the sample.
    cases += [Case(1000), Case(100_003), Case(2**20 + 7, intra_bits=8)]
    cases += [Case(2**20 + 7, 32, op="avg"), Case(300_000, bucket_size=1 << 20)]
    return cases


def _compressors() -> list[Case]:
    cases, dtypes = [], itertools.cycle(DTYPES_IN_TURN)

    def add(size: int, bucket_size: int, **knobs: Any) -> None:
        cases.append(Case(size, bucket_size=bucket_size, **{"dtype": next(dtypes), **knobs}))

    sizes = ((0, 512), (15, 16), (513, 512), (5003, 100), (4000, 8192))
    specials = ("nan", "inf", "huge", "tiny", "zeros", "constant")
    for row in of_compressors():
        algorithms: tuple[Algorithm, ...] = ("one_shot", "sra", "ring")
        for algorithm in algorithms:
            for (size, bucket_size), op in itertools.product(sizes, ("sum", "avg")):
                add(size, bucket_size, op=op, algorithm=algorithm, **row)
            for special in specials:
                add(1500, 64, algorithm=algorithm, special=special, **row)
            if row["compressor"] != "sign":
                add(1000, 96, algorithm=algorithm, skip_incomplete_buckets=True, **row)
        add(40_000, 512, **row)
        add(1, 512, algorithm="one_shot", **row)
        verbs = ("reduce_scatter", "all_gather")
        for verb, op, special in itertools.product(verbs, ("sum", "avg"), ("", "zeros")):
            add(1234, 100, verb=verb, op=op, special=special, **row)
    # Exact values support all operators. They have several blocks.
    for op, algorithm in itertools.product(
        ("sum", "avg", "min", "max", "product"), ("one_shot", "sra", "ring")
    ):
        add(70_000, 512, op=op, algorithm=algorithm, special="large", compressor="lossless")
    for verb in ("reduce_scatter", "all_gather"):
        add(50_000, 512, verb=verb, compressor="lossless")
        add(70_000, 512, verb=verb, compressor="entropy", rounding="nearest")
    for row, verb in itertools.product(packed(), ("reduce_scatter", "all_gather")):
        cases.append(Case(verb=verb, op="avg", dtype=next(dtypes), **row))
    for algorithm in ("one_shot", "sra", "ring"):
        add(140_000, 512, algorithm=algorithm, compressor="entropy", rounding="nearest")
    gathered: tuple[tuple[Compressor, int, int], ...] = (
        ("levels", 2, 4), ("qsgd", 4, 8), ("topk", 4, 32), ("onebit", 4, 32), ("half", 4, 32),
        ("nvfp4", 4, 32),
    )  # fmt: skip
    for (name, bits, back), algorithm in itertools.product(gathered, ("sra", "ring")):
        add(5000, 128, bits=bits, gather_bits=back, algorithm=algorithm, compressor=name)
    return cases


def _all_to_all() -> list[Case]:
    sizes = ((0, 7), (1, 64), (17, 7), (511, 64), (512, 100), (513, 512))
    splits, dtypes = itertools.cycle(("uneven", "", "empty")), itertools.cycle(DTYPES_IN_TURN)
    options: list[dict[str, Any]] = [
        *({"bits": bits, "rounding": rounding} for bits in (1, 4, 8) for rounding in ROUNDINGS),
        {"bits": 32},
        *of_compressors(),
        {"skip_incomplete_buckets": True},
        {"minimal_size": 512},
        {"gather_bits": 8},
        *({"special": special} for special in ("nan", "inf", "huge", "tiny", "zeros")),
    ]
    cases = [
        Case(size, bucket_size=bucket_size, dtype=next(dtypes), splits=next(splits), **each)
        for each, (size, bucket_size) in itertools.product(options, sizes)
    ]
    # Several messages per block, and several blocks of a codec without fixed length.
    large: tuple[Compressor, ...] = ("uniform", "lossless", "entropy", "topk")
    cases += [
        Case(70_000, compressor=compressor, rounding="nearest", splits="uneven")
        for compressor in large
    ]
    cases.append(Case(2**20 + 7, 8, splits="empty"))
    return [replace(case, verb="all_to_all") for case in cases]


SAMPLE = MATRIX[::7]  # 7 divides no argument's number of values: core/test_collectives.py
FEATURES = _features()
COMPRESSORS = _compressors()
ALL_TO_ALL = _all_to_all()
LARGE_ALL_TO_ALL = [
    Case(2**20 + 7, 4, verb="all_to_all"),
    Case(2**20 + 7, 4, dtype="bfloat16", verb="all_to_all", splits="uneven"),
]
_NESTED = _hierarchical()
# Several hosts: tests/core/test_hierarchical.py. 5 divides no argument's number of values.
HIERARCHICAL = {"all": _NESTED, "sample": _NESTED[:-5:5] + _NESTED[-5:]}
SETS = {
    "matrix": MATRIX,
    "sample": SAMPLE,
    "features": FEATURES,
    "compressors": COMPRESSORS,
    "compressors, some": COMPRESSORS[::17],
    "all_to_all": ALL_TO_ALL,
    "all_to_all, large": LARGE_ALL_TO_ALL,
}


def has_rounding(case: Case) -> bool:
    """Return whether the compressor supports several roundings."""
    formats = ("mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4")
    return case.compressor in ("uniform", "half", "entropy", *formats)


def sizes_of_blocks(case: Case, world_size: int) -> list[list[int]]:
    """Return the sizes of each rank's blocks for all ranks, in an all_to_all.

    "": all have the case's size. "uneven": from 0 to twice that size. "empty": only the first rank
    sends, and nothing to itself.
    """
    ranks = range(world_size)
    match case.splits:
        case "":
            return [[case.size] * world_size for _ in ranks]
        case "uneven":
            return [[case.size * ((3 * a + 5 * b) % 7) // 3 for b in ranks] for a in ranks]
        case "empty":
            return [[case.size if a == 0 != b else 0 for b in ranks] for a in ranks]
        case _:
            raise ValueError(case.splits)


def _numel_in(case: Case, rank: int, world_size: int) -> int:
    match case.verb:
        case "reduce_scatter":
            return case.size * world_size
        case "all_to_all":
            return sum(sizes_of_blocks(case, world_size)[rank])
        case _:
            return case.size


def inputs(case: Case, rank: int, world_size: int) -> npt.NDArray[Any]:
    """Return a rank's input: a block for each rank or, in allreduce and all_gather, one."""
    random = np.random.default_rng([abs(case.seed(rank)) % 2**32, rank])
    numel = _numel_in(case, rank, world_size)
    x = random.standard_normal(numel).astype(np.float32)
    if case.special and numel:
        at = random.integers(0, numel, 3)
        if case.special in ("nan", "inf"):
            # Both signs, on one rank only: every rank must get the result.
            if rank == world_size - 1:
                x[at] = [np.nan, -np.nan, np.nan] if case.special == "nan" else [np.inf, -np.inf, 1]
        elif case.special == "large":
            # Sums and products of two exceed fp16, but the average or product of all does not.
            x = np.clip(x, -0.5, 0.5) + 1
            inverted = case.op == "product" and 2 * rank >= world_size
            x *= {"product": 1 / 300 if inverted else 300}.get(case.op, 40_000)
        elif case.special == "lowest":
            # Shifted grids that begin below the lowest number; all values are on one rank.
            lowest = np.finfo(np.float32).min
            x = lowest * random.choice([0, 0.3, 1], numel).astype(np.float32) * (rank == 0)
        else:
            scale = {"huge": 3e38, "tiny": 1e-41, "zeros": -0.0, "constant": 0.0}[case.special]
            x = np.clip(x, -1, 1) * np.float32(scale)
            if case.special == "constant":
                x += np.float32(rank + 0.1)
    with np.errstate(all="ignore"):
        return x.astype(DTYPES[case.dtype])


def residual_of(case: Case, rank: int, world_size: int) -> npt.NDArray[Any] | None:
    """Return a rank's residual before the call; None without feedback."""
    if not case.feedback:
        return None
    random = np.random.default_rng([abs(case.seed(rank)) % 2**32, rank, 1])
    x = random.standard_normal(_numel_in(case, rank, world_size)).astype(np.float32)
    return (x / np.float32(8)).astype(DTYPES[case.dtype])


def result_of(result: npt.NDArray[Any], residual: npt.NDArray[Any] | None) -> npt.NDArray[Any]:
    """Return all results of a call on a rank."""
    return result if residual is None else np.concatenate([result, residual])


def digest(result: npt.NDArray[Any]) -> str:
    """Return a digest of the result's bits."""
    return hashlib.blake2b(result.tobytes(), digest_size=12).hexdigest()


def config_of(case: Case) -> Config:
    """Return the Config of a case."""
    return Config(
        bits=case.bits,
        bucket_size=case.bucket_size,
        rounding=case.rounding if has_rounding(case) else None,
        algorithm=case.algorithm,
        gather_bits=case.gather_bits or None,
        intra_bits=case.intra_bits or None,
        minimal_size=case.minimal_size,
        skip_incomplete_buckets=case.skip_incomplete_buckets,
        compressor=case.compressor,
        density=case.density,
        value_bits=case.value_bits,
        rotation=case.rotation,
        clip=case.clip,
        rate=case.rate,
    )


def converges(case: Case) -> bool:
    """Return whether error feedback converges."""
    try:
        replace(config_of(case), error_feedback=True)
    except InvalidArgument:
        return False
    return True


def segments_of(case: Case, config: Config) -> list[Segment] | None:
    """Return the segments for the library's call."""
    return [
        Segment(o, n, config.with_own(bits=b, bucket_size=k)) for o, n, b, k in case.segments
    ] or None


def options_of(case: Case, comm: Communicator) -> dict[str, Any]:
    """Return the arguments of the library's call on this rank, except for arrays."""
    config = config_of(case)
    options: dict[str, Any] = {"config": config, "seed": case.seed(comm.rank)}
    if case.verb != "all_to_all":
        options["segments"] = segments_of(case, config)
    elif case.splits:
        sizes = sizes_of_blocks(case, comm.size)
        options["input_split_sizes"] = sizes[comm.rank]
        options["output_split_sizes"] = [sent[comm.rank] for sent in sizes]
    if tables.VERBS[case.verb]["reduces"]:
        options["op"] = case.op
    return options


def run(case: Case, comm: Communicator) -> str:
    """Call the library on this rank and return its result's digest."""
    x = inputs(case, comm.rank, comm.size)
    kept = x.copy()
    residual = residual_of(case, comm.rank, comm.size)
    lost = {} if residual is None else {"residual": residual}
    result = getattr(comm, case.verb)(x, **options_of(case, comm), **lost)
    assert x.tobytes() == kept.tobytes(), f"the input changed: {case}"
    return digest(result_of(result, residual))


@functools.cache
def expected(
    case: Case,
    world_size: int,
    hosts: tuple[int, ...] | None = None,
    noise_ranks: tuple[int, ...] | None = None,
) -> list[str]:
    """Return the digest of the oracle's result, by rank.

    hosts: the host of each rank, if there are several. noise_ranks: for an allreduce in a group,
    the rank number with which each one draws noise.
    """
    xs = [inputs(case, rank, world_size) for rank in range(world_size)]
    segments = [
        reference.Segment(
            *segment,
            case.compressor,
            case.density or 0.01,
            case.value_bits or 32,
            case.rotation or 0,
            case.clip,
            case.rate or 2.0,
        )
        for segment in case.segments or ((0, case.size, case.bits, case.bucket_size),)
    ]
    options: dict[str, Any] = {
        "rounding": case.rounding,
        "seeds": [case.seed(rank) for rank in range(world_size)],
        "minimal_size": case.minimal_size,
        "skip_incomplete_buckets": case.skip_incomplete_buckets,
    }
    with np.errstate(all="ignore"):
        if case.verb == "all_to_all":
            sizes = sizes_of_blocks(case, world_size)
            return [digest(y) for y in reference.all_to_all(xs, sizes, *segments, **options)]
        if case.verb == "all_gather":
            return [digest(reference.all_gather(xs, segments, **options))] * world_size
        options["op"] = case.op
        lost = [residual_of(case, rank, world_size) for rank in range(world_size)]
        options |= {"algorithm": case.algorithm, "hosts": hosts, "intra_bits": case.intra_bits}
        options |= {"residuals": lost if case.feedback else None, "noise_ranks": noise_ranks}
        if case.verb == "reduce_scatter":
            results = reference.reduce_scatter(xs, segments, **options)
            return [digest(result_of(*each)) for each in zip(results, lost, strict=True)]
        options["gather_bits"] = case.gather_bits
        result = reference.allreduce(xs, segments, **options)
        return [digest(result_of(result, residual)) for residual in lost]
