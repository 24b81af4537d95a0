"""Error feedback: the quantization error of a layer's gradient is added to the next gradient.

1. values: compared with the numpy allreduce of each layer, bit for bit; those of entropy, whose
   small layers share blocks, with the oracle's of each bucket
2. which layers have residuals; invalid settings
3. checkpoints; those for other numbers of ranks are in run_torch_restart.py
"""

import copy
import gc
from dataclasses import replace
from typing import Any

import numpy as np
import reference
import torch
import torch.distributed as dist
from failing import fails
from shared_folder import folder_of_all
from support import torch_cases as tc
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.nn.parallel import DistributedDataParallel

import cgx_ops.torch
from cgx_ops import Config, InvalidArgument, Rules, Segment
from cgx_ops._core.call import call_seed
from cgx_ops.torch import ddp
from cgx_ops.torch.ddp import models as ddp_models

from .common import (
    RANK,
    SIZE,
    gradients_of,
    hooked,
    identical_on_all_ranks,
    images,
    local_gradients,
    network,
    same,
)
from .steps import train

LEVELS = Config(bits=1, compressor="levels", bucket_size=64)
TOPK = Config(compressor="topk", density=0.1, bucket_size=256)
UNIFORM = Config(bits=2, bucket_size=64, error_feedback=True)
ENTROPY = Config(compressor="entropy", rate=2)

# ---- values --------------------------------------------------------------------------------------


def by_layer(
    gradients: dict[str, torch.Tensor],
    residuals: dict[str, torch.Tensor],
    config: Config,
    step: int,
    group_name: str,
) -> dict[str, torch.Tensor]:
    """Return the averages, with one collective per layer; update residuals in place."""
    averages = {}
    for name, x in gradients.items():
        own = config if name in residuals else Config(bits=32)
        seed = call_seed(0, f"ddp/{name}", step, group_name)
        y = cgx_ops.init().allreduce(
            tc.to_numpy(x), "avg", own, segments=[Segment(0, x.numel())], seed=[seed],
            residual=tc.to_numpy(residuals[name]) if name in residuals else None,
        )  # fmt: skip
        averages[name] = tc.from_numpy(y).reshape(x.shape)
    return averages


def zeros_for(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(x.numel()) for name, x in gradients.items() if x.dim() > 1}


def carriers_and_buckets() -> list[dict[str, Any]]:
    """Return arguments of hooked(): one bucket, several, and several over torch's collectives."""
    carried = {"carrier": "c10d", "process_group": dist.new_group(backend="gloo")}
    several: dict[str, Any] = {"bucket_cap_mb": 0.001}
    return [{}, several, {**several, **carried}]


def feedback_by_layer() -> None:
    """Compare before and after DDP rebuilds its buckets, for both carriers."""
    modes = carriers_and_buckets()
    for config in (LEVELS, TOPK, UNIFORM):
        for mode in modes:
            buckets: list[tuple[int, list[int]]] = []

            def hook(
                state: Any, bucket: GradBucket, seen: Any = buckets
            ) -> torch.futures.Future[torch.Tensor]:
                seen.append((state.steps, [p.numel() for p in bucket.parameters()]))
                return ddp.quantized_allreduce_hook(state, bucket)

            model, state = hooked(network(), config, hook, **mode)
            own = replace(config, algorithm="by_hosts")
            residuals = zeros_for(local_gradients(RANK, spare=True))
            group: Any = mode.get("process_group") or dist.group.WORLD
            for step in range(4):
                model.zero_grad()
                model(images(RANK, step), spare=True).square().sum().backward()
                alone = local_gradients(RANK, (step,), spare=True)
                want = by_layer(alone, residuals, own, step, group.group_name)
                same(gradients_of(model), want, (config, mode, step))
                same(state.residuals.tensors, residuals, (config, mode, step))
            if "bucket_cap_mb" in mode:
                first, last = ([b for s, b in buckets if s == step] for step in (0, 3))
                assert first != last, "DDP did not rebuild its buckets"


