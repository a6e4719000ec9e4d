"""Weight sync: a sender packs a state dict as differences to what its receivers hold, a receiver applies them or refuses them.

``Sender`` and ``Receiver`` are codecs: the caller moves the parts of a message, by whatever way. ``save`` and ``load`` are such a way, for
files and sockets. :mod:`.message` has the layout of a message.
"""

from ds_zipccl.sync.errors import SyncError, SyncErrorCode
from ds_zipccl.sync.files import load, save
from ds_zipccl.sync.receiver import Receiver
from ds_zipccl.sync.sender import Sender

__all__ = ["Receiver", "Sender", "SyncError", "SyncErrorCode", "load", "save"]
