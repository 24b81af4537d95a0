"""Benchmarks that run anywhere: `mpirun -n 2 python -m cgx_ops bench` times allreduce.

    measure    interleaved rounds of contenders; median and quartiles of the slowest rank
    peers      the contenders: other libraries, and cgx_ops
    results    one contender at one size, derived quantities, and the table
    verdict    whether compression is faster than exact allreduce
    plot       the measured times as a picture
    report     results as tables for terminals and Markdown, and as JSON
    allreduce  the command

`import cgx_ops` imports none of these.
"""
