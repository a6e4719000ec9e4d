"""The sends of a pipeline's stages that a low-rank codec takes, and the ranks that share a weight of several stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def compresses(stage: int, stages: int, micro_batches: int, index: int) -> bool:
    """Return whether the gradient that a stage sends backward for a micro-batch is one of its epilogue, after the stage's last forward.

    The earlier stage has nothing else to do then but wait for that message. Both ends of a link can compute the rule from the index of
    the micro-batch. A count of own forwards cannot serve the receiver: one more gradient arrives there after its own last forward.
    Published as "epilogue-only compression" (Optimus-CC, ASPLOS 2023).

    Args:
        stage: the sending stage, 1 to ``stages`` - 1.
        stages: number of stages.
        micro_batches: micro-batches of one optimizer step.
        index: of the micro-batch in the order of the sends, from 0.
    """
    return index >= micro_batches - (stages - stage)


def sharing_ranks(coordinates: Sequence[Mapping[str, int]], stages: Sequence[int]) -> list[list[int]]:
    """Return the groups of ranks that hold the same values of a weight that ``stages`` share: all data-parallel ranks of the stages. Ranks
    with different coordinates on another axis, such as tensor parallelism, hold different parts of the weight and are in different groups.

    Args:
        coordinates: of each rank, its place on each axis; "pipe" and "data" are two of them.
        stages: places on the axis "pipe".

    Returns:
        Ranks in ascending order, groups in the order of their first ranks.
    """
    groups: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for rank, place in enumerate(coordinates):
        if place["pipe"] in stages:
            others = tuple(sorted((axis, at) for axis, at in place.items() if axis not in ("pipe", "data")))
            groups.setdefault(others, []).append(rank)
    return list(groups.values())
