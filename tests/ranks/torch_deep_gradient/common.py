"""Helpers of the Deep Gradient Compression checks: models, and a numpy reference of the hook."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from reference import DeepGradient, density_at
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel
from torch_training import RANK, SIZE, gathered, network

from cgx_ops.torch import ddp
from cgx_ops.torch.averaging.residuals import Residuals

Hooked = tuple[DistributedDataParallel, ddp.DeepGradientState]
MATRICES = {"0.weight", "2.weight", "4.weight"}
DENSITY = 0.05  # 29 of 576 values


def hooked(
    module: nn.Module | None = None,
    hook: Any = ddp.deep_gradient_hook,
    wrapper: dict[str, Any] | None = None,
    **options: Any,
) -> Hooked:
    model = DistributedDataParallel(module or network(), **(wrapper or {}))
    options.setdefault("density", DENSITY)
    state = ddp.DeepGradientState(**options)
    model.register_comm_hook(state, hook)
    return model, state


class Followed:
    """A model whose every step is repeated by the reference and compared bit for bit.

    Attributes:
        model, state: the model with the hook, and its state.
        average: the average that all ranks received, by layer.
        layers: the reference of each layer.
    """

    def __init__(
        self, module: nn.Module | None = None, hosts: list[int] | None = None, **options: Any
    ) -> None:
        """Create the model. Ranks with equal `hosts` sum their gradients first."""
        self.model, self.state = hooked(module, hook=self._run, **options)
        self.names = {id(p): name for name, p in self.model.module.named_parameters()}
        self.given: dict[str, list[torch.Tensor]] = {}
        self.average: dict[str, torch.Tensor] = {}
        self.hosts = list(range(SIZE)) if hosts is None else hosts
        method = self.state.method
        self.layers = {
            name: DeepGradient(
                len(set(self.hosts)), p.numel(), momentum=method.momentum,
                nesterov=method.nesterov, clip=method.clip, sparse=name in MATRICES,
                value_bits=self.state.config.value_bits or 32,
            )
            for name, p in self.model.module.named_parameters()
        }  # fmt: skip

    def _run(
        self, state: ddp.DeepGradientState, bucket: GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        pairs = list(zip(bucket.parameters(), bucket.gradients(), strict=True))
        for parameter, gradient in pairs:
            self.given[self.names[id(parameter)]] = gathered(gradient.float().flatten())

        def note(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            buffer = future.value()
            for parameter, gradient in pairs:
                self.average[self.names[id(parameter)]] = gradient.clone().flatten()
            return buffer

        return ddp.deep_gradient_hook(state, bucket).then(note)

    def compare(self, step: int) -> None:
        """Compare the step's averages, momenta and residuals with the reference."""
        method = self.state.method
        density = density_at(step, method.warmup_steps, method.density)
        hosts = sorted(set(self.hosts))
        first = self.hosts.index(self.hosts[RANK]) == RANK
        for name, layer in self.layers.items():
            values = self._sums(name)
            # Sums over hosts, whose mean is larger by a power of two.
            average = layer.step(values, density) * np.float32(len(hosts) / SIZE)
            got = self.average[name]
            assert torch.equal(got, torch.from_numpy(average).to(got.dtype)), (step, name)
            host = hosts.index(self.hosts[RANK])
            if layer.sparse:
                own = float(first)
                self._same(self.state.residuals, name, layer.v[host] * np.float32(own), step)
            else:
                own = len(hosts) / SIZE
            if method.momentum:
                self._same(self.state.momenta, name, layer.u[host] * np.float32(own), step)
        assert self.state.residuals.tensors.keys() == MATRICES

    def _sums(self, name: str) -> list[npt.NDArray[np.float32]]:
        sums: dict[int, npt.NDArray[np.float32]] = {}
        for host, given in zip(self.hosts, self.given[name], strict=True):
            sums[host] = sums[host] + given.numpy() if host in sums else given.numpy().copy()
        return [sums[host] for host in sorted(sums)]

    def _same(self, kept: Residuals, name: str, want: npt.NDArray[np.float32], step: int) -> None:
        assert torch.equal(kept.tensors[name], torch.from_numpy(want)), (step, name)
