"""The algebra of PowerSGD; torch/test_hooks.py tests the hooks."""

import pytest
import torch

from cgx_ops.methods import low_rank
from cgx_ops.torch.averaging.power_sgd.linear_algebra import (
    Form,
    Matrices,
    Part,
    orthogonalized,
    usable_of,
)


@pytest.mark.parametrize("columns", [1, 2, 5])
def test_columns_become_orthonormal(columns: int) -> None:
    torch.manual_seed(0)
    dependent = torch.randn(9, 1).expand(9, columns)
    for x in (torch.randn(9, columns), torch.zeros(9, columns), dependent, 1e-30 * dependent):
        q = orthogonalized(x[None])[0]
        assert torch.allclose(q.T @ q, torch.eye(columns), atol=1e-6)
        assert torch.allclose(q @ (q.T @ x), x, atol=float(x.abs().max()) * 1e-5)
    assert orthogonalized(torch.full((1, 9, columns), float("nan"))).isnan().all()


def test_epsilon_shortens_columns() -> None:
    x = torch.tensor([[[3.0, 0.0], [0.0, 1.0], [0.0, 0.0]]])
    lengths = orthogonalized(x, 1.0).norm(dim=1)
    assert torch.allclose(lengths, torch.tensor([[0.75, 0.5]]))


def rank_of(gradient: torch.Tensor, residual: torch.Tensor | None, rank: int = 1) -> Matrices:
    """Return one rank's state of one matrix."""
    part = Part(gradient.flatten(), None if residual is None else residual.flatten())
    rows, columns = gradient.shape
    return Matrices(Form(("x",), (0,), (1, rows, columns), rank), [part])


def step(
    gradients: list[torch.Tensor], residuals: list[torch.Tensor], q: torch.Tensor, feedback: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do a step on all ranks; return the average and the new Q."""
    written = [g.clone() for g in gradients]
    ranks = [rank_of(g, e, q.shape[2]) for g, e in zip(written, residuals, strict=True)]
    p = torch.stack([m.project(q) for m in ranks]).mean(0)
    own = [m.project_back(p, 0.0) for m in ranks]
    mean = torch.stack(own).mean(0)
    news = [
        m.finish(mean, mean if feedback == "torch" else mine)
        for m, mine in zip(ranks, own, strict=True)
    ]
    assert all(torch.equal(x, written[0]) for x in written)
    return written[0], news[0]


@pytest.mark.parametrize("feedback", ["local", "torch"])
def test_residuals_of_a_thousand_steps(feedback: str) -> None:
    """Use four ranks with constant gradients: differences between ranks grow in PyTorch's form."""
    torch.manual_seed(0)
    apart = torch.randn(4, 6, 9)
    apart -= apart.mean(0)
    residuals = list(torch.zeros(4, 6, 9))
    q = torch.from_numpy(low_rank.first_q(0, "x", 0, 9, 1))[None]
    norms = []
    for i in range(1001):
        common = torch.randn(6, 9)
        _, q = step([common + x for x in apart], residuals, q, feedback)
        if i in (500, 1000):
            norms.append(float(torch.stack(residuals).norm()))
    if feedback == "local":
        assert norms[1] < 1.5 * norms[0] < 300
    else:
        assert norms[1] > 1.9 * norms[0] > 5000


def test_gradient_of_full_rank_is_exact() -> None:
    torch.manual_seed(1)
    left, right = torch.randn(3, 8, 2), torch.randn(2, 12)  # over all ranks, the rank is 2
    gradients = list(left @ right)
    q = torch.from_numpy(low_rank.first_q(0, "x", 0, 12, 2))[None]
    average, _ = step(gradients, list(torch.zeros(3, 8, 12)), q, "local")
    assert torch.allclose(average, torch.stack(gradients).mean(0), atol=1e-5)


def test_zero_q_is_replaced() -> None:
    """Check that the next step begins with the same Q."""
    m = rank_of(torch.zeros(8, 12), torch.zeros(8, 12))
    q = torch.from_numpy(low_rank.first_q(0, "x", 0, 12, 1))[None]
    zero = m.project_back(m.project(q), 0.0)
    assert not zero.any()
    (usable,) = usable_of(zero.flatten(), torch.tensor([12]), [1])
    assert torch.equal(m.finish(zero, zero, usable), orthogonalized(q))


def test_flags_are_per_matrix() -> None:
    means, numels, counts = torch.ones(17), torch.tensor([6, 6, 5]), [2, 1]
    assert usable_of(means, numels, counts) == [None, None]
    for at, to, finite, nonzero in (
        (slice(6, 12), 0.0, [True] * 3, [True, False, True]),
        (slice(6, 11), 0.0, [True] * 3, [True] * 3),
        (slice(11, 12), float("nan"), [True, False, True], [True, False, True]),
        (slice(12, 13), -float("inf"), [True, True, False], [True, True, False]),
    ):
        spoilt = means.clone()
        spoilt[at] = to
        usable = usable_of(spoilt, numels, counts)
        got = [torch.cat(each).tolist() for each in zip(*filter(None, usable), strict=True)]
        assert got == ([] if all(nonzero) else [finite, nonzero]), (at, to)


def test_first_q_follows_from_the_seed() -> None:
    first = low_rank.first_q(3, "a", 0, 50, 2)
    assert first.shape == (50, 2)
    assert first.dtype == "float32"
    for seed, name, draw in ((4, "a", 0), (3, "b", 0), (3, "a", 1)):
        assert (first != low_rank.first_q(seed, name, draw, 50, 2)).all()
    # Ranks with another release of numpy draw the same.
    assert first[0].tolist() == [1.2157580852508545, 1.7510019540786743]
    assert abs(first.mean()) < 0.4
    assert 0.7 < first.std() < 1.3


@pytest.mark.parametrize(
    ("rows", "columns", "rank", "rate", "found"),
    [
        (24, 24, 2, 2, 2),
        (8, 24, 3, 2, 0),  # exactly twice: no gain
        (8, 24, 3, 1.9, 3),
        (24, 1, 1, 2, 0),  # a vector
        (3, 1000, 7, 0.9, 3),  # limited by the number of rows
        (3, 1000, 7, 2, 0),
    ],
)
def test_which_matrices_are_factored(
    rows: int, columns: int, rank: int, rate: float, found: int
) -> None:
    assert low_rank.rank_of(rows, columns, rank, rate) == found
