"""Rank program: a group that is reconfigured without a lost newcomer, in many rounds.

    RANK=... WORLD_SIZE=4 run_torch_reconfigure_faults.py FOLDER ROUNDS     # from torch 2.14 on

In every round process 3 forks a newcomer, which joins the others' group and reduces with them. It
suffers a fault at a random moment, which may be in any phase of connecting or reducing: it is
killed, it is stopped for longer than the deadline, or (over TCP) nothing arrives at it for so long.
The others get an error in time, reconfigure without it, and reduce as in a fresh group. A newcomer
that lives gets an error, too. Prints where the faults were noticed.
"""

import collections
import contextlib
import datetime
import math
import os
import random
import signal
import sys
import threading
import time

import run_torch_reconfigure as group
from chaos import links
from chaos.resources import Resources, grown, used

from cgx_ops import Config
from cgx_ops.torch import BackendOptions

dist = group.dist
ROUNDS = int(sys.argv[2])
BREEDER, OTHERS, EVERYONE = 3, range(3), range(4)
DEADLINE = datetime.timedelta(seconds=2)
AWAY = 2.5  # seconds of a stop, and of a link that is away
# Seconds of a call whose peer is lost: each step has the deadline. Members meet, exchange four
# times and connect; gloo tries four times.
LONGEST = 10 * DEADLINE.total_seconds() + group.SOON
FAULTS = {"kill": 8, "stop": 1}  # weights
if os.environ.get("COMMUNICATOR_TYPE") == "TCP":
    FAULTS["blink"] = 1


def fault_of(turn: int) -> tuple[str, float]:
    """Return the fault of a round, and the seconds until it occurs."""
    rng = random.Random(turn)
    fault = rng.choices(list(FAULTS), list(FAULTS.values()))[0]
    return fault, 10 ** rng.uniform(-4, -0.7)


def start() -> None:
    options = BackendOptions(Config(bits=4, rounding="stochastic"), compress="all", seed=3)
    dist.init_process_group(
        "cgx", rank=group.RANK, world_size=group.SIZE, store=group.store, timeout=DEADLINE,
        enable_reconfigure=True, pg_options=options,
    )  # fmt: skip


def connect(uuid: int, ranks: range) -> None:
    handles = group.collect(uuid, ranks)
    dist._reconfigure(uuid, handles, timeout=DEADLINE).wait()


leaving = False


def reduce_until_an_error() -> None:
    while not leaving:
        group.digest()


# ---- The newcomer --------------------------------------------------------------------------------


def be_away(delay: float) -> None:
    """Lose what arrives at the connections of this moment."""
    time.sleep(delay)
    with links.away(group.store.port):
        time.sleep(AWAY)


def leave(*_: object) -> None:
    """Handle a signal: end the loop of reductions, if no fault has."""
    global leaving
    leaving = True


def newcomer(turn: int) -> None:
    """Join the others and reduce; end with status 0 after an error."""
    signal.signal(signal.SIGUSR1, leave)
    group.store = group.open_store()
    start()
    fault, delay = fault_of(turn)
    if fault == "blink":
        threading.Thread(target=be_away, args=(delay,), daemon=True).start()
    with contextlib.suppress(RuntimeError):
        connect(2 * turn + 1, EVERYONE)
        reduce_until_an_error()
    os._exit(0)


def breed(turn: int) -> None:
    """Fork a newcomer, let it suffer, and wait for its end."""
    child = os.fork()
    if child == 0:
        try:
            newcomer(turn)
        finally:
            os._exit(1)
    fault, delay = fault_of(turn)
    group.store.wait([f"handle {2 * turn + 1} {BREEDER}"], group.LIMIT)
    time.sleep(delay)
    if fault == "kill":
        os.kill(child, signal.SIGKILL)
    elif fault == "stop":
        os.kill(child, signal.SIGSTOP)
        time.sleep(AWAY)
        os.kill(child, signal.SIGCONT)
    else:
        time.sleep(AWAY)
    if fault != "kill":  # it may have been over before a deadline began
        time.sleep(DEADLINE.total_seconds())
        os.kill(child, signal.SIGUSR1)
    until = time.monotonic() + AWAY + LONGEST
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        assert time.monotonic() < until, f"the newcomer of round {turn} hangs after {fault}"
        time.sleep(0.001)
    status = os.waitstatus_to_exitcode(ended[1])
    assert status == (-signal.SIGKILL if fault == "kill" else 0), (turn, fault, status)
    group.store.set(f"gone {turn}", fault)


# ---- The others ----------------------------------------------------------------------------------


def play(turn: int, fresh: str) -> tuple[str, float]:
    """Return where the fault was noticed, while connecting or reducing, and when, in seconds."""
    noticed, begin, took = "connecting", time.monotonic(), 0.0
    try:
        connect(2 * turn + 1, EVERYONE)
        noticed, begin = "reducing", time.monotonic()
        reduce_until_an_error()
    except RuntimeError:
        took = time.monotonic() - begin
        assert took < fault_of(turn)[1] + AWAY + LONGEST, (turn, noticed, took)
    group.backend().abort()  # a rank that still waits must not wait for its deadline
    group.store.wait([f"gone {turn}"], group.LIMIT)
    connect(2 * turn + 2, OTHERS)
    assert group.digest() == fresh, f"round {turn}: not as in a fresh group"
    return f"{fault_of(turn)[0]}, {noticed}", took


def measured() -> tuple[dict[str, int], Resources]:
    time.sleep(0.1)  # the old gloo ends on another thread
    return used(), Resources()


def main() -> None:
    if group.RANK == BREEDER:
        for turn in range(1, ROUNDS + 1):
            group.store.wait([f"begin {turn} {rank}" for rank in OTHERS], group.LIMIT)
            breed(turn)
        print("OK", flush=True)
        return
    start()
    connect(0, OTHERS)
    fresh, counts, before = group.digest(), collections.Counter[str](), None
    longest: dict[str, float] = {}
    for turn in range(1, ROUNDS + 1):
        group.store.set(f"begin {turn} {group.RANK}", "")
        what, took = play(turn, fresh)
        counts[what] += 1
        longest[what] = max(longest.get(what, 0), round(took, 1))
        if turn == math.ceil(ROUNDS / 4):
            before = measured()
    assert before is not None
    after = measured()
    growth = grown(before[0], after[0]) or after[1].more_than(before[1])
    print(f"rank {group.RANK}: {dict(sorted(counts.items()))}; growth: {growth or 'none'}")
    print(f"seconds until the latest was noticed: {longest}")
    group.meet("end", OTHERS)
    dist.destroy_process_group()
    print("OK", flush=True)


if __name__ == "__main__":
    main()
