"""The CGX_* variables. An unknown one is reported once, with the most similar name."""

import difflib
import functools
import os

from cgx_ops._core.user_warnings import warn_once

NAMES = frozenset(
    {
        "CGX_AUTO_BITS",
        "CGX_COMPRESSION_BUCKET_SIZE",
        "CGX_COMPRESSION_CLIP",
        "CGX_COMPRESSION_DENSITY",
        "CGX_COMPRESSION_MINIMAL_SIZE",
        "CGX_COMPRESSION_QUANTIZATION_BITS",
        "CGX_COMPRESSION_RATE",
        "CGX_COMPRESSION_ROTATION",
        "CGX_COMPRESSION_ROUNDING",
        "CGX_COMPRESSION_SKIP_INCOMPLETE_BUCKETS",
        "CGX_COMPRESSION_VALUE_BITS",
        "CGX_COMPRESSOR",
        "CGX_CPU_TARGET",
        "CGX_CROSS_COMMUNICATOR_TYPE",
        "CGX_CROSS_REDUCTION_TYPE",
        "CGX_FUSION_BUFFER_SIZE_MB",
        "CGX_HOST_ID",
        "CGX_INNER_COMMUNICATOR_TYPE",
        "CGX_INNER_REDUCTION_TYPE",
        "CGX_INTRA_BROADCAST",
        "CGX_INTRA_COMPRESS",
        "CGX_LOG",
        "CGX_SOCKET_IFNAME",
        "CGX_THREADS",
        "CGX_TIMEOUT",
        "CGX_WITH",
        "CGX_WORLD",
    }
)
_OF_TESTS = ("CGX_TEST_", "CGX_REQUIRE_")


@functools.cache
def warn_of_unknown() -> None:
    """Warn about unknown variables that begin with CGX_. This happens once per process."""
    for name in sorted(os.environ):
        if not name.startswith("CGX_") or name in NAMES or name.startswith(_OF_TESTS):
            continue
        nearest = difflib.get_close_matches(name, NAMES, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else "see docs/reference/environment.md"
        warn_once(f"cgx_ops has no environment variable {name}, so it has no effect: {hint}")
