"""Averages of tensors with state: the base of DDP hooks, FSDP2, optimizers and outer loops.

`QuantizedModelAverager` averages a model's weights every few steps.
"""

from cgx_ops.torch.averaging.averager import QuantizedModelAverager

__all__ = ["QuantizedModelAverager"]
