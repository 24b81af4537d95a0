"""Values of averages, momenta and residuals.

1. averages are bitwise equal to the reference over 50 steps; weights up to float32 rounding
2. gradients are conserved; NaN, infinities and zeros
"""

from typing import Any

import torch
from torch_training import RANK, SIZE, batch, gathered, identical_on_all_ranks, loss_of, network

from cgx_ops import Config

from .common import MATRICES, Followed

RATE = 0.02


# ---- 1. the reference ----------------------------------------------------------------------------


def follow(steps: int, **options: Any) -> Followed:
    """Train, compare each step, and compare the weights after the last."""
    followed = Followed(**options)
    optimizer = torch.optim.SGD(followed.model.parameters(), RATE)
    parameters = dict(followed.model.module.named_parameters())
    weights = {name: p.detach().clone().flatten() for name, p in parameters.items()}
    bound = {name: torch.zeros_like(w, dtype=torch.float64) for name, w in weights.items()}
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(followed.model, batch(RANK, step, shift=0.1)).backward()
        optimizer.step()
        followed.compare(step)
        for name, average in followed.average.items():
            change = average * RATE
            weights[name] = weights[name] - change
            # The reference rounds a product and a difference; torch may round once, or twice.
            unit = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
            size = weights[name].abs().double() + 2 * change.abs().double()
            bound[name] += 2 * unit[average.dtype] * size + 2.0**-24
    for name, p in parameters.items():
        got = p.detach().flatten()
        assert ((got.double() - weights[name].double()).abs() <= bound[name]).all(), name
        identical_on_all_ranks(got.float())
    return followed


def default_method() -> None:
    follow(50)


def all_options() -> None:
    follow(50, nesterov=True)
    follow(50, clip=0.5)
    follow(50, clip=0.5, nesterov=True, momentum=0.5)
    follow(50, momentum=0.0)
    follow(50, warmup_steps=18, density=0.01)
    follow(10, density=1.0)
    follow(10, density=0.25, config=Config(compressor="topk", value_bits=16))


def half_precision_gradients() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        follow(50, module=network(dtype), clip=2.0)


# ---- 2. conservation -----------------------------------------------------------------------------


def conservation() -> None:
    """Check that gradients plus old residuals equal average plus new residuals, without momentum.

    Each rank rounds c = v + g once, and c minus the sent values once; W sums and a quotient are
    rounded. Together that is less than W + 3 roundings of the sum of all

    c

    .
    """
    variants: list[dict[str, Any]] = [
        {"config": Config(compressor="topk")},
        {"config": Config(compressor="topk", value_bits=16)},
        {"config": Config(compressor="topk", value_bits=4)},
        {"warmup_steps": 4},
    ]
    for options in variants:
        followed = Followed(momentum=0.0, **options)
        old = {name: torch.zeros_like(followed_v) for name, followed_v in zeros_like(followed)}
        for step in range(6):
            followed.model.zero_grad()
            loss_of(followed.model, batch(RANK, step)).backward()
            for name in sorted(MATRICES):
                given = torch.stack(followed.given[name]).double()
                before = torch.stack(gathered(old[name])).double()
                new = followed.state.residuals.tensors[name].clone()
                after = torch.stack(gathered(new)).double()
                sent = followed.average[name].double() * SIZE
                error = (given.sum(0) + before.sum(0) - sent - after.sum(0)).abs()
                bound = (SIZE + 3) * 2.0**-24 * (given + before).abs().sum(0)
                assert (error <= bound).all(), (options, step, name, error.max())
                assert SIZE == 1 or (0 < (sent != 0).sum() < len(sent)), (options, step, name)
                old[name] = new


def zeros_like(followed: Followed) -> list[tuple[str, torch.Tensor]]:
    named = followed.model.module.named_parameters()
    return [(name, torch.zeros(p.numel())) for name, p in named if name in MATRICES]


def zeros() -> None:
    """Check that momentum continues with zero gradients, and that residuals are sent."""
    followed = Followed()
    for step, scale in enumerate((0.0, 1.0, 0.0, 0.0, 1.0)):
        followed.model.zero_grad()
        (loss_of(followed.model, batch(RANK, step)) * scale).backward()
        followed.compare(step)


def not_finite() -> None:
    """Check that one rank's NaN appears on every rank, there alone, and not in the state."""
    for clip in (None, 1.0):
        followed = Followed(clip=clip)
        for step in range(5):
            followed.model.zero_grad()
            loss = loss_of(followed.model, batch(RANK, step))
            if step == 3 and RANK == SIZE - 1:
                layer = followed.model.module[2]
                spoilt = layer.weight[3, 4] + layer.bias[5]
                loss = loss + spoilt * float("nan")
            loss.backward()
            for name, average in followed.average.items():
                expected = step == 3 and name.startswith("2.")
                assert int(average.isnan().sum()) == expected, (step, name)
            kept = (followed.state.residuals, followed.state.momenta)
            assert all(x.isfinite().all() for each in kept for x in each.tensors.values())


CHECKS = [default_method, not_finite]
CHECKS += [all_options, half_precision_gradients, conservation, zeros]
