"""Rank program: DistributedDataParallel with quantized_allreduce_hook, over the backend "cgx".

Every check compares with the oracle to the bit, or with another run to the bit.
"""

import copy
import datetime
import io
import itertools
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch_cases as tc
from torch import nn
from torch._C._distributed_c10d import BuiltinCommHookType, GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward
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
    world = dist.group.WORLD
    assert world is not None
    group_name = world.group_name
    result = {}
    for name, first in gradients[0].items():
        own = bits(name, first) if bits else config.bits if first.dim() > 1 else 32
        result[name] = tc.expected(
            [g[name] for g in gradients],
            own,
            config.bucket_size,
            op="avg",
            rounding=config.rounding,
            seeds=[call_seed(config.seed, f"ddp/{name}", step, group_name)] * SIZE,
        )
    return result


def same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], what: object = "") -> None:
    assert got.keys() == want.keys(), (what, got.keys(), want.keys())
    for name, value in want.items():
        assert tc.same_bits(got[name], value), (what, name)


def compressing_group() -> Any:
    """Return a group over the backend that gives DistributedDataParallel the hook."""
    options = cgx_ops.torch.BackendOptions(config=NEAREST)
    return dist.new_group(backend="cgx", pg_options=options)


def fails(error: type[Exception], words: str, call: Callable[[], object]) -> None:
    try:
        call()
    except error as raised:
        assert words in str(raised), raised
    else:
        raise AssertionError(f"no {error.__name__} with {words!r}")


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
    """Torch would stop averaging without a word."""
    automatic = DistributedDataParallel(network(), process_group=compressing_group())
    for model in (hooked(network())[0], automatic):
        model(images(RANK), spare=True).square().sum().backward()
        model.module.bfloat16()
        fails(
            TypeError,
            "'first.weight' is torch.bfloat16 and was torch.float32",
            lambda model=model: model(images(RANK, dtype=torch.bfloat16)),
        )
        other, _ = hooked(model.module)
        other.zero_grad()
        other(images(RANK, dtype=torch.bfloat16), spare=True).float().square().sum().backward()
        alone = [local_gradients(r, dtype=torch.bfloat16, spare=True) for r in range(SIZE)]
        same(gradients_of(other), averaged(alone))


class Mixed(nn.Module):
    """Parameters of two dtypes, frozen ones, and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.after = nn.Linear(20, 20), nn.Linear(20, 20)
        self.narrow = nn.Linear(20, 20).bfloat16()
        self.frozen = nn.Linear(20, 20).requires_grad_(False)
        self.empty = nn.Parameter(torch.empty(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.narrow(self.wide(x).bfloat16()).float()
        return self.frozen(self.after(x)) + self.empty.sum()


def layers_of_all_kinds() -> None:
    model, _ = hooked(Mixed())
    alone = []
    for rank in range(SIZE):
        module = Mixed()
        module(images(rank)).square().sum().backward()
        alone.append(gradients_of(module))
    model(images(RANK)).square().sum().backward()
    got = gradients_of(model)
    assert got.pop("empty").shape == (0, 4)
    for gradients in alone:
        del gradients["empty"]
    same(got, averaged(alone))


def small_layers_are_exact() -> None:
    config = Config(bits=4, bucket_size=64, rounding="nearest", minimal_size=900)
    model, _ = hooked(network(), config)
    model(images(RANK), spare=True).square().sum().backward()
    alone = [local_gradients(r, spare=True) for r in range(SIZE)]
    want = averaged(alone, config, bits=lambda name, _: 4 if name == "spare.weight" else 32)
    same(gradients_of(model), want)


def over_gloo_under_mpirun() -> None:
    """The native carrier serves a group of another backend that has the world's ranks."""
    model, _ = hooked(network(), process_group=dist.new_group(backend="gloo"))
    model(images(RANK), spare=True).square().sum().backward()
    same(gradients_of(model), averaged([local_gradients(r, spare=True) for r in range(SIZE)]))


def uneven_inputs() -> None:
    """Ranks that have run out of data take part with zeros."""
    model, state = hooked(network())
    with model.join():
        for step in range(1 + RANK):
            model.zero_grad()
            model(images(RANK, step), spare=True).square().sum().backward()
    assert state.steps == SIZE
    last = local_gradients(SIZE - 1, (SIZE - 1,), spare=True)
    zeros = {name: torch.zeros_like(g) for name, g in last.items()}
    if RANK == SIZE - 1:
        alone = [zeros] * (SIZE - 1) + [last]
        # Ranks that are still there are what the average divides by in torch's own hook; a hook
        # of a user's divides by what it likes: all ranks.
        same(gradients_of(model), averaged(alone, step=SIZE - 1))


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


