"""FSDP2 in few bits: `fsdp.compress(model)`.

hooks.py: compress() and its collectives; block.py: which parameters lie in a message; state.py:
noise and checkpoints; feedback.py: residuals.
"""

from cgx_ops.torch.fsdp.feedback import LOCO, Feedback
from cgx_ops.torch.fsdp.hooks import GRADIENTS, WEIGHTS, compress
from cgx_ops.torch.fsdp.state import State

__all__ = ["GRADIENTS", "LOCO", "WEIGHTS", "Feedback", "State", "compress"]
