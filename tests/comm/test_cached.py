"""Gathers that copy bases while all ranks hold the same values; the memory that the ranks of a node share."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ranks as runner
import torch
import torch.distributed as dist
from cached import CONFIG, FULL, MISS, OTHER, SHARDS, VERSION, Rank, refusing
from test_bases import Trainer

from ds_zipccl import comm
from ds_zipccl.codecs import decompress
from ds_zipccl.comm import topology
from ds_zipccl.comm.bases import host_memory, shared
from ds_zipccl.comm.group_state import group_state
from ds_zipccl.comm.host import cached, frames


@runner.together(2, "host", True)
@runner.together(3, "device", False)
def frozen(rank: int, ranks: int, kind: str, later: bool) -> None:
    """One small message for all parameters of a gather whose bases were filled; no other one, and no frames."""
    one = Rank(rank, ranks, kind)
    found, sent = one.gather(0, 1, 2, later=later)
    assert found == {FULL: 1} and sent > 0 and one.agreements == 0
    for some in ((1,), (0, 1, 2), (2, 0), (0,)):
        assert one.gather(*some, later=later) == ({"": 1}, 0) and one.agreements == 1


@runner.together(2)
def trained(rank: int, ranks: int) -> None:
    """A parameter that steps change goes as a difference once a step, and is copied afterwards; the others are copied."""
    one = Rank(rank, ranks).settle()
    for _ in range(3):
        one.step(2)
        found, sent = one.gather(0, 2)
        assert found == {MISS: 1, "": 2} and 0 < sent < 1000, "a copy and a difference"
        assert one.gather(0, 2) == one.gather(1) == ({"": 1}, 0)


@runner.together(2)
def mixed(rank: int, ranks: int) -> None:
    """Parameters without a base go beside copies, in one gather; in any order, also while bases are filled."""
    one = Rank(rank, ranks)
    full = one.gather(0, 1, also=5_000)[1]
    assert one.gather(0, 1, also=5_000) == ({"": 1}, one.gather(0, 1, also=5_000)[1])
    assert 5_000 < one.gather(1, 0, also=5_000)[1] < 11_000 < full // 4
    assert one.gather(2, 0, also=3)[0] == {"": 1}
    assert one.gather(0, 2, also=3, later=False)[0] == {"": 1}
    two = [one.start([2, 1], also=7), one.start([0])]
    assert all(handle.wait() and torch.equal(whole, wanted) for whole, wanted, handle in reversed(two))


@runner.together(2)
def schedules(rank: int, ranks: int) -> None:
    """Whatever the schedule of the first gather is, it fills the bases."""
    for config, dtype in (
        (replace(CONFIG, mode="auto"), torch.bfloat16),
        (replace(CONFIG, min_bytes=1 << 30), torch.bfloat16),
        (CONFIG, torch.int8),
        (CONFIG, torch.float64),
        (replace(CONFIG, check="shadow"), torch.float32),
    ):
        one = Rank(rank, ranks, config=config, dtype=dtype)
        for chosen in ((0,), (1,), (2, 1)):
            one.gather(*chosen)
        assert one.gather(0, 1, 2) == one.gather(0, 1, 2) == ({"": 1}, 0)


@runner.together(2)
def in_flight(rank: int, ranks: int) -> None:
    """Gathers of one parameter at once: each has the words of its call, whoever writes, waits or frees the base between them."""
    one = Rank(rank, ranks, "device").settle()
    for _ in range(25):
        started = [one.start([0, 2], later=rank == 1)]
        if rank == 0:
            by_data(one)
        started += [one.start([2]), one.start([2, 0]), one.start([1, 2], also=9, later=rank == 0)]
        for whole, wanted, handle in reversed(started):
            assert (handle is None or handle.wait()) and torch.equal(whole, wanted)
        one.step(2)
    copied = one.start([0, 2])
    for slot in one.slots:
        slot.free()
    for whole, wanted, handle in (one.start([2, 0]), copied):
        assert handle.wait() and torch.equal(whole, wanted)


# ---- edits ---------------------------------------------------------------------------------------------------------


def by_data(one: Rank) -> None:
    version = one.shards[2]._version
    one.shards[2].data[-1] = 1.5
    assert one.shards[2]._version == version, "the counter does not move"


def by_copy(one: Rank) -> None:
    one.shards[2].copy_(one.shards[2] + 1)


def by_a_new_tensor(one: Rank) -> None:
    one.shards[2] = one.shards[2] * 2


EDITS: tuple[Callable[[Rank], None], ...] = (by_data, by_copy, by_a_new_tensor)
DAMAGED = r"p0: the copies in host memory that ranks gather from are not the same any more"


@runner.together(2)
def edited(rank: int, ranks: int) -> None:
    """A write by one rank at any moment is a miss of the next gather of that parameter, however it is made; never an old word."""
    one = Rank(rank, ranks).settle()
    for edit in EDITS:
        if rank == 1:
            edit(one)
        assert one.gather(0) == ({"": 1}, 0), "another parameter"
        found, sent = one.gather(0, 2)
        assert found[MISS] == 1 and found[""] == 2 and sent < 300_000, "a miss, a copy and a difference"
        assert one.gather(0, 2) == ({"": 1}, 0)
    saved = one.shards[2].clone()
    if rank == 1:
        by_data(one)
    one.gather(2)
    one.shards[2].data.copy_(saved)
    assert MISS in one.gather(2)[0], "the old words again, after a gather of other ones"


@runner.together(2)
def freed(rank: int, ranks: int) -> None:
    """Ranks whose references to bases end at other times gather alike; a call of all ranks ends bases."""
    one = Rank(rank, ranks).settle()
    if rank == 1:
        one.slots = []
    assert one.gather(0, 1) == ({"": 1}, 0)
    for parameter in one.cached:
        (slot := parameter.slot()).free()
        assert parameter.slot() is None and slot.memory.numel() == 0


@runner.together(2, full="rarer mistakes")
def swapped_versions(rank: int, ranks: int) -> None:
    """A base says that another gather has filled it, or is another base with the same words."""
    one = Rank(rank, ranks, "device").settle()
    if rank == 1:
        one.slots[0].version += 1
    assert one.gather(0, 2)[0] == {VERSION: 1, "": 2}
    assert one.gather(0, 2) == ({"": 1}, 0)
    if rank == 1:
        one.slots[0].serial += 1
    assert one.gather(0, 2)[0] == {VERSION: 1, "": 2}


@runner.together(2)
def swapped_contents(rank: int, ranks: int) -> None:
    """Two bases have each other's words on one rank: misses, and right bits."""
    one = Rank(rank, ranks, "device", sizes=(40_000, 1_000, 40_000)).settle()
    if rank == 1:
        saved = one.slots[0].memory.clone()
        one.slots[0].memory.copy_(one.slots[2].memory), one.slots[2].memory.copy_(saved)
    assert one.gather(0, 1, 2)[0] == {MISS: 2, OTHER: 1, "": 1}
    assert one.gather(0, 1, 2) == ({"": 1}, 0)


