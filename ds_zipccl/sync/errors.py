"""The error of weight sync and its codes."""

from __future__ import annotations

from enum import IntEnum


class SyncErrorCode(IntEnum):
    """Why a state or a message was refused; numbers never change meaning."""

    #: The message ends too early, or a part is shorter than its own sizes say.
    TRUNCATED = 1
    #: The bytes are not a message, or a message of another version of the layout.
    FORMAT = 2
    #: A checksum differs.
    DAMAGED = 3
    #: A part of the message is missing, comes twice, comes too early or belongs to another message.
    ORDER = 4
    #: A size exceeds what the receiver allows.
    LIMIT = 5
    #: The manifest contradicts itself, the message or the receiver's state.
    MANIFEST = 6
    #: The message is for another base than the receiver's. A full message helps.
    BASE = 7
    #: A frame of the message cannot be decoded.
    FRAME = 8
    #: The decoded words are not the sender's: the base of one side was edited. A full message helps.
    HASH = 9
    #: The sender's state has an entry that no message can hold.
    STATE = 10
    #: The iterator of a message that a later ``pack`` replaced.
    REPLACED = 11


class SyncError(ValueError):
    """A state that cannot be packed or a message that must not be applied; ``code`` is a :class:`SyncErrorCode`."""

    def __init__(self, code: int, message: str) -> None:
        self.code = SyncErrorCode(code)
        self.message = message
        super().__init__(f"{self.code.name}: {message}")

    def __reduce__(self) -> tuple[type[SyncError], tuple[int, str]]:
        return SyncError, (int(self.code), self.message)
