"""The compiled part of cgx_ops.torch: importing it registers torch.ops.cgx.*."""

__file__: str
torch_version: str
cgx_version: str

def set_copy_input(copy: bool) -> None:
    """Say whether collectives read from a copy of their input. Off unless set."""
