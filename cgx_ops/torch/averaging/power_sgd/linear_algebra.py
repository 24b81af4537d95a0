"""PowerSGD's linear algebra: one step of a power iteration on the matrices of a bucket.

    P = mean(M) Q, orthogonalized;  Q = mean(M)^T P;  the average is P Q^T

Each rank sends its own M Q and M^T P. Both are linear in M, so their means are those of the
averaged matrices. All arithmetic is float32.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch


def orthogonalized(matrices: torch.Tensor, epsilon: float = 0.0) -> torch.Tensor:
    """Return an orthonormal basis of the columns of each matrix, (count, rows, columns).

    Columns that are zero or depend on others are replaced by any orthogonal ones. NaN and
    infinities make their column and all later ones NaN. A column is contiguous in memory.

    Args:
        matrices: at least as many rows as columns.
        epsilon: a column of norm x gets norm x / (x + epsilon), as if epsilon were added to the
            norm before the division.
    """
    basis, triangle = torch.linalg.qr(matrices)
    if epsilon:
        norms = triangle.diagonal(dim1=1, dim2=2).abs()
        basis = basis * (norms / (norms + epsilon)).unsqueeze(1)
    return basis


@dataclass
class Part:
    """The gradient of one layer.

    Attributes:
        gradient: flat, in the bucket; read first, and overwritten with the average.
        residual: flat, float32, of the same size; None without error feedback.
        decay: factor of the residual when the gradient is added to it.
        is_added: whether the residual includes the gradient.
    """

    gradient: torch.Tensor
    residual: torch.Tensor | None
    decay: float = 1.0
    is_added: bool = False

    @property
    def value(self) -> torch.Tensor:
        """The values to average, after added() was called."""
        return self.gradient if self.residual is None else self.residual

    def added(self) -> torch.Tensor:
        """Add the gradient to the residual; return the sum, or the gradient alone."""
        if self.residual is not None:
            if self.decay != 1:
                self.residual.mul_(self.decay)
            self.residual.add_(self.gradient)
            self.is_added = True
        return self.value

    def take_back(self) -> None:
        """Restore the residual from before added(), up to rounding.

        Values that are not finite become zero.
        """
        if self.residual is not None and self.is_added:
            self.residual.sub_(self.gradient).div_(self.decay).nan_to_num_(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Form:
    """The constant properties of matrices of one shape that are factored together.

    Attributes:
        names: of each matrix.
        members: indices of the bucket's layers that they consist of.
        shape: count, rows, columns.
        rank: of their factors.
    """

    names: tuple[str, ...]
    members: tuple[int, ...]
    shape: tuple[int, int, int]
    rank: int

    @property
    def p_shape(self) -> tuple[int, int, int]:
        """Shape of all P in the message."""
        return self.shape[0], self.rank, self.shape[1]

    @property
    def q_shape(self) -> tuple[int, int, int]:
        """Shape of all Q in the message."""
        return self.shape[0], self.rank, self.shape[2]


class Usable(NamedTuple):
    """For each matrix, whether the average of its Q is finite, and whether it is also nonzero."""

    finite: torch.Tensor
    nonzero: torch.Tensor


class Matrices:
    """Matrices of one form in one step.

    Factors are sent transposed, one column after the other. A product of a few rows with a large
    matrix is five times as fast as one of the matrix with a few columns.

    Attributes:
        form: their constant properties.
        parts: the layers, one after the other; the rest of the matrices is zero.
        values: (count, rows, columns), float32: gradients plus residuals. Shares the memory of the
            part if there is only one and it has the right size.
        basis: Q of the previous step, orthonormal, (count, columns, rank).
        p: orthonormal, equal on all ranks, (count, rows, rank).
    """

    values: torch.Tensor
    basis: torch.Tensor
    p: torch.Tensor

    def __init__(self, form: Form, parts: Sequence[Part]) -> None:
        self.form, self.parts = form, parts
        self._whole = len(parts) == 1 and parts[0].gradient.numel() == math.prod(form.shape)

    def project(self, old_q: torch.Tensor) -> torch.Tensor:
        """Collect the values; return this rank's P before averaging, transposed."""
        shape, flats = self.form.shape, [part.added() for part in self.parts]
        if self._whole:
            self.values = flats[0].float().view(shape)
        else:
            self.values = flats[0].new_zeros(shape, dtype=torch.float32)
            for piece, flat in zip(self._pieces(self.values), flats, strict=True):
                piece.copy_(flat)
        self.basis = orthogonalized(old_q)
        return torch.bmm(self.basis.mT, self.values.mT)

    def project_back(self, mean_p: torch.Tensor, epsilon: float) -> torch.Tensor:
        """Take the average of P; return this rank's Q before averaging, transposed."""
        self.p = orthogonalized(mean_p.view(self.form.p_shape).mT, epsilon)
        return torch.bmm(self.p.mT, self.values)

    def finish(
        self, mean_q: torch.Tensor, share: torch.Tensor, usable: Usable | None = None
    ) -> torch.Tensor:
        """Write the averages into the gradients and the errors into the residuals.

        A matrix whose average is not finite leaves no residual.

        Args:
            mean_q: the average of Q, as it was sent.
            share: this rank's part of the average, in the same layout: the new residual is the
                matrix minus P share^T.
            usable: which averages are usable; None: all.

        Returns:
            The Q for the next step, (count, columns, rank): the average, or, if that is zero or not
            finite, the Q that this step started with.
        """
        mean_q, share = mean_q.view(self.form.q_shape), share.view(self.form.q_shape)
        if self.parts[0].residual is not None:
            self.values.baddbmm_(self.p, share, alpha=-1)
            if usable is not None:
                self.values.masked_fill_(~usable.finite[:, None, None], 0.0)
            for part, lost in zip(self.parts, self._pieces(self.values), strict=True):
                assert part.residual is not None
                if part.residual.data_ptr() != lost.data_ptr():
                    part.residual.copy_(lost)
        gradient = self.parts[0].gradient
        if self._whole and gradient.dtype == torch.float32:
            torch.bmm(self.p, mean_q, out=gradient.view(self.form.shape))
        else:
            average = torch.bmm(self.p, mean_q)
            for part, piece in zip(self.parts, self._pieces(average), strict=True):
                part.gradient.copy_(piece)
        q = mean_q.mT
        return q if usable is None else torch.where(usable.nonzero[:, None, None], q, self.basis)

    def _pieces(self, values: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the parts' views of (count, rows, columns) values."""
        if self._whole:
            return (values.view(-1),)
        sizes = [part.gradient.numel() for part in self.parts]
        rest = values.numel() - sum(sizes)
        return values.view(-1).split([*sizes, rest])[: len(sizes)]


def usable_of(
    means: torch.Tensor, numels: torch.Tensor, counts: Sequence[int]
) -> list[Usable | None]:
    """Return which averages of Q are usable; None if all are finite and nonzero.

    Args:
        means: of all matrices, flat, concatenated.
        numels: elements of each matrix's Q.
        counts: number of matrices of each form.
    """
    largest = torch.segment_reduce(means.abs(), "max", lengths=numels.to(means.device))
    finite = largest < math.inf  # false for NaN
    nonzero = finite & (largest > 0)
    if means.device.type == "cpu" and nonzero.all():  # do not wait for a GPU
        return [None] * len(counts)
    return list(map(Usable, finite.split(counts), nonzero.split(counts)))
