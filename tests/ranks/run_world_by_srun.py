"""run_world.py with the variables that srun sets in place of torchrun's."""

import os
import runpy
from pathlib import Path

for theirs, ours in (("RANK", "SLURM_PROCID"), ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS")):
    os.environ[ours] = os.environ.pop(theirs)
runpy.run_path(str(Path(__file__).with_name("run_world.py")))
