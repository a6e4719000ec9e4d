"""Handles of operations in flight, and the threads that run them.

Every asynchronous operation has a thread of its own while it is in flight, so that no order in which a program waits for its
operations can block one behind another. Threads are kept and used again.
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

#: Longest time that the end of the interpreter waits for operations nobody waited for (admission, seconds).
EXIT_SECONDS = 5.0
#: Time that gloo's threads get at the end of the interpreter to release the tensors of the last operations (seed, seconds). They need the
#: interpreter for that, and abort the process where it is already being taken down.
SETTLE_SECONDS = 0.2
#: Threads without work that are kept for the next operations (seed).
IDLE_THREADS = 8


class CommError(RuntimeError):
    """A coded operation failed; the message names the operation, its group, this rank and the peer."""


class Work:
    """An operation in flight, like ``torch.distributed.Work``. It keeps its tensors alive until it is done."""

    def __init__(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        self._name = name
        self._tensors = list(tensors)
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None
        self._future_lock = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the outputs hold the result; may be called again.

        Raises:
            CommError: the operation failed, or is not done after ``timeout`` (it then goes on, and can be waited for again).
        """
        if not self._done.wait(None if timeout is None else timeout.total_seconds()):
            raise CommError(
                f"{self._name} is not done after {timeout}; it is still running and can be waited for again"
            )
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """As :meth:`wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """True once the outputs are written, or the operation failed; does not block."""
        return self._done.is_set()

    def is_success(self) -> bool:
        """True once the outputs are written."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """What :meth:`wait` would raise; None while in flight and after success."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The output tensors, after :meth:`wait`."""
        self.wait()
        return self._tensors

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of the output tensors, or of the error; always the same one. Does not block."""
        with self._future_lock:
            if self._future is None:
                devices = {tensor.device for tensor in self._tensors if tensor.device.type == "cuda"}
                self._future = torch.futures.Future(devices=sorted(devices, key=str))
                if self._done.is_set():
                    self._complete(self._future)
            return self._future

    def block_current_stream(self) -> None:
        """As :meth:`wait`: what the caller puts on a stream afterwards finds the outputs written."""
        self.wait()

    def source_rank(self) -> int:
        """For receives only.

        Raises:
            RuntimeError: this is another operation.
        """
        raise RuntimeError(f"source_rank() is for receives, this is {self._name}")

    def _complete(self, future: torch.futures.Future[list[torch.Tensor]]) -> None:
        if self._error is None:
            future.set_result(self._tensors)
        else:
            error = self._error if isinstance(self._error, Exception) else CommError(str(self._error))
            future.set_exception(error)  # type: ignore[arg-type]  # torch's annotation is that of results

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:  # it belongs to whoever waits
            self._error = error
        finally:
            with self._future_lock:
                self._done.set()
                future = self._future
            if future is not None:
                self._complete(future)


class PostedWork(Work):
    """A send or receive that the transport has already taken; ``finish`` runs once, in the first :meth:`wait`.

    As with plain gloo, a posted operation counts as completed from its first :meth:`wait` on.
    """

    def __init__(
        self,
        name: str,
        tensors: Sequence[torch.Tensor],
        finish: Callable[[timedelta | None], None],
        source: Callable[[], int],
    ) -> None:
        super().__init__(name, tensors)
        self._finish: Callable[[timedelta | None], None] | None = finish
        self._source = source
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the frame is out, or decoded into the tensor; may be called again.

        Raises:
            CommError: the frame did not arrive in ``timeout`` (gloo then closes the connection), or cannot be decoded.
        """
        with self._lock:
            finish, self._finish = self._finish, None
            if finish is not None:
                self._run(lambda: finish(timeout))
        return super().wait()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """For collectives only, as with plain gloo.

        Raises:
            RuntimeError: always; nothing would complete the future, as a message is decoded in :meth:`wait`.
        """
        raise RuntimeError(f"get_future() is for collectives, this is {self._name}; call wait()")

    def source_rank(self) -> int:
        """Group rank of the sender, after :meth:`wait`."""
        return self._source()

    _source_rank = source_rank


class JoinedWork(Work):
    """Several handles of torch.distributed, works or futures, as one."""

    def __init__(self, name: str, handles: Sequence[Any], tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(name, tensors)
        self._handles = list(handles)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until all are done; ``timeout`` has no effect, the group's own has."""
        for handle in self._handles:
            handle.wait()
        self._done.set()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Completes when all have."""
        futures = [handle if hasattr(handle, "then") else handle.get_future() for handle in self._handles]
        return torch.futures.collect_all(futures)

    def is_completed(self) -> bool:
        """True once all are done; does not block."""
        return all((getattr(handle, "done", None) or handle.is_completed)() for handle in self._handles)


class _Threads:
    """A thread for each operation in flight; some of those that have nothing to do wait for the next."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: list[threading.Thread] = []
        self._idle: list[SimpleQueue[Callable[[], None] | None]] = []
        self._closed = False
        self.used = False  # whether this process has had a group to communicate in
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
            del job  # it holds the operation's tensors
            with self._lock:
                if self._closed:
                    return
                if len(self._idle) >= IDLE_THREADS:
                    self._all.remove(threading.current_thread())
                    return
                self._idle.append(queue)

    def close(self) -> None:
        """Let operations finish: no thread may be inside the transport while the interpreter is taken down."""
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


_threads = _Threads()


def settle_at_exit() -> None:
    """Let the end of the interpreter wait for the transport's threads: a group is in use."""
    _threads.used = True


def start(name: str, tensors: Sequence[torch.Tensor], job: Callable[[], None]) -> Work:
    """Run ``job`` on a background thread; returns at once. ``tensors`` are the outputs that the handle reports."""
    work = Work(name, tensors)
    _threads.run(lambda: work._run(job))
    return work