@runner.together(2)
def damaged_copy(rank: int, ranks: int) -> None:
    """One bit of another rank's row, on one rank: no comparison sees it, and the hash stops all ranks. A base that was not copied since it
    was filled is only filled again."""
    one = Rank(rank, ranks, "device")
    one.gather(0, 1, 2)
    sign = one.slots[0].memory[1 - rank].view(torch.int16)[35_000:35_001]
    if rank == 1:
        sign.bitwise_xor_(1)
    assert one.gather(0)[0] == ({OTHER: 1, "": 1} if rank else {OTHER: 2})
    one.gather(0)
    if rank == 1:
        sign.bitwise_xor_(1)
    with pytest.raises(comm.CommError, match=DAMAGED):
        for _ in range(cached.AUDITS * cached.AUDIT_EACH):
            one.start([0])[2].wait()


@runner.together(2, full="rarer mistakes")
def damaged_shared_copy(rank: int, ranks: int) -> None:
    """One bit of memory that all ranks share: its owner sees it."""
    one = Rank(rank, ranks).settle()
    if rank == 0:
        one.slots[2].memory[1].view(torch.int16)[-1:].bitwise_xor_(1)
    dist.barrier()
    assert MISS in one.gather(2)[0]


@runner.together(4)
def ranks_of_a_node_share_a_copy(rank: int, ranks: int) -> None:
    """Two nodes of two ranks, each of which has one copy: an edit on one rank is a miss of all, and copies are compared by hash. Shards
    come straight, or by way of the other rank of a node."""
    topology.here = lambda: "left" if rank < 2 else "right"
    assert comm.allocate_bases([], "host", dist.group.WORLD) == []
    for nodes in ([], [[0, 1], [2, 3]]):
        group_state(None).nodes = nodes
        one = Rank(rank, ranks)
        assert one.slots[0].node_ranks == ([0, 1] if rank < 2 else [2, 3])
        one.settle()
        one.step(2)
        assert one.gather(0, 2)[0] == {MISS: 1, "": 2}
    if rank == 3:
        by_data(one)
    assert one.gather(0, 2)[0][MISS] == 1
    assert one.gather(0, 1, 2) == ({"": 1}, 0)
    dist.barrier()  # the other rank of the node has copied
    if rank == 2:
        one.slots[0].memory[0, 7] = 77
    dist.barrier()
    with pytest.raises(comm.CommError, match=DAMAGED):
        for _ in range(cached.AUDITS * cached.AUDIT_EACH):
            one.start([0])[2].wait()


