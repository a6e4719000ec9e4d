"""The sends of a pipeline's stages that a low-rank codec takes."""

from __future__ import annotations


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
