"""Host memory: the bytes that are available, and memory that processes of one user and one PID namespace share.

Shared memory is a *memfd*: a file without a name in any folder. A process finds it as a descriptor of its creator, in ``/proc``. The kernel
opens this door only to a process that may read the creator's memory, as processes of one user may. The memory is gone with the last
process that maps it, also after a ``kill -9``. The size of ``/dev/shm``, 64 MiB in a container, is no limit.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
_CONTROL_GROUPS = Path("/sys/fs/cgroup")
#: Files of a control group with its limit and its use, and the name of its reclaimable bytes in ``memory.stat``: version 2, version 1.
_LIMITS = {
    True: ("memory.max", "memory.current", "inactive_file"),
    False: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def available() -> int:
    """Return the bytes of memory that this process may take: those that the machine and each of its control groups have left."""
    return max(0, min(_left_on_machine(), *_left_in_control_groups(), sys.maxsize))


def _left_on_machine() -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in (_PROC / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _left_in_control_groups() -> Iterator[int]:
    """Yield the bytes left in each control group of this process that has a limit. A container sees its own group as the root."""
    with contextlib.suppress(OSError):
        for line in (_PROC / "self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            unified = number == "0" and not controllers
            if unified or "memory" in controllers.split(","):
                root = _CONTROL_GROUPS if unified else _CONTROL_GROUPS / "memory"
                leaf = root / path.lstrip("/")
                limit, use, reclaimable = _LIMITS[unified]
                for folder in (leaf, *leaf.parents):
                    with contextlib.suppress(OSError, ValueError):  # no such group here, or "max": no limit
                        left = int((folder / limit).read_text()) - int((folder / use).read_text())
                        stat = dict(one.split(maxsplit=1) for one in (folder / "memory.stat").read_text().splitlines())
                        yield left + int(stat.get(reclaimable, 0))
                    if folder == root:
                        break


def place() -> str:
    """Return a name that is equal in processes of one machine that can share memory; a name of this process alone where none can."""
    try:
        namespaces = [os.readlink(_PROC / "self/ns" / kind) for kind in ("pid", "user")]
    except OSError:
        namespaces = []
    if not namespaces or not hasattr(os, "memfd_create"):
        return secrets.token_hex()
    return " ".join([*namespaces, str(os.geteuid())])


class Address(NamedTuple):
    """The place of shared memory in ``/proc``: a process and its descriptor, and a token that is part of the memory's name."""

    process: int
    descriptor: int
    token: str

    def packed(self) -> str:
        """Return a text for :meth:`unpacked`."""
        return " ".join(map(str, self))

    @classmethod
    def unpacked(cls, text: str) -> Address:
        """Return the address in a text of :meth:`packed`. Raises ValueError for another text."""
        process, descriptor, token = text.split()
        return cls(int(process), int(descriptor), token)

    @property
    def name(self) -> str:
        """The name of the memory. It is in no folder, and shows in ``/proc/PID/maps``."""
        return f"ds_zipccl-{self.token}"


def create(nbytes: int) -> tuple[int, Address]:
    """Make shared memory of a fixed size, all of which is taken now. Blocks for the pages.

    Returns:
        A descriptor, which the caller closes after every other process has opened the memory; and the address for these processes.

    Raises:
        OSError: the machine has no room, or no such memory.
    """
    token = secrets.token_hex(16)
    descriptor = os.memfd_create(Address(0, 0, token).name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(descriptor, 0o600)
        os.posix_fallocate(descriptor, 0, nbytes)  # so that no later write can fail
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)  # so that no process can take pages from under another
        # /proc may show another number than os.getpid()
        return descriptor, Address(int(os.readlink(_PROC / "self")), descriptor, token)
    except BaseException:
        os.close(descriptor)
        raise


def open_shared(address: Address, nbytes: int) -> int:
    """Open the shared memory of another process of this machine.

    Args:
        address: as the other process has told it. Nothing but shared memory of this package, of this user, is opened.

    Returns:
        A descriptor, which the caller closes.

    Raises:
        OSError: there is no such memory at the address, or this process may not open it.
    """
    found = _PROC / str(address.process) / "fd" / str(address.descriptor)
    _check_name(found, address)  # opening another kind of file may block, or act on a device
    descriptor = os.open(found, os.O_RDWR | os.O_CLOEXEC)
    try:
        _check_name(_PROC / "self/fd" / str(descriptor), address)
        stat = os.fstat(descriptor)
        if (stat.st_size, stat.st_uid) != (nbytes, os.geteuid()):
            raise OSError(f"the memory has {stat.st_size} bytes of user {stat.st_uid}, wanted {nbytes} of our own")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_name(file: Path, address: Address) -> None:
    found = os.readlink(file)
    if found != f"/memfd:{address.name} (deleted)":
        raise OSError(f"{file} is {found}, wanted the memory {address.name}")
