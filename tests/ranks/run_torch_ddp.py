"""Rank program: DistributedDataParallel with quantized_allreduce_hook, over the backend "cgx".

Every check compares with the oracle to the bit, or with another run to the bit.
"""

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch_cases as tc
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import cgx_ops.torch
from cgx_ops import Config
from cgx_ops.call import call_seed
from cgx_ops.torch import ddp, layers

RANK, SIZE = 0, 1  # main() sets them
NEAREST = Config(bits=4, bucket_size=64, rounding="nearest")
Hooked = tuple[DistributedDataParallel, ddp.QuantizedAllreduceState]


class Net(nn.Module):
    """Layers of several sizes, vectors among them, and one that a forward may leave out."""

    def __init__(self, width: int = 40) -> None:
        super().__init__()
        self.first = nn.Linear(20, width)
        self.bn = nn.LayerNorm(width)
        self.spare = nn.Linear(width, width)
        self.last = nn.Linear(width, 5)

    def forward(self, x: torch.Tensor, spare: bool = False) -> torch.Tensor:
        x = self.bn(self.first(x)).relu()
        return self.last(self.spare(x) if spare else x)


def network(width: int = 40, dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net(width).to(dtype)


def images(rank: int, step: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return tc.values(rank, 8 * 20, dtype, call=step).reshape(8, 20)


def hooked(module: nn.Module, config: Config = NEAREST, hook: Any = None, **options: Any) -> Hooked:
    own = {k: options.pop(k) for k in ("rules", "carrier", "process_group") if k in options}
    model = DistributedDataParallel(module, **options)
    state = ddp.QuantizedAllreduceState(own.pop("process_group", None), config, **own)
    model.register_comm_hook(state, hook or ddp.quantized_allreduce_hook)
    return model, state


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    named = getattr(model, "module", model).named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def local_gradients(
    rank: int, steps: tuple[int, ...] = (0,), dtype: torch.dtype = torch.float32, **options: Any
) -> dict[str, torch.Tensor]:
    """Return what rank `rank` computes alone: any rank can."""
    module = network(dtype=dtype)
    for step in steps:
        module(images(rank, step, dtype), **options).float().square().sum().backward()
    return gradients_of(module)


def averaged(
    gradients: list[dict[str, torch.Tensor]],
    config: Config = NEAREST,
    step: int = 0,
    bits: Callable[[str, torch.Tensor], int] | None = None,
) -> dict[str, torch.Tensor]:
    """Return the oracle's average of the ranks' gradients, layer by layer."""
    seeds = [call_seed(config.seed, "ddp", step)] * SIZE
    result = {}
    for name, first in gradients[0].items():
        own = bits(name, first) if bits else config.bits if first.dim() > 1 else 32
        result[name] = tc.expected(
            [g[name] for g in gradients],
            own,
            config.bucket_size,
            op="avg",
            rounding=config.rounding,
            seeds=seeds,
        )
    return result


def same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], what: object = "") -> None:
    assert got.keys() == want.keys(), (what, got.keys(), want.keys())
    for name, value in want.items():
        assert tc.same_bits(got[name], value), (what, name)


def identical_on_all_ranks(tensors: dict[str, torch.Tensor]) -> None:
    flat = torch.cat([t.detach().float().flatten() for t in tensors.values()])
    everyone = [torch.empty_like(flat) for _ in range(SIZE)]
    dist.all_gather(everyone, flat)
    assert all(torch.equal(flat, other) for other in everyone)


# ---- one step ------------------------------------------------------------------------------------


def equals_the_oracle() -> None:
    """In all ways to use DistributedDataParallel, over its buckets before and after rebuilding."""
    modes: list[dict[str, Any]] = [
        {},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"bucket_cap_mb": 0.001},
        {"bucket_cap_mb": 0.001, "static_graph": True, "gradient_as_bucket_view": True},
    ]
    stochastic = Config(bits=2, bucket_size=100, seed=7)
    for mode in modes:
        for config in (NEAREST, stochastic):
            unused = "find_unused_parameters" in mode
            model, state = hooked(network(), config, **mode)
            for step in range(3):
                model.zero_grad()
                spare = not unused or step == 1
                model(images(RANK, step), spare=spare).square().sum().backward()
                alone = [local_gradients(r, (step,), spare=spare) for r in range(SIZE)]
                got = gradients_of(model)
                if not spare:
                    for name in ("spare.weight", "spare.bias"):
                        got.pop(name, None)
                same(got, averaged(alone, config, step), (mode, step))
            assert state.steps == 3


def carried_by_torch() -> None:
    """carrier="c10d" gives the same bits, over gloo."""
    gloo = dist.new_group(backend="gloo")
    model, _ = hooked(network(), carrier="c10d", process_group=gloo, bucket_cap_mb=0.001)
    for step in range(2):
        model.zero_grad()
        model(images(RANK, step), spare=True).square().sum().backward()
        alone = [local_gradients(r, (step,), spare=True) for r in range(SIZE)]
        same(gradients_of(model), averaged(alone, step=step))


