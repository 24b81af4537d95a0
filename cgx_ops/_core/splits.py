"""Sizes of the blocks of an all_to_all."""

import math
from collections.abc import Sequence
from ctypes import c_int64
from dataclasses import dataclass

import numpy as np

from cgx_ops._core import structs
from cgx_ops._core.arrays import Array
from cgx_ops.errors import InvalidArgument, require_integer

_MOST = 2**59  # elements, as in the core


@dataclass(frozen=True)
class Splits:
    """The blocks for, and from, each rank.

    Attributes:
        rows_in: Rows of the input's blocks, by rank.
        rows_out: Rows of the output's blocks, by rank.
        row: Elements of a row.
    """

    rows_in: Sequence[int]
    rows_out: Sequence[int]
    row: int

    def set(self, collective: structs.Collective) -> None:
        """Set the fields of a call, which has one segment of 0 elements."""
        elements = [[self.row * rows for rows in side] for side in (self.rows_in, self.rows_out)]
        size = len(self.rows_in)
        collective.input_splits, collective.output_splits = ((c_int64 * size)(*e) for e in elements)
        collective.block_numel = self.row


def splits_of(
    source: Array,
    out: Array | None,
    size: int,
    input_split_sizes: Sequence[int] | None,
    output_split_sizes: Sequence[int] | None,
) -> Splits:
    """Return the blocks of an all_to_all of arrays.

    Args:
        source: The input.
        out: The array for the result, if the caller passed one.
        size: The number of ranks.
        input_split_sizes: Rows of the block for each rank; None: equal blocks.
        output_split_sizes: Rows of the block from each rank; None: equal blocks.

    Raises:
        InvalidArgument: The sizes are not one integer >= 0 per rank, or do not add up to the rows
            of their array.
    """
    if source.ndim == 0:
        raise InvalidArgument("all_to_all of a scalar: it needs an array with a first axis")
    rows, row = len(source), math.prod(source.shape[1:])
    rows_out = len(out) if isinstance(out, np.ndarray) and out.ndim else rows
    splits = Splits(
        _blocks("input_split_sizes", input_split_sizes, rows, row, size),
        _blocks("output_split_sizes", output_split_sizes, rows_out, row, size),
        row,
    )
    if (total := sum(splits.rows_in)) != rows:
        raise InvalidArgument(
            f"input_split_sizes add up to {total}, but the array has {rows} rows: its shape is "
            f"{source.shape}"
        )
    return splits


def _blocks(
    what: str, given: Sequence[int] | None, rows: int, row: int, size: int
) -> Sequence[int]:
    """Return the rows of each rank's block.

    Args:
        what: Name of the argument.
        given: The argument; None: equal blocks.
        rows: Rows of all equal blocks together.
        row: Elements of a row.
        size: The number of ranks.
    """
    if given is None:
        if rows % size:
            raise InvalidArgument(
                f"all_to_all sends equal blocks without {what}, but {size} ranks do not divide "
                f"{rows} rows: pass {what}"
            )
        return [rows // size] * size
    try:
        sizes = list(given)
    except TypeError:
        raise InvalidArgument(f"{what} is {given!r}; it must be a list of integers") from None
    if len(sizes) != size:
        raise InvalidArgument(
            f"{what} has {len(sizes)} sizes; it must have one for each of {size} ranks"
        )
    most = _MOST // max(1, row)
    return [require_integer(f"{what}[{i}]", rows, 0, most) for i, rows in enumerate(sizes)]
