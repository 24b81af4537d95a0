"""Rank program: PowerSGD, Deep Gradient Compression, and PyTorch's features around hooks.

Covers PyTorch's wrappers and optimizers, post-local SGD, averaging optimizers, outer loops,
combinations of these, and steps that fail.
"""

import checks
import torch.distributed as dist
import torch_deep_gradient.state
import torch_deep_gradient.values
import torch_hooks.again
import torch_hooks.ambient
import torch_hooks.averager
import torch_hooks.composed
import torch_hooks.diloco
import torch_hooks.diloco_ranks
import torch_hooks.failing_rank
import torch_hooks.grad_scaler
import torch_hooks.names
import torch_hooks.optim
import torch_hooks.together
import torch_power_sgd.state
import torch_power_sgd.values


def main() -> None:
    dist.init_process_group("cgx")
    checks.run(
        checks.of_modules(
            torch_power_sgd.values,
            torch_power_sgd.state,
            torch_deep_gradient.values,
            torch_deep_gradient.state,
            torch_hooks.composed,
            torch_hooks.averager,
            torch_hooks.optim,
            torch_hooks.diloco,
            torch_hooks.diloco_ranks,
            torch_hooks.together,
            torch_hooks.again,
            torch_hooks.ambient,
            torch_hooks.failing_rank,
            torch_hooks.grad_scaler,
            torch_hooks.names,
        )
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
