"""A static Linux program for 64-bit Arm in the CPU emulator of the Python package unicorn: for machines without QEMU.

The system calls are those that C and C++ libraries make for memory, files and time on one thread. A program that touches memory that is not
its own ends with the status of a segmentation fault.
"""

from __future__ import annotations

import os
import struct
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PAGE = 1 << 16
_BREAK, _MAPS, _STACK = 0x40_0000_0000, 0x50_0000_0000, 0x7F_0000_0000
_STACK_BYTES = 8 << 20
_ENOSYS, _ENOTTY, _SEGFAULT = -38, -25, 139
_LOAD, _SYSTEM_CALL = 1, 2  # of ELF segments, and of Unicorn's interrupts


def _up(size: int) -> int:
    return -(-size // PAGE) * PAGE


class Process:
    """A program from its start to its end; ``output`` is all that it writes."""

    def __init__(self, path: Path, arguments: Sequence[str]) -> None:
        import unicorn
        from unicorn import arm64_const as arm

        self.output = bytearray()
        self._arm, self._error = arm, unicorn.UcError
        self._status: int | None = None
        self._break = _BREAK
        self._maps, self._mapped = _MAPS, dict[int, int]()
        self._cpu = unicorn.Uc(unicorn.UC_ARCH_ARM64, unicorn.UC_MODE_ARM)
        self._cpu.reg_write(arm.UC_ARM64_REG_CPACR_EL1, 3 << 20)  # floating point and NEON on
        self._entry, headers = self._load(path.read_bytes())
        self._cpu.mem_map(_STACK, _STACK_BYTES)
        self._cpu.reg_write(arm.UC_ARM64_REG_SP, self._stack([str(path), *arguments], headers))
        self._cpu.hook_add(unicorn.UC_HOOK_INTR, self._interrupt)

    def run(self) -> int:
        """Run the program to its end, and return its exit status; blocks."""
        try:
            self._cpu.emu_start(self._entry, 0)
        except self._error:
            return _SEGFAULT
        return _SEGFAULT if self._status is None else self._status

    def _load(self, elf: bytes) -> tuple[int, tuple[int, int, int]]:
        """Maps the segments; returns the entry, and place, size and number of the program headers."""
        entry, table = struct.unpack_from("<QQ", elf, 24)
        size, count = struct.unpack_from("<HH", elf, 54)
        segments = [struct.unpack_from("<IIQQQQQQ", elf, table + i * size) for i in range(count)]
        loaded = [one for one in segments if one[0] == _LOAD]
        first, last = loaded[0][3] // PAGE * PAGE, _up(loaded[-1][3] + loaded[-1][6])
        self._cpu.mem_map(first, last - first)
        for _, _, offset, at, _, in_file, _, _ in loaded:
            self._cpu.mem_write(at, elf[offset : offset + in_file])
        return entry, (loaded[0][3] + table - loaded[0][2], size, count)

    def _stack(self, arguments: Sequence[str], headers: tuple[int, int, int]) -> int:
        """Writes arguments, an empty environment and the auxiliary vector (AT_PHDR to AT_RANDOM); returns the stack pointer."""
        random = at = _STACK + _STACK_BYTES - PAGE
        places = []
        for text in (bytes(range(16)), *(word.encode() + b"\0" for word in arguments)):
            self._cpu.mem_write(at, text)
            places.append(at)
            at += len(text)
        vector = {3: headers[0], 4: headers[1], 5: headers[2], 6: PAGE, 9: self._entry, 25: random, 0: 0}
        words = [len(arguments), *places[1:], 0, 0, *(one for pair in vector.items() for one in pair)]
        pointer = (random - 8 * len(words)) // 16 * 16
        self._cpu.mem_write(pointer, struct.pack(f"<{len(words)}Q", *words))
        return pointer

    def _interrupt(self, cpu: Any, number: int, data: Any) -> None:
        """A system call; any other exception ends the program."""
        if number != _SYSTEM_CALL:
            cpu.emu_stop()
            return
        first = self._arm.UC_ARM64_REG_X0
        call = self._CALLS.get(cpu.reg_read(self._arm.UC_ARM64_REG_X8))
        result = call(self, *(cpu.reg_read(first + i) for i in range(6))) if call else _ENOSYS
        cpu.reg_write(first, result & (1 << 64) - 1)

    def _exit(self, status: int, *_: int) -> int:
        self._status = status
        self._cpu.emu_stop()
        return 0

    def _more(self, end: int, *_: int) -> int:
        mapped, wanted = _up(self._break), _up(end)
        if wanted > mapped:
            self._cpu.mem_map(mapped, wanted - mapped)
        self._break = max(self._break, end)
        return self._break

    def _map(self, _: int, size: int, protection: int, *more: int) -> int:
        at, self._maps = self._maps, self._maps + _up(size) + PAGE  # no address twice
        if protection:  # Unicorn takes long to split a piece of memory: one that no access survives is not there
            self._protect(at, size, protection)
        return at

    def _unmap(self, at: int, size: int, *_: int) -> int:
        for begin in [begin for begin in self._mapped if at <= begin < at + size]:
            self._cpu.mem_unmap(begin, self._mapped.pop(begin))
        return 0

    def _protect(self, at: int, size: int, protection: int, *_: int) -> int:
        begin = at // PAGE * PAGE
        change = self._cpu.mem_protect
        if begin >= _MAPS and begin not in self._mapped:
            change, self._mapped[begin] = self._cpu.mem_map, _up(at + size) - begin
        change(begin, _up(at + size) - begin, protection)
        return 0

    def _write(self, file: int, at: int, size: int, *_: int) -> int:
        self.output += self._cpu.mem_read(at, size)
        return size

    def _vectors(self, at: int, count: int) -> list[tuple[int, int]]:
        return list(struct.iter_unpack("<QQ", self._cpu.mem_read(at, 16 * count)))

    def _write_vectors(self, file: int, at: int, count: int, *_: int) -> int:
        return sum(self._write(file, *one) for one in self._vectors(at, count))

    def _open(self, _: int, name: int, *more: int) -> int:
        path = bytearray()
        while byte := self._cpu.mem_read(name + len(path), 1)[0]:
            path.append(byte)
        return os.open(bytes(path), os.O_RDONLY)

    def _read(self, file: int, at: int, size: int, *_: int) -> int:
        content = os.read(file, size)
        self._cpu.mem_write(at, content)
        return len(content)

    def _read_vectors(self, file: int, at: int, count: int, *_: int) -> int:
        total = 0
        for place, size in self._vectors(at, count):
            got = self._read(file, place, size) if size else 0
            total += got
            if got < size:
                break
        return total

    def _close(self, file: int, *_: int) -> int:
        os.close(file)
        return 0

    def _time(self, _: int, at: int, *more: int) -> int:
        self._cpu.mem_write(at, struct.pack("<QQ", int(time.time()), 0))
        return 0

    #: Numbers of Linux on 64-bit Arm (include/uapi/asm-generic/unistd.h).
    _CALLS: dict[int, Callable[..., int]] = {
        29: lambda *_: _ENOTTY,  # ioctl
        56: _open,
        57: _close,
        63: _read,
        64: _write,
        65: _read_vectors,
        66: _write_vectors,
        93: _exit,
        94: _exit,
        96: lambda *_: 1,  # set_tid_address
        98: lambda *_: 0,  # futex: nobody waits
        113: _time,
        135: lambda *_: 0,  # rt_sigprocmask
        214: _more,
        215: _unmap,
        222: _map,
        226: _protect,
    }


def main() -> None:
    process = Process(Path(sys.argv[1]), sys.argv[2:])
    status = process.run()
    sys.stdout.buffer.write(process.output)
    sys.exit(status)


if __name__ == "__main__":
    main()
