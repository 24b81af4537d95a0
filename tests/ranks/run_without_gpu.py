"""Run a program for CUDA without a GPU, in place of `python PROGRAM ARGUMENT...`.

support/no_gpu.py describes the stand-in for the GPU. Fewer and smaller sizes are enough here.
"""

import os
import runpy
import sys
from pathlib import Path

from support import cuda_cases, cuda_core, no_gpu

no_gpu.install()
cuda_cases.SIZES, cuda_cases.BITS, cuda_core.NUMEL = (0, 17, 513), (2, 32), 20_000
sys.argv = sys.argv[1:]
sys.path.insert(0, os.fspath(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
