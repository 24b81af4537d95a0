"""Benchmarks that run anywhere: `mpirun -n 2 python -m cgx_ops bench` times allreduce.

    measure    interleaved rounds over contenders; median and quartiles of the slowest rank
    peers      the contenders: what a user would take instead, and cgx
    results    one contender at one size, and what follows from it
    report     findings as tables for terminals and Markdown, and as JSON
    allreduce  the command

Nothing here is imported by `import cgx_ops`.
"""
