"""SaveHookState: a callback that saves the communication hook's state beside Trainer's checkpoints.

    trainer = transformers.Trainer(...)
    trainer.add_callback(cgx_ops.torch.integrations.transformers.SaveHookState(trainer))

Trainer saves no state of communication hooks. Nothing else of cgx_ops imports transformers.
"""

# Where transformers is not installed pyright takes this file for it.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from pathlib import Path
from typing import Any

import torch
import transformers

from cgx_ops.torch.integrations import trainer_state


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
        hook = trainer_state.save_for_all_ranks(self._trainer.model_wrapped)
        if hook is not None and args.should_save:  # of every node with save_on_each_node
            torch.save(hook, _file(args, state))

    def on_train_begin(
        self,
        args: transformers.TrainingArguments,
        state: transformers.TrainerState,
        control: transformers.TrainerControl,
        **_: Any,
    ) -> None:
        """Read it, in a run that is resumed from a checkpoint that has it."""
        if (file := _file(args, state)).exists():
            trainer_state.restore(self._trainer.model_wrapped, torch.load(file))


def _file(args: transformers.TrainingArguments, state: transformers.TrainerState) -> Path:
    return Path(str(args.output_dir), f"checkpoint-{state.global_step}", "cgx_ops.pt")
