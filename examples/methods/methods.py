"""METHODS: the training methods that the examples of this folder compare, by name.

    python examples/methods/methods.py      # prints the names

1. PyTorch's methods, over gloo
2. compressors of cgx_ops: the DDP hook with a Config
3. other hooks and optimizers of cgx_ops
4. outer loops of cgx_ops: ranks train alone and average every SYNC_EVERY steps
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from task import Task
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from cgx_ops import Config
from cgx_ops.config import Rounding
from cgx_ops.torch import ddp, optim
from cgx_ops.torch.diloco import DiLoCo, sparse_loco

RANK = 4  # of PowerSGD's matrices
SYNC_EVERY = 10


@dataclass(frozen=True)
class Run:
    """The settings of one training.

    Attributes:
        task: the model and its data.
        gloo: a gloo process group of all ranks, for PyTorch's methods. The default group has the
            backend "cgx".
        seed: seed of the weights, the batches and the noise.
        warmup: steps of the warm-up, for methods that have one.
    """

    task: Task
    gloo: dist.ProcessGroup
    seed: int
    warmup: int

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Return the optimizer of the task."""
        return self.task.optimizer(model.parameters(), self.task.rate, self.task.momentum)


class Alone(nn.Module):
    """A model without averaging; has `module` as DistributedDataParallel does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any) -> Any:
        return self.module(*inputs)


Prepared = tuple[DistributedDataParallel | Alone, Optimizer]


@dataclass(frozen=True)
class Method:
    """A training method.

    Attributes:
        prepare: wraps a model and returns it with its optimizer.
        warms: whether the method has a warm-up of Run.warmup steps.
        ours: whether cgx_ops averages.
        every: steps from one average to the next.
    """

    prepare: Callable[[nn.Module, Run], Prepared]
    warms: bool = False
    ours: bool = True
    every: int = 1


# One bucket: these models are too small to gain from several. PyTorch's hook fails with several:
# it starts collectives in callbacks, whose order differs between ranks, and gloo aborts.
POWER_SGD_BUCKET_MB = 1 << 20


def parallel(
    model: nn.Module, group: dist.ProcessGroup | None = None, bucket_mb: float | None = None
) -> DistributedDataParallel:
    # Without buffers, only gradients are sent: each rank has its own statistics of batch norm.
    # The argument that torch 2.13 recommends instead sends the buffers once.
    warnings.filterwarnings("ignore", "`broadcast_buffers`", FutureWarning)
    return DistributedDataParallel(
        model, process_group=group, bucket_cap_mb=bucket_mb, broadcast_buffers=False
    )


# ---- 1. PyTorch's methods ------------------------------------------------------------------------


def gloo(hook: Callable[..., Any] | None = None) -> Method:
    def prepare(model: nn.Module, run: Run) -> Prepared:
        wrapped = parallel(model, run.gloo)
        if hook is not None:
            wrapped.register_comm_hook(run.gloo, hook)
        return wrapped, run.optimizer(wrapped)

    return Method(prepare, ours=False)


def torch_power_sgd(model: nn.Module, run: Run) -> Prepared:
    wrapped = parallel(model, run.gloo, POWER_SGD_BUCKET_MB)
    state = powerSGD_hook.PowerSGDState(
        run.gloo, matrix_approximation_rank=RANK, start_powerSGD_iter=2, random_seed=run.seed
    )
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return wrapped, run.optimizer(wrapped)


# ---- 2. compressors ------------------------------------------------------------------------------


def hooked(model: nn.Module, config: Config, seed: int) -> DistributedDataParallel:
    """Return a model whose gradients are averaged as `config` says."""
    wrapped = parallel(model)
    state = ddp.QuantizedAllreduceState(config=config, seed=seed)
    wrapped.register_comm_hook(state, ddp.quantized_allreduce_hook)
    return wrapped


def codec(config: Config) -> Method:
    def prepare(model: nn.Module, run: Run) -> Prepared:
        wrapped = hooked(model, config, run.seed)
        return wrapped, run.optimizer(wrapped)

    return Method(prepare)


def chosen(compressor: Any, density: float) -> Method:
    """Return a sparse compressor with error feedback."""
    return codec(
        Config(compressor=compressor, density=density, bucket_size=4096, error_feedback=True)
    )


# ---- 3. other methods ----------------------------------------------------------------------------


def power_sgd(model: nn.Module, run: Run) -> Prepared:
    wrapped = parallel(model, bucket_mb=POWER_SGD_BUCKET_MB)
    state = ddp.PowerSGDState(
        config=Config(32),
        matrix_approximation_rank=RANK,
        start_powerSGD_iter=2,
        random_seed=run.seed,
    )
    wrapped.register_comm_hook(state, ddp.power_sgd_hook)
    return wrapped, run.optimizer(wrapped)


def deep_gradient(density: float) -> Method:
    def prepare(model: nn.Module, run: Run) -> Prepared:
        wrapped, task = parallel(model), run.task
        # The hook applies the momentum.
        state = ddp.DeepGradientState(
            density=density, momentum=task.momentum, warmup_steps=run.warmup
        )
        wrapped.register_comm_hook(state, ddp.deep_gradient_hook)
        optimizer = task.optimizer(wrapped.parameters(), task.rate, 0)
        for group in optimizer.param_groups:
            group["weight_decay"] /= 1 - task.momentum  # SGD would apply momentum to it
        return wrapped, optimizer

    return Method(prepare, warms=True)


def own_gradients(model: nn.Module) -> DistributedDataParallel:
    """Return a model that does not average gradients, because its optimizer does."""
    wrapped = parallel(model)
    ddp.CommHookType.NOOP.register(wrapped)
    return wrapped


BETAS = (0.9, 0.95)  # with 0.999 the variance would not settle in so short a warm-up


def adamw(model: nn.Module, run: Run) -> Prepared:
    wrapped = hooked(model, Config(32), run.seed)
    return wrapped, AdamW(wrapped.parameters(), run.task.adam_rate, BETAS, weight_decay=0.0)


def compressed_adamw(warmup_config: Config, refreshes: int) -> Method:
    def prepare(model: nn.Module, run: Run) -> Prepared:
        wrapped = own_gradients(model)
        return wrapped, optim.CompressedAdamW(
            wrapped.parameters(),
            run.task.adam_rate,
            BETAS,
            weight_decay=0.0,
            warmup_steps=max(1, run.warmup),
            warmup_config=warmup_config,
            refreshes=refreshes,
        )

    return Method(prepare, warms=True)


def signum(model: nn.Module, run: Run) -> Prepared:
    wrapped = own_gradients(model)
    return wrapped, optim.Signum(wrapped.parameters(), run.task.sign_rate)


# ---- 4. outer loops ------------------------------------------------------------------------------


def outer_loop(
    make: Callable[..., DiLoCo] = DiLoCo, config: Config | None = None, **settings: Any
) -> Method:
    def prepare(model: nn.Module, run: Run) -> Prepared:
        optimizer = run.optimizer(model)
        own = {} if config is None else {"config": config, "seed": run.seed}
        loop = make(model, sync_every=SYNC_EVERY, **settings, **own)
        optimizer.register_step_post_hook(lambda *_: loop.step())
        return Alone(model), optimizer

    return Method(prepare, every=SYNC_EVERY)


TWO_BITS = Config(2, compressor="levels")


def entropy(rate: float, rounding: Rounding = "nearest") -> Config:
    """Return the settings of entropy coding with a mean of `rate` bits."""
    return Config(compressor="entropy", rate=rate, rounding=rounding)


METHODS: dict[str, Method] = {
    "gloo": gloo(),
    "gloo, fp16": gloo(default_hooks.fp16_compress_hook),
    "gloo, PowerSGD": Method(torch_power_sgd, ours=False),
    "exact": codec(Config(32)),
    "half": codec(Config(compressor="half")),
    "8 bits": codec(Config(8)),
    "4 bits": codec(Config(4)),
    "levels, 2 bits": codec(Config(2, compressor="levels", error_feedback=True)),
    "levels, 1 bit": codec(Config(1, compressor="levels", error_feedback=True)),
    "entropy, 4 bits": codec(entropy(4)),
    "entropy, 2 bits": codec(entropy(2)),
    "entropy, 2 bits, shift": codec(entropy(2, "shift")),
    "entropy, 1 bit": codec(entropy(1)),
    "onebit": codec(Config(compressor="onebit", error_feedback=True)),
    "ternary": codec(Config(compressor="ternary", clip=True)),
    "qsgd, 4 bits": codec(Config(4, compressor="qsgd")),
    "topk 1 %": chosen("topk", 0.01),
    "randk 10 %": chosen("randk", 0.1),
    "PowerSGD": Method(power_sgd),
    "DGC 1 %": deep_gradient(0.01),
    "DGC 0.1 %": deep_gradient(0.001),
    "AdamW": Method(adamw),
    "1-bit Adam": compressed_adamw(Config(32), 0),
    "compressed AdamW": compressed_adamw(replace(entropy(4), error_feedback=False), 1),
    "SigNUM": Method(signum),
    "DiLoCo": outer_loop(config=Config(32)),
    "DiLoCo, 4 bits": outer_loop(config=Config(4)),
    "DiLoCo, 2 bits": outer_loop(config=TWO_BITS),
    "DiLoCo, entropy, 2 bits": outer_loop(config=entropy(2)),
    "DiLoCo, 4 bits, 5 late": outer_loop(config=Config(4), fragment_sync_delay=5),
    "SparseLoCo": outer_loop(sparse_loco),
}

if __name__ == "__main__":
    print(*METHODS, sep="\n")
