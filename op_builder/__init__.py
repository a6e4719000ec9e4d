"""Op builders of ds_zipccl, installed as ``ds_zipccl.op_builder``; import them by that name only.

This file holds nothing else: ``import deepspeed`` executes whatever top-level ``op_builder`` it finds on ``sys.path``.
"""