def each_layer_in_its_own_bits() -> None:
    rules = layers.Rules([layers.Rule("first"), layers.Rule("*.weight", bits=2)])
    rules.exclude("last")
    rules.set_bits("bn.bias", 8)
    model, _ = hooked(network(), rules=rules)
    model(images(RANK), spare=True).square().sum().backward()
    table = {"first.weight": 2, "spare.weight": 2, "bn.bias": 8, "bn.weight": 2}
    want = averaged(
        [local_gradients(r, spare=True) for r in range(SIZE)],
        bits=lambda name, _: table.get(name, 32),
    )
    same(gradients_of(model), want)


def accumulates() -> None:
    """no_sync keeps gradients here; the next backward averages the sum."""
    model, state = hooked(network())
    with model.no_sync():
        model(images(RANK, 0), spare=True).square().sum().backward()
    same(gradients_of(model), local_gradients(RANK, (0,), spare=True))
    model(images(RANK, 1), spare=True).square().sum().backward()
    same(
        gradients_of(model), averaged([local_gradients(r, (0, 1), spare=True) for r in range(SIZE)])
    )
    assert state.steps == 1


def inside_torchs_wrappers() -> None:
    for wrapper, dtype in (
        (default_hooks.fp16_compress_wrapper, torch.float16),
        (default_hooks.bf16_compress_wrapper, torch.bfloat16),
    ):
        inner = wrapper(ddp.quantized_allreduce_hook)

        # Without a GPU torch refuses the bfloat16 wrapper, by its function's name alone.
        def hook(
            state: Any, bucket: GradBucket, inner: Any = inner
        ) -> torch.futures.Future[torch.Tensor]:
            return inner(state, bucket)

        model, _ = hooked(network(), hook=hook)
        model(images(RANK), spare=True).square().sum().backward()
        alone = [local_gradients(r, spare=True) for r in range(SIZE)]
        narrow = averaged([{k: v.to(dtype) for k, v in g.items()} for g in alone])
        same(gradients_of(model), {k: v.float() for k, v in narrow.items()}, dtype)


def a_module_changes_its_dtype() -> None:
    module = network()
    model, _ = hooked(module)
    model(images(RANK), spare=True).square().sum().backward()
    other, _ = hooked(copy.deepcopy(module).to(torch.bfloat16))
    other.zero_grad()
    other(images(RANK, dtype=torch.bfloat16), spare=True).float().square().sum().backward()
    alone = [local_gradients(r, dtype=torch.bfloat16, spare=True) for r in range(SIZE)]
    same(gradients_of(other), averaged(alone))


def a_large_layer_before_small_ones() -> None:
    """One bucket whose first layer has over 64 MB: CGX lost what came after it."""
    torch.manual_seed(0)
    module = nn.ParameterDict(
        {"large": torch.zeros(17 << 20), "after": torch.zeros(30, 30), "last": torch.zeros(7)}
    )
    numel = {name: p.numel() for name, p in module.items()}

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, scale: float) -> torch.Tensor:
            return sum((p * scale).sum() for p in self.inner.values())  # type: ignore[return-value]

    rules = layers.Rules([layers.Rule("large", bits=1)])
    model, _ = hooked(Sum(), rules=rules, bucket_cap_mb=200)
    model(float(RANK + 1)).backward()
    mean = sum(range(1, SIZE + 1)) / SIZE
    for name, p in module.items():
        assert p.grad is not None
        # A constant bucket travels exactly, in any number of bits.
        assert (p.grad == torch.tensor(mean)).all(), name
        assert p.numel() == numel[name]


def not_finite_is_not_hidden() -> None:
    model, _ = hooked(network())
    x = images(RANK)
    if RANK == SIZE - 1:
        x[0, 0] = float("inf")
    model(x, spare=True).square().sum().backward()
    assert not gradients_of(model)["first.weight"].isfinite().all()
    identical_on_all_ranks({k: v.nan_to_num() for k, v in gradients_of(model).items()})


# ---- several steps -------------------------------------------------------------------------------


def train(model: nn.Module, steps: range, optimizer: torch.optim.Optimizer) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(images(RANK, step), spare=True).square().sum().backward()
        optimizer.step()


def resumes_to_the_same_bits() -> None:
    """PyTorch's own end-to-end example, with this hook and state in place of PowerSGD's."""
    config = Config(bits=3, bucket_size=64, seed=5)
    modes: list[dict[str, Any]] = [{}, {"bucket_cap_mb": 0.001}]
    for mode in modes:
        model, state = hooked(network(), config, **mode)
        optimizer = torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9)
        train(model, range(4), optimizer)
        checkpoint = io.BytesIO()
        torch.save(
            {
                "state_dict": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "comm_hook": ddp.quantized_allreduce_hook,
                "comm_hook_state": state,
            },
            checkpoint,
        )
        train(model, range(4, 8), optimizer)

        checkpoint.seek(0)
        loaded = torch.load(checkpoint)  # weights_only, torch's default
        again = DistributedDataParallel(network(), **mode)
        again.load_state_dict(loaded["state_dict"])
        restored = loaded["comm_hook_state"]
        assert restored.steps == 4
        again.register_comm_hook(restored, loaded["comm_hook"])
        resumed = torch.optim.SGD(again.parameters(), 1e-4, momentum=0.9)
        resumed.load_state_dict(loaded["optimizer"])
        train(again, range(4, 8), resumed)
        same(dict(again.module.named_parameters()), dict(model.module.named_parameters()), mode)
        identical_on_all_ranks(dict(model.module.named_parameters()))


