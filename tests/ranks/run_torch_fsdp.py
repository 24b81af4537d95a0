"""Rank program: FSDP2 with compressed collectives, in all its training modes.

    mpirun -np 2 python run_torch_fsdp.py CHECK ...

Some checks need four ranks (see torch/test_fsdp.py). Every message that FSDP hands to the core
is recorded and compared with the oracle's. The checks are in torch_fsdp/.
"""

import checks
import torch.distributed as dist
from support import torch_cases as tc
from torch_fsdp import (
    adaptive,
    ambient,
    differences,
    feedback,
    messages,
    refusals,
    replica_states,
    replicas,
    rules,
    training,
)


def main() -> None:
    tc.forget_compiled_graphs()
    dist.init_process_group("cgx")
    found = checks.of_modules(messages, training, rules, refusals, feedback, adaptive, ambient)
    checks.run(found | checks.of_modules(differences, replicas, replica_states))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
