"""PowerSGD's linear algebra: matrices of a bucket, and one step of a power iteration on them.

    P = mean(M) Q, orthogonalized;  Q = mean(M)^T P;  the average is P Q^T

A rank sends its own M Q and M^T P; what their means make of all ranks' matrices is the same as if
the matrices had been averaged. All of it in float32, whatever the gradients are.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch


def orthogonalized(matrices: torch.Tensor, epsilon: float = 0.0) -> torch.Tensor:
    """Return orthonormal columns that span those of each matrix, (count, rows, columns).

    Columns of zeros, or that depend on others, become any that are orthogonal to these: there is
    nothing to divide by. NaN and infinities make NaN of all columns from theirs on. A column lies
    in one piece in memory.

    Args:
        matrices: at least as many rows as columns.
        epsilon: as if it were added to each column's norm before it is divided by that: a column x
            long becomes x / (x + epsilon) long.
    """
    basis, triangle = torch.linalg.qr(matrices)
    if epsilon:
        norms = triangle.diagonal(dim1=1, dim2=2).abs()
        basis = basis * (norms / (norms + epsilon)).unsqueeze(1)
    return basis


@dataclass
class Part:
    """One layer's gradient.

    Attributes:
        gradient: flat, in the bucket: read, and in the end written.
        residual: flat, float32, alike; None without error feedback.
        decay: what is left of the residual when the gradient is added.
        is_added: whether the residual has the gradient in it.
    """

    gradient: torch.Tensor
    residual: torch.Tensor | None
    decay: float = 1.0
    is_added: bool = False

    @property
    def value(self) -> torch.Tensor:
        """What is to be averaged, once added() was called."""
        return self.gradient if self.residual is None else self.residual

    def added(self) -> torch.Tensor:
        """Add the gradient to the residual; return their sum, or the gradient without one."""
        if self.residual is not None:
            if self.decay != 1:
                self.residual.mul_(self.decay)
            self.residual.add_(self.gradient)
            self.is_added = True
        return self.value

    def take_back(self) -> None:
        """Have the residual be what it was before added(), up to rounding.

        What is not finite leaves nothing there.
        """
        if self.residual is not None and self.is_added:
            self.residual.sub_(self.gradient).div_(self.decay).nan_to_num_(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Form:
    """What matrices of one shape that are factored together have in every step.

    Attributes:
        names: of each.
        members: which of the bucket's layers they are made of.
        shape: count, rows, columns.
        rank: of their factors.
    """

    names: tuple[str, ...]
    members: tuple[int, ...]
    shape: tuple[int, int, int]
    rank: int

    @property
    def p_shape(self) -> tuple[int, int, int]:
        """Shape of all P, as they travel."""
        return self.shape[0], self.rank, self.shape[1]

    @property
    def q_shape(self) -> tuple[int, int, int]:
        """Shape of all Q, as they travel."""
        return self.shape[0], self.rank, self.shape[2]


class Usable(NamedTuple):
    """For each matrix, whether the average of its Q is finite, and whether it is nonzero too."""

    finite: torch.Tensor
    nonzero: torch.Tensor


class Matrices:
    """Matrices of one form in one step.

    Factors travel transposed, a column after the other: a product of a few rows with a large matrix
    takes a fifth of the time that the matrix takes with a few columns.

    Attributes:
        form: what they have in every step.
        parts: the layers, one behind the other; what the matrices have more is zero.
        values: (count, rows, columns), float32: gradients and residuals; memory of the only part,
            if there is one that fits.
        basis: Q of the step before, orthonormal, (count, columns, rank).
        p: orthonormal, equal on all ranks, (count, rows, rank).
    """

    values: torch.Tensor
    basis: torch.Tensor
    p: torch.Tensor

    def __init__(self, form: Form, parts: Sequence[Part]) -> None:
        self.form, self.parts = form, parts
        self._whole = len(parts) == 1 and parts[0].gradient.numel() == math.prod(form.shape)

    def project(self, old_q: torch.Tensor) -> torch.Tensor:
        """Gather the values, and return this rank's P before it is averaged, as it travels."""
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
        """Take the average of P, and return this rank's Q before it is averaged, as it travels."""
        self.p = orthogonalized(mean_p.view(self.form.p_shape).mT, epsilon)
        return torch.bmm(self.p.mT, self.values)

    def finish(
        self, mean_q: torch.Tensor, share: torch.Tensor, usable: Usable | None = None
    ) -> torch.Tensor:
        """Write the averages into the gradients, and what is lost into the residuals.

        A matrix whose average is not finite leaves no residual.

        Args:
            mean_q: the average of Q, as it travelled.
            share: what counts as this rank's part of it, alike: its residual is its matrix without
                P share^T.
            usable: which averages are; None: all.

        Returns:
            What to begin the next step with, (count, columns, rank): the average; of matrices where
            it is zero or not finite, and so tells nothing, what this step began with.
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
        """Return what of (count, rows, columns) values belongs to each part."""
        if self._whole:
            return (values.view(-1),)
        sizes = [part.gradient.numel() for part in self.parts]
        rest = values.numel() - sum(sizes)
        return values.view(-1).split([*sizes, rest])[: len(sizes)]


def usable_of(
    means: torch.Tensor, numels: torch.Tensor, counts: Sequence[int]
) -> list[Usable | None]:
    """Return which averages of Q are usable; None where all are finite, and none is zero.

    Args:
        means: of all matrices, flat, end to end.
        numels: elements of each matrix's.
        counts: how many matrices are factored together, of each form.
    """
    largest = torch.segment_reduce(means.abs(), "max", lengths=numels.to(means.device))
    finite = largest < math.inf  # which NaN is not
    nonzero = finite & (largest > 0)
    if means.device.type == "cpu" and nonzero.all():  # a GPU is not waited for
        return [None] * len(counts)
    return list(map(Usable, finite.split(counts), nonzero.split(counts)))
