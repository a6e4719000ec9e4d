"""What the commands of :mod:`ds_zipccl.cli` share: cases, trials, tables, pictures.

Modules that the parser needs import torch inside their functions, because ``--help`` must not wait for torch.
"""


class ToolError(RuntimeError):
    """A command cannot do its task; the user sees the message without a traceback."""
