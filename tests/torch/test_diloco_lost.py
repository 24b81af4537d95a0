"""Outer loops that lose ranks within an average: what the others continue from, bit for bit."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed
from support import launch

dist: Any = torch.distributed  # its annotations refer to torch internals
PROGRAM = Path(__file__).parents[1] / "ranks" / "run_torch_diloco_lost.py"
# Whether the average that failed is applied: always, never, or either.
APPLIED = {
    "before send": (False,),
    "sending": (False, True),
    "before confirmation": (False, True),
    "after confirmation": (True,),
    "after applying": (True,),
    "one without means": (False,),
    "one without confirmation": (True,),
    "all without confirmation": (True,),
}


def play(folder: Path, scenarios: list[dict[str, Any]]) -> list[list[bool]]:
    """Run scenarios; return for each whether the averages that failed were applied."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {"CGX_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONPATH": launch.python_path(), "CGX_TIMEOUT": "20"}
    lines = "\n".join(map(json.dumps, scenarios))
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", PROGRAM, str(store.port), str(folder)],
        input=lines, env=os.environ | environment, capture_output=True, text=True, check=False,
        timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = []
    for scenario, line in zip(scenarios, done.stdout.splitlines(), strict=True):
        report = json.loads(line)
        assert not report["wrong"], (scenario, report["wrong"], done.stderr[-4000:])
        victims = {loss["victim"] for loss in scenario["losses"]}
        stays = min(set(range(scenario["size"])) - victims)  # in all groups
        applied, outcome = report["applied"][str(stays)], []
        trained = [loss for loss in scenario["losses"] if loss["average"]]
        for loss, before, after in zip(trained, applied[:-1], applied[1:], strict=True):
            is_applied = after == before + loss["average"]
            assert is_applied or after == before + loss["average"] - 1, (scenario, applied)
            assert is_applied in APPLIED.get(loss["fault"], (False, True)), (scenario, applied)
            outcome.append(is_applied)
        found.append(outcome)
    return found


SETTINGS: list[dict[str, Any]] = [
    {},
    {"fragments": 3, "delay": 1, "alpha": 0.5},
    {"fragments": 3, "feedback": False, "dtype": "bfloat16"},
    {"delay": 2, "alpha": 0.5, "dtype": "bfloat16", "carrier": "c10d"},
]
IN_REGROUP = ["comparing", "before progress", "after progress"]
IN_REGROUP += ["first parameter", "third parameter", "last parameter"]
LARGE, SLOW = pytest.mark.exhaustive, pytest.mark.slow
SIZES = [3, pytest.param(2, marks=SLOW), *(pytest.param(size, marks=LARGE) for size in (4, 5))]


def lost(average: int, victim: int | None, fault: str, joins: int = 0, **more: Any) -> Any:
    return {"average": average, "victim": victim, "fault": fault, "joins": joins, **more}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", SIZES)
def test_lost_in_each_phase(size: int, tmp_path: Path) -> None:
    """Check what all ranks continue from, for each victim in turn."""
    scenarios = []
    for i, fault in enumerate(APPLIED):
        for j, settings in enumerate(SETTINGS):
            loss = lost(1 + (i + j + 1) % 3, (i + j) % size, fault)
            scenarios.append({"size": size, "losses": [loss], **settings})
    play(tmp_path, scenarios)


@SLOW
@pytest.mark.timeout(300)
def test_new_members(tmp_path: Path) -> None:
    """Let one or two join after a loss, or without one; another is lost in the next group."""
    scenarios = []
    for i, settings in enumerate(SETTINGS):
        for deferred in (False, True):
            more = {"deferred": deferred, **settings}
            for fault in ("one without means", "one without confirmation"):
                losses = [lost(2, i % 3, fault, joins=1 + i % 2), lost(2, 3, "before send")]
                scenarios.append({"size": 3, "losses": losses, **more})
            scenarios.append({"size": 2, "losses": [lost(2, None, "none", joins=1)], **more})
    play(tmp_path, scenarios)


@SLOW
@pytest.mark.timeout(300)
def test_lost_twice_in_a_row(tmp_path: Path) -> None:
    """Lose a rank in regroup(), or in the first average after it."""
    scenarios = []
    for i, fault in enumerate(IN_REGROUP):
        for first in ("one without means", "one without confirmation"):
            settings = SETTINGS[i % len(SETTINGS)]
            twice = [lost(2, 3, first, joins=i % 2), lost(0, 1 + i % 2, fault, joins=i % 2)]
            scenarios.append({"size": 4, "losses": twice, **settings})
    for i, settings in enumerate(SETTINGS):
        twice = [lost(2, i % 4, "after confirmation"), lost(2, (i + 1) % 4, "sending")]
        scenarios.append({"size": 4, "losses": twice, "seed": i, **settings})
    play(tmp_path, scenarios)


@SLOW
@pytest.mark.timeout(300)
def test_restored_members(tmp_path: Path) -> None:
    """Restore one from a checkpoint while the others have an average that it does not have."""
    delayed = (SETTINGS[1], SETTINGS[3])  # so that the average is pending
    scenarios = [
        {"size": 4, "losses": [lost(1, 3, fault, restores=1)], **settings}
        for settings in delayed
        for fault in ("one without means", "one without confirmation", "after applying")
    ]
    play(tmp_path, scenarios)
    confirmed = [
        {"size": 3, "losses": [lost(1, None, "none", restores=restores)], **settings}
        for settings in delayed
        for restores in range(3)
    ]
    assert play(tmp_path, confirmed) == [[True]] * len(confirmed)


@pytest.mark.skipif(
    not hasattr(dist, "_reconfigure"), reason="torch reconfigures groups from 2.14 on"
)
@pytest.mark.timeout(300)
def test_reconfigured_groups(tmp_path: Path) -> None:
    """Let the group itself change its members, in place of a new group."""
    scenarios = []
    for settings in SETTINGS[:3]:  # not the carrier "c10d", which finds no ranks that are added
        more = {"reconfigures": True, **settings}
        scenarios += [{"size": 3, "losses": [lost(2, 2, fault)], **more} for fault in APPLIED]
        grows = [lost(2, 2, "one without confirmation", joins=2), lost(1, 3, "before send")]
        twice = [lost(2, 2, "one without means", joins=1), lost(0, 1, IN_REGROUP[3], joins=1)]
        scenarios.append({"size": 3, "losses": grows, **more})
        scenarios.append({"size": 3, "losses": twice, "deferred": True, **more})
        scenarios.append({"size": 2, "losses": [lost(2, None, "none", joins=1)], **more})
    play(tmp_path, scenarios)


@SLOW
@pytest.mark.timeout(300)
def test_killed_at_any_time(tmp_path: Path) -> None:
    """Kill a rank at random times within averages of large messages.

    Not in the first average of a group: the carrier "c10d" makes a gloo group in it, and gloo tries
    to connect to a lost rank for up to five timeouts.
    """
    scenarios = [
        {
            "size": 3, "losses": [lost(2, seed % 3, "sending"), lost(2, (seed + 1) % 3, "sending")],
            "width": 256, "seed": seed, **SETTINGS[seed % len(SETTINGS)],
        }
        for seed in range(12)
    ]  # fmt: skip
    applied = [each for outcome in play(tmp_path, scenarios) for each in outcome]
    assert set(applied) == {False, True}
