"""Exchange: the average of a list of tensors over the ranks, one message, in a Config's bits.

For what is no bucket of gradients: differences of weights (averager.py), momenta (optim.py).
What compression loses of each tensor, by name, is added to the next one, where the Config says so.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

import torch
import torch.distributed as dist

from cgx_ops import Config, Segment
from cgx_ops.call import call_seed
from cgx_ops.errors import InvalidArgument
from cgx_ops.rules import EXACT_BITS
from cgx_ops.torch._compat import group_or_default
from cgx_ops.torch.ddp_bucket import for_any_bucket, residuals_of
from cgx_ops.torch.ddp_state import HookState
from cgx_ops.torch.layers import Layer, Rules
from cgx_ops.torch.work import DTYPES, devices

Carriers = Literal["native", "c10d"]


class Exchange(HookState):
    """The ranks, the Config and the residuals of averages that follow each other.

    It is saved, restored and consolidated as a hook's state is.

    Attributes:
        caller: its owner's name, for errors and to match messages.
        steps: averages so far.
    """

    kept = (*HookState.kept, "caller")

    def __init__(
        self,
        caller: str,
        process_group: dist.ProcessGroup | None,
        config: Config | None,
        carrier: Carriers,
        *,
        exact_vectors: bool = True,
    ) -> None:
        super().__init__(process_group, config, Rules(exact_vectors=exact_vectors), carrier)
        self.caller = caller

    @torch.no_grad()
    def mean(
        self, names: Sequence[str], tensors: Sequence[torch.Tensor], *, exact: bool = False
    ) -> list[torch.Tensor]:
        """Return the mean of each tensor over the ranks, equal on all of them, to the bit.

        Args:
            names: of the tensors: that of a residual and of noise.
            tensors: float32, of any shapes, on one device; as many on all ranks, of equal shapes.
            exact: whether they travel exact; residuals then stay as they are.
        """
        step, self.steps = self.steps, self.steps + 1
        if not tensors:
            return []
        starts = list(accumulate((x.numel() for x in tensors), initial=0))
        buffer = torch.cat([x.reshape(-1) for x in tensors])
        if exact:
            config, residuals = self.config, None
            segments, seeds = [Segment(0, buffer.numel(), bits=EXACT_BITS)], [0]
        else:
            rules = self.rules
            assert rules is not None
            config = for_any_bucket(self.config, rules)
            found = [Layer(n, x.dim(), x.numel()) for n, x in zip(names, tensors, strict=True)]
            segments = rules.segments(found, starts[:-1])
            residuals = residuals_of(self.caller, self, config, found, segments, tensors)
            group = group_or_default(self.process_group).group_name
            seeds = [
                call_seed(config.seed, f"{self.caller}/{layer.name}", step, group)
                for layer in found
            ]
        self.average(
            buffer, config, segments=segments, seed=seeds, name=self.caller, residuals=residuals
        ).wait()
        pieces = buffer.split([x.numel() for x in tensors])
        return [piece.view(x.shape) for piece, x in zip(pieces, tensors, strict=True)]


def check_parameters(caller: str, parameters: Sequence[torch.Tensor]) -> None:
    """Require parameters whose values the core can carry.

    Raises:
        TypeError: one is complex, sparse, of float64, or where the core has no values.
        InvalidArgument: there are none, or they are on several devices.
    """
    if not parameters:
        raise InvalidArgument(f"{caller}: there is no parameter that requires a gradient")
    for i, parameter in enumerate(parameters):
        what = f"{caller}: parameter {i} of shape {tuple(parameter.shape)} is"
        if parameter.layout != torch.strided:
            raise TypeError(f"{what} {parameter.layout}; only dense ones can be averaged")
        if parameter.dtype not in DTYPES:
            raise TypeError(
                f"{what} {parameter.dtype}; train it in float32, float16 or bfloat16: model.float()"
            )
        if parameter.device.type not in devices():
            raise TypeError(
                f"{what} on {parameter.device}; build cgx_ops with CUDA (nvcc on PATH or in "
                "CUDA_HOME)"
            )
        if parameter.device != parameters[0].device:
            raise InvalidArgument(
                f"{what} on {parameter.device}, parameter 0 on {parameters[0].device}: one message "
                "is of one device"
            )
