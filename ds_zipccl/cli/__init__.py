"""The commands of ``python -m ds_zipccl``, one file each."""
