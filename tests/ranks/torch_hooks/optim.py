"""CompressedAdamW and Signum.

1. values: bitwise equal to the reference; conservation; carrier="c10d"
2. convergence, and elements without gradients
3. checkpoints
4. bad input
"""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import reference
import torch
import torch.distributed as dist
from failing import fails
from shared_folder import folder_of_all
from support import torch_cases as tc
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.nn.parallel import DistributedDataParallel
from torch_training import (
    RANK,
    SIZE,
    batch,
    gathered,
    identical_on_all_ranks,
    loss_of,
    network,
    weights_of,
)

from cgx_ops import Communicator, Config, InvalidArgument, Rules
from cgx_ops.torch.ddp import CommHookType
from cgx_ops.torch.optim import CompressedAdamW, Signum

SHIFT = 0.1  # between ranks' data
ONE_BIT = Config(compressor="levels", bits=1)
FEEDBACK = Config(compressor="levels", bits=2)
NEAREST = Config(bits=8, rounding="nearest", error_feedback=False)
ADAM: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.01, "warmup_steps": 10, "refreshes": 2}
MAKERS: dict[str, Any] = {
    "compressed_adamw": lambda params, **options: CompressedAdamW(params, **ADAM | options),
    "signum": lambda params, **options: Signum(
        params, **{"lr": 0.002, "weight_decay": 0.01, **options}
    ),
}


def backward(model: nn.Module, step: int) -> float:
    model.zero_grad()
    loss = loss_of(model, batch(RANK, step, SHIFT))
    loss.backward()
    return float(loss.detach())


def run(model: nn.Module, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        losses.append(backward(model, step))
        optimizer.step()
    return losses


# ---- 1. values -----------------------------------------------------------------------------------


def root(x: Any) -> Any:
    return tc.to_numpy(torch.from_numpy(x).sqrt())


def reference_of(name: str, x: torch.Tensor, **options: Any) -> Any:
    start = tc.to_numpy(x)
    if name == "signum":
        return reference.Signum(SIZE, start, lr=0.002, decay=0.01)
    own = {"bits": 1, "compressor": "levels", "rotation": 32} if x.dim() > 1 else {"bits": 32}
    whole = reference.Segment(0, x.numel(), 8 if x.dim() > 1 else 32)
    options = {"warmup": 10, "lr": 0.01, "decay": 0.01, "variance_segment": whole, **options}
    options.setdefault("segment", reference.Segment(0, x.numel(), **own))  # type: ignore[arg-type]
    return reference.CompressedAdamW(SIZE, start, root=root, **options)


def matches_reference() -> None:
    """Compare 50 steps: states and residuals bit for bit, parameters up to roundings."""
    fixed: dict[str, Any] = {"refreshes": 0, "betas": (0.8, 0.95)}
    early: dict[str, Any] = {"refreshes": 3, "betas": (0.9, 0.5)}
    variants: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("signum", {}, {}),
        ("compressed_adamw", {"warmup_config": NEAREST}, {}),
        ("compressed_adamw", {"warmup_config": NEAREST, **fixed}, fixed),
        ("compressed_adamw", {"warmup_config": NEAREST, "warmup_steps": 2, **early}, early | {
            "warmup": 2,
        }),
    ]  # fmt: skip
    for name, options, theirs in variants:
        model = network()
        named = list(model.named_parameters())
        wants = [reference_of(name, p, **theirs) for _, p in named]
        optimizer = MAKERS[name](model.parameters(), **options)
        for step in range(50):
            backward(model, step)
            for (_, p), want in zip(named, wants, strict=True):
                assert p.grad is not None
                want.step([tc.to_numpy(g) for g in gathered(p.grad)])
            optimizer.step()
            for i, ((of, p), want) in enumerate(zip(named, wants, strict=True)):
                state, x = optimizer.state[p], tc.to_numpy(p)
                if name == "signum":
                    assert np.array_equal(x, want.x), (step, of)
                    assert np.array_equal(tc.to_numpy(state["momentum_buffer"]), want.momenta[RANK])
                    continue
                assert optimizer.schedule.due == want.schedule[0], (step, want.schedule)
                assert (np.abs(x - want.x) <= want.off).all(), (step, of)
                assert np.array_equal(tc.to_numpy(state["exp_avg"]), want.m), (step, of)
                assert np.array_equal(tc.to_numpy(state["exp_avg_sq"]), want.v), (step, of)
                residual = optimizer.exchange.residuals.tensors.get(str(i))
                if residual is not None:
                    assert np.array_equal(tc.to_numpy(residual), want.residuals[RANK]), (step, of)
        identical_on_all_ranks(weights_of(model))
        kept = {str(i) for i, (_, p) in enumerate(named) if p.dim() > 1}
        assert optimizer.exchange.residuals.tensors.keys() == (
            kept if name == "compressed_adamw" else set()
        )


