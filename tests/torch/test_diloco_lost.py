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
        applied = report["applied"]["0"] if "0" in report["applied"] else report["applied"]["1"]
        outcome = []
        for loss, before, after in zip(scenario["losses"], applied, applied[1:], strict=False):
            is_applied = after == before + loss["average"]
            assert is_applied or after == before + loss["average"] - 1, (scenario, applied)
            assert is_applied in APPLIED[loss["fault"]], (scenario, applied)
            outcome.append(is_applied)
        found.append(outcome)
    return found


SETTINGS: list[dict[str, Any]] = [
    {},
    {"fragments": 3, "delay": 1, "alpha": 0.5},
    {"fragments": 3, "feedback": False, "dtype": "bfloat16"},
    {"delay": 2, "alpha": 0.5, "dtype": "bfloat16", "carrier": "c10d"},
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_lost_in_each_phase(size: int, tmp_path: Path) -> None:
    scenarios = []
    for i, fault in enumerate(APPLIED):
        for j, settings in enumerate(SETTINGS):
            loss = {"average": 1 + (i + j) % 3, "victim": size - 1 - j % min(2, size - 1), "fault": fault}
            scenarios.append({"size": size, "losses": [loss], **settings})
    play(tmp_path, scenarios)
