"""The runner of the checks of rank programs, and their pytest items."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
from ranks import checks
from support.launch import check_ok
from support.rank_checks import Launch, failures_of, names_in


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
    names = ["first", "second"]
    assert not failures_of([said, said], names, names, "")
    with pytest.raises(AssertionError):
        check_ok([said.replace("ok all", "ok")], names)
    late = failures_of([said, said.replace("ok second", "second")], names, names, "")
    assert late.keys() == {"second"} and "did not pass on ranks [1]" in late["second"]
    for other in (["first"], ["second", "first"], ["first", "second", "third"]):
        wrong = failures_of([said], other, ["first"], "")
        assert f"rank 0 has checks {names}".replace("'", '"') in wrong["first"]
    for output, failure in ((said, "status 1"), (said.replace("ok all", "ok"), "")):
        ended = failures_of([output], names, names, failure)
        assert ended.keys() == set(names) and "then the program failed" in ended["first"]


def test_names_select_checks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_failure_names_its_check_and_ends_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ArithmeticError) as failure:
        checks.run(checks.named(first, fails, second), [])
    assert failure.value.__notes__ == ["The check that failed: fails"]
    said = capsys.readouterr().out
    names = ["first", "fails", "second"]
    found = failures_of([said], names, names, "status 1, and a traceback")
    assert "did not pass on ranks [0]\nstatus 1, and a traceback" in found.pop("fails")
    assert found == {"second": "second was not run on ranks [0]: fails failed before it"}
    assert failures_of([], names, ["first"], "status 1").keys() == {"first"}


def test_names_are_unique() -> None:
    with pytest.raises(ValueError, match="several checks have one name"):
        checks.named(first, first)


def test_sources_list_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.rank_checks.RANKS", tmp_path)
    (tmp_path / "torch_some").mkdir()
    (tmp_path / "torch_some" / "module.py").write_text("CHECKS = [a, b]\nCHECKS += [c]\n")
    program = tmp_path / "program.py"
    imports = "import torch_some.module\nfrom torch_some import module\n"
    for module in ("module", "torch_some.module"):
        program.write_text(f"{imports}checks.run(checks.of_modules({module}) | checks.named(d))")
        assert names_in("program.py") == ["some.module.a", "some.module.b", "some.module.c", "d"]
    program.write_text("checks.run(checks.named(*found))")
    with pytest.raises(ValueError, match=r"program\.py lists no checks by plain names"):
        names_in("program.py")
    with pytest.raises(ValueError, match="program has no check 'b', but a"):
        Launch(2, "program", "b", names=["a"])
