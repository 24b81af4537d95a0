"""Chaos: collectives under faults, round after round, each from a seed.

    PYTHONPATH=tests python -m chaos --rounds 1000 --seed 1 --transport shm

A round takes 2 to 4 processes, makes a communicator of them, runs traffic on it and does something
bad to one of them. Afterwards every survivor must hold the oracle's bits or an error of the right
kind in time, be usable, and have left nothing behind.

    rounds.py    what a round is: everything follows from transport and seed
    faults.py    the table of faults, and what a rank does to itself
    traffic.py   the table of traffic: calls whose results the oracle knows
    worker.py    a rank: plays rounds, then checks its own process
    member.py    a rank in one round
    zygote.py    imports once, then forks workers for rounds over shared memory or TCP
    pool.py      the processes that rounds are played with: forked ones, or jobs of mpirun
    referee.py   leads one round and collects what its ranks tell
    checks.py    what must hold afterwards
    machine.py   the machine: how late it wakes sleepers, what is left, where a process is stuck
    report.py    the table
"""
