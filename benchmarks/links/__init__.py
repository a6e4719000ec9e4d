"""Backends of ``bench comm`` and ``bench train``, and the one that runs the schedules of NCCL groups on CPUs."""

#: The backend of :mod:`ds_zipccl.benchmarks.links.slots`, and variables of its ranks: the number of the node; the file
#: to which rank 0 writes :attr:`Transport.between` at the end.
SLOTS, NODE, COUNTED = "slots", "DS_ZIPCCL_SLOTS_NODE", "DS_ZIPCCL_SLOTS_COUNTED"
