"""Words of a device in which decoders report refused frames, and gathers that copy report changed shards."""

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
#: Words of shards that gathers copy, two for each (seed: more than 70B of frozen parameters have). Later kinds share the last word.
_SHARD_WORDS = 3072
#: Value of a word whose shard was changed.
_CHANGED = 0
_REMEDY = (
    "outside of an optimizer step: change parameters with deepspeed.zero.GatheredParameters(..., modifier_rank=...)"
)
#: What is said of a shard whose words are not those of its last gather, and of one of which some rank had other words.
CHANGED_SINCE = f"gathered before, and changed since; {_REMEDY}"
WRONG_COPY = 'its copy on the devices of a node is wrong: look at the hardware, or set "zero3_base": "host"'
#: Code of a refused frame -> the reason, for users.
_REASONS: dict[int, str] = {
    FrameErrorCode.OVERFLOWED: f"larger than agreed; the tensor was changed after the ranks had agreed on sizes, {_REMEDY}"
}


class Reports:
    """A status word for each kind of operation on a device, so that a failure names the operation and the parameter; and two words for
    each shard of each kind of gather that copies bases."""

    def __init__(self, device: torch.device) -> None:
        with torch.inference_mode(False):  # written in inference mode and outside
            self.words = tensors.filled(_WORDS + _SHARD_WORDS, NO_FAILURE, torch.int64, device)
        self._names: dict[tuple[str, Sequence[str]], int] = {}
        self._shards: dict[tuple[str, Sequence[str], str], int] = {}
        self._end = _WORDS

    def word(self, name: str, frames: Sequence[str] = ()) -> torch.Tensor:
        """Return the status word of operations ``name`` whose frames, in a call, have the names ``frames``."""
        key = name, tuple(frames)
        number = self._names.get(key, min(len(self._names), _WORDS - 1))
        if number < _WORDS - 1:  # groups come and go, and their names with them
            self._names[key] = number
        return self.words[number : number + 1]

    def note_changes(
        self, name: str, shards: Sequence[str], last: torch.Tensor, now: torch.Tensor, said: str = CHANGED_SINCE
    ) -> None:
        """Report the shards of an operation ``name`` whose hashes, two words each, differ; ``said``: of such a shard. Work of the current
        stream, of two launches: the host takes most of its time in a gather that copies for launches of small kernels."""
        key, numel = (name, tuple(shards), said), 2 * len(shards)
        start, changed = self._shards.get(key), last != now
        if start is None and self._end + numel < len(self.words):
            start = self._shards[key] = self._end
            self._end += numel
        if start is None:
            self.words[-1:].masked_fill_(changed.any(), _CHANGED)
        else:
            self.words[start : start + numel].masked_fill_(changed, _CHANGED)

    def failed(self) -> torch.Tensor:
        """Return one int64 on the device: 1 where some word has a failure. Work of the current stream."""
        return (self.words != NO_FAILURE).any().to(torch.int64).view(1)

    def describe(self) -> str:
        """Return the failures of this rank, "" where there are none. Waits for the device; for messages of errors alone."""
        said = []
        by_number = dict(zip(self._names.values(), self._names, strict=True))
        if len(self._names) >= _WORDS:
            by_number[_WORDS - 1] = ("one of many operations", ())
        words = self.words.tolist()
        for number, value in enumerate(words[:_WORDS]):
            failure = failure_of(value)
            if failure is not None:
                name, frames = by_number.get(number, ("one of the later operations", ()))
                frame = frames[failure.frame] if failure.frame < len(frames) else f"frame {failure.frame}"
                sender = "" if failure.rank is None else f" of group rank {failure.rank}"
                reason = _REASONS.get(failure.code, "damaged")
                said.append(f"{name}: {frame}{sender} refused: {FrameError(failure.code, reason)}")
        for (name, shards, text), start in self._shards.items():
            changed = [shard for at, shard in enumerate(shards, start // 2) if _CHANGED in words[2 * at : 2 * at + 2]]
            said += [f"{name}: {shard}: {text}" for shard in changed]
        if words[-1] == _CHANGED:
            said.append(f"one of the later gathers: a shard was {CHANGED_SINCE}; or {WRONG_COPY}")
        return "; ".join(said)


_reports: WeakKeyDictionary[Streams, Reports] = WeakKeyDictionary()


def reports_of(streams: Streams) -> Reports:
    """Return the reports of the device of ``streams``."""
    found = _reports.get(streams)
    return _reports.setdefault(streams, Reports(streams.device)) if found is None else found