def recommended_codecs() -> None:
    """Compare updates of half a bit, and gradients of four bits in variance steps."""
    rates = {"segment": 0.5, "variance_segment": 4.0}
    weight = nn.Parameter(torch.ones(64, 64))
    segments = {
        name: reference.Segment(0, 4096, compressor="entropy", rate=rate)
        for name, rate in rates.items()
    }
    want = reference_of("compressed_adamw", weight, **segments)
    few, gradients = (Config(compressor="entropy", rate=rate) for rate in rates.values())
    gradients = replace(gradients, error_feedback=False)
    optimizer = MAKERS["compressed_adamw"]([weight], config=few, warmup_config=gradients)
    for step in range(24):
        torch.manual_seed(100 * step + RANK)
        weight.grad = torch.randn(64, 64)
        want.step([tc.to_numpy(g) for g in gathered(weight.grad)])
        optimizer.step()
        assert np.array_equal(tc.to_numpy(optimizer.state[weight]["exp_avg"]), want.m), step
        assert np.array_equal(tc.to_numpy(optimizer.state[weight]["exp_avg_sq"]), want.v), step
        residual = optimizer.exchange.residuals.tensors.get("0")
        if residual is not None:
            assert np.array_equal(tc.to_numpy(residual), want.residuals[RANK]), step
    assert optimizer.exchange.residuals.tensors.keys() == {"0"}


def warm_up_that_ends_by_itself() -> None:
    """Compare the end with the reference, also where gradients grow until step 12."""
    for scale, last in ((lambda _: 1.0, 8), (lambda step: 2.0 ** min(step, 12), 64)):
        weight = nn.Parameter(torch.ones(24, 24))
        options: dict[str, Any] = {"betas": (0.9, 0.95), "warmup": "auto"}
        want = reference_of("compressed_adamw", weight, **options)
        optimizer = CompressedAdamW(
            [weight], lr=0.01, betas=(0.9, 0.95), refreshes=2, warmup_config=NEAREST
        )
        ended = 0
        for step in range(80):
            torch.manual_seed(100 * step + RANK)
            weight.grad = torch.randn(24, 24) * scale(step)
            want.step([tc.to_numpy(g) for g in gathered(weight.grad)])
            optimizer.step()
            assert optimizer.schedule.due == want.schedule[0], (step, want.schedule)
            ended = ended or (step + 1 if optimizer.schedule.interval else 0)
        assert ended == last, ended


def exact_by_rules() -> None:
    """Check that rules make a parameter exact in both kinds of steps."""
    ends = []
    for own in ({"compressor": "lossless"}, {"minimal_size": 10**6}, {"bits": 32}):
        model = network()
        run(
            model,
            MAKERS["compressed_adamw"](model.parameters(), rules=Rules([("0", own)])),
            range(14),
        )
        ends.append(weights_of(model))
    assert torch.equal(ends[0], ends[2]) and torch.equal(ends[1], ends[2])


