"""Soak tests: repeated calls, with constant memory, descriptors, threads and time per call.

PYTHONPATH=tests python -m soak --scale 0.01 --transport shm

__main__.py          the command: launches, compares, prints the table
loads.py             the table of loads
    ../ranks/run_soak.py a rank: runs loads and prints measurements, window by window
"""
