"""Measurements of codecs, collectives, trainings and weight sync, and the programs and figures used for comparison.

No user job runs these modules: ``python -m ds_zipccl bench`` does.
"""
