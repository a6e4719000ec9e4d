"""Evidence: measurements of codecs, collectives, trainings and weight sync, and the programs and figures that they are compared with.

No module here runs on a user's job. ``python -m ds_zipccl bench``, ``plan --clusters|--validate`` and ``doctor --check`` start them.
"""
