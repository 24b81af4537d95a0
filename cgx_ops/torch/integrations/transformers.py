"""SaveHookState: a callback that saves the communication hook's state with Trainer's checkpoints.

Trainer does not save it. No other module of cgx_ops imports transformers.
"""

# Without transformers, pyright resolves the import to this file.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from pathlib import Path
from typing import Any

import torch
import transformers

from cgx_ops.torch.integrations import trainer_state


class SaveHookState(transformers.TrainerCallback):
    """Trainer callback that saves the hook's state, so that a run resumes bit for bit.

    The file `cgx_ops.pt` in the checkpoint's folder is the same for all ranks and loads on any
    number of ranks: on saving, residuals, if there are any, are replaced by their mean over the
    ranks. On resuming, the callback looks in `output_dir` for the checkpoint of the current step.
    For a model without a hook of cgx_ops, the callback does nothing.

    Args:
        trainer: the trainer that the callback is added to. Callbacks otherwise see the model
            without DistributedDataParallel.

    Example:
        >>> import tempfile
        >>> import torch
        >>> import transformers
        >>> from cgx_ops.torch.integrations.transformers import SaveHookState
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     trainer = transformers.Trainer(
        ...         model=torch.nn.Linear(8, 1),
        ...         args=transformers.TrainingArguments(folder, use_cpu=True, report_to=[]),
        ...     )
        ...     trainer.add_callback(SaveHookState(trainer))
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
        """Write the state. Trainer calls this on all ranks.

        Args:
            args: the training arguments.
            state: Trainer's state, whose step names the checkpoint.
            control: unused.
        """
        hook = trainer_state.save_for_all_ranks(self._trainer.model_wrapped)
        if hook is not None and args.should_save:  # one rank, or one on each node
            torch.save(hook, _file(args, state))

    def on_train_begin(
        self,
        args: transformers.TrainingArguments,
        state: transformers.TrainerState,
        control: transformers.TrainerControl,
        **_: Any,
    ) -> None:
        """Restore the state if the run resumes from a checkpoint that has it.

        Args:
            args: the training arguments.
            state: Trainer's state, whose step names the checkpoint.
            control: unused.
        """
        if (file := _file(args, state)).exists():
            trainer_state.restore(self._trainer.model_wrapped, torch.load(file))


def _file(args: transformers.TrainingArguments, state: transformers.TrainerState) -> Path:
    return Path(str(args.output_dir), f"checkpoint-{state.global_step}", "cgx_ops.pt")
