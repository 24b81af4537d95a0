"""Arithmetic of hooks, optimizers and outer loops that is independent of autocast and streams."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Compute in the dtypes of the tensors, without autocast and without autograd.

    Use it as a block or a decorator. Autocast belongs to the thread that entered it, and callbacks
    run on the caller's thread or on another one. Without this, ranks would send different dtypes::

        @full_precision()
        def project(gradient: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
            return gradient @ q  # float32, even in a backward() inside torch.autocast()

    Tensors made inside need an explicit dtype and device, because the defaults belong to the
    process.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def use_on_this_stream(*tensors: torch.Tensor | None) -> None:
    """Keep the memory of CUDA tensors until the current (callback's) stream has used them."""
    for x in tensors:
        if x is not None and x.is_cuda:
            x.record_stream(torch.cuda.current_stream(x.device))
