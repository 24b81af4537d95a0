"""Run `python -m cgx_ops` with these arguments, for mpirun() of launch.py."""

import sys

from cgx_ops.__main__ import main

sys.exit(main(sys.argv[1:]))
