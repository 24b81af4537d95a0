"""Restore the state of layers that no rank uses in a step.

DistributedDataParallel(find_unused_parameters=True) does not change the gradient of such a layer
and discards its average. Without restoring, the part of the layer's residual that the hook sent
would be lost.
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
    """Find out, in the background, which layers of a bucket no rank has a gradient of.

    A layer that only some ranks use is averaged like any other; all ranks send their residuals of
    it.

    Args:
        state: the hook's state.
        gradients: the layers' gradients before averaging; zeros if this rank did not use a layer.
        kept: for each layer, the tensors that the step changes in place, before it does.
        name: name of the collective.

    Returns:
        A function to call when the averages are there. It waits for the answer. For layers that no
        rank used, it sets the averages to zero and restores the tensors of `kept`.
    """
    if all(x is None for each in kept for x in each):
        return nothing
    own = torch.stack([gradient.count_nonzero() for gradient in gradients]) > 0
    # Do not wait for a GPU: copy every layer there.
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
