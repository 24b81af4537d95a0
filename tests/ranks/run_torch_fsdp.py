"""Rank program: FSDP2 whose collectives are compressed, in every way that it trains.

    mpirun -np 2 python run_torch_fsdp.py 2        # the checks that need two ranks
    mpirun -np 4 python run_torch_fsdp.py 4        # HSDP, two by two, and others
    mpirun -np 4 python run_torch_fsdp.py "4 feedback"

Every message that FSDP hands to the core is recorded, and compared with the oracle's. The checks
are in torch_fsdp/.
"""

import sys
import time

import torch.distributed as dist
import torch_cases as tc
from torch_fsdp import feedback, messages, refusals, rules, training

CHECKS = {
    "2": (
        messages.messages_equal_the_oracle,
        messages.what_forward_sees,
        messages.other_layouts,
        training.every_way_to_train,
        training.resumed_training_is_the_same_to_the_bit,
        rules.rules_by_name,
        refusals.bad_input,
        refusals.exact_with_a_warning,
        refusals.compressing_again,
        refusals.ranks_that_disagree,
        *feedback.CHECKS,
    ),
    "4": (
        messages.messages_equal_the_oracle,
        messages.hybrid,
        messages.smaller_mesh_after_forward,
        feedback.feedback_to_the_bit,
    ),
    "4 feedback": (
        *feedback.CHECKS,
        feedback.consolidated_residuals_fit_any_number_of_shards,
    ),
}


def main() -> None:
    tc.forget_compiled_graphs()
    dist.init_process_group("cgx")
    for check in CHECKS[sys.argv[1]]:
        start = time.perf_counter()
        check()
        print(f"ok {check.__name__}: {time.perf_counter() - start:.1f} s", flush=True)
    dist.destroy_process_group()
    print("ok all")


if __name__ == "__main__":
    main()
