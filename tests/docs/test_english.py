"""Phrases that readers stumble over do not come back: in the pages, in the texts that generate them, in docstrings and help."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from places import ROOT

#: Pattern -> what to write.
PHRASES = {
    r", beside\b|\bbeside (memcpy|ideal|pairs|XOR|trainings|it\b)": "compared with, next to, in addition to",
    r"\bof (ours|yours)\b|\b[Nn]o hang of": "your own job, the schedule of ds_zipccl, no deadlock",
    r"(?<!there)(?<!\s)\s+(is|are) none\b(?! of)": "is not a collective, are not in the message",
    r"\b(bits|bytes|ms|errors?|waits?|\w+ \d+\.\d+) an? (value|rounding|step|element|parameter|row|bucket|layer)\b": "bits per value",
    r"\bbut for (?!the slot)|\b(decodes?|draws?|runs?|are) alike\b|(rank|node)s? so (get|send|take)s?\b": "except for; equally; therefore",
    r"\b[Nn]obody\b|\blooks? again\b": "the subject that acts: reports are asynchronous",
    r"^#+ (The (net|proof|door)|Owners)\b|\*\*(The (net|proof)|Owners)\.": "the words that a reader searches for",
}
FILES = (
    "*.md",
    "docs/*.md",
    "docs/*.py",
    "ds_zipccl/**/*.py",
    "benchmarks/**/*.py",
    "examples/**/*.py",
    "release/*.py",
    "ds_zipccl/*.md",
)


def prose(path: Path) -> str:
    """What a reader sees: a page without generated sections and code, or the texts of a source file, docstrings among them."""
    text = path.read_text()
    if path.suffix == ".md":
        return re.sub(r"<!-- begin \w+ -->.*?<!-- end -->|`[^`\n]+`", "", text, flags=re.DOTALL)
    return "\n".join(str(node.value) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))


def test_no_text_has_such_a_phrase() -> None:
    found = []
    for path in (path for glob in FILES for path in ROOT.glob(glob)):
        text = prose(path)
        for phrase, better in PHRASES.items():
            hits = re.finditer(phrase.replace(" ", r"\s+"), text, re.MULTILINE)
            found += [f"{path.name}: {text[hit.start() : hit.end() + 40]!r}; write: {better}" for hit in hits]
    assert not found, "\n".join(found)
