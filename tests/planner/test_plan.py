"""Plans as values: files, agreement among ranks; measured costs; the command line."""

import json
import math
import sys
import threading
import time
from dataclasses import astuple, replace
from pathlib import Path

import numpy as np
import pytest
from support.launch import mpirun, threads

from cgx_ops import Communicator, Config, InvalidArgument, MismatchError, Unsupported, __main__
from cgx_ops._core.codec import encoded_bytes
from cgx_ops.planner import Costs, Plan, measure, partition, ready_times, timeline
from cgx_ops.planner.plot import draw
from cgx_ops.planner.rates import message_bytes

_COSTS = Costs(3e-5, 5e-10, 4e-4, 8e-9, 3e-5, 3e-10, 1e-4)
_PLAN = Plan(("a", "b", "c"), (10, 20, 30), (4, 32, 2), ((0, 1), (2,)))


def test_a_plan_is_the_partition_of_its_bytes() -> None:
    numels = {f"layer{i}.weight": 512 * (1 + 37 * i % 400) for i in range(40)}
    ready = [i / 400 for i in range(40)]
    config = Config(bits=2, bucket_size=128)
    plan = Plan.of(numels, ready, _COSTS, config=config, margin=1)
    assert plan.names == tuple(numels)
    assert set(plan.bits) == {2}
    sizes = [n // 4 + n // 128 * 8 for n in numels.values()]
    groups = partition(list(numels.values()), ready, sizes, _COSTS)
    assert [list(group) for group in plan.groups] == groups
    dearer = Costs(*(1.5 * cost for cost in astuple(_COSTS)))
    careful = Plan.of(numels, ready, _COSTS, config=config, margin=1.5)
    assert careful == Plan.of(numels, ready, dearer, config=config, margin=1) != plan
    with pytest.raises(InvalidArgument, match=r"margin is 0[.]5"):
        Plan.of(numels, ready, _COSTS, margin=0.5)
    exact = Plan.of(numels, ready, _COSTS, bits=[32] * 40)
    assert exact.groups != plan.groups
    assert exact.order == list(range(40))


def test_save_and_load_a_plan(tmp_path: Path) -> None:
    for plan in (_PLAN, replace(_PLAN, names=("a\n", '"b"', "\N{GREEK SMALL LETTER MU}"))):
        plan.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json") == plan
    of_numpy = Plan(("a",), (np.prod((2, 5)),), (np.int64(4),), ((np.int32(0),),))  # pyright: ignore
    of_numpy.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == of_numpy
    empty = Plan((), (), (), ())
    empty.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == empty


def test_rates_in_a_plan(tmp_path: Path) -> None:
    config = Config(compressor="entropy", rate=2.5)
    numels = {"a.weight": 100_000, "b.bias": 1000, "c": 5000}
    plan = Plan.of(numels, [0.1] * 3, _COSTS, config=config)
    assert plan.bits == (2.5, 2.5, 2.5)
    plan = Plan.of(numels, [0.1] * 3, _COSTS, config=config, bits=[3.0, np.float32(0.25), 32])  # pyright: ignore
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan and [*map(type, loaded.bits)] == [float, float, int]
    assert '"rate": 3.0' in (tmp_path / "plan.json").read_text()
    assert [plan.rules.of(name, 1, config).rate for name in numels] == [3.0, 0.25, 2.5]
    assert [plan.rules.of(name, 1, config).bits for name in numels] == [4, 4, 32]


def test_groups_follow_from_the_bytes_of_a_rate() -> None:
    """The bound of a message is larger, and would make other groups."""
    numels = {f"layer{i}": 2048 * (1 + 37 * i % 40) for i in range(40)}
    ready = [i / 4000 for i in range(40)]
    config = Config(compressor="entropy", rate=1.3)
    plan = Plan.of(numels, ready, _COSTS, config=config, margin=1)
    sizes = [math.ceil(1.3 * n / 8) for n in numels.values()]
    groups = partition(list(numels.values()), ready, sizes, _COSTS)
    assert [list(group) for group in plan.groups] == groups


def test_bytes_are_those_of_both_messages_and_of_short_tensors() -> None:
    four, eight = encoded_bytes(4096, Config(4)), encoded_bytes(4096, Config(8))
    assert message_bytes(4096, Config(4, gather_bits=8)) == (four + eight) // 2
    assert message_bytes(4096, Config(32, gather_bits=8)) == 4 * 4096
    assert message_bytes(4096, Config(4, minimal_size=4096)) == four
    assert message_bytes(4095, Config(4, minimal_size=4096)) == 4 * 4095
    for config in (Config(4), Config(compressor="entropy"), Config(compressor="topk")):
        assert message_bytes(15, config) == 4 * 15
    assert message_bytes(15, Config(compressor="sign")) == 4  # whole words


def test_measured_costs_of_a_rate_are_for_its_bytes() -> None:
    config = Config(compressor="entropy", rate=2)
    costs = threads(2, lambda _rank, communicator: measure(communicator, config), timeout=60)
    assert costs[0] == costs[1]
    assert costs[0].encode_per_value > 0


def _text(numel: object = 3, bits: object = 4, name: object = "a", group: object = 0) -> str:
    tensor = {"name": name, "numel": numel, "bits": bits}
    return json.dumps({"format": "cgx_ops plan 1", "tensors": [tensor], "groups": [[group]]})


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", '{"format": "cgx_ops plan 9"}', '{"format": "cgx_ops plan 1"}',
        "[" * 100_000, _text(3.7), _text("12"), _text(True), _text(math.inf), _text(bits=4.0),
        _text(bits="auto"), _text(name=None), _text(group=0.5), _text(group="0"),
        _text().replace("bits", "rate").replace("4", '"4"'), _text().replace("bits", "rate", 1)
        .replace("4", "9"), _text().replace("bits", "rate").replace("4", "NaN"),
    ],
)  # fmt: skip
def test_other_files_raise(text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(InvalidArgument, match=r"plan.json is not a valid plan .*Plan.save"):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("own", "says"),
    [
        ({"numels": (1, 2)}, "3 names, 2 numels and 3 bits"),
        ({"names": ("a", "b", "a")}, "two tensors with the name 'a'"),
        ({"groups": ((0, 1),)}, "each of its 3 tensors must be in one group"),
        ({"groups": ((0, 1), (), (2,))}, "no group may be empty"),
        ({"bits": (4, 9, 4)}, "bits is 9"),
        ({"bits": (4, 9.0, 4)}, "rate is 9.0"),
        ({"bits": (4, math.nan, 4)}, "rate is nan"),
        ({"numels": (10, -5, 30)}, r"numels\[1\] is -5; it must be an integer from 0"),
        ({"numels": (10, 5, math.nan)}, r"numels\[2\] is nan; it must be an integer"),
        ({"bits": (4, "auto", 4)}, r"bits\[1\] is 'auto'; it must be an integer from 1 to 32"),
    ],
)
def test_inconsistent_plans_raise(own: dict, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        replace(_PLAN, **own)


_OTHERS = {
    "bits": (replace(_PLAN, bits=(4, 8, 2)), "has tensor 1 'b' .20 values, 32 bits"),
    "rate": (replace(_PLAN, bits=(4, 32, 2.0)), "2 bits, .* rank 2 has 'c' .30 values, rate 2.0"),
    "name": (replace(_PLAN, names=("a", "b", "d")), "has tensor 2 'c' .*, rank 2 has 'd'"),
    "groups": (replace(_PLAN, groups=((0,), (1, 2))), "tensor 1 .*group 0.*, rank 2 .*group 1"),
    "order": (replace(_PLAN, groups=((1, 0), (2,))), "has tensor 0 'a'.*, rank 2 has 'b'"),
    "shorter": (
        Plan(("a", "b"), (10, 20), (4, 32), ((0, 1),)),
        "rank 0 has tensor 2 'c' .*, rank 2 has nothing",
    ),
    "none": (Plan((), (), (), ()), "rank 0 has tensor 0 'a'.*, rank 2 has nothing"),
    "long": (
        replace(_PLAN, names=("a" * 500, "b", "c")),
        "rank 2 has 'a{500}' .10 values, 4 bits, group 0.[.] Use one",
    ),
}


@pytest.mark.parametrize("what", _OTHERS)
def test_different_plans_raise_on_all_ranks(what: str) -> None:
    other, says = _OTHERS[what]

    def run(rank: int, communicator: Communicator) -> None:
        _PLAN.agree(communicator)  # plans match
        with pytest.raises(MismatchError, match=says):
            (other if rank == 2 else _PLAN).agree(communicator)
        _PLAN.agree(communicator)  # the communicator is still usable

    threads(3, run, timeout=20)


def test_threads_measure_the_same_costs() -> None:
    costs = threads(2, lambda _rank, communicator: measure(communicator), timeout=30)
    assert costs[0] == costs[1]
    assert all(0 <= seconds < math.inf for seconds in astuple(costs[0]))


@pytest.mark.slow
def test_processes_measure_the_same_costs() -> None:
    outputs = mpirun(2, "run_planner.py", timeout=60)
    assert outputs[0] == outputs[1]
    exact = Costs(**json.loads(outputs[0].splitlines()[1]))
    assert exact.encode_per_value == exact.decode_fixed == 0


def test_ready_times_are_medians_of_steps_and_the_latest_of_ranks() -> None:
    def run(rank: int, communicator: Communicator) -> list[float]:
        steps = np.array([[7.0, 8, 9], [1, 3, 2], [5, 6.25, 9]]) + 100 * rank
        return ready_times(communicator, steps * [1, 1, 1 + rank])

    for ready in threads(2, run, timeout=20):
        assert ready == [0, 1.25, 111]
    with pytest.raises(InvalidArgument, match=r"begins have shape \(1,\).* each of 2 steps"):
        ready_times(Communicator.local(1)[0], [[1, 2], [3, 4]], begins=[0])
    with pytest.raises(InvalidArgument, match="no later than its first arrival"):
        ready_times(Communicator.local(1)[0], [[1, 2]], begins=[1.5])
    assert ready_times(Communicator.local(1)[0], [[1, 2], [5, 9]], begins=[0.5, 3]) == [1.25, 3.75]
    with pytest.raises(InvalidArgument, match=r"shape \(3,\)"):
        ready_times(Communicator.local(1)[0], [1, 2, 3])


def test_ranks_of_different_speeds_agree_on_a_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Use four ranks from 30 % slower to 30 % faster; they must agree on costs, times and plans."""
    speeds = (0.7, 0.9, 1.1, 1.3)
    speed_of: dict[int, float] = {}  # by thread
    clock = time.perf_counter

    def skewed() -> float:
        return clock() * speed_of.get(threading.get_ident(), 1.0)

    monkeypatch.setattr(time, "perf_counter", skewed)
    numels = {f"layer{i}": 1000 * (1 + 7 * i % 11) for i in range(30)}

    def run(rank: int, communicator: Communicator) -> tuple[Costs, Plan]:
        speed_of[threading.get_ident()] = speeds[rank]
        costs = measure(communicator, Config(bits=4), spare_processors=True)
        noise = np.random.default_rng(rank).uniform(0.9, 1.1, (5, 30))
        arrivals = 1e-3 * speeds[rank] * np.cumsum(noise, axis=1) + 100 * rank
        plan = Plan.of(numels, ready_times(communicator, arrivals), costs)
        plan.agree(communicator)
        return costs, plan

    found = threads(4, run, timeout=60)
    assert len(set(found)) == 1
    assert len(found[0][1].groups) > 1


# ---- python -m cgx_ops plan ----------------------------------------------------------------------


def test_the_command_prints_a_table_and_a_verdict_and_saves_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = {f"layers.{i}.weight": [512, 512, 9] for i in range(10)} | {"head": 1000}
    model, saved = tmp_path / "model.json", tmp_path / "plan.json"
    model.write_text(json.dumps(shapes))
    arguments = ["plan", str(model), "--link", "1gbit", "--hosts", "4", "--save", str(saved)]
    assert __main__.main(arguments) == 0
    printed = capsys.readouterr().out
    for text in ("11 tensors, 23.6 M", "4 hosts", "1 Gbit/s", "per tensor", "whole", "planned"):
        assert text in printed
    assert "Verdict: 4 bits are faster; a planned step takes" in printed
    assert "\x1b" not in printed
    plan = Plan.load(saved)
    assert plan.names == tuple(shapes)
    assert plan.order == list(range(10, -1, -1))  # the last layer's gradient is ready first


def test_the_command_draws_the_timeline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "step.svg"
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(Unsupported, match="pip install matplotlib"):
        draw(path, "a step", [])
    with pytest.raises(InvalidArgument, match=r"step' has no ending: .* [.]png"):
        draw(path.with_suffix(""), "a step", [])
    monkeypatch.undo()
    pytest.importorskip("matplotlib").rcParams["svg.fonttype"] = "none"  # keep text as text
    assert __main__.main(["plan", "3000000", "5000000", "--plot", str(path)]) == 0
    assert f"The timeline is in {path}." in capsys.readouterr().out
    picture = path.read_text()
    for lane in ("compute", "encode", "link", "decode"):
        assert f">{lane}, predicted<" in picture
    assert "nothing is measured here" in picture
    for panel in ("exact (32 bits): predicted ", "compressed: predicted "):
        assert f">{panel}" in picture
    messages = timeline([[1], [0]], [10, 20], [0.02, 0.01], [10, 20], _COSTS)
    draw(path, "a step", messages, [(0.01, 0.013), (0.02, 0.025)])
    assert ">in flight, measured<" in path.read_text()


@pytest.mark.parametrize(
    ("link", "backward", "verdict"),
    [
        ("400gbit", "0.1", "Verdict: no difference; a planned step takes 1"),  # 0.5 ms of 101 ms
        ("400gbit", "0.0001", "Verdict: 4 bits are slower; a planned step takes "),
        ("1gbit", "0.0001", "Verdict: 4 bits are faster; a planned step takes "),
    ],
)
def test_the_command_compares_whole_steps(
    link: str, backward: str, verdict: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = ("1000000", "1000000")
    assert __main__.main(["plan", *tensors, "--link", link, "--backward", backward]) == 0
    assert verdict in capsys.readouterr().out


def test_the_command_plans_a_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "plan.json"
    arguments = ["plan", "4000000", "1000000", "--rate", "0.5", "--save", str(saved)]
    assert __main__.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "Verdict: entropy, rate 0.5 is faster; a planned step takes" in printed
    assert " at rate 0.5, " in printed
    row = next(line for line in printed.splitlines() if "entropy, rate 0.5   whole" in line)
    assert f"{5e6 * 0.5 / 8 / 2**20:.2f}" in row.split()
    assert Plan.load(saved).bits == (0.5, 0.5)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("no/such.json",), "no/such.json"),
        (("12x",), "12x"),
        ((1000, "--link", "fast"), "'fast' is not a valid rate"),
        ((1000, "--hosts", "1"), "--hosts"),
        ((1000, "--hosts", "9" * 400), "--hosts"),
        ((1000, "--link", "9" * 400 + "gbit"), "is not a valid rate"),
        ((1000, "--backward", "1e300"), "--backward"),
        ((1000, "--bits", "9"), "--bits"),
        ((1000, "--bits", "4", "--rate", "2"), "not allowed with argument --bits"),
    ],
)
def test_the_command_rejects_invalid_arguments(
    arguments: tuple, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        __main__.main(["plan", *map(str, arguments)])
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "more", "says"),
    [
        ("{}", (), "the model has no tensors"),
        ('{"a": -5}', (), "'a' is -5; it must be an integer >= 0"),
        ('{"a": [3.5, 2]}', (), "'a' is [3.5, 2]"),
        ('{"a": 1000, "a": 10}', (), "it has the name 'a' twice"),
        ("[" * 100_000, (), "is not a number of values or a JSON file"),
        (f'{{"a": {"9" * 400}}}', (), "numel is 999"),
        ('{"a": 1000}', ("--save", "/nonexistent/plan.json"), "/nonexistent"),
        ('{"a": 1000}', ("--plot", "plan.foo"), "foo"),
        ('{"a": 1000}', ("--backward", "100000"), "ready"),
        ('{"a": 1000}', ("--rate", "9"), "Config.rate is 9.0"),
    ],
)
def test_the_command_reports_errors_of_a_model(
    model: str, more: tuple[str, ...], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.json"
    path.write_text(model)
    try:
        status = __main__.main(["plan", str(path), *more])
    except SystemExit as end:  # of argparse
        status = end.code
    assert status == 2
    told = capsys.readouterr().err
    assert "python -m cgx_ops plan: " in told
    assert says in told


@pytest.mark.slow
def test_predicted_and_timed_steps_are_printed_side_by_side(tmp_path: Path) -> None:
    program = Path(__file__).parents[2] / "benchmarks/planned_steps.py"
    path = tmp_path / "report.json"
    mpirun(2, program, "--rounds", 2, "--backward", 0.02, "--json", path, timeout=100)
    results = json.loads(path.read_text())["results"]
    assert [row["groups"] for row in results][-1] == "planned"
    assert all(row["predicted_s"] > 0.02 < row["seconds"] for row in results)
    assert results[0]["messages"] == 161