@runner.together(2, full="rarer mistakes")
def refused(rank: int, ranks: int) -> None:
    """A rank that refuses a frame goes on, and the next gather goes in full for all ranks."""
    one = Rank(rank, ranks)
    frames.decompress = refusing(SHARDS[0]) if rank == 0 else decompress
    if rank == 0:
        with pytest.raises(comm.CommError, match="refused"):
            one.gather(0)
    else:
        one.gather(0)
    frames.decompress = decompress
    dist.barrier()
    assert one.gather(0)[0] == {FULL: 2}
    assert one.gather(0) == ({"": 1}, 0)


def no_comparison() -> None:
    cached.same_bits = lambda shard, row: True


def seen_by_shadow(rank: int, ranks: int) -> None:
    one = Rank(rank, ranks, config=replace(CONFIG, check="shadow")).settle()
    if rank == 1:
        by_data(one)
    with pytest.raises(comm.CommError, match="1 of 140002 wrong") as caught:
        one.start([2])[2].wait()
    assert isinstance(caught.value, comm.ShadowMismatch) == (rank == 0)


def test_a_missing_comparison_shows() -> None:
    """Negative proof: without the comparison an edit gives wrong bits, which these tests and the shadow check see."""
    with pytest.raises(runner.RankFailure, match=r"torch\.equal"):
        runner.run(edited, 2, plant=no_comparison)
    runner.run(seen_by_shadow, 2, plant=no_comparison)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_shards_are_compared_bit_by_bit(dtype: torch.dtype) -> None:
    row = torch.arange(70_001).to(dtype)
    if dtype.is_floating_point:
        row[:2] = torch.tensor([float("nan"), 0.0])
    shard = row.clone()
    assert cached.same_bits(shard, row) and cached.same_bits(shard[:0], row[:0])
    assert not cached.same_bits(shard[:-1], row)
    if dtype.is_floating_point:
        shard[1] = -0.0
        assert not cached.same_bits(shard, row)
        shard[1] = 0.0
    assert cached.same_bits(shard.double(), row) and cached.same_bits(torch.stack([row, row], 1)[:, 0], row)
    shard.view(torch.uint8)[-1] ^= 1
    assert not cached.same_bits(shard, row) and not cached.same_bits(shard.double(), row)


