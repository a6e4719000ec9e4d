"""Calls that all ranks check, on groups that exchange messages: each rank learns the outcome of every other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from ds_zipccl import tensors
from ds_zipccl.comm.context import OpContext, SmallGather, packed, unpacked
from ds_zipccl.comm.host.pipeline import abandon
from ds_zipccl.comm.request import compare_by, problem_of
from ds_zipccl.comm.shadow_check import Shadow
from ds_zipccl.comm.transport.protocol import TAGS_PER_COLLECTIVE

#: The tag of a checked call's outcome, after those of its exchanges.
_OUTCOME = TAGS_PER_COLLECTIVE - 1


@contextmanager
def telling_failures(ctx: OpContext) -> Iterator[None]:
    """If the body of a checked call fails, tell the other ranks, which wait for the outcome of this one. Does not wait for theirs: they may
    lack frames of this rank."""
    try:
        yield
    except BaseException as error:
        with suppress(RuntimeError):
            abandon(_outcomes(ctx, problem_of(ctx, error)))
        raise


@tensors.undisturbed()
def compare_on_all_ranks(ctx: OpContext, shadow: Shadow, outputs: Sequence[torch.Tensor]) -> None:
    """Compare the outputs of a call that all ranks check. A collective; blocks.

    Raises:
        CommError: the outputs of a rank differ from the plain results, or a rank has failed. All ranks raise; ShadowMismatch is raised by
            those whose outputs differ.
    """

    def tell(text: str) -> dict[int, str]:
        texts = [unpacked(part) for part in _outcomes(ctx, text).all()]
        return dict(zip((ctx.rank, *ctx.peers), texts, strict=True))

    compare_by(ctx, shadow, outputs, tell)


def _outcomes(ctx: OpContext, text: str) -> SmallGather:
    return SmallGather(ctx, tensors.of_buffer(packed(text)), "the outcomes of a check", ctx.tag(_OUTCOME))
