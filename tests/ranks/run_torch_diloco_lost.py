"""Rank program: outer loops that lose ranks. Runs scenarios one after the other.

    run_torch_diloco_lost.py PORT FOLDER < scenarios.json

Forks a process for each rank of a scenario, which is faster than starting it. A store listens at
PORT. Prints a line of JSON for each scenario: how many averages were applied when each group began.
"""

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch.distributed
from torch_diloco_lost.scenario import Loss, Member, Scenario

dist: Any = torch.distributed  # its annotations refer to torch internals
DEADLINE = 120.0  # of a scenario, whose waits end after 20 s each


def play(scenario: Scenario, index: int, number: int, port: int, report: Path) -> None:
    """Be a rank, in a forked process; never returns."""
    status = 1
    try:
        # Only this process's copy; the parent must not start threads.
        store: Any = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        member = Member(scenario, number, dist.PrefixStore(f"scenario {index}", store))
        member.run()
        report.write_text(json.dumps(member.applied))
        status = 0
    except BaseException:
        report.write_text(traceback.format_exc())
    finally:
        os._exit(status)


def ended(children: dict[int, int]) -> dict[int, Any]:
    """Return the status of each child; kill those that are late."""
    found: dict[int, Any] = {}
    deadline = time.monotonic() + DEADLINE
    while len(found) < len(children):
        for number, process in children.items():
            if number in found:
                continue
            if time.monotonic() > deadline:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
                found[number] = "late"
                continue
            pid, status = os.waitpid(process, os.WNOHANG)
            if pid:
                found[number] = os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    return found


def main() -> None:
    port, folder = int(sys.argv[1]), Path(sys.argv[2])
    for index, line in enumerate(sys.stdin.read().splitlines()):
        given = json.loads(line)
        scenario = Scenario(**given | {"losses": [Loss(**each) for each in given["losses"]]})
        numbers = sorted({n for members in scenario.groups for n in members})
        reports = {n: folder / f"{index}-{n}" for n in numbers}
        children = {}
        for n in numbers:
            child = os.fork()
            if not child:
                play(scenario, index, n, port, reports[n])
            children[n] = child
        victims = {loss.victim for loss in scenario.losses} - {None}
        wrong = {
            n: f"{status}: {reports[n].read_text() if reports[n].exists() else ''}"
            for n, status in ended(children).items()
            if status != (-signal.SIGKILL if n in victims else 0)
        }
        applied = {n: json.loads(reports[n].read_text()) for n in numbers
                   if n not in victims and not wrong}  # fmt: skip
        print(json.dumps({"wrong": wrong, "applied": applied}), flush=True)


if __name__ == "__main__":
    main()
