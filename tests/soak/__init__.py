"""Soak: the same calls for long. Memory, descriptors, threads and time a call must stay flat.

PYTHONPATH=tests python -m soak --scale 0.01 --transport shm

__main__.py          the command: launches, compares, prints the table
loads.py             the table of loads
../ranks/run_soak.py a rank: runs loads and prints what it measured, window by window
"""
