"""Schedules: how frames travel between the ranks of a group.

A schedule is an object with ``run(ctx, inputs, outputs)``, see :class:`ds_zipccl.comm.request.Schedule`. ``run`` gets flat contiguous
tensors of one dtype on one device, in inference mode, and blocks until the outputs are written.
"""
