"""The commands of ``python -m ds_zipccl`` on a user's job, one file each; measurements are in ``benchmarks``, which they do not import.

A command has ``add_arguments(parser)`` and ``main(args) -> int`` (the exit status). Its docstring is the text of ``--help``. Modules that
the parser needs import torch inside their functions, because ``--help`` must not wait for torch.
"""
