"""Handles of operations in flight, and the threads that run them.

Every asynchronous operation in flight has a thread of its own, so that no order of ``wait()`` calls can block one operation behind
another. Idle threads are kept for the next operations.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

#: Longest time that the end of the interpreter waits for operations without a ``wait()`` (admission, seconds).
EXIT_SECONDS = 5.0
#: Time of gloo's threads, at the end of the interpreter, to release the tensors of the last operations (seed, seconds). The release needs
#: the interpreter; a release during the interpreter's shutdown aborts the process.
SETTLE_SECONDS = 0.2
#: Idle threads that are kept for the next operations (seed).
IDLE_THREADS = 8


class CommError(RuntimeError):
    """A compressed operation failed. The message names the operation, its group, this rank and the peer."""


class Handle(dist.Work):
    """An operation in flight, on threads or on streams. A subclass has :meth:`wait`, :meth:`is_completed` and :meth:`get_future`."""

    def __init__(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._name = name
        self._tensors = list(tensors)
        self._error: BaseException | None = None
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None

    def synchronize(self) -> None:
        """As :meth:`wait`."""
        self.wait()

    def block_current_stream(self) -> None:
        """As :meth:`wait`: work that the caller queues on a stream afterwards finds the outputs written."""
        self.wait()

    def is_success(self) -> bool:
        """Return True once the outputs are written; does not block."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Return the error that :meth:`wait` raises; None while in flight and after success. Does not block."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Return the output tensors, after :meth:`wait`."""
        self.wait()
        return self._tensors

    def source_rank(self) -> int:
        """Raise RuntimeError: only receives have a source rank."""
        raise RuntimeError(f"source_rank() is for receives, this is {self._name}; call it on the handle of irecv")

    def _late(self, timeout: timedelta | None) -> CommError:
        return CommError(f"{self._name} is not done after {timeout}; it is still running and can be waited for again")


class Work(Handle):
    """An operation on a thread. The handle keeps the operation's tensors alive."""

    def __init__(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(name, tensors)
        self._done = threading.Event()
        self._future_lock = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the outputs hold the result; may be called again.

        Raises:
            CommError: the operation failed, or is not done after ``timeout``. After a timeout the operation goes on, and ``wait`` may be
                called again.
        """
        if not self._done.wait(None if timeout is None else timeout.total_seconds()):
            raise self._late(timeout)
        if self._error is not None:
            raise self._error
        return True

    def join(self) -> None:
        """Block until the operation has ended, in success or in error; does not raise."""
        self._done.wait()

    def is_completed(self) -> bool:
        """Return True once the outputs are written or the operation has failed; does not block."""
        return self._done.is_set()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future of the output tensors, or of the error; always the same future. Does not block."""
        with self._future_lock:
            if self._future is None:
                devices = {tensor.device for tensor in self._tensors if tensor.device.type == "cuda"}
                self._future = torch.futures.Future(devices=sorted(devices, key=str))
                if self._done.is_set():
                    self._complete(self._future)
            return self._future

    def _complete(self, future: torch.futures.Future[list[torch.Tensor]]) -> None:
        if self._error is None:
            future.set_result(self._tensors)
        else:
            error = self._error if isinstance(self._error, Exception) else CommError(str(self._error))
            future.set_exception(error)  # type: ignore[arg-type]  # torch's annotation is that of results

    def begin(self, job: Callable[[], None]) -> Work:
        """Run ``job`` on a background thread; returns the handle at once."""
        threads.run(lambda: self._run(job))
        return self

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:  # wait() raises it
            self._error = error
        finally:
            with self._future_lock:
                self._done.set()
                future = self._future
            if future is not None:
                self._complete(future)


class PointToPointWork(Work):
    """A send or receive. ``source`` returns the group rank of the sender, after :meth:`wait`; None for a send.

    ``finish`` ends an operation that is posted to the transport, once, in the first :meth:`wait`. As with plain gloo, a posted operation
    counts as completed from its first :meth:`wait` on. None: :meth:`begin` runs the operation.

    ``limit``: the longest :meth:`wait` that names no timeout. The time counts from that call on, as with plain gloo: a program may post a
    receive long before the message.
    """

    def __init__(
        self,
        name: str,
        tensors: Sequence[torch.Tensor],
        source: Callable[[], int] | None,
        finish: Callable[[timedelta | None], None] | None = None,
        limit: timedelta | None = None,
    ) -> None:
        super().__init__(name, tensors)
        self._source, self._finish, self._limit = source, finish, limit
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """As :meth:`Work.wait`. A posted operation is sent, or decompressed into the tensor, on this thread.

        Raises:
            CommError: also where a frame did not arrive in ``timeout`` (gloo then closes the connection), or is refused.
        """
        with self._lock:
            finish, self._finish = self._finish, None
            if finish is not None:
                self._run(lambda: finish(timeout))
        return super().wait(self._limit if timeout is None else timeout)

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Raise RuntimeError: as with plain gloo, only collectives have futures. The first :meth:`wait` may have work to do, so that
        a future would never complete by itself."""
        raise RuntimeError(f"get_future() is for collectives, this is {self._name}; call wait()")

    def source_rank(self) -> int:
        """Return the group rank of the sender, after :meth:`wait`. Raises RuntimeError for a send."""
        return super().source_rank() if self._source is None else self._source()

    _source_rank = source_rank


class JoinedWork(Handle):
    """Several handles of torch.distributed, works or futures, as one handle."""

    def __init__(self, name: str, handles: Sequence[Any], tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(name, tensors)
        self._handles = list(handles)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until all handles are done. ``timeout`` has no effect; the group's timeout has."""
        for handle in self._handles:
            handle.wait()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that completes when all handles have completed; does not block."""
        futures = [handle if hasattr(handle, "then") else handle.get_future() for handle in self._handles]
        return torch.futures.collect_all(futures)

    def is_completed(self) -> bool:
        """Return True once all handles are done; does not block."""
        return all((getattr(handle, "done", None) or handle.is_completed)() for handle in self._handles)


class _Threads:
    """A thread for each operation in flight. Up to IDLE_THREADS idle threads wait for the next operations."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: list[threading.Thread] = []
        self._idle: list[SimpleQueue[Callable[[], None] | None]] = []
        self._closed = False
        self.used = False  # whether this process has had a group, whose transport has threads too
        atexit.register(self.close)

    def run(self, job: Callable[[], None]) -> None:
        """Run ``job``, which must not raise, on an idle thread or a new one; returns at once."""
        with self._lock:
            queue = self._idle.pop() if self._idle else self._add()
        queue.put(job)

    def _add(self) -> SimpleQueue[Callable[[], None] | None]:
        queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        thread = threading.Thread(target=self._serve, args=(queue,), name=f"ds_zipccl-{len(self._all)}", daemon=True)
        self._all.append(thread)
        thread.start()
        return queue

    def _serve(self, queue: SimpleQueue[Callable[[], None] | None]) -> None:
        while (job := queue.get()) is not None:
            job()
            del job  # the job holds the operation's tensors
            with self._lock:
                if self._closed:
                    return
                if len(self._idle) >= IDLE_THREADS:
                    self._all.remove(threading.current_thread())
                    return
                self._idle.append(queue)

    def close(self) -> None:
        """Block until operations are done, at most EXIT_SECONDS: no thread may be in the transport during the interpreter's shutdown."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for queue in idle:
            queue.put(None)
        deadline = time.monotonic() + EXIT_SECONDS
        for thread in tuple(self._all):
            thread.join(max(0.0, deadline - time.monotonic()))
        if self.used or (dist.is_available() and dist.is_initialized()):
            time.sleep(SETTLE_SECONDS)


threads = _Threads()


def start(name: str, tensors: Sequence[torch.Tensor], job: Callable[[], None]) -> Work:
    """Run ``job`` on a background thread; returns at once. ``tensors`` are the outputs that the handle reports."""
    return Work(name, tensors).begin(job)


def done(name: str, tensors: Sequence[torch.Tensor]) -> Work:
    """Return the handle of an operation that has ended in success."""
    work = Work(name, tensors)
    work._done.set()
    return work
