"""Folders from which code may be loaded: only this user and root can have written to them. Independent of DeepSpeed."""

from __future__ import annotations

import contextlib
import os
import stat
from functools import cache
from pathlib import Path

#: Where a file has an ACL, the bits of the group are the most that the ACL grants.
_WRITABLE = stat.S_IWGRP | stat.S_IWOTH
_SEARCHABLE = stat.S_IXGRP | stat.S_IXOTH


def claim(folder: Path) -> str:
    """Make ``folder`` where it is missing, and return the reason why its content cannot be trusted; "" if it can.

    The folder is made for this user alone; other users can read the folders that are made above it.

    Each folder from the root to ``folder`` must belong to this user or to root, and group and others must not write to it: a user
    who can write to a folder can replace its entries. A sticky folder such as /tmp may stand above ``folder``, as only owners
    replace entries there. All entries of ``folder`` must pass too, because they may be older than its mode.

    After a folder has passed, no other user can change it or a folder above it, so the answer holds until a library is loaded.
    Therefore each folder is checked before a file is made in it.

    Args:
        folder: a path without links; ``Path.resolve`` gives it.
    """
    try:
        for part in (*reversed(folder.parents), folder):
            reason = _part(part, above=part != folder)
            if reason:
                return reason
        return _entries(folder, reachable=bool(os.lstat(folder).st_mode & _SEARCHABLE))
    except OSError as error:
        return str(error)


def _part(folder: Path, above: bool) -> str:
    """Return why another user could replace the content of ``folder``, which is made where it is missing; "" if none could."""
    try:
        status = os.lstat(folder)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):  # another process was faster
            os.mkdir(folder, 0o755 if above else 0o700)
        status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode):
        return f"{folder} is not a folder"
    if above and status.st_uid == _outside():
        return _writer(folder, status, sticky=True)
    return _owner(folder, status) or _writer(folder, status, sticky=above)


def _entries(folder: Path, reachable: bool) -> str:
    """Return why an entry of ``folder``, at any depth, could be another user's; "" if none could be.

    ``reachable``: other users can open files in the folder.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # of a build in another process, which has ended
                status, path = entry.stat(follow_symlinks=False), Path(entry.path)
                if entry.is_symlink():
                    return f"{path} is a link, and this package makes none"
                reason = _owner(path, status) or (_writer(path, status, sticky=False) if reachable else "")
                if not reason and entry.is_dir(follow_symlinks=False):
                    reason = _entries(path, reachable and bool(status.st_mode & _SEARCHABLE))
                if reason:
                    return reason
    return ""


def _owner(path: Path, status: os.stat_result) -> str:
    user = os.geteuid()
    if status.st_uid in (user, 0):
        return ""
    return (
        f"{path} belongs to uid {status.st_uid}, and only uid {user}"
        + (" and root are" if user else " is")
        + " trusted"
    )


def _writer(path: Path, status: os.stat_result, sticky: bool) -> str:
    if not status.st_mode & _WRITABLE or (sticky and status.st_mode & stat.S_ISVTX):
        return ""
    everybody = status.st_mode & stat.S_IWOTH
    return f"{'everybody' if everybody else f'group {status.st_gid}'} can write to {path}"


@cache
def _outside() -> int | None:
    """Return the uid that stands for all users outside this user namespace, root included; None where every user is known.

    In an unprivileged container that uid owns / and /tmp, which does not count against the folders of this user below them.
    """
    try:
        unknown = int(Path("/proc/sys/fs/overflowuid").read_text())
        ranges = [list(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    except OSError:
        return None
    return None if any(first <= unknown < first + count for first, _, count in ranges) else unknown
