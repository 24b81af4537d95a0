"""Chaos tests: rounds of collectives under faults, each determined by a seed.

    PYTHONPATH=tests python -m chaos --rounds 1000 --seed 1 --transport shm

A round starts 2 to 4 processes, creates their communicator, runs traffic on it and applies a
fault to one of them. Afterwards every survivor must have the oracle's bits, or an error of the
right kind in time; it must be usable and must have left nothing behind.

        rounds.py    the definition of a round, which follows from transport and seed
        faults.py    the table of faults, and how a rank applies them to itself
        links.py     faults of TCP connections
        traffic.py   the table of traffic: calls with results from the oracle
    worker.py    a rank: plays rounds, then checks its own process
    member.py    a rank in one round
    zygote.py    imports once, then forks workers for rounds over shared memory or TCP
    pool.py      the processes that rounds are played with: forked ones, or jobs of mpirun
        referee.py   runs one round and collects the reports of its ranks
        checks.py    conditions that must hold after a round
        machine.py   the machine: wake-up delays, leftovers, where a process is stuck
    report.py    the table
"""
