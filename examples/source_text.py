"""Text that every machine has, as tokens: the sources of Python's standard library."""

from __future__ import annotations

import os
import random
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import torch
from torch import Tensor


def read_text(data: Path | None, characters: int) -> str:
    """The first characters of a file, or of the standard library's modules in a fixed shuffled order."""
    if data:
        return data.read_text(encoding="utf-8", errors="replace")[:characters]
    library = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    files = []
    for folder, inside, names in os.walk(library):
        inside[:] = sorted(set(inside) - skipped)
        files += [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
    if not files:
        raise SystemExit(f"no Python sources under {library} to train on: name a text with --data FILE")
    random.Random(0).shuffle(files)
    text = ""
    while files and len(text) < characters:
        text += files.pop().read_text(encoding="utf-8", errors="replace")
    return text[:characters]


def tokenise(text: str, vocabulary: int) -> Tensor:
    """Words, digits, line ends, indents and symbols as numbers by frequency; 0: not in the vocabulary."""
    words = re.findall(r"[^\W\d_]+|\d|_|\n| {4}|[^\w\s]", text)
    common = Counter(words).most_common(vocabulary - 1)
    number = {word: index for index, (word, _) in enumerate(common, start=1)}
    return torch.tensor([number.get(word, 0) for word in words])


def batches(tokens: Tensor, batch: int, context: int, seed: int, rank: int, world: int) -> Iterator[Tensor]:
    """Endless [batch, context + 1] windows at random places, fixed by seed, step and rank."""
    for step in count():
        source = torch.Generator().manual_seed((seed << 32) + step * world + rank)
        starts = torch.randint(len(tokens) - context - 1, (batch,), generator=source)
        yield torch.stack([tokens[start : start + context + 1] for start in starts.tolist()])
