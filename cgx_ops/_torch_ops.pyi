"""The compiled part of cgx_ops.torch: importing it registers torch.ops.cgx.*."""

from collections.abc import Callable

__file__: str
torch_version: str
cgx_version: str

def on_trace(callback: Callable[[], bool]) -> None:
    """Call callback() whenever an operator is traced, until it returns True. Once per process."""
