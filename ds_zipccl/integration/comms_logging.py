"""DeepSpeed's comms logger: its summary has logical and wire bytes of coded calls too."""

from __future__ import annotations

import functools
import inspect
from types import ModuleType
from typing import Any

from ds_zipccl.integration import hook_points
from ds_zipccl.telemetry import comms_log

_LOG_ALL, _RESET = "comms_logger.log_all", "comms_logger.reset_data"


def watch(module: ModuleType) -> None:
    """Let ``log_summary()`` and ``reset_log()`` of ``deepspeed.comm`` serve :mod:`ds_zipccl.telemetry.comms_log` too. Repeating does
    nothing.

    Args:
        module: ``deepspeed.comm.comm``.
    """
    logger = getattr(module, "comms_logger", None)
    log_all, reset_data = hook_points.fitting(_LOG_ALL, logger), hook_points.fitting(_RESET, logger)
    if logger is None or log_all is None or reset_data is None or hasattr(log_all, "ds_zipccl"):
        return
    signature = inspect.signature(log_all)

    @functools.wraps(log_all)
    def summarize(*args: Any, **kwargs: Any) -> Any:
        found = log_all(*args, **kwargs)
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        text = comms_log.render() if given.arguments["print_log"] else ""
        if text:
            print(text, flush=True)
        coded = comms_log.summary()
        if coded and isinstance(found, dict):
            found[comms_log.KEY] = coded
        return found

    @functools.wraps(reset_data)
    def reset(*args: Any, **kwargs: Any) -> Any:
        comms_log.reset()
        return reset_data(*args, **kwargs)

    summarize.ds_zipccl = True  # type: ignore[attr-defined]
    logger.log_all, logger.reset_data = summarize, reset
