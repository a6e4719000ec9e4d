"""Words of a device in which decoders report refused frames."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch

from ds_zipccl import tensors
from ds_zipccl.comm.device.streams import Streams
from ds_zipccl.frame import FrameError, FrameErrorCode
from ds_zipccl.kernels.cuda.status import NO_FAILURE, failure_of

#: Status words of a device (seed: more than a model has kinds of gathers). Later kinds share the last word.
_WORDS = 4096
_REMEDY = (
    "outside of an optimizer step: change parameters with deepspeed.zero.GatheredParameters(..., modifier_rank=...)"
)
#: Code of a refused frame -> the reason, for users.
_REASONS: dict[int, str] = {
    FrameErrorCode.OVERFLOWED: f"larger than agreed; the tensor was changed after the ranks had agreed on sizes, {_REMEDY}"
}
#: Value of a status word for frame 0, whose shard was changed: no rank, chunk 0, and a code that no frame is refused for.
_CHANGED_CODE = 255
_CHANGED = (0xFFFF << 48 | _CHANGED_CODE) - (1 << 64)


class Reports:
    """A status word for each kind of operation on a device, so that a failure names the operation and the parameter."""

    def __init__(self, device: torch.device) -> None:
        with torch.inference_mode(False):  # written in inference mode and outside
            self.words = tensors.filled(_WORDS, NO_FAILURE, torch.int64, device)
        self._names: dict[tuple[str, Sequence[str]], int] = {}

    def word(self, name: str, frames: Sequence[str] = ()) -> torch.Tensor:
        """Return the status word of operations ``name`` whose frames, in a call, have the names ``frames``."""
        key = name, tuple(frames)
        number = self._names.get(key, min(len(self._names), _WORDS - 1))
        if number < _WORDS - 1:  # groups come and go, and their names with them
            self._names[key] = number
        return self.words[number : number + 1]

    def note_changes(self, name: str, frames: Sequence[str], changed: torch.Tensor) -> None:
        """Report that shards of an operation ``name`` were changed, where the bools of ``changed`` are true. Work of the current stream."""
        # of the frames, from 1 on
        numbers = tensors.filled(len(frames), 1 << 32, torch.int64, changed.device).cumsum(0)
        values = numbers + (_CHANGED - (1 << 32))
        word = self.word(name, frames)
        found = values.masked_fill_(~changed, NO_FAILURE).amin()
        word.copy_(torch.where(word == NO_FAILURE, found, word))  # the first failure stays

    def failed(self) -> torch.Tensor:
        """Return one int64 on the device: 1 where some word has a failure. Work of the current stream."""
        return (self.words != NO_FAILURE).any().to(torch.int64).view(1)

    def describe(self) -> str:
        """Return the failures of this rank, "" where there are none. Waits for the device; for messages of errors alone."""
        said = []
        by_number = dict(zip(self._names.values(), self._names, strict=True))
        if len(self._names) >= _WORDS:
            by_number[_WORDS - 1] = ("one of many operations", ())
        for number, value in enumerate(self.words.tolist()):
            failure = failure_of(value)
            if failure is not None:
                name, frames = by_number.get(number, ("one of the later operations", ()))
                frame = frames[failure.frame] if failure.frame < len(frames) else f"frame {failure.frame}"
                sender = "" if failure.rank is None else f" of group rank {failure.rank}"
                if failure.code == _CHANGED_CODE:
                    said.append(f"{name}: {frame}: gathered before, and changed since; {_REMEDY}")
                    continue
                reason = _REASONS.get(failure.code, "damaged")
                said.append(f"{name}: {frame}{sender} refused: {FrameError(failure.code, reason)}")
        return "; ".join(said)


_reports: WeakKeyDictionary[Streams, Reports] = WeakKeyDictionary()


def reports_of(streams: Streams) -> Reports:
    """Return the reports of the device of ``streams``."""
    found = _reports.get(streams)
    return _reports.setdefault(streams, Reports(streams.device)) if found is None else found