MIB = 1 << 20


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 1000 MiB available, without control groups, as a folder."""
    monkeypatch.setattr(host_memory, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(host_memory, "_CONTROL_GROUPS", tmp_path / "groups")
    write(tmp_path / "proc/meminfo", "MemTotal: 9999999 kB\nMemFree: 5 kB\nMemAvailable:    1024000 kB\n")
    return tmp_path


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def group(folder: Path, limit: str, used: int, version: int = 2, reclaimable: int = 0) -> None:
    of_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    names = of_1 if version == 1 else ("memory.max", "memory.current", "inactive_file")
    write(folder / names[0], f"{limit}\n")
    write(folder / names[1], f"{used * MIB}\n")
    write(folder / "memory.stat", f"anon 77\n{names[2]} {reclaimable * MIB}\nfile 99\n")


def left() -> float:
    return host_memory.available() / MIB


def test_the_machine(machine: Path) -> None:
    assert left() == 1000
    write(machine / "proc/self/cgroup", "0::/\n")
    assert left() == 1000, "a group without files"
    (machine / "proc/meminfo").unlink()
    assert left() > 100, "the machine's memory where nothing is known of its use"


def test_every_group_above_counts(machine: Path) -> None:
    write(machine / "proc/self/cgroup", "0::/job/step\n")
    group(machine / "groups/job/step", "max", 5)
    assert left() == 1000
    group(machine / "groups/job", str(600 * MIB), 100)
    assert left() == 500
    group(machine / "groups/job/step", str(300 * MIB), 100)
    assert left() == 200
    group(machine / "groups/job/step", str(300 * MIB), 400, reclaimable=150)
    assert left() == 50
    group(machine / "groups/job/step", str(300 * MIB), 400)
    assert left() == 0, "more is used than allowed"
    write(machine / "proc/self/cgroup", "0::/\n")
    group(machine, str(MIB), 0)
    assert left() == 1000, "no folder above the root counts"


def test_groups_of_version_1(machine: Path) -> None:
    """In a container the process sees the path of the host, and its own group as the root."""
    write(machine / "proc/self/cgroup", "9:cpu,cpuacct:/x\n5:memory:/docker/0123\n0::/y\n")
    group(machine / "groups/memory", str(400 * MIB), 300, 1, reclaimable=50)
    assert left() == 150
    group(machine / "groups/memory", str((1 << 63) - 4096), 300, 1)
    assert left() == 1000


def mapped(process: int) -> set[str]:
    """Names of the shared memory that a process maps."""
    lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if "/memfd:ds_zipccl-" in line}


def opened(process: int) -> set[str]:
    """Names of the shared memory that a process has open."""
    found = set()
    for file in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(os.readlink(file))
    return {name for name in found if "ds_zipccl" in name}


@runner.together(3, "full", [0], "No space left")
@runner.together(3, "little", [0], "this node has 0.2 MB available")
@runner.together(3, "foreign", [1], "wanted 240000 of our own")
@runner.together(3, "renamed", [1, 2], "wanted the memory ds_zipccl-0000")
@runner.together(3, "elsewhere", [1, 2], "No such file")
def without_room(rank: int, ranks: int, failing: str, guilty: list[int], why: str) -> None:
    """The message of every rank where one node has no room, or where a rank finds memory that is not its own."""

    def refuse(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    if failing == "full" and rank == 0:
        os.posix_fallocate = refuse
    if failing == "little" and rank == 0:
        host_memory.available = lambda: 200_000
    if failing == "foreign" and rank == 1:
        os.geteuid = lambda: 12345
    if failing == "renamed" and rank == 0:
        address = host_memory.Address.packed
        host_memory.Address.packed = lambda self: address(self._replace(token="00" * 16))
    if failing == "elsewhere" and rank == 0:
        address = host_memory.Address.packed
        host_memory.Address.packed = lambda self: address(self._replace(descriptor=1 << 63))
    host_memory.place = lambda: "one place"
    with pytest.raises(comm.CommError) as caught:
        comm.allocate_bases([(SHARDS[0], torch.bfloat16)], "host", dist.group.WORLD)
    assert not mapped(os.getpid()) and not opened(os.getpid())
    text = str(caught.value)
    assert "0.2 MB" in text and '"zero3_base"' in text
    assert (why if rank in guilty else "another rank has the reason") in text


@runner.together(2)
def the_memory_goes_with_its_last_slot(rank: int, ranks: int) -> None:
    trainer = Trainer(rank, ranks, "host")
    trainer.gather(0)
    assert len(mapped(os.getpid())) == len(opened(os.getpid())) == 1
    assert not list(Path("/dev/shm").glob("*ds_zipccl*")), "no folder has its name"
    del trainer
    assert not mapped(os.getpid()) and not opened(os.getpid())


def test_places_differ_where_processes_do_not_see_each_other() -> None:
    """Two interpreters here are at one place; one in a PID namespace of its own is not, whatever it sees in /proc, and one without /proc
    is at no other's."""
    assert 0 < host_memory.available() < 1 << 50
    program = f"import runpy; print(runpy.run_path({host_memory.__file__!r})['place']())"  # without torch
    assert host_memory.place() == host_memory.place() == said([sys.executable, "-c", program])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_memory, "_PROC", Path("/nowhere"))
        assert host_memory.place() != host_memory.place()
    if os.geteuid() == 0 and shutil.which("unshare"):
        for options in (["--mount-proc"], []):
            inside = said(["unshare", "--pid", "--fork", *options, sys.executable, "-c", program])
            assert inside and inside != host_memory.place(), options


