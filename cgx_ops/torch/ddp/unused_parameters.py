"""Layers that no rank uses in a step: what hooks keep of them stays as it was.

DistributedDataParallel(find_unused_parameters=True) leaves the gradient of such a layer as it was,
and throws its average away. What a hook had sent of the layer's residual would be lost with it.
"""

from collections.abc import Callable, Sequence

import torch

from cgx_ops import Config, Segment
from cgx_ops._core.tables import EXACT_BITS
from cgx_ops.torch.averaging.arithmetic import full_precision, use_on_this_stream
from cgx_ops.torch.averaging.residuals import nothing
from cgx_ops.torch.averaging.state import AveragingState

_EXACT = Config(bits=EXACT_BITS, algorithm="by_hosts")


def unused_kept(
    state: AveragingState,
    gradients: Sequence[torch.Tensor],
    kept: Sequence[Sequence[torch.Tensor | None]],
    name: str,
) -> Callable[[], None]:
    """Ask, in the background, which layers of a bucket any rank has a gradient of.

    A layer that only some ranks use is averaged as any other: all send what they have kept.

    Args:
        state: the hook's.
        gradients: of the layers, before they are averaged; zeros where this rank did not use one.
        kept: what the step changes in place of each layer, before it does.
        name: of the collective.

    Returns:
        What is called when the averages are there: it waits for the answer; of layers that no rank
        uses averages become zero, and what is kept becomes what it was.
    """
    if all(x is None for each in kept for x in each):
        return nothing
    own = torch.stack([gradient.count_nonzero() for gradient in gradients]) > 0
    # A GPU is not waited for: copies there are of every layer.
    mine = [x.is_cuda or not used for x, used in zip(gradients, own, strict=True)]
    before = [
        [(x, x.clone()) for x in each if x is not None] if idle else []
        for each, idle in zip(kept, mine, strict=True)
    ]
    shares = own.float()
    answer = state.average(
        shares, _EXACT, segments=[Segment(0, shares.numel())], seed=[0], name=f"{name}/used"
    )

    @full_precision()
    def restore() -> None:
        answer.wait()
        use_on_this_stream(shares, *(copy for pairs in before for _, copy in pairs))
        for used, gradient, idle, pairs in zip(shares > 0, gradients, mine, before, strict=True):
            if idle:
                gradient.masked_fill_(~used, 0.0)
            for now, copy in pairs:
                now.copy_(torch.where(used, now, copy))

    return restore
