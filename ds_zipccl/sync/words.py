"""The words of a state: flat tensors by name, and the fragments of a stream that records hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from ds_zipccl import tensors
from ds_zipccl.codecs import memory
from ds_zipccl.sync.message import Layout, Slice, Spec, Stream

#: A tensor of fewer bytes shares a record with others: the head of its own record would count.
SMALL = 1 << 20

#: Returns the flat words of a tensor, with the dtype of its stream.
Words = Callable[[str], torch.Tensor]


def flat(tensor: torch.Tensor, spec: Spec) -> torch.Tensor:
    """The words of a tensor as a frame has them, flat; a copy unless the elements are contiguous."""
    words = memory.flatten(tensor)
    return words if words.dtype == spec.words[0] else words.view(spec.words[0])


def shaped(words: torch.Tensor, spec: Spec) -> torch.Tensor:
    """The tensor of these words, in the same memory."""
    return words.view(spec.dtype).view(spec.shape)


def empty(spec: Spec, device: torch.device) -> torch.Tensor:
    """Memory for the words of a tensor."""
    dtype, count = spec.words
    return tensors.empty(count, dtype, device)


def cut(stream: Stream, layout: Layout, fragment: int) -> Iterator[list[Slice]]:
    """The slices of each record of a stream, of at most ``fragment`` bytes: small tensors together, parts of a large one apart."""
    most = max(1, fragment // stream.dtype.itemsize)
    together: list[Slice] = []
    held = 0
    for name in stream.names:
        count = layout[name].words[1]
        small = count * stream.dtype.itemsize < SMALL and count <= most
        if together and (not small or held + count > most):
            yield together
            together, held = [], 0
        if small:
            together += [Slice(name, 0, count)] if count else []
            held += count
        else:
            yield from ([Slice(name, at, min(at + most, count))] for at in range(0, count, most))
    if together:
        yield together


class Cursor:
    """The place in a stream up to which records came."""

    def __init__(self, stream: Stream, layout: Layout) -> None:
        self._left = [(name, layout[name].words[1]) for name in reversed(stream.names) if layout[name].words[1]]
        self._at = 0
        #: Elements that no record had so far.
        self.left = sum(count for _, count in self._left)

    def take(self, count: int) -> list[Slice]:
        """The slices of the next ``count`` elements, at most ``left``."""
        self.left -= count
        taken = []
        while count:
            name, size = self._left[-1]
            stop = min(size, self._at + count)
            taken.append(Slice(name, self._at, stop))
            count -= stop - self._at
            self._at = stop
            if stop == size:
                self._left.pop()
                self._at = 0
        return taken


class Staging:
    """Memory in which the slices of a fragment stand together; grows to the largest fragment on each device."""

    def __init__(self) -> None:
        self._memory: dict[torch.device, torch.Tensor] = {}

    def room(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Undefined words, until the next call."""
        size = count * dtype.itemsize
        if device not in self._memory or self._memory[device].numel() < size:
            self._memory[device] = tensors.empty(size, torch.uint8, device)
        return self._memory[device][:size].view(dtype)

    def gather(self, slices: Sequence[Slice], words: Words) -> torch.Tensor:
        """The words of the slices: a view where there is one slice, else a copy on the first one's device, until the next call."""
        first = words(slices[0].name)
        if len(slices) == 1:
            return first[slices[0].start : slices[0].stop]
        room = self.room(sum(part.stop - part.start for part in slices), first.dtype, first.device)
        at = 0
        for part in slices:
            room[at : at + part.stop - part.start].copy_(words(part.name)[part.start : part.stop])
            at += part.stop - part.start
        return room


def scatter(words: torch.Tensor, slices: Sequence[Slice], target: Mapping[str, torch.Tensor]) -> None:
    """Write the words of a fragment to their tensors."""
    at = 0
    for part in slices:
        target[part.name][part.start : part.stop].copy_(words[at : at + part.stop - part.start])
        at += part.stop - part.start
