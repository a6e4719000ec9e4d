"""The commands of ``python -m ds_zipccl``.

A command is a module with ``add_arguments(parser)`` and ``main(args) -> int`` (the exit status). Modules that the parser needs
import torch inside their functions: ``--help`` must not wait for it.
"""


class ToolError(RuntimeError):
    """A command cannot do what was asked; the message is for the user, who sees no traceback."""