class _AcceleratesProject:
    """What Accelerate's register_for_checkpointing does with an object: no more than this."""

    def __init__(self, state: Any) -> None:
        assert callable(state.state_dict) and callable(state.load_state_dict)
        self.state = state

    def save(self, folder: str) -> None:
        torch.save(self.state.state_dict(), f"{folder}/custom_checkpoint_0.pkl")

    def load(self, folder: str) -> None:
        self.state.load_state_dict(torch.load(f"{folder}/custom_checkpoint_0.pkl"))


def resumes_in_place() -> None:
    """A hook that is registered already goes on with the steps of the checkpoint."""
    config = Config(bits=3, bucket_size=64, seed=5)

    def by_torch(state: Any, folder: str, save: bool) -> None:
        project = _AcceleratesProject(state)
        (project.save if save else project.load)(folder)

    def by_dcp(state: Any, folder: str, save: bool) -> None:
        (dcp_save if save else dcp_load)({"cgx": state}, checkpoint_id=f"{folder}/dcp")

    for checkpoint in (by_torch, by_dcp):
        names: list[Any] = [tempfile.mkdtemp() if RANK == 0 else None]
        dist.broadcast_object_list(names)
        folder = f"{names[0]}" if checkpoint is by_dcp else tempfile.mkdtemp()
        model, state = hooked(network(), config)
        optimizer = torch.optim.SGD(model.parameters(), 1e-4)
        train(model, range(4), optimizer)
        weights = copy.deepcopy(model.module.state_dict())
        checkpoint(state, folder, save=True)
        train(model, range(4, 7), optimizer)

        again, restored = hooked(network(), Config(bits=4, seed=6))
        train(again, range(1), torch.optim.SGD(again.parameters(), 1e-4))  # its hook is in use
        again.module.load_state_dict(weights)
        checkpoint(restored, folder, save=False)
        assert (restored.steps, restored.config) == (4, state.config)
        train(again, range(4, 7), torch.optim.SGD(again.parameters(), 1e-4))
        same(dict(again.module.named_parameters()), dict(model.module.named_parameters()))
        dist.barrier()
        shutil.rmtree(folder, ignore_errors=True)
    fails(ValueError, "give what state_dict() returned", lambda: state.load_state_dict({"a": 1}))


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


# ---- time ----------------------------------------------------------------------------------------


def does_not_wait() -> None:
    """The hook returns while a peer has not even begun; only the end of backward waits."""
    for carrier in ("native", "c10d"):
        done, begun = [], time.monotonic()

        def hook(
            state: Any,
            bucket: GradBucket,
            done: list[bool] = done,
        ) -> torch.futures.Future[torch.Tensor]:
            future = ddp.quantized_allreduce_hook(state, bucket)
            done.append(future.done())
            return future

        group = dist.new_group(backend="gloo")
        options: dict[str, Any] = {"process_group": group, "bucket_cap_mb": 0.001}
        model, _ = hooked(network(), hook=hook, carrier=carrier, **options)
        model(images(RANK), spare=True).square().sum().backward()  # connects
        loss = model(images(RANK), spare=True).square().sum()
        done.clear()
        dist.barrier()
        if RANK == SIZE - 1:
            time.sleep(0.5)
        begun = time.monotonic()
        loss.backward()
        if RANK == 0:
            assert len(done) > 1
            assert not any(done), "a bucket ended before its last rank began"
            assert time.monotonic() - begun > 0.3


def a_peer_that_never_comes() -> None:
    group = dist.new_group(backend="cgx", timeout=datetime.timedelta(seconds=1))
    model, _ = hooked(network(), process_group=group)
    loss = model(images(RANK), spare=True).square().sum()
    if RANK == 0:
        fails(RuntimeError, "rank 1 has not started it", loss.backward)
    dist.barrier()
    # Torch's collectives end at the deadline of the group that was given, on the state's own too.
    group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=2))
    model, state = hooked(network(), process_group=group, carrier="c10d")
    state.carry()
    loss = model(images(RANK), spare=True).square().sum()
    if RANK == 0:
        begun = time.monotonic()
        fails(RuntimeError, "", loss.backward)
        assert time.monotonic() - begun < 20
    dist.barrier()


def looks_for_names_once() -> None:
    """Steps after the first do not walk through the modules."""
    model, _ = hooked(network())
    for _ in range(2):
        model(images(RANK), spare=True).square().sum().backward()
    loss = model(images(RANK), spare=True).square().sum()
    walk, walks = nn.Module.named_parameters, []

    def counted(*args: Any, **options: Any) -> Any:
        walks.append(args)
        return walk(*args, **options)

    nn.Module.named_parameters = counted  # type: ignore[method-assign]
    try:
        loss.backward()
    finally:
        nn.Module.named_parameters = walk  # type: ignore[method-assign]
    assert not walks


# ---- the backend, and CGX's names ----------------------------------------------------------------


