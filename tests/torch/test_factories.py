"""Tensors created by the package do not depend on torch's default dtype and device."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Functions that use the default dtype or device unless both are given: torch.set_default_dtype()
# and torch.set_default_device() change these defaults.
FACTORIES = {
    "arange", "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye", "full",
    "linspace", "logspace", "nested_tensor", "normal", "ones", "rand", "randint", "randn",
    "randperm", "range", "scalar_tensor", "sparse_coo_tensor", "tensor", "tril_indices",
    "triu_indices", "zeros",
}  # fmt: skip
# Functions that always use a default.
LEGACY = {"Tensor", "FloatTensor", "get_default_dtype", "get_default_device"}


def incomplete(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and name of each call that uses the default dtype or device."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        module, _, function = name.rpartition(".")
        given = {keyword.arg for keyword in node.keywords}
        if module == "torch" and (
            function in LEGACY or (function in FACTORIES and not {"dtype", "device"} <= given)
        ):
            yield node.lineno, name


def test_all_factory_calls_have_dtype_and_device() -> None:
    files = list((ROOT / "cgx_ops").rglob("*.py"))
    assert len(files) > 50
    found = [(file.name, *each) for file in files for each in incomplete(file.read_text())]
    assert not found


@pytest.mark.parametrize(
    ("source", "complete"),
    [
        ("torch.zeros(3)", False),
        ("torch.zeros(3, dtype=torch.float32)", False),
        ("torch.tensor([1.0], device='cpu')", False),
        ("torch.FloatTensor(3)", False),
        ("torch.zeros(3, dtype=torch.float32, device='cpu')", True),
        ("torch.zeros_like(x)", True),
        ("np.zeros(3)", True),
    ],
)
def test_incomplete_calls_are_found(source: str, complete: bool) -> None:
    assert (not list(incomplete(source))) == complete


def test_cpp_factory_calls_have_options() -> None:
    """Check that each C++ factory call names its dtype, or a tensor."""
    factories = r"\bat::(?:empty|zeros|ones|full|tensor|scalar_tensor|arange|rand\w*)\("
    files = list((ROOT / "torch_ops").glob("*.cc"))
    calls = [
        (file.name, file.read_text()[found.end() :].split(";")[0])
        for file in files
        for found in re.finditer(factories, file.read_text())
    ]
    assert len(calls) > 5
    wrong = [call for call in calls if not re.search(r"options|bytes_like|TensorOptions", call[1])]
    assert not wrong