def as_adamw() -> None:
    """Check that exact variance steps are torch's AdamW on the mean gradient."""
    for betas in ((0.9, 0.999), (0.5, 0.9), (0.0, 0.9)):
        models = network(), network()
        adamw = torch.optim.AdamW(models[1].parameters(), 0.01, betas, weight_decay=0.1)
        own = CompressedAdamW(
            models[0].parameters(), 0.01, betas, weight_decay=0.1, warmup_steps=40,
            warmup_config=Config(bits=32),
        )  # fmt: skip
        for step in range(40):
            backward(models[0], step)
            for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
                assert p.grad is not None
                q.grad = torch.stack(gathered(p.grad)).mean(0)
            own.step()
            adamw.step()
            error = (weights_of(models[0]) - weights_of(models[1])).abs().max()
            assert error <= 2e-6 * (step + 1), (betas, step, error)


def tiny_variances() -> None:
    """Check that updates stay within AdamW's bound where v is tiny or 0 and gradients grow."""
    beta1, beta2 = 0.9, 0.95
    # The largest |m| / sqrt(v) of Adam, by brute force: its gradients grow geometrically.
    weights = beta1 ** np.arange(400.0), beta2 ** np.arange(400.0)
    gradients = weights[0] / weights[1]
    most = (1 - beta1) * (weights[0] @ gradients)
    most /= ((1 - beta2) * (weights[1] @ gradients**2)) ** 0.5
    weight = nn.Parameter(torch.zeros(32, 32))
    optimizer = CompressedAdamW(
        [weight], lr=1.0, betas=(beta1, beta2), weight_decay=0.0, warmup_steps=4, refreshes=0
    )
    for step in range(40):
        torch.manual_seed(step)
        gradient = torch.randn(32, 32)
        if step < 4:
            gradient[:8] = 0
            gradient[8:16] *= 1e-18
        before = weight.detach().clone()
        weight.grad = gradient
        optimizer.step()
        moved = (weight.detach() - before).abs().max() * (1 - beta1 ** (step + 1))
        assert step < 4 or moved <= most * 1.001, (step, moved, most)
    assert optimizer.schedule.due == -1
    assert weight[:16].abs().min() > 0, "elements without a variance do not move"


def conservation() -> None:
    """Check that momenta plus old residuals equal the average (as a sum) plus new residuals."""
    model = network()
    optimizer = MAKERS["compressed_adamw"](
        model.parameters(),
        betas=(0.5, 0.999),
        refreshes=0,
        config=ONE_BIT,
        warmup_config=Config(bits=32),
    )
    parameters = list(model.parameters())
    for step in range(16):
        backward(model, step)
        old = optimizer.exchange.residuals.tensors
        given, before, denominators = [], [], []
        for i, p in enumerate(parameters):
            assert p.grad is not None
            state, group = optimizer.state[p], optimizer.param_groups[0]
            denominator = (state["exp_avg_sq"] / (group["variance_weight"] or 1)).sqrt() + 1e-8
            denominators.append(denominator)
            own = (state["exp_avg"] * 0.5 + p.grad * 0.5) / denominator
            given.append([g.double() for g in gathered(own)])
            e = old.get(str(i), torch.zeros(p.numel())).view(p.shape)
            before.append([x.double() for x in gathered(e)])
        optimizer.step()
        if step < 10:
            assert not old
            continue
        for i, p in enumerate(parameters):
            now = optimizer.exchange.residuals.tensors.get(str(i), torch.zeros(p.numel()))
            left = torch.stack([x.double() for x in gathered(now.view(p.shape))]).sum(0)
            values = [g + e for g, e in zip(given[i], before[i], strict=True)]
            sent = optimizer.state[p]["exp_avg"] / denominators[i]
            lost = torch.stack(values).sum(0) - left - SIZE * sent.double()
            # Roundings per value: the sum with its residual, minus the decoded value, the ranks'
            # sum, three quotients, a product, and the same for the encoded average. Each is at most
            # 2^-24 of the sum of all of them and the scales, which are means of magnitudes.
            scale = torch.stack(values).abs().sum(0).max()
            assert (lost.abs() <= (2 * SIZE + 12) * 2.0**-24 * 4 * scale).all(), (step, i)


