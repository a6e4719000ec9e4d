"""Whole rows of flat tensors (FORMAT.md 2.6), gathered and put back by torch, on any device.

Row r of ``words`` begins at element ``head + r * width``. The literals are the first ``head`` elements, some rows, and the elements behind
the last whole row. Rows are int32 tensors, in ascending order, on the device of the words.
"""

from __future__ import annotations

import torch

#: itemsize -> dtype that moves words of that size without looking at them; larger words are several of the last one.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def matrix(words: torch.Tensor, width: int, head: int = 0) -> torch.Tensor:
    """The whole rows of ``words`` as integers in two dimensions, in the same memory."""
    whole = (words.numel() - head) // width
    integers = words[head : head + whole * width].view(_INTEGERS[min(8, words.itemsize)])
    return integers.view(whole, width * words.itemsize // integers.itemsize)


def literal_numel(words: torch.Tensor, width: int, head: int, rows: torch.Tensor) -> int:
    """Elements of the literals."""
    return head + len(rows) * width + (words.numel() - head) % width


def gather(words: torch.Tensor, width: int, head: int, rows: torch.Tensor, literals: torch.Tensor) -> None:
    """Copy the literals of ``words`` to ``literals``, flat, of :func:`literal_numel` elements."""
    end = head + len(rows) * width
    literals[:head].copy_(words[:head])
    torch.index_select(matrix(words, width, head), 0, rows, out=matrix(literals[:end], width, head))
    literals[end:].copy_(words[words.numel() - (literals.numel() - end) :])


def spread(literals: torch.Tensor, words: torch.Tensor, width: int, head: int, rows: torch.Tensor) -> None:
    """Copy ``literals`` to their places in ``words``; the inverse of :func:`gather`."""
    end = head + len(rows) * width
    words[:head].copy_(literals[:head])
    matrix(words, width, head).index_copy_(0, rows.long(), matrix(literals[:end], width, head))
    words[words.numel() - (literals.numel() - end) :].copy_(literals[end:])
