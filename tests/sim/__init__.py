"""A GPU and an NCCL to test against without either: n ranks as threads of one process.

Code for CUDA tensors and NCCL groups runs here unchanged: tensors say ``device.type == "cuda"``, streams and events are those of
``torch.cuda``, groups those of ``torch.distributed``. The simulator knows no library under test; ``on_sim/world.py`` puts one on it.
A program that would hang, race or read freed memory on hardware fails with the places of both parties::

    def program(rank, ranks, numel):                   # as for tests/support/ranks.py
        words = torch.ones(numel, device=f"cuda:{rank}")
        dist.all_reduce(words, async_op=True).wait()
        return words.sum().item()

    for seed in range(100):
        outcome = world.run(program, 4, 1000, seed=seed, modes=world.Modes(one_queue=True))
        assert outcome.values == [4000] * 4
        assert len(outcome.counters[0].waits) == 1     # the item()

A run raises :class:`sim.scheduler.Fault`; its ``kind`` is one of these:

=================  ================================================================================================================
race               two accesses of a byte, one of them a write, without an order by streams, events or waits of the host
would hang         ranks call a collective with different kinds, dtypes, counts, roots or reductions
may deadlock       ranks issue operations of two groups in two orders
deadlock           no host and no stream can move; the message is the wait-for graph
overlap, tensor    an input that overlaps the output; a tensor that is not contiguous, or not on the GPU
device             a tensor, stream or event of another rank
capture            a wait or a query while a graph is captured
undeclared         a kernel wrote memory that its launch did not name (``Modes.declared``)
operation          an operation of a stream raised
memory, stuck      no memory left; a rank blocks in a call that is none of the simulator's
unsupported        torch operations that change a tensor's memory, such as ``resize_``
=================  ================================================================================================================

=====================  ========================================================================================
``world.py``           ``run``, machines and their properties
``scheduler.py``       whose turn it is; deadlocks
``device.py``          launches, Python functions as kernels, host waits, counters
``streams.py``         streams, events, graphs, flags; ``cuda.py`` has the functions of torch.cuda
``memory.py``          the allocator
``tensor.py``          tensors of the GPU and pinned memory
``races.py``           vector clocks
``communicator.py``    collectives; ``nccl.py`` has the rules and the process group
``mistakes.py``        whether a few seeds notice a mistake
=====================  ========================================================================================

Not simulated: time, autograd of GPU tensors, memory that the host reads without torch (through ``data_ptr`` or a numpy view that was made
earlier: there the poison alone shows a mistake), sends and receives, threads that a rank starts, several processes. State that a library
keeps in global variables is shared by all ranks.
"""
