"""Averages of tensors with state, whatever the tensors are: gradients, differences, momenta.

state.py: AveragingState, from which hooks' states and Exchange derive. exchange.py: the average of
a list of tensors; averager.py: of a model's weights. residuals.py, layers.py, loaded.py: state by
layer. sent.py: messages that follow others. adaptation.py: adaptive bits. exact.py, reports.py,
grad_scaler.py, arithmetic.py: what these need. Nothing here imports ddp, fsdp, optim or diloco.
"""

from cgx_ops.torch.averaging.averager import QuantizedModelAverager

__all__ = ["QuantizedModelAverager"]
