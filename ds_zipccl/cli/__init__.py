"""The commands of ``python -m ds_zipccl``, one file each.

A file has ``add_arguments(parser)`` and ``main(args) -> int`` (the exit status). Its docstring is the text of ``--help``.
"""