def two_models() -> None:
    """Their buckets interleave: a generator and a critic."""
    one, _ = hooked(network())
    two, _ = hooked(network())
    (
        one(images(RANK, 0), spare=True).square().sum()
        + two(images(RANK, 1), spare=True).square().sum()
    ).backward()
    for model, step in ((one, 0), (two, 1)):
        same(
            gradients_of(model),
            averaged([local_gradients(r, (step,), spare=True) for r in range(SIZE)]),
        )


# ---- the backend, and CGX's names ----------------------------------------------------------------


def over_the_backend_without_a_word() -> None:
    """A script for torch_cgx: only the import is changed."""
    import cgx_ops.torch as torch_cgx

    group = dist.new_group(backend="cgx", pg_options=cgx_ops.torch.BackendOptions(config=NEAREST))
    module = network()
    torch_cgx.register_model([(name, p.numel()) for name, p in module.named_parameters()])
    torch_cgx.exclude_layer("last")
    torch_cgx.set_quantization_bits("spare.weight", 2)
    torch_cgx.set_quantization_bucket_size("spare.weight", 32)
    try:
        model = DistributedDataParallel(module, process_group=group)
        model(images(RANK), spare=True).square().sum().backward()
        x = torch.full((1000,), RANK + 0.3)
        dist.all_reduce(x, group=group)  # CGX would have crashed, or taken it for a bucket
        want = sum(torch.full((1000,), r + 0.3) for r in range(SIZE))
        torch.testing.assert_close(x, want)
    finally:
        torch_cgx.forget_models()
    alone = [local_gradients(r, spare=True) for r in range(SIZE)]
    small = [{"spare.weight": g["spare.weight"]} for g in alone]
    own = averaged(small, Config(bits=2, bucket_size=32, rounding="nearest"))
    table = {"first.weight": 4}
    want_all = averaged(alone, bits=lambda name, _: table.get(name, 32)) | own
    same(gradients_of(model), want_all)
    with cgx_ops.torch.uncompressed():
        model.zero_grad()
        model(images(RANK), spare=True).square().sum().backward()
    same(gradients_of(model), averaged(alone, bits=lambda *_: 32))


def a_hook_of_the_users_own_is_left_alone() -> None:
    group = dist.new_group(backend="cgx", pg_options=cgx_ops.torch.BackendOptions(config=NEAREST))
    model = DistributedDataParallel(network(), process_group=group)
    seen = []

    def own(_state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        seen.append(bucket.index())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, own)
    model(images(RANK), spare=True).square().sum().backward()
    assert seen
    same(gradients_of(model), local_gradients(RANK, spare=True))


# ---- errors --------------------------------------------------------------------------------------


def refuses() -> None:
    def fails(error: type[Exception], words: str, call: Callable[[], object]) -> None:
        try:
            call()
        except error as raised:
            assert words in str(raised), raised
        else:
            raise AssertionError(f"no {error.__name__} with {words!r}")

    model, _ = hooked(network(dtype=torch.float64))
    loss = model(images(RANK).double(), spare=True).square().sum()
    fails(TypeError, "'first.weight', 'first.bias'", loss.backward)

    model, _ = hooked(nn.Embedding(10, 4, sparse=True))
    loss = model(torch.tensor([1, 2])).sum()
    fails(TypeError, "sparse=False", loss.backward)

    gloo = dist.new_group([0], backend="gloo")
    if isinstance(gloo, dist.ProcessGroup) and RANK == 0:
        state = ddp.QuantizedAllreduceState(gloo, NEAREST)
        fails(ValueError, "carrier='c10d'", state.communicator)

    module = network()
    layers.register_model([(name, p.numel() + 1) for name, p in module.named_parameters()])
    try:
        group = dist.new_group(backend="cgx")
        model = DistributedDataParallel(module, process_group=group)
        fails(ValueError, "'first.weight' was registered with 801", lambda: model(images(RANK)))
    finally:
        layers.forget_models()


def main() -> None:
    global RANK, SIZE
    dist.init_process_group("cgx")
    RANK, SIZE = dist.get_rank(), dist.get_world_size()
    checks = [equals_the_oracle, carried_by_torch, each_layer_in_its_own_bits, accumulates]
    checks += [inside_torchs_wrappers, a_module_changes_its_dtype, a_large_layer_before_small_ones]
    checks += [not_finite_is_not_hidden, resumes_to_the_same_bits, two_models]
    checks += [over_the_backend_without_a_word, a_hook_of_the_users_own_is_left_alone, refuses]
    for check in checks:
        check()
        print(f"ok {check.__name__}", flush=True)
    dist.destroy_process_group()
    print("ok all")


if __name__ == "__main__":
    main()
