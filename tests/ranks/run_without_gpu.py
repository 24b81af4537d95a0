"""Run a program for CUDA without a GPU, in place of `python PROGRAM ARGUMENT...`.

support/no_gpu.py describes the stand-in for the GPU. Fewer sizes and bits are enough here.
"""

import os
import runpy
import sys
from pathlib import Path

from support import cuda_cases, no_gpu

no_gpu.install()
cuda_cases.SIZES, cuda_cases.BITS = (0, 17, 513), (2, 32)
sys.argv = sys.argv[1:]
sys.path.insert(0, os.fspath(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
