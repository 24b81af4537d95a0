"""Invalid calls, unsupported models (exact with a warning), and repeated calls of compress()."""

import contextlib
import re
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from support import torch_cases as tc
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from cgx_ops import Config, InvalidArgument
from cgx_ops.torch import fsdp
from cgx_ops.torch._compat import parallel
from cgx_ops.torch.averaging import QuantizedModelAverager
from cgx_ops.torch.averaging.layers import Rules
from cgx_ops.torch.diloco import DiLoCo
from cgx_ops.torch.fsdp.feedback import ModuleResiduals
from cgx_ops.torch.optim import CompressedAdamW

from .common import FEW, Block, Model, batch, equals_the_oracle, full, recorded, sharded

LEVELS = Config(bits=1, compressor="levels", bucket_size=64)


def refuses(call: Callable[[], object], kind: type[Exception], words: str) -> None:
    try:
        call()
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"nothing was raised: {words}")


def bad_input() -> None:
    refuses(lambda: fsdp.compress(Model()), InvalidArgument, "fully_shard before compress")
    model = sharded(Model())
    refuses(lambda: fsdp.compress(model, 8), TypeError, "gradients is 8")  # type: ignore[arg-type]
    wrong: list[Any] = [[("a", 2)], ["head"], {"head": 2}]
    for rules in wrong:
        refuses(lambda r=rules: fsdp.compress(model, rules=r), TypeError, "give cgx_ops.Rules(")
    none: Any = None
    message = "fsdp.compress: rules is None; give cgx_ops.Rules(...)."
    refuses(lambda: fsdp.compress(model, rules=none), TypeError, message)


def several_meshes() -> None:
    """Check that a module on two meshes, to which torch gives two groups, changes nothing."""
    model = sharded(Model())
    fsdp.compress(model, FEW, FEW)
    before = [parallel.fsdp_communications(g) for m in model.modules() for g in groups_of(m)]
    one = groups_of(model)
    with mock.patch.object(
        parallel, "fsdp_groups", lambda m: groups_of(m) * (2 if groups_of(m) == one else 1)
    ):
        refuses(lambda: fsdp.compress(model, FEW), InvalidArgument, "over several meshes")
    after = [parallel.fsdp_communications(g) for m in model.modules() for g in groups_of(m)]
    assert before == after


def groups_of(module: Any) -> list[Any]:
    return _groups_of(module) if isinstance(module, FSDPModule) else []


_groups_of = parallel.fsdp_groups


def warned(call: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in caught if re.search("cgx_ops|no layer", str(w.message))]


def exact_with_warning() -> None:
    def run(model: Any, dtype: torch.dtype = torch.float32) -> None:
        x, y = batch(0, dtype)
        for _ in range(2):  # the warning appears once
            nn.functional.cross_entropy(model(x), y).backward()

    plain, double = (sharded(Model().double()) for _ in range(2))
    fsdp.compress(double, FEW, FEW)
    run(plain, torch.float64)
    said = warned(lambda: run(double, torch.float64))
    assert len(said) == 2 * 4, said
    assert any("root module" in text and "torch.float64" in text for text in said)
    for one, other in zip(plain.parameters(), double.parameters(), strict=True):
        assert tc.same_bits(full(one.grad), full(other.grad))

    class Partly(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.norm(x)

    model = Model()
    model.blocks[1] = Partly()
    model = sharded(model)
    fsdp.compress(model, FEW)
    with recorded() as messages:
        (text,) = warned(lambda: run(model))
    assert "blocks.1" in text
    assert "set_reduce_scatter_unused_params(True)" in text
    alone = [m for m in messages if len(m.segments) == 1]
    assert len(alone) == 2
    assert all(equals_the_oracle(m) for m in messages)
    model.blocks[1].set_reduce_scatter_unused_params(True)
    assert not warned(lambda: run(model))


def repeated_compress() -> None:
    """Check that the last call counts, and that without a Config FSDP2 is unchanged."""
    x, y = batch(0)
    model = sharded(Model())
    # Weights only: gradients take the same path, exact, and signal that the weights were used.
    for configs, count in (
        ((FEW, None), 4),
        ((None, FEW), 11),
        ((FEW, FEW), 11),
        ((None, None), 0),
    ):
        fsdp.compress(model, *configs)
        with recorded() as messages:
            nn.functional.cross_entropy(model(x), y).backward()
        assert len(messages) == count, (configs, len(messages))
    for gradients in (None, FEW):
        root: Any = fully_shard(nn.Linear(30, 30))  # its weights stay gathered until backward
        state = fsdp.compress(root, gradients, FEW)
        for steps in range(3):
            root(torch.ones(2, 30)).sum().backward()
            assert state.state_dict()["draws"] == steps, "each step must draw new noise"


def failure_on_one_rank() -> None:
    """Check that others raise the reason before any deadline, and the group remains usable."""
    model = sharded(Model())
    fsdp.compress(model, LEVELS)
    x, y = batch(0)
    loss = nn.functional.cross_entropy(model(x), y)
    failing = dist.get_rank() == 1
    with contextlib.ExitStack() as stack:
        if failing:
            accident = ValueError("an accident")
            stack.enter_context(mock.patch.object(ModuleResiduals, "take", side_effect=accident))
        said = "an accident" if failing else "ValueError: an accident"
        refuses(loss.backward, ValueError if failing else RuntimeError, said)
    again = sharded(Model())
    fsdp.compress(again, LEVELS)
    nn.functional.cross_entropy(again(x), y).backward()


def mismatched_ranks() -> None:
    """Run this check last: it ends the communicator."""
    model = sharded(Model())
    rank = dist.get_rank()
    fsdp.compress(model, FEW, FEW, rules=Rules(exact_vectors=rank == 0))
    x, y = batch(0)
    try:
        nn.functional.cross_entropy(model(x), y).backward()
    except dist.DistBackendError as error:
        assert re.search("ranks 0 and 1 disagree .*fsdp/all_gather/", str(error)), error
    else:
        raise AssertionError("nothing was raised")


def weight_averagers_reject_shards() -> None:
    """Check that weight averagers raise for FSDP2 shards, and name the alternative."""
    calls: list[Callable[[Any], object]] = [
        lambda model: CompressedAdamW(model.parameters(), warmup_steps=1),
        lambda model: DiLoCo(model, sync_every=2),
        lambda model: QuantizedModelAverager(1).average_parameters(model.parameters()),
    ]
    for call in calls:
        model = sharded(Model())
        refuses(lambda own=call, of=model: own(of), TypeError, "a DTensor, but averages need whole")


CHECKS = [weight_averagers_reject_shards]
CHECKS += [bad_input, exact_with_warning, repeated_compress, failure_on_one_rank]
CHECKS += [mismatched_ranks, several_meshes]