def listing(module: torch.nn.Module, hook: Any) -> tuple[Any, list[list[str]]]:
    """Return a hook that lists the names in each bucket before it calls `hook`, and the list."""
    known = {id(p): name for name, p in module.named_parameters()}
    buckets: list[list[str]] = []

    def listed(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        buckets.append([known[id(p)] for p in bucket.parameters()])
        return hook(state, bucket)

    return listed, buckets


def entropy_by_bucket() -> None:
    """Compare with the oracle, which packs the small layers of a bucket as the core does."""
    for mode in carriers_and_buckets():
        module = network()
        hook, buckets = listing(module, ddp.quantized_allreduce_hook)
        model, state = hooked(module, ENTROPY, hook, **mode)
        alone = [local_gradients(rank, spare=True) for rank in range(SIZE)]
        lost = [{n: tc.to_numpy(x) for n, x in zeros_for(each).items()} for each in alone]
        for step in range(4):
            buckets.clear()
            model.zero_grad()
            model(images(RANK, step), spare=True).square().sum().backward()
            alone = [local_gradients(rank, (step,), spare=True) for rank in range(SIZE)]
            want: dict[str, torch.Tensor] = {}
            for names in buckets:
                want |= bucket_average(names, alone, lost)
            same(gradients_of(model), want, (mode, step))
            for name, e in state.residuals.tensors.items():
                assert np.array_equal(tc.to_numpy(e), lost[RANK][name]), (mode, step, name)
        assert any(len([n for n in names if n in lost[0]]) > 1 for names in buckets) or mode


def bucket_average(
    names: list[str], gradients: list[dict[str, torch.Tensor]], lost: list[dict[str, Any]]
) -> dict[str, torch.Tensor]:
    """Return the oracle's averages of a bucket, sent in one message; update `lost` in place."""

    def flat(of: dict[str, Any]) -> np.ndarray:
        zero = {n: np.zeros(gradients[0][n].numel(), np.float32) for n in names}
        return np.concatenate([np.ravel({**zero, **of}[n]) for n in names])

    parts, segments = {}, []
    end = 0
    for name in names:
        numel = gradients[0][name].numel()
        own = ENTROPY if name in lost[0] else Config(bits=32)
        segments.append(
            reference.Segment(end, numel, own.bits, 512, own.compressor, rate=own.rate or 2.0)
        )
        parts[name] = slice(end, end + numel)
        end += numel
    residuals = [flat(each) for each in lost]
    mean = reference.allreduce(
        [flat({n: tc.to_numpy(g[n]) for n in names}) for g in gradients], segments, op="avg",
        algorithm="sra", residuals=residuals,
    )  # fmt: skip
    for each, residual in zip(lost, residuals, strict=True):
        each.update({n: residual[parts[n]] for n in names if n in each})
    return {
        n: tc.from_numpy(mean[at].copy()).reshape(gradients[0][n].shape) for n, at in parts.items()
    }


def inside_torchs_wrapper() -> None:
    """Check that residuals have the dtype of the messages."""
    hook: Any = default_hooks.fp16_compress_wrapper(ddp.quantized_allreduce_hook)  # type: ignore[arg-type]
    model, state = hooked(network(), LEVELS, hook)
    model(images(RANK), spare=True).square().sum().backward()
    alone = {n: x.half() for n, x in local_gradients(RANK, spare=True).items()}
    residuals = {name: x.half() for name, x in zeros_for(alone).items()}
    own, world = replace(LEVELS, algorithm="by_hosts"), dist.group.WORLD
    assert world is not None
    want = by_layer(alone, residuals, own, 0, world.group_name)
    same(gradients_of(model), {name: x.float() for name, x in want.items()})
    same(state.residuals.tensors, residuals)


# ---- layers with residuals -----------------------------------------------------------------------


def layers_with_residuals() -> None:
    """Check that compressed layers have residuals if the codec needs them, or if requested."""
    weights = {"first.weight", "spare.weight", "last.weight"}
    rules = Rules([(r"spare\.weight", {"compressor": "topk", "density": 0.1})])
    for config, own, named in (
        (LEVELS, None, weights),
        (Config(bits=2), None, set()),
        (Config(bits=2), rules, {"spare.weight"}),
        (replace(UNIFORM, minimal_size=700), None, {"first.weight", "spare.weight"}),
        (replace(LEVELS, error_feedback=False), rules, set()),
        (Config(compressor="sign"), None, set()),
    ):
        model, state = hooked(network(), config, rules=own)
        model(images(RANK), spare=True).square().sum().backward()
        assert set(state.residuals.tensors) == named, (config, own)


def exact_steps_leave_residuals_alone() -> None:
    model, state = hooked(network(), LEVELS)
    model(images(RANK), spare=True).square().sum().backward()
    before = {name: x.clone() for name, x in state.residuals.tensors.items()}
    assert all(x.any() for x in before.values())
    for scope in (cgx_ops.torch.uncompressed(), cgx_ops.torch.compressed(Config(bits=8))):
        with scope:
            model(images(RANK, 1), spare=True).square().sum().backward()
        same(state.residuals.tensors, before)
    with model.no_sync():
        model(images(RANK, 1), spare=True).square().sum().backward()
    same(state.residuals.tensors, before)


def invalid_settings() -> None:
    diverging: list[tuple[dict[str, Any], str]] = [
        ({"compressor": "sign"}, "a vote has no magnitude"),
        ({"bits": 32}, "there is no quantization error"),
        ({"compressor": "ternary"}, "without clip=True"),
        ({"compressor": "qsgd", "bits": 2, "bucket_size": 4096}, "use more bits"),
    ]
    for config, words in diverging:
        fails(InvalidArgument, words, lambda own=config: Config(**own, error_feedback=True))
    model, state = hooked(network(), LEVELS)
    state.residuals.tensors["first.weight"] = torch.zeros(3)
    forward = model(images(RANK), spare=True).square().sum()
    fails(Exception, "'first.weight' has 3 elements, but its gradient has 800", forward.backward)
    # Explicit feedback with a compressor from a rule.
    rules = Rules([("last", {"compressor": "sign"})])
    model, _ = hooked(network(), UNIFORM, rules=rules)
    forward = model(images(RANK), spare=True).square().sum()
    fails(Exception, "a vote has no magnitude", forward.backward)
    # A model whose layer names cannot be found.
    model, _ = hooked(network(), LEVELS)
    forward = model(images(RANK), spare=True).square().sum()
    del ddp_models._known[model]
    gc.freeze()  # hides the model from the hook's search through the garbage collector
    fails(Exception, "error feedback stores residuals by layer", forward.backward)


def feedback_by_default() -> None:
    """Check that a group's config with a biased compressor enables residuals."""
    group: Any = dist.new_group(backend="cgx", pg_options=cgx_ops.torch.BackendOptions(TOPK))
    model: Any = DistributedDataParallel(network(), process_group=group)
    residuals: dict[str, torch.Tensor] = zeros_for(local_gradients(RANK, spare=True))
    for step in range(2):
        model.zero_grad()
        model(images(RANK, step), spare=True).square().sum().backward()
        alone = local_gradients(RANK, (step,), spare=True)
        own = replace(TOPK, algorithm="by_hosts")
        same(gradients_of(model), by_layer(alone, residuals, own, step, group.group_name))


# ---- checkpoints ---------------------------------------------------------------------------------


def resumed_feedback_is_bitwise_equal() -> None:
    for config in (LEVELS, TOPK, UNIFORM):
        for form in ("torch", "in place", "dcp"):
            with folder_of_all() as folder:
                file = f"{folder}/{RANK}.pt"
                model, state = hooked(network(), config)
                optimizer = torch.optim.SGD(model.parameters(), 1e-4)
                train(model, range(3), optimizer)
                weights = copy.deepcopy(model.module.state_dict())
                if form == "dcp":
                    dcp_save({"cgx": state}, checkpoint_id=folder)
                else:
                    torch.save(state if form == "torch" else state.state_dict(), file)
                train(model, range(3, 6), optimizer)

                module = network()
                module.load_state_dict(weights)
                if form == "torch":
                    again, restored = DistributedDataParallel(module), torch.load(file)
                    again.register_comm_hook(restored, ddp.quantized_allreduce_hook)
                else:
                    again, restored = hooked(module, replace(config, bucket_size=32), seed=9)
                    train(again, range(1), torch.optim.SGD(again.parameters(), 1e-4))
                    module.load_state_dict(weights)
                    if form == "dcp":
                        dcp_load({"cgx": restored}, checkpoint_id=folder)
                    else:
                        restored.load_state_dict(torch.load(file))
                train(again, range(3, 6), torch.optim.SGD(again.parameters(), 1e-4))
                same(dict(again.module.named_parameters()), dict(model.module.named_parameters()))
                same(restored.residuals.tensors, state.residuals.tensors)
                identical_on_all_ranks(dict(model.module.named_parameters()))


def compiled_module_restores_residuals() -> None:
    """Check that DistributedDataParallel(torch.compile(module)) restores uncompiled residuals."""
    plain, state = hooked(network(), LEVELS)
    compiled, restored = hooked(torch.compile(network()), LEVELS)  # type: ignore[arg-type]
    with torch.compiler.set_stance("force_eager"):
        for step in range(3):
            for model in (plain, compiled) if step else (plain,):
                model.zero_grad()
                model(images(RANK, step), spare=True).square().sum().backward()
            if step == 0:
                restored.load_state_dict(state.state_dict())
                continue
            got = {n.removeprefix("_orig_mod."): x for n, x in gradients_of(compiled).items()}
            same(got, gradients_of(plain))
            same(restored.residuals.tensors, state.residuals.tensors)


def state_without_feedback_rejects_residuals() -> None:
    model, state = hooked(network(), LEVELS)
    train(model, range(1), torch.optim.SGD(model.parameters(), 1e-4))
    with folder_of_all() as folder:
        dcp_save({"cgx": state}, checkpoint_id=folder)
        other = ddp.QuantizedAllreduceState(config=Config(bits=4))
        fails(
            Exception, "residuals of each of",
            lambda: dcp_load({"cgx": other}, checkpoint_id=folder),
        )  # fmt: skip


CHECKS = [feedback_by_layer, entropy_by_bucket, inside_torchs_wrapper, layers_with_residuals]
CHECKS += [exact_steps_leave_residuals_alone, invalid_settings, feedback_by_default]
CHECKS += [compiled_module_restores_residuals]
CHECKS += [resumed_feedback_is_bitwise_equal, state_without_feedback_rejects_residuals]
