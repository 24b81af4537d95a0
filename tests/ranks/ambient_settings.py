"""Settings that a caller's context may impose on a model: default dtype and device, autocast."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch

Setting = Callable[[], AbstractContextManager[object]]


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


# Contexts that change the dtype of new tensors, or create tensors without values, by default.
DEFAULTS: dict[str, Setting] = {
    "bfloat16": lambda: _default_dtype(torch.bfloat16),
    "float64": lambda: _default_dtype(torch.float64),
    "meta": lambda: torch.device("meta"),
}


def autocast(dtype: torch.dtype) -> Setting:
    return lambda: torch.autocast("cpu", dtype=dtype)


def nested_autocast(dtype: torch.dtype) -> Setting:
    @contextlib.contextmanager
    def inside() -> Iterator[None]:
        with torch.autocast("cpu", enabled=False), torch.autocast("cpu", dtype=dtype):
            yield

    return inside


def around_backward(dtype: torch.dtype) -> dict[str, Setting]:
    """Return the contexts of backward() for a forward pass under autocast(dtype)."""
    return {"autocast": autocast(dtype), "nested autocast": nested_autocast(dtype)}
