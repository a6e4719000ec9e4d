"""The host waits for a device in :mod:`ds_zipccl.comm.device.sizes` alone: read from the code, so that every path counts."""

from __future__ import annotations

import ast
from pathlib import Path

import host_waits
import pytest
from places import PACKAGE

DEVICE, BASES = PACKAGE / "comm/device", PACKAGE / "comm/bases"
#: Bases whose work is on streams.
ON_DEVICE = [BASES / f"{name}.py" for name in ("agreed", "on_device", "proof")]
#: File -> functions that may wait: errors have been found then.
ALLOWED = {"reports.py": ("describe",)}
#: Modules whose annotations say which functions and attributes are tensors.
KNOWN = (
    *sorted(DEVICE.glob("*.py")),
    *ON_DEVICE,
    PACKAGE / "tensors.py",
    PACKAGE / "kernels/cuda/jobs.py",
    PACKAGE / "kernels/cuda/backend.py",
)
FILES = [file for file in [*sorted(DEVICE.glob("*.py")), *ON_DEVICE] if file.name != "sizes.py"]
#: Files with the methods ``enqueue``, which are on the device too.
OPS = [*sorted((PACKAGE / "comm/ops").glob("*.py")), BASES / "agreement.py", BASES / "gather.py"]

#: Mistakes, each a line of a function with these arguments.
ARGUMENTS = "ctx: DeviceContext, words: torch.Tensor, many: Sequence[torch.Tensor], shard: Shard, piece: Piece"
MISTAKES = [
    "return words.item()",
    "return words[0].tolist()",
    "words.cpu()",
    "words.to('cpu')",
    "torch.cuda.synchronize()",
    "ctx.streams.record(Stage.WIRE).synchronize()",
    "words.nonzero()",
    "return bool(words)",
    "return int(words[3])",
    "return float(words.sum())",
    "return int(frame_bytes(words))",
    "if words.any(): return",
    "if (words > 3).all(): return",
    "if shard.own[0] == 0: return",
    "while words[0]: pass",
    "return 1 if words.max() > 3 else 2",
    "return not words[0]",
    "return piece.numel and words[0]",
    "assert torch.cat(many).sum() == 0",
    "return [one for one in many if one.any()]",
    "for one in many:\n        if one.any(): return",
    "for number, (one, other) in enumerate(zip(many, many)):\n        int(one)",
    "sizes = encoded_sizes(ctx, many)\n    return max(sizes)",
    "sizes = encoded_sizes(ctx, many)\n    return range(sizes[0])",
    "with ctx.streams.staging(3, 4) as staging:\n        return int(staging[0])",
    "raise ctx.error(f'got {words}')",
]
#: Code that reads nothing of a device.
RIGHT = [
    "return int(words.numel()) if words.numel() else 0",
    "if words.shape[0] > 3: return",
    "if many: return bool(many)",
    "return bool(ctx.streams.record(Stage.WIRE).query())",
    "if shard.own.data_ptr() == words.data_ptr(): return",
    "if words is None: return",
    "return [one for one in many if one.numel()]",
    "return max(one.nbytes for one in many)",
    "return piece.numel > 3 and piece.start < 5",
]


def tree(file: Path, more: str = "") -> ast.Module:
    return ast.parse(file.read_text() + more)


@pytest.fixture(scope="module")
def known() -> host_waits.Known:
    return host_waits.Known(map(tree, KNOWN))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_schedules_do_not_wait(known: host_waits.Known, file: Path) -> None:
    assert host_waits.waits(tree(file), known, allowed=ALLOWED.get(file.name, ())) == []


@pytest.mark.parametrize("file", OPS, ids=lambda file: file.name)
def test_enqueueing_does_not_wait(known: host_waits.Known, file: Path) -> None:
    assert host_waits.waits(tree(file), known, only="enqueue") == []


def test_what_waits_is_seen(known: host_waits.Known) -> None:
    """The two places where the host waits."""
    assert host_waits.waits(tree(DEVICE / "sizes.py"), known)
    assert host_waits.waits(tree(DEVICE / "reports.py"), known)
    assert any("def enqueue" in file.read_text() for file in OPS)


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_noticed(known: host_waits.Known, line: str) -> None:
    mistaken = tree(DEVICE / "gather.py", f"\n\ndef planted({ARGUMENTS}):\n    {line}\n")
    assert host_waits.waits(mistaken, known, only="planted")


@pytest.mark.parametrize("line", RIGHT)
def test_right_code_is_not_noticed(known: host_waits.Known, line: str) -> None:
    right = tree(DEVICE / "gather.py", f"\n\ndef planted({ARGUMENTS}):\n    {line}\n")
    assert host_waits.waits(right, known, only="planted") == []
