"""How, on a device: schedules whose frames stay in device memory and travel by the backend's collectives, in the order of streams.

The rule for all of them: a call puts its work on streams, on the caller's thread, in program order, on the caller's group. No thread, and
no stream that waits for work which the calling thread has not put on a stream already. Only :mod:`.sizes` waits on the host.

A rank that fails inside an operation, after its agreement, raises at once and sends nothing. The hosts of the other ranks go on, and their
streams wait in the backend's collective. Their next agreement raises after the group's timeout, or the backend's watchdog ends the job
first.
"""