def said(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip()


def test_the_memory_is_nobody_elses() -> None:
    """Its size is sealed, its mode is 0600, no program that this one starts inherits it; another kind of file is not even opened."""
    before = opened(os.getpid())
    descriptor, address = host_memory.create(12345)
    stat = os.fstat(descriptor)
    assert (stat.st_size, stat.st_mode & 0o777, stat.st_uid) == (12345, 0o600, os.geteuid())
    assert not os.get_inheritable(descriptor)
    with pytest.raises(OSError):
        os.ftruncate(descriptor, 1)
    again = host_memory.open_shared(host_memory.Address.unpacked(address.packed()), 12345)
    assert os.fstat(again).st_ino == stat.st_ino and not os.get_inheritable(again)
    for wrong in (12344, 1 << 40):
        with pytest.raises(OSError, match=f"wanted {wrong} of our own"):
            host_memory.open_shared(address, wrong)
    os.close(again), os.close(descriptor)
    reader, writer = os.pipe()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", lambda *arguments: pytest.fail("opening another kind of file may act on a device"))
        for other in (reader, writer, descriptor):
            with pytest.raises(OSError):
                host_memory.open_shared(address._replace(descriptor=other), 12345)
    os.close(reader), os.close(writer)
    assert opened(os.getpid()) <= before


@runner.together(3)
def fitting(rank: int, ranks: int) -> None:
    """The largest that fit, where rank 1 is another node, the poorest, which decides. Each size is rounded up to whole cache lines."""
    if rank == 1:
        topology.here = lambda: "poor"
    shards = [(100, torch.bfloat16), (64_000, torch.float32), (1_000, torch.int8), (64_000, torch.bfloat16)]
    whole = ranks * (64_000 * 6 + 200 + 1_000)
    found = []
    for share in (whole, 300 * ranks * 1_000, 129 * ranks * 1_000, 1_000, 0, -5):
        mine = share if rank == 1 else share // 2 + 1_000_000
        found.append(shared.choose_fitting(shards, mine, dist.group.WORLD))
    assert [chosen for chosen, _ in found] == [[1, 2, 3], [0, 1, 2], [0, 3], [0], [], []]
    assert [limit for _, limit in found] == [1_155_600, 900_000, 387_000, 1_000, 0, 0]


def killed(rank: int, ranks: int, folder: Path) -> None:
    """Both ranks are killed, one after the other; the second one has the memory until then."""
    trainer = Trainer(rank, ranks, "host")
    trainer.gather(0)
    (name,) = mapped(os.getpid())
    Path(folder, f"{rank}.txt").write_text(f"{os.getpid()} {name}\n")
    other = Path(folder, f"{1 - rank}.txt")
    while not (
        other.exists() and other.read_text().endswith("\n")
    ):  # no barrier: the first to leave it would end the other's
        time.sleep(0.01)
    if rank == 1:
        first, _ = other.read_text().split(maxsplit=1)
        while holds(Path(f"/proc/{first}/maps"), name):
            time.sleep(0.01)
        assert torch.equal(trainer.kept[0].memory.float(), trainer.masters[0].bfloat16().float())
        Path(folder, "alive").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def test_nothing_is_left_after_kill_9(tmp_path: Path) -> None:
    before = sorted(Path("/dev/shm").iterdir())
    with pytest.raises(runner.RankFailure, match="died without a word"):
        runner.run(killed, 2, tmp_path)
    assert (tmp_path / "alive").exists()
    first, second = ((tmp_path / f"{rank}.txt").read_text().split(maxsplit=1)[1].strip() for rank in range(2))
    assert first == second
    left = [file for file in Path("/proc").glob("[0-9]*/maps") if holds(file, first)]
    assert not left and not [
        file for file in Path("/dev/shm").iterdir() if "zipccl" in file.name and file not in before
    ]


def holds(file: Path, name: str) -> bool:
    with contextlib.suppress(OSError):  # the process has ended
        return name in file.read_text()
    return False


test_programs = runner.programs(__name__)