def carried_by_torch() -> None:
    """Check that carrier="c10d" over gloo gives the same bits, also inside of DDP."""
    gloo: Any = dist.new_group(backend="gloo")
    for name, make in MAKERS.items():
        # Random rounding depends on the group's name.
        own = {} if name == "signum" else {"warmup_config": NEAREST}
        model = network()
        run(model, make(model.parameters(), **own), range(14))
        other = network()
        run(other, make(other.parameters(), carrier="c10d", process_group=gloo, **own), range(14))
        assert torch.equal(weights_of(other), weights_of(model)), name
        wrapped = DistributedDataParallel(network())
        CommHookType.NOOP.register(wrapped)
        run(wrapped, make(wrapped.parameters(), **own), range(14))
        assert torch.equal(weights_of(wrapped), weights_of(model)), name


def bytes_sent() -> None:
    """Check that a step sends one message: 8 bits per value or 1, scales, and exact vectors."""
    if SIZE == 1:
        return
    world: Any = dist.group.WORLD
    comm = Communicator.find(world.group_name)
    for name, make in MAKERS.items():
        model = network()
        optimizer = make(model.parameters())
        sent = []
        for step in range(13):
            backward(model, step)
            before = comm.bytes_sent, comm.collectives
            optimizer.step()
            after = comm.bytes_sent, comm.collectives
            sent.append(after[0] - before[0])
            assert after[1] - before[1] == 1 or step == 0, name  # the first call compares the ranks
        vectors = sum(p.numel() for p in model.parameters() if p.dim() <= 1)
        matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1)
        whole = 2 * (SIZE - 1) / SIZE
        for step, bits in ((1, 8), (9, 8), (10, 8), (12, 1)):
            ours = bits * matrices / 8 + 4 * vectors
            least = whole * (ours if name == "compressed_adamw" else (matrices + vectors) / 8)
            assert least <= sent[step] <= 1.15 * least + 700 * SIZE, (name, step, sent, least)


# ---- 2. convergence ------------------------------------------------------------------------------


def convergence() -> None:
    """Check that one bit with both feedbacks trains like exact momentum; votes train, too."""
    ends: dict[str, float] = {}
    first = 0.0
    variants: list[tuple[str, str, dict[str, Any]]] = [
        ("exact", "compressed_adamw", {"config": Config(bits=32)}),
        ("one bit", "compressed_adamw", {}),
        ("votes", "signum", {}),
    ]
    for what, name, options in variants:
        model = network()
        rate: dict[str, Any] = {} if name == "signum" else {"lr": 0.003, "warmup_steps": 30}
        losses = run(model, MAKERS[name](model.parameters(), **rate, **options), range(120))
        means = torch.stack(gathered(torch.tensor(losses))).mean(0)
        first, ends[what] = float(means[0]), float(means[-5:].mean())
    assert ends["exact"] < 0.05 * first, (first, ends)
    assert abs(ends["one bit"] - ends["exact"]) < 0.01 * first, (first, ends)
    assert ends["votes"] < 0.2 * first, (first, ends)


def without_gradients() -> None:
    """Check unused rows, rare rows, and that a rank without a gradient counts as zero."""
    torch.manual_seed(0)
    table = nn.Embedding(10, 32)
    start = table.weight.detach().clone()
    optimizer = CompressedAdamW(
        table.parameters(), 0.01, (0.9, 0.95), weight_decay=0.0, warmup_steps=3, refreshes=2
    )
    never, rare, seen = [4, 6, 7, 8, 9], [3], [0, 1, 2, 5]
    for step in range(40):
        table.zero_grad(set_to_none=True)
        if RANK == 0:
            table(torch.tensor([step % 3, 5, 3] if step > 3 else [step % 3, 5])).sum().backward()
        optimizer.step()
        if step == 2:
            assert torch.equal(table.weight[never + rare], start[never + rare])
    moved = (table.weight.detach() - start).abs()
    assert moved[seen].mean() > 0.15, moved[seen].mean()
    assert moved[rare].min() > 0.1, "rows without a gradient in the warm-up do not move"
    if SIZE > 1:  # the error of compression, which feedback keeps small
        assert moved[never].mean() < 0.5 * moved[seen].mean(), moved[never].mean()
    else:
        assert torch.equal(table.weight[never], start[never])
    identical_on_all_ranks(table.weight.detach().flatten())
    table.weight.requires_grad_(False)
    frozen = table.weight.clone()
    optimizer.step()
    assert torch.equal(table.weight, frozen)
    table.weight.requires_grad_(True)
    # Votes have no zero: elements without votes alternate.
    voting = Signum(table.parameters(), lr=0.01)
    before = table.weight.detach().clone()
    for _ in range(2):
        table.zero_grad(set_to_none=True)
        voting.step()
    assert (table.weight.detach() - before).abs().max() <= 1e-6


