"""The sender of a state."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache

import torch

from ds_zipccl import tensors
from ds_zipccl.codecs.arrays import as_tensor
from ds_zipccl.sync import message, words
from ds_zipccl.sync.errors import SyncError, SyncErrorCode
from ds_zipccl.sync.held import Held, Packer, head_part, snapshot, specs
from ds_zipccl.sync.message import DELTA, FULL, MAX_FRAGMENT, Head


class Sender:
    """Packs states of one trainer for any number of receivers, each as a difference to the one before.

    The sender keeps the last state that it packed, its base: one copy of all tensors. Beside that, ``pack`` takes at most five fragments of
    memory on the device of the tensors, the part that it yields, and a copy of one tensor at a time where that is not contiguous.
    Coding uses ``torch.get_num_threads()`` threads. One thread at a time may use a sender.

    A shard is a state of its own: each rank of FSDP or ZeRO has a sender for its part, and each of these a receiver.

    Args:
        device: device of the base; None: each tensor's own. "cpu" keeps the base out of the memory of a GPU, and moves it there in
            fragments.
        fragment_mib: MiB of words in a record, 1 to 128. Larger ones use more memory and cost less in calls.
        block: elements that share their statistics in a frame: 128, 256, 512 or 1024.
        route: kernels to use, see :data:`ds_zipccl.kernels.ROUTES`.

    Raises:
        ValueError: ``fragment_mib`` or ``block`` is not possible.
    """

    def __init__(
        self,
        *,
        device: torch.device | str | None = None,
        fragment_mib: int = 16,
        block: int = 1024,
        route: str = "auto",
    ) -> None:
        if not 1 <= fragment_mib <= MAX_FRAGMENT >> 20:
            raise ValueError(f"fragment_mib must be 1 to {MAX_FRAGMENT >> 20}, got {fragment_mib}")
        self._device = None if device is None else torch.device(device)
        self._packer = Packer(fragment_mib << 20, block, route)
        self._held = Held()
        self._version = 0
        self._turn = 0

    @property
    def version(self) -> int:
        """The version of the base: of the last message that was packed to its end; 0 where the next message is full."""
        return self._held.version

    def pack(
        self, state: Mapping[str, torch.Tensor], *, full: bool = False, partial: bool = False
    ) -> Iterator[torch.Tensor]:
        """Pack ``state`` as the next version; the parts of the message are made as they are asked for.

        The tensors must stay as they are until the last part was taken. The base takes the new words record by record, so an iterator that
        is dropped before its end leaves no base, and the next message is full. Blocks, on CUDA for the current stream.

        A tensor that the base has under the same name, with the same dtype and shape, is packed as a difference. Any other is packed whole.
        So are all of them where the kernels are numba's, which have no differences. A tensor that ``state`` no longer has is removed.
        Tensors that share their memory are packed once and arrive as one.

        Args:
            state: names and dense CPU or CUDA tensors of any dtype, in any order; parameters are packed as their data. Or arrays of
                numpy, CuPy, JAX or another library with DLPack, which are read in place.
            full: pack all tensors whole, for receivers that have another base or none. The first message is always full.
            partial: ``state`` has a part of the tensors, and the others stay as they are.

        Returns:
            The parts: 1-D uint8 CPU tensors. The first has the version, names and shapes, and each other one a record, in order.

        Raises:
            SyncError: STATE, an entry that no message can hold; nothing is packed. REPLACED, from the iterator: there was a later ``pack``.
            ValueError: ``full`` and ``partial`` together.
            RouteUnavailable: no kernels here.
        """
        if full and partial:
            raise ValueError("a full message has all tensors, a partial one has not: choose full or partial")
        state = {name: as_tensor(value) for name, value in state.items()}
        with tensors.undisturbed():
            found = specs(state)
        held = self._held
        base = held.layout if held.version and not full else None
        if partial and base is None:
            raise SyncError(
                SyncErrorCode.STATE, "a partial message needs a base, and there is none: pack the whole state"
            )
        same = base is not None and not partial and found == base
        names = list(held.layout if same else found)
        head = Head(
            FULL if base is None else DELTA, self._version + 1, os.urandom(16), 0, 0 if base is None else held.version,
            bytes(16) if base is None else held.id, None if same else found, partial,
        )  # fmt: skip
        parts = self._parts(state, head, names, base, self._turn + 1)
        self._version += 1
        self._turn += 1
        return parts

    def snapshot(self) -> Iterator[torch.Tensor]:
        """The base as a full message of its own version, for a receiver that joins: the next message of :meth:`pack` fits after it.

        Parts as of :meth:`pack`. They must be taken before the next ``pack``.

        Raises:
            SyncError: STATE, there is no base; REPLACED, from the iterator: there was a later ``pack``.
        """
        return snapshot(lambda: self._held, self._packer)

    def _parts(
        self, state: dict[str, torch.Tensor], head: Head, names: list[str], base: message.Layout | None, turn: int
    ) -> Iterator[torch.Tensor]:
        layout = message.new_layout(head, base)
        found = message.streams(layout, names, base)
        fragments = [
            (stream, slices) for stream in found for slices in words.cut(stream, layout, self._packer.fragment)
        ]
        start = head_part(replace(head, records=len(fragments)))

        def parts() -> Iterator[torch.Tensor]:
            yield start
            self._own_turn(turn)
            # the last words are kept: a tensor that is not contiguous is copied for them
            source = lru_cache(maxsize=1)(lambda name: words.flat(state[name], layout[name]))
            target = self._memory(state, layout)
            self._held = Held(0, head.id, layout, target)  # not whole before the last record
            for index, (stream, slices) in enumerate(fragments):
                self._own_turn(turn)
                with tensors.undisturbed():
                    part, fragment = self._packer.record(
                        slices, source, target if stream.delta else None, index, head.id
                    )
                    words.scatter(fragment, slices, target)
                yield part
            self._own_turn(turn)
            self._held = Held(head.version, head.id, layout, target)

        return parts()

    def _own_turn(self, turn: int) -> None:
        if turn != self._turn:
            raise SyncError(SyncErrorCode.REPLACED, "a later pack() replaced this message: send the parts of that one")

    def _memory(self, state: Mapping[str, torch.Tensor], layout: message.Layout) -> dict[str, torch.Tensor]:
        """Memory of the new base: that of the old one, where a tensor has the same words as before."""
        found = {}
        for name, spec in layout.items():
            if spec.tied_to is not None:
                continue
            old = self._held.words.get(name)
            device = self._device or (state[name].device if name in state else old.device if old is not None else None)
            assert device is not None  # a tensor comes from the state or from the base
            kept = old is not None and (old.dtype, old.numel()) == spec.words
            found[name] = old.to(device) if old is not None and kept else words.empty(spec, device)
        return found
