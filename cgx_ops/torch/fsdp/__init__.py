"""FSDP2 in few bits: `fsdp.compress(model)`."""

from cgx_ops.torch.fsdp.feedback import LOCO, Feedback
from cgx_ops.torch.fsdp.hooks import GRADIENTS, WEIGHTS, compress
from cgx_ops.torch.fsdp.state import State

__all__ = ["GRADIENTS", "LOCO", "WEIGHTS", "Feedback", "State", "compress"]
