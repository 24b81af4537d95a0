"""Settings: how a segment's values are encoded, and properties of the compressors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from .values import EXACT_BITS, FLOAT32, RoundingMode

Compressor = Literal[
    "uniform", "levels", "sign", "onebit", "ternary", "qsgd", "half", "topk", "randk",
    "entropy", "lossless", "mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4",
]  # fmt: skip
LOSSLESS_BLOCK, ENTROPY_BLOCK, ENTROPY_CUT = 16384, 65536, 4096
BLOCKS_BUCKET = 512  # values of a bucket of the mx formats
# Compressors with one rounding; the others support several.
_ALWAYS: dict[Compressor, RoundingMode] = {
    "levels": "nearest",
    "sign": "nearest",
    "onebit": "nearest",
    "ternary": "stochastic",
    "qsgd": "stochastic",
    "topk": "nearest",
    "randk": "nearest",
    "lossless": "nearest",
}
# Bits of their codes. "uniform", "levels" and "qsgd" use those of the call.
_CODE_BITS: dict[Compressor, int] = {"sign": 1, "onebit": 1, "ternary": 0}


@dataclass(frozen=True)
class Settings:
    """Settings of a message: resolved fields of cgx_ops.Config; dtype: that of raw values."""

    bits: int = 4
    bucket_size: int = 512
    compressor: Compressor = "uniform"
    rounding: RoundingMode = "nearest"
    density: float = 0.01
    value_bits: int = EXACT_BITS
    rotation: int = 0
    clip: bool = False
    rate: float = 2.0
    skip_incomplete_buckets: bool = False
    dtype: np.dtype[Any] = FLOAT32

    @property
    def exact(self) -> bool:
        return self.bits == EXACT_BITS

    @property
    def votes(self) -> bool:
        """Whether a sum is a majority vote."""
        return self.compressor == "sign" and not self.exact

    @property
    def mode(self) -> RoundingMode:
        """How values are rounded."""
        return _ALWAYS.get(self.compressor, self.rounding)

    @property
    def code_bits(self) -> int:
        """Bits of a bucket's codes; 0: trits."""
        return _CODE_BITS.get(self.compressor, self.bits)

    @property
    def bucket(self) -> int:
        """The elements of a bucket."""
        return BLOCKS_BUCKET if self.compressor.startswith("mx") else self.bucket_size

    @property
    def grain(self) -> int:
        """A message can be split at multiples of this number of elements."""
        if self.compressor == "lossless" and not self.exact:
            return LOSSLESS_BLOCK
        if self.compressor == "entropy" and not self.exact:
            return ENTROPY_BLOCK
        return 1 if self.exact or self.compressor == "half" else self.bucket

    @property
    def cut(self) -> int:
        """Shards are cut at multiples of this number of elements."""
        entropy = self.compressor == "entropy" and not self.exact
        return ENTROPY_CUT if entropy else self.grain

    def share(self, numel: int) -> int:
        """Return how many of `numel` > 0 values a sparse compressor sends."""
        billionths = round(self.density * 10**9)
        return max(1, -(-billionths * numel // 10**9))