def not_finite() -> None:
    """Check that one rank's NaN appears on every rank."""
    for make in MAKERS.values():
        for at in (2, 12):
            model = network()
            optimizer = make(model.parameters())
            run(model, optimizer, range(at))
            backward(model, at)
            weight = next(model.parameters())
            assert weight.grad is not None
            if RANK == SIZE - 1:
                weight.grad[0, 0] = float("nan")
            optimizer.step()
            assert weight[0, 0].isnan()
            assert all(e.isfinite().all() for e in optimizer.exchange.residuals.tensors.values())


def sixteen_bits() -> None:
    """Check that the state is float32, and parameters are rounded once."""
    for name, make in MAKERS.items():
        model = network(torch.bfloat16)
        optimizer = make(model.parameters())
        run(model, optimizer, range(12))
        assert {x.dtype for s in optimizer.state.values() for x in s.values()} == {torch.float32}
        assert next(model.parameters()).dtype == torch.bfloat16, name
        identical_on_all_ranks(weights_of(model))
        mixed = network()
        next(mixed.children()).to(torch.bfloat16)
        optimizer = make(mixed.parameters())
        for step in range(14):
            for p in mixed.parameters():
                p.grad = torch.full_like(p, 0.1 * (step + RANK))
            optimizer.step()
        assert {x.dtype for s in optimizer.state.values() for x in s.values()} == {torch.float32}
        for p in mixed.parameters():
            identical_on_all_ranks(p.detach().float().flatten())


# ---- 3. checkpoints ------------------------------------------------------------------------------


def resumed() -> None:
    """Resume bit for bit: in the warm-up, at its end, and between refreshes."""
    for name, make in MAKERS.items():
        for at, form, dtype in (
            (6, "torch", torch.float32),
            (10, "torch", torch.float32),
            (14, "torch", torch.bfloat16),
            (21, "dcp", torch.float32),
        ):
            with folder_of_all() as folder:
                model = network(dtype)
                optimizer = make(model.parameters())
                run(model, optimizer, range(at))
                weights = copy.deepcopy(model.state_dict())
                if form == "dcp":
                    dcp_save({"optimizer": optimizer}, checkpoint_id=folder)
                else:
                    torch.save(optimizer.state_dict(), f"{folder}/{RANK}.pt")
                copied = copy.deepcopy((model, optimizer))
                run(model, optimizer, range(at, at + 8))
                run(*copied, range(at, at + 8))
                assert torch.equal(weights_of(copied[0]), weights_of(model)), (name, at)

                again = network(dtype)
                other = make(again.parameters())
                run(again, other, range(11))
                if form == "dcp":
                    dcp_load({"optimizer": other}, checkpoint_id=folder)
                else:
                    other.load_state_dict(torch.load(f"{folder}/{RANK}.pt"))
                again.load_state_dict(weights)
                run(again, other, range(at, at + 8))
                assert torch.equal(weights_of(again), weights_of(model)), (name, at, form)
                for e, own in zip(
                    other.exchange.residuals.tensors.values(),
                    optimizer.exchange.residuals.tensors.values(),
                    strict=True,
                ):
                    assert torch.equal(e, own)


