"""The figures of this package in the logs of Hugging Face's Trainer. This module alone imports transformers."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from ds_zipccl.telemetry import counters, monitor


class ZipcclCallback(TrainerCallback):
    """Adds this rank's figures to the training logs: ``zipccl/saved_bytes``, ``zipccl/ratio``, ``zipccl/seconds_saved`` once a trial has
    measured any, and the others that DeepSpeed's monitors get.

    :meth:`add_to` puts it before the reporters, such as TensorBoard. In ``Trainer(callbacks=[ZipcclCallback])`` it comes after them: only
    ``trainer.state.log_history`` and the printed lines have the figures.
    """

    @classmethod
    def add_to(cls, trainer: Any) -> None:
        """Add the callback to a Trainer, so that everything that it logs to gets the figures."""
        trainer.add_callback(cls)
        callbacks = trainer.callback_handler.callbacks
        callbacks.insert(0, callbacks.pop())

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Add the figures to ``logs``, which later callbacks get too; none to those of evaluations, or where nothing was sent."""
        if logs is None or not counters.rows() or any(name.startswith("eval_") for name in logs):
            return
        logs.update({f"zipccl/{name}": value for name, value in monitor.figures("trainer").items()})
        if state.log_history:  # its entry is a copy that was made before
            state.log_history[-1] |= logs
