"""The state that one side holds, with its version, and the full message of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ds_zipccl import codecs, kernels, tensors
from ds_zipccl.codecs import memory
from ds_zipccl.sync import message, words
from ds_zipccl.sync.errors import SyncError, SyncErrorCode
from ds_zipccl.sync.message import FULL, RECORD_BYTES, Head, Layout, Slice, Spec


@dataclass
class Held:
    """A state: ``words`` has the flat words of each tensor that is not tied. ``version`` 0: none yet, or none that is whole."""

    version: int = 0
    id: bytes = bytes(16)
    layout: Layout = field(default_factory=dict)
    words: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor of that name, in the memory of the state."""
        spec = self.layout[name]
        return words.shaped(self.words[name if spec.tied_to is None else spec.tied_to], spec)


class Packer:
    """Fragments of words to records.

    Holds three fragments of memory: for words and for bases that stand apart, and for a frame.
    """

    def __init__(self, fragment: int, block: int, route: str) -> None:
        self._block, self._route = block, route
        self.fragment = fragment
        self._words, self._bases, self._frames = words.Staging(), words.Staging(), words.Staging()

    def record(
        self,
        slices: Sequence[Slice],
        source: words.Words,
        base: Mapping[str, torch.Tensor] | None,
        index: int,
        new_id: bytes,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The record of a fragment, on the CPU, and the words of the fragment, until the next call; ``base``: None for a whole one."""
        fragment = self._words.gather(slices, source)
        if kernels.lacking(lambda: kernels.delta_route(self._route, fragment.device.type)):
            base = None  # a frame without a base may stand for a difference
        before = None if base is None else self._bases.gather(slices, base.__getitem__).to(fragment.device)
        codec = "delta" if base is not None else "cascade"
        bound = codecs.compress_bound(fragment.numel(), fragment.dtype, codec, block=self._block)
        room = self._frames.room(bound, torch.uint8, fragment.device)
        frame = codecs.compress(
            fragment, codec, base=before, out=room, block=self._block, shaped=False, checksum=False, route=self._route
        )
        part = tensors.empty(RECORD_BYTES + frame.numel(), torch.uint8)
        part[RECORD_BYTES:].copy_(frame)
        message.write_record(part, index, codecs.region_hash(fragment, route=self._route), new_id)
        return part, fragment


def head_part(head: Head) -> torch.Tensor:
    """Head and manifest as the first part of a message."""
    return tensors.of_buffer(bytearray(message.pack_head(head)))


def snapshot(current: Callable[[], Held], packer: Packer) -> Iterator[torch.Tensor]:
    """The full message of the ``current`` state, with the state's own version.

    Raises:
        SyncError: STATE, there is no whole state; REPLACED, from the iterator: there is another state now.
    """
    held = current()
    if not held.version:
        raise SyncError(SyncErrorCode.STATE, "there is no state to pack yet: pack or apply a full message first")
    found = message.streams(held.layout, list(held.layout), None)
    fragments = [slices for stream in found for slices in words.cut(stream, held.layout, packer.fragment)]

    def parts() -> Iterator[torch.Tensor]:
        yield head_part(Head(FULL, held.version, held.id, len(fragments), layout=held.layout))
        for index, slices in enumerate(fragments):
            if current() is not held:  # its memory is that of the new state
                raise SyncError(
                    SyncErrorCode.REPLACED, "the state changed before its snapshot was read: take another one"
                )
            with tensors.undisturbed():
                part, _ = packer.record(slices, held.words.__getitem__, None, index, held.id)
            yield part

    return parts()


def specs(state: Mapping[str, torch.Tensor]) -> dict[str, Spec]:
    """The layout of a state dict. Tensors with the same memory, dtype, shape and strides are tied to the first of them.

    Raises:
        SyncError: STATE, an entry that no message can hold.
    """
    layout: dict[str, Spec] = {}
    first: dict[tuple[object, ...], str] = {}
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise SyncError(
                SyncErrorCode.STATE,
                f"wanted names and tensors, got {type(tensor).__name__} under {name!r}: leave that entry out",
            )
        if not memory.has_words(tensor) or tensor.dtype not in message.DTYPE_IDS:
            raise SyncError(
                SyncErrorCode.STATE,
                f"{name!r} is a {type(tensor).__name__} of {tensor.dtype}, {tensor.layout} on {tensor.device}; wanted a dense tensor "
                f"on {' or '.join(codecs.DEVICES)} with data of its own, for a DTensor its .to_local()",
            )
        spec = Spec(tensor.dtype, tuple(tensor.shape))
        if spec.nbytes:
            place = (tensor.data_ptr(), tensor.device, tensor.stride(), tensor.is_conj(), tensor.is_neg(), spec)
            if first.setdefault(place, name) != name:
                spec = Spec(spec.dtype, spec.shape, first[place])
        layout[name] = spec
    return layout