def resumed_in_automatic_warm_up() -> None:
    """Check that the check of v at step 8 compares with that at step 4 of the saved run."""
    for at in (5, 7, 9):
        model = network()
        optimizer = MAKERS["compressed_adamw"](model.parameters(), warmup_steps="auto")
        run(model, optimizer, range(at))
        saved, weights = copy.deepcopy((optimizer.state_dict(), model.state_dict()))
        run(model, optimizer, range(at, 20))
        again = network()
        other = MAKERS["compressed_adamw"](again.parameters(), warmup_steps="auto")
        other.load_state_dict(saved)
        again.load_state_dict(weights)
        run(again, other, range(at, 20))
        assert other.schedule == optimizer.schedule, (at, other.schedule, optimizer.schedule)
        assert torch.equal(weights_of(again), weights_of(model)), at


def resumed_on_other_rank_count() -> None:
    alone: Any = dist.new_group([0], backend="cgx")
    for name, make in MAKERS.items():
        model = network()
        optimizer = make(model.parameters())
        run(model, optimizer, range(14))
        own = copy.deepcopy(optimizer.state_dict())
        optimizer.consolidate()
        for e in optimizer.exchange.residuals.tensors.values():
            identical_on_all_ranks(e)
        for state in optimizer.state.values():
            for x in state.values():
                identical_on_all_ranks(x.flatten())
        consolidated = copy.deepcopy(optimizer.state_dict())
        for saved in (own, consolidated):  # a loaded state is saved again in its original form
            optimizer.load_state_dict(saved)
            assert optimizer.state_dict()["own"].keys() == saved["own"].keys(), name
        if RANK == 0:
            other = make(model.parameters(), process_group=alone)
            other.load_state_dict(optimizer.state_dict())
            backward(model, 14)
            other.step()
            if name == "compressed_adamw" and SIZE > 1:
                other.load_state_dict(own)
                fails(InvalidArgument, f"of rank 0 of {SIZE}", other.step)
            elif SIZE > 1:
                words = f"the state is that of rank 0 of {SIZE}, but this is rank 0 of 1"
                fails(InvalidArgument, words, lambda o=other, s=own: o.load_state_dict(s))
        dist.barrier()


# ---- 4. bad input --------------------------------------------------------------------------------


def bad_settings() -> None:
    params = list(network().parameters())
    bad: list[tuple[str, dict[str, Any], str]] = [
        ("compressed_adamw", {"warmup_steps": 0}, "warmup_steps is 0; it must be an integer of at"),
        ("compressed_adamw", {"warmup_steps": -3}, "warmup_steps is -3"),
        ("compressed_adamw", {"warmup_steps": 2.5}, "warmup_steps is 2.5"),
        ("compressed_adamw", {"warmup_steps": True}, "warmup_steps is True"),
        (
            "compressed_adamw",
            {"warmup_steps": "never"},
            "warmup_steps is 'never'; it must be 'auto'",
        ),
        ("compressed_adamw", {"refreshes": -1}, "refreshes is -1; it must be an integer of at"),
        ("compressed_adamw", {"refreshes": 0.5}, "refreshes is 0.5"),
        ("compressed_adamw", {"warmup_config": 8}, "warmup_config is 8; it must be a Config"),
        (
            "compressed_adamw",
            {"warmup_config": Config(compressor="sign")},
            "votes have no magnitude",
        ),
        ("compressed_adamw", {"warmup_config": FEEDBACK}, "warmup_config has error feedback"),
        (
            "compressed_adamw",
            {"betas": (1.0, 0.9)},
            "betas[0] is 1.0; it must be at least 0 and less",
        ),
        ("compressed_adamw", {"eps": 0.0}, "eps is 0.0; it must be more than 0"),
        ("compressed_adamw", {"lr": -1.0}, "lr is -1.0; it must be at least 0"),
        ("compressed_adamw", {"config": 4}, "config is 4"),
        ("compressed_adamw", {"config": Config(compressor="sign")}, "have no magnitude"),
        ("signum", {"momentum": 1.0}, "momentum is 1.0"),
        ("signum", {"weight_decay": -1.0}, "weight_decay is -1.0"),
        ("signum", {"carrier": "x"}, "carrier is 'x'"),
    ]
    for name, options, words in bad:
        fails(InvalidArgument, words, lambda n=name, o=options: MAKERS[n](params, **o))
    for make in MAKERS.values():
        for dtype in (torch.complex64, torch.float64):
            parameter = nn.Parameter(torch.zeros(4, 4, dtype=dtype))
            fails(TypeError, f"is {dtype}", lambda m=make, p=parameter: m([p]))
        sparse = nn.Embedding(20, 8, sparse=True)
        optimizer = make(sparse.parameters())
        sparse(torch.tensor([1])).sum().backward()
        fails(TypeError, "sparse=False", optimizer.step)


