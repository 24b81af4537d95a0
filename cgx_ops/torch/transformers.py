"""SaveHookState: a callback that saves the communication hook's state beside Trainer's checkpoints.

    trainer = transformers.Trainer(...)
    trainer.add_callback(cgx_ops.torch.transformers.SaveHookState(trainer))

Trainer saves no state of communication hooks. Nothing else of cgx_ops imports transformers.
"""

from pathlib import Path
from typing import Any

import torch
import transformers  # pyright: ignore[reportMissingImports]

from cgx_ops.torch.ddp_unasked import hook_state


class SaveHookState(transformers.TrainerCallback):
    """Save and restore the state of the hook of cgx_ops, so that a resumed run has the same bits.

    The file, cgx_ops.pt in the folder of the checkpoint, is one for all ranks: residuals, if there
    are any, are made their mean over the ranks when it is saved, and it loads on any number of
    ranks. A checkpoint is looked for in `output_dir`, by the number of its step. A model without a
    hook of cgx_ops has no state; nothing happens then.

    Args:
        trainer: to which the callback is added: callbacks see the model only as it was before
            DistributedDataParallel.
    """

    def __init__(self, trainer: transformers.Trainer) -> None:
        self._trainer = trainer

    def on_save(
        self,
        args: transformers.TrainingArguments,
        state: transformers.TrainerState,
        control: transformers.TrainerControl,
        **_: Any,
    ) -> None:
        """Write the state; Trainer calls this on all ranks."""
        if hook := hook_state(self._trainer.model_wrapped):
            if hook.keeps_residuals():
                hook.consolidate()
            if state.is_world_process_zero:
                torch.save(hook.state_dict(), _file(args, state))

    def on_train_begin(
        self,
        args: transformers.TrainingArguments,
        state: transformers.TrainerState,
        control: transformers.TrainerControl,
        **_: Any,
    ) -> None:
        """Read it, in a run that is resumed from a checkpoint that has it."""
        if (file := _file(args, state)).exists() and (hook := hook_state(self._trainer.model_wrapped)):
            hook.load_state_dict(torch.load(file))


def _file(args: transformers.TrainingArguments, state: transformers.TrainerState) -> Path:
    return Path(args.output_dir, f"checkpoint-{state.global_step}", "cgx_ops.pt")
