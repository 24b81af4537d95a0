"""`python -m cgx_ops` with the arguments given here, as mpirun() of launch.py starts programs."""

import sys

from cgx_ops.__main__ import main

sys.exit(main(sys.argv[1:]))