def over_the_backend_without_a_word() -> None:
    """A script for torch_cgx: only the import is changed."""
    import cgx_ops.torch as torch_cgx

    group, module = compressing_group(), network()
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
    model = DistributedDataParallel(network(), process_group=compressing_group())
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
    model = DistributedDataParallel(network(), process_group=compressing_group())
    model._register_builtin_comm_hook(BuiltinCommHookType.ALLREDUCE)
    model(images(RANK), spare=True).square().sum().backward()


def _chain(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket in two steps, the second one started where the first one's future ends."""
    values = bucket.buffer().div_(dist.get_world_size(group))
    half = values.numel() // 2

    def reduce(part: torch.Tensor) -> torch.futures.Future[Any]:
        work: Any = dist.all_reduce(part, group=group, async_op=True)
        return work.get_future()

    def second(first: Any) -> torch.Tensor:
        first.value()
        reduce(values[half:]).wait()
        return values

    return reduce(values[:half]).then(second)


def _trained_by(hook: Callable[[], tuple[Any, Any]], group: Any, steps: int) -> nn.Module:
    torch.manual_seed(7)  # PowerSGD draws from it, too
    # One bucket: the chains of several start in no certain order, over any backend.
    model = DistributedDataParallel(network(64), process_group=group)
    model.register_comm_hook(*hook())
    train(model, range(steps), torch.optim.SGD(model.parameters(), 1e-4))
    return model.module


def hooks_that_chain_collectives_do_not_race() -> None:
    """What a callback starts is decided alike, whether a rank runs it at once or on a thread."""
    compressing, exact = compressing_group(), dist.new_group(backend="cgx")

    def chain() -> tuple[Any, Any]:
        return current, _chain

    def low_rank() -> tuple[Any, Any]:
        state = powerSGD_hook.PowerSGDState(current, 2, start_powerSGD_iter=2)
        return state, powerSGD_hook.powerSGD_hook

    for hook, steps in ((chain, 20), (low_rank, 20)):
        current = exact
        want = _trained_by(hook, current, steps).state_dict()
        current = compressing
        same(_trained_by(hook, current, steps).state_dict(), want, hook)
        with cgx_ops.torch.compressed(NEAREST):  # asked for: in its callbacks as well
            module = _trained_by(hook, current, steps)
        identical_on_all_ranks(dict(module.named_parameters()))


def callbacks_are_where_their_collective_was_started() -> None:
    """Not where a thread completes it: in compressed() still, and still completing gradients."""
    group = compressing_group()
    comm = cgx_ops.Communicator.find(group.group_name)

    def sums(x: torch.Tensor) -> list[int]:
        """Reduce x, and once more in a callback; return the bytes that each of the two sent."""
        sent = [comm.bytes_sent]
        dist.barrier()
        work: Any = dist.all_reduce(x, group=group, async_op=True)

        def again(first: Any) -> None:
            first.value()
            sent.append(comm.bytes_sent)
            dist.all_reduce(x, group=group)
            sent.append(comm.bytes_sent)

        if RANK == 0:
            time.sleep(0.05)  # it has ended: the callback runs here; elsewhere, on a thread
        work.get_future().then(again).wait()
        return [after - before for before, after in itertools.pairwise(sent)]

    numel = 30_000
    exact = sums(torch.ones(numel))
    with cgx_ops.torch.compressed():
        quantized = sums(torch.ones(numel))
    assert min(exact) > 6 * max(quantized), (exact, quantized)
    found = []
    parameter = nn.Parameter(torch.ones(numel))
    parameter.register_post_accumulate_grad_hook(lambda p: found.append(sums(p.grad)))  # type: ignore[arg-type]
    (parameter * 2).sum().backward()
    assert found == [quantized]


def optimizers_that_step_in_backward_keep_their_hook() -> None:
    module = network()
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 1e-4})
    model = DistributedDataParallel(module, process_group=compressing_group())
    model(images(RANK), spare=True)  # here it gets torch's hook, and would refuse two
    assert [hook.__name__ for hook, _ in model._comm_hooks] != ["quantized_allreduce_hook"]
    # torch's hook takes the accelerator's stream in backward: without one this is all.