def bad_states() -> None:
    adam, signum = (make(network().parameters()) for make in MAKERS.values())
    fails(InvalidArgument, "the state belongs to a Signum", lambda: adam.load_state_dict(
        signum.state_dict()
    ))  # fmt: skip
    other = MAKERS["compressed_adamw"](nn.Linear(3, 3).parameters())
    fails(InvalidArgument, "another model's", lambda: other.load_state_dict(adam.state_dict()))
    first, *others = network().parameters()
    grouped = MAKERS["compressed_adamw"]([{"params": [first]}, {"params": others}])
    grouped.step()
    fails(InvalidArgument, "the state have [6] parameters", lambda: grouped.load_state_dict(
        adam.state_dict()
    ))  # fmt: skip
    assert grouped.exchange.steps == 1, "half of it was loaded"
    partial = adam.state_dict() | {"schedule": {"due": 3}}
    fails(InvalidArgument, "schedule", lambda: adam.load_state_dict(partial))
    exact = torch.optim.Adam(network().parameters())
    fails(
        InvalidArgument,
        "'exchange' is missing",
        lambda: adam.load_state_dict(exact.state_dict()),
    )
    adam.step()
    own = {"params": [nn.Parameter(torch.zeros(3))]}
    fails(InvalidArgument, "before the first", lambda: adam.add_param_group(own))


def mismatched_settings() -> None:
    """Check that every rank raises."""
    if SIZE == 1:
        return
    for make in MAKERS.values():
        model = network()
        with torch.no_grad():
            next(model.parameters()).add_(0.1 * RANK)
        fails(InvalidArgument, "rank 0 has parameter 0 of shape", make(model.parameters()).step)
        optimizer = make(network().parameters(), lr=0.1 + RANK)
        fails(InvalidArgument, "rank 0 has group 0's lr 0.1, rank", optimizer.step)
    gloo: Any = dist.new_group(backend="gloo")
    own = Config(bits=4 + RANK, error_feedback=False)
    for by in ({}, {"carrier": "c10d", "process_group": gloo}):
        for options, words in (
            ({"warmup_steps": 10 + RANK}, "warmup_steps 10, rank 1 has 11"),
            ({"refreshes": 2 + RANK}, "refreshes 2, rank 1 has 3"),
            ({"config": own}, "config bits=4 "),
            ({"warmup_config": own}, "warmup_config bits=4 "),
            ({"rules": Rules([("0", 8 - RANK)])}, "rules Rules([('0', {'bits': 8})"),
        ):
            optimizer = MAKERS["compressed_adamw"](network().parameters(), **by, **options)
            fails(InvalidArgument, f"rank 0 has {words}", optimizer.step)


CHECKS = [
    matches_reference,
    recommended_codecs,
    warm_up_that_ends_by_itself,
    exact_by_rules,
    as_adamw,
    tiny_variances,
]
CHECKS += [conservation, carried_by_torch, bytes_sent, convergence]
CHECKS += [without_gradients, not_finite, sixteen_bits, resumed]
CHECKS += [resumed_in_automatic_warm_up, resumed_on_other_rank_count]
CHECKS += [bad_settings, bad_states, mismatched_settings]
