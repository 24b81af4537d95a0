"""What runs the checks of rank programs: names, choices, failures; and what tests require of it."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.launch import check_ok


def load() -> Any:
    spec = importlib.util.spec_from_file_location(
        "checks", Path(__file__).parents[1] / "ranks" / "checks.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


checks = load()


def first() -> None:
    pass


def second() -> None:
    pass


def fails() -> None:
    raise ArithmeticError("no such number")


def test_all_run_in_order_and_are_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr(sys, "argv", ["program"])
    checks.run(checks.named(first, second), after=lambda: done.append("after"))
    said = capsys.readouterr().out
    check_ok([said], ["first", "second"])
    assert done == ["after"] * 2
    for wrong in (said.replace("ok all", "ok"), said.replace("ok second", "second")):
        with pytest.raises(AssertionError):
            check_ok([said, wrong], ["first", "second"])


def test_names_choose(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("torch_some.module")
    module.__dict__["CHECKS"] = [first, second, fails]
    by_name = checks.of_modules(module)
    assert list(by_name) == [f"some.module.{name}" for name in ("first", "second", "fails")]
    for patterns in (["some.module.*st"], ["first"], ["module.first"]):
        monkeypatch.setattr(sys, "argv", ["program", *patterns])
        checks.run(by_name)
        check_ok([capsys.readouterr().out], ["some.module.first"])
    with pytest.raises(ValueError, match=r"no check is 'irst'; there are some\.module\.first"):
        checks.run(by_name, ["first", "irst"])


def test_a_failure_names_its_check_and_ends_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ArithmeticError) as failure:
        checks.run(checks.named(first, fails, second), [])
    assert failure.value.__notes__ == ["The check that failed: fails"]
    said = capsys.readouterr().out
    assert "ok first" in said and "ok second" not in said
    with pytest.raises(AssertionError):
        check_ok([said])


def test_names_are_of_one_check_each() -> None:
    with pytest.raises(ValueError, match="several checks have one name"):
        checks.named(first, first)
