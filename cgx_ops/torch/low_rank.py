"""PowerSGD's linear algebra: matrices of a bucket, and one step of a power iteration on them.

    P = mean(M) Q, orthogonalized;  Q = mean(M)^T P;  the average is P Q^T

A rank sends its own M Q and M^T P; what their means make of all ranks' matrices is the same as if
the matrices had been averaged. All of it in float32, whatever the gradients are.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


def orthogonalized(matrices: torch.Tensor, epsilon: float = 0.0) -> torch.Tensor:
    """Return orthonormal columns that span those of each matrix, (count, rows, columns).

    Columns of zeros, or that depend on others, become any that are orthogonal to these: there is
    nothing to divide by. NaN and infinities make all of their matrix NaN.

    Args:
        matrices: at least as many rows as columns.
        epsilon: as if it were added to each column's norm before it is divided by that: a column x
            long becomes x / (x + epsilon) long.
    """
    basis, triangle = torch.linalg.qr(matrices.clone())
    if epsilon:
        norms = triangle.diagonal(dim1=1, dim2=2).abs()
        basis = basis * (norms / (norms + epsilon)).unsqueeze(1)
    return basis


@dataclass
class Part:
    """One layer's gradient.

    Attributes:
        name: of the layer.
        gradient: flat, in the bucket: read, and in the end written.
        residual: flat, float32, alike; None without error feedback.
    """

    name: str
    gradient: torch.Tensor
    residual: torch.Tensor | None

    @property
    def value(self) -> torch.Tensor:
        """What is to be averaged, once added() was called."""
        return self.gradient if self.residual is None else self.residual

    def added(self) -> torch.Tensor:
        """Add the gradient to the residual; return their sum, or the gradient without one."""
        if self.residual is not None:
            self.residual.add_(self.gradient)
        return self.value


class Matrices:
    """Matrices of one shape that are factored together, and the layers that they are made of.

    Attributes:
        names: of each.
        shape: count, rows, columns.
        rank: of their factors.
        parts: the layers, one behind the other; what the matrices have more is zero.
        values: (count, rows, columns), float32: gradients and residuals; memory of the only part,
            if there is one that fits.
        basis: Q of the step before, orthonormal, (count, columns, rank).
        p: orthonormal, equal on all ranks, (count, rows, rank).
        q: this rank's own, (count, columns, rank).
    """

    values: torch.Tensor
    basis: torch.Tensor
    p: torch.Tensor
    q: torch.Tensor

    def __init__(
        self, names: Sequence[str], parts: Sequence[Part], rows: int, columns: int, rank: int
    ) -> None:
        self.names, self.parts, self.rank = names, parts, rank
        self.shape = len(names), rows, columns

    @property
    def p_numel(self) -> int:
        """Elements of all P."""
        return self.shape[0] * self.shape[1] * self.rank

    @property
    def q_numel(self) -> int:
        """Elements of all Q."""
        return self.shape[0] * self.shape[2] * self.rank

    def project(self, old_q: torch.Tensor) -> torch.Tensor:
        """Gather the values, and return this rank's P before it is averaged."""
        flats = [part.added() for part in self.parts]
        if len(flats) == 1 and flats[0].numel() == math.prod(self.shape):
            self.values = flats[0].float().view(self.shape)
        else:
            self.values = flats[0].new_zeros(self.shape, dtype=torch.float32)
            for piece, flat in zip(self._pieces(self.values), flats, strict=True):
                piece.copy_(flat)
        self.basis = orthogonalized(old_q)
        return torch.bmm(self.values, self.basis)

    def project_back(self, mean_p: torch.Tensor, epsilon: float) -> torch.Tensor:
        """Take the average of P, and return this rank's Q before it is averaged."""
        rows = mean_p.view(self.shape[0], self.shape[1], self.rank)
        self.p = orthogonalized(rows, epsilon)
        self.q = torch.bmm(self.values.mT, self.p)
        return self.q

    def finish(self, mean_q: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        """Write the averages into the gradients, and what is lost into the residuals.

        A matrix whose average is not finite leaves no residual.

        Args:
            mean_q: the average of Q, flat.
            share: what counts as this rank's part of it, flat: its residual is its matrix without
                P share^T.

        Returns:
            What to begin the next step with, (count, columns, rank): the average; of matrices where
            it is zero or not finite, and so tells nothing, what this step began with.
        """
        mean_q, share = mean_q.view_as(self.q), share.view_as(self.q)
        finite = self.p.isfinite().all((1, 2)) & mean_q.isfinite().all((1, 2))  # pyright: ignore[reportArgumentType, reportCallIssue]
        tells = finite & mean_q.any(2).any(1)
        if self.parts[0].residual is not None:
            self.values.baddbmm_(self.p, share.mT, alpha=-1)
            if self.values.device.type != "cpu" or not finite.all():  # a GPU is not waited for
                self.values.masked_fill_(~finite[:, None, None], 0.0)
            for part, lost in zip(self.parts, self._pieces(self.values), strict=True):
                assert part.residual is not None
                if part.residual.data_ptr() != lost.data_ptr():
                    part.residual.copy_(lost)
        average = torch.bmm(self.p, mean_q.mT)
        for part, piece in zip(self.parts, self._pieces(average), strict=True):
            part.gradient.copy_(piece)
        return torch.where(tells[:, None, None], mean_q, self.basis)

    def _pieces(self, values: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return what of (count, rows, columns) values belongs to each part."""
        sizes = [part.gradient.numel() for part in self.parts]
        rest = values.numel() - sum(sizes)
        return values.view(-1).split([*sizes, rest])[: len(sizes)]