class Products(nn.Module):
    """Several layers of any dtype, complex ones too."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = (20, 30, 5)
        self.w = nn.ParameterList([nn.Parameter(torch.randn(n, n, dtype=dtype)) for n in sizes])

    def forward(self, scale: float) -> torch.Tensor:
        return sum((w * scale).abs().square().sum() for w in self.w)  # type: ignore[return-value]


def what_it_cannot_compress_stays_exact_over_the_backend() -> None:
    """Nobody asked for the hook there: it must not make a model fail."""
    mean = sum((r + 1) ** 2 for r in range(SIZE)) / SIZE
    for dtype in (torch.float64, torch.complex64):
        module = Products(dtype)
        model = DistributedDataParallel(module, process_group=compressing_group())
        model(float(RANK + 1)).backward()
        for w in module.w:
            torch.testing.assert_close(w.grad, w.detach() * 2 * mean)
    module = nn.Embedding(20, 40, sparse=True)
    model = DistributedDataParallel(module, process_group=compressing_group())
    model(torch.tensor([RANK, 5])).sum().backward()
    want = torch.zeros(20, 40)
    want[:SIZE] = 1 / SIZE
    want[5] += 1
    assert module.weight.grad is not None
    torch.testing.assert_close(module.weight.grad.to_dense(), want)


def is_saved_and_copied_before_its_first_forward() -> None:
    group = compressing_group()
    model = DistributedDataParallel(network(), process_group=group)
    default = DistributedDataParallel(network())
    torch.save(default, io.BytesIO())
    copied = copy.deepcopy(default)
    for each in (model, copied):
        each(images(RANK), spare=True).square().sum().backward()
    alone = [local_gradients(r, spare=True) for r in range(SIZE)]
    same(gradients_of(model), averaged(alone))
    for name, gradient in gradients_of(copied).items():  # the default group has 32 bits
        torch.testing.assert_close(gradient, sum(g[name] for g in alone) / SIZE)


# ---- errors --------------------------------------------------------------------------------------


def refuses() -> None:
    model, _ = hooked(network(dtype=torch.float64))
    loss = model(images(RANK).double(), spare=True).square().sum()
    fails(TypeError, "'first.weight', 'first.bias'", loss.backward)

    model, _ = hooked(nn.Embedding(10, 4, sparse=True))
    loss = model(torch.tensor([1, 2])).sum()
    fails(TypeError, "sparse=False", loss.backward)

    for bits in (4, 32):  # their buckets are real: layers would not lie where they seem to
        model, _ = hooked(Products(torch.complex64), Config(bits=bits))
        fails(TypeError, "torch.complex64", model(1.0).backward)

    alone = [dist.new_group([rank], backend="gloo") for rank in range(SIZE)][RANK]
    model = DistributedDataParallel(network(), process_group=alone)
    model.register_comm_hook(
        ddp.QuantizedAllreduceState(None, NEAREST), ddp.quantized_allreduce_hook
    )
    loss = model(images(RANK), spare=True).square().sum()
    fails(ValueError, f"DistributedDataParallel over [{RANK}]", loss.backward)

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model, _ = hooked(network(), rules=layers.Rules([layers.Rule("typo", bits=2)]))
        model(images(RANK), spare=True).square().sum().backward()
    assert any("no layer matches 'typo'" in str(w.message) for w in warned), warned

    gloo = dist.new_group([0], backend="gloo")
    if isinstance(gloo, dist.ProcessGroup) and RANK == 0:
        state = ddp.QuantizedAllreduceState(gloo, NEAREST)
        fails(ValueError, "carrier='c10d'", state.communicator)

    module = network()
    layers.register_model([(name, p.numel() + 1) for name, p in module.named_parameters()])
    try:
        wrong = "'first.weight' was registered with 801"
        model = DistributedDataParallel(module, process_group=compressing_group())
        for _ in range(2):  # it does not go away
            fails(ValueError, wrong, lambda: model(images(RANK)))
        model, _ = hooked(network())
        fails(ValueError, wrong, model(images(RANK), spare=True).sum().backward)
    finally:
        layers.forget_models()


def main() -> None:
    global RANK, SIZE
    dist.init_process_group("cgx")
    RANK, SIZE = dist.get_rank(), dist.get_world_size()
    checks = [equals_the_oracle, carried_by_torch, each_layer_in_its_own_bits, accumulates]
    checks += [inside_torchs_wrappers, a_module_changes_its_dtype, a_large_layer_before_small_ones]
    checks += [layers_of_all_kinds, small_layers_are_exact, over_gloo_under_mpirun, uneven_inputs]
    checks += [not_finite_is_not_hidden, resumes_to_the_same_bits, resumes_in_place, two_models]
    checks += [does_not_wait, a_peer_that_never_comes, looks_for_names_once]
    checks += [over_the_backend_without_a_word, a_hook_of_the_users_own_is_left_alone]
    checks += [hooks_that_chain_collectives_do_not_race]
    checks += [callbacks_are_where_their_collective_was_started]
    checks += [optimizers_that_step_in_backward_keep_their_hook]
    checks += [what_it_cannot_compress_stays_exact_over_the_backend]
    checks += [is_saved_and_copied_before_its_first_forward, refuses]
    for check in checks:
        check()
        print(f"ok {check.__name__}", flush=True)
    dist.destroy_process_group()
    print("ok all")


if __name__ == "__main__":
    main()
