"""The sends between the stages of a pipeline: the tensors that are activations or gradients of activations, and the low-rank codec of the
gradients.

Of a gradient G the stage sends the factors of M = G + E. E is what the messages before on the same link did not deliver, where the role has
feedback of errors. The receiver gets the product of the rounded factors, and so E is M minus that product. Q, the second factor, is kept:
it begins the power iteration for the next message. Published as compressed backpropagation with lazy error propagation (Optimus-CC, ASPLOS
2023).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from ds_zipccl import tensors
from ds_zipccl.codecs import lowrank
from ds_zipccl.comm.lossy.factors import Factored, Factoring
from ds_zipccl.comm.lossy.squared_error import sum_of_squares
from ds_zipccl.integration.lossy import state
from ds_zipccl.integration.lossy.state import Entry, Ready, State
from ds_zipccl.lossy import LowRank
from ds_zipccl.policy.admission import compresses
from ds_zipccl.role_settings import RoleSettings
from ds_zipccl.telemetry import counters

ROLE = "pp"


def begin_batch(engine: Any) -> None:
    """Count the micro-batches of an engine from 0 again. Where each batch may have a shape of its own, no state outlives one."""
    own = state.of(engine)
    own.sent, own.inputs = 0, None
    if getattr(engine, "dynamic_shape", False):
        forget_shapes(engine)


def forget_shapes(engine: Any) -> None:
    """Forget the state of an engine's links: tensors of other shapes follow."""
    state.of(engine).drop(ROLE)


# ---- activations


def activations(engine: Any, buffer_id: int) -> tuple[int, Ready]:
    """Return how many activations a stage sends, and a function that tells them from other floating-point tensors, such as positions:
    gradients flow through activations. A mask, the last tensor, becomes floating-point only to be sent. Of tensors that
    tensor-parallel ranks share out, DeepSpeed sends a part of the first, behind its sizes."""
    outputs = engine.pipe_buffers["outputs"][buffer_id]
    if isinstance(outputs, torch.Tensor):
        return 1, lambda tensor, settings: True
    masked = getattr(engine, "has_attention_mask", False) or getattr(engine, "has_bool_tensors", False)
    parts = outputs[1:2] if getattr(engine, "is_pipe_partitioned", False) else ()
    places = {one.data_ptr() for one in (*(one for one in outputs if one.requires_grad), *parts)}
    return len(_floating(outputs[:-1] if masked else outputs)), lambda tensor, settings: tensor.data_ptr() in places


def _floating(given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor for tensor in given if tensor.is_floating_point()]


# ---- gradients


def _sent_for(engine: Any, buffer_id: int) -> list[torch.Tensor]:
    """Return the inputs of a micro-batch whose gradients are sent."""
    inputs = engine.pipe_buffers["inputs"][buffer_id]
    return [inputs] if isinstance(inputs, torch.Tensor) else _floating(inputs)


def gradients(engine: Any, buffer_id: int) -> tuple[int, Ready]:
    """Return how many gradients of activations a stage sends for one micro-batch, and a function for them, in the order in which they are
    sent: it gives what makes factors of each, if the role has a low-rank codec, and tells whether that codec is for this micro-batch. Where
    tensor-parallel ranks share gradients out, each sends a slice of one."""
    own = state.of(engine)
    index, own.sent = own.sent, own.sent + 1
    inputs = _sent_for(engine, buffer_id)
    numbers = itertools.count()

    def ready(tensor: torch.Tensor, settings: RoleSettings) -> bool | Factoring:
        if not isinstance(settings.codec, LowRank):
            return True
        number = next(numbers)
        if number == 0 and settings.error != "off":
            _compare_inputs(engine, own, inputs[0], last=index + 1 == engine.micro_batches)
        last_sends = compresses(engine.stage_id, engine.num_stages, engine.micro_batches, index)
        if settings.send == "epilogue" and not last_sends:
            return False
        peer, ranks = engine.grid.stage_to_global(stage_id=engine.prev_stage), torch.distributed.get_world_size()
        return _Link(settings, (peer, "backward", number), inputs[number].shape[-1], ranks, own)

    return 1 if engine.is_grad_partitioned else len(inputs), ready


def _compare_inputs(engine: Any, own: State, inputs: torch.Tensor, last: bool) -> None:
    """Count, once a step, how alike the stage's inputs are in the last two micro-batches: errors of a gradient that ride on the next one
    help where the inputs of both are similar, with a cosine beyond 1/2."""
    before, own.inputs = own.inputs, None
    if last and before is not None and before.shape == inputs.shape:
        with torch.no_grad(), tensors.undisturbed():
            one, other = (each.reshape(-1).double() for each in (before, inputs))
            cosine = torch.dot(one, other) / (torch.linalg.vector_norm(one) * torch.linalg.vector_norm(other))
            counters.record_alike(ROLE, "send", float(cosine))
    elif not last and own.sent + 1 == engine.micro_batches:
        own.inputs = inputs.detach()


@dataclass(frozen=True)
class _Link(Factoring):
    """Makes the factors of one gradient that a stage sends: the tensor of ``key``, the peer's rank, the direction, and the number among the
    gradients of a micro-batch. Rows of its matrix have ``width`` elements. ``ranks``: of the job. ``state``: of the engine."""

    settings: RoleSettings
    key: tuple[int, str, int]
    width: int
    ranks: int
    state: State

    def __str__(self) -> str:
        return str(self.settings.codec)

    def factored(self, tensor: torch.Tensor, op: str, route: str) -> Factored | None:
        """As :meth:`ds_zipccl.comm.lossy.factors.Factoring.factored`."""
        codec = cast(LowRank, self.settings.codec)
        counters.record_lossy(ROLE, op, str(self), 1)
        rows = tensor.numel() // self.width if self.width and not tensor.numel() % self.width else 0
        rank = lowrank.factor_rank(rows, self.width, codec.rank)
        if not rank:
            counters.record_exact(ROLE, op, "shape", 1)
            return None
        entry = self.state.entry(ROLE, self.key, (rows, self.width), tensor.dtype, self.ranks)
        with torch.inference_mode(False), torch.no_grad(), tensors.undisturbed():
            return self._step(tensor.detach().reshape(rows, self.width), tensor.shape, entry, rank, op, route)

    def _step(
        self, given: torch.Tensor, shape: torch.Size, entry: Entry, rank: int, op: str, route: str
    ) -> Factored | None:
        """Return the factors of ``given``, [n, m], and renew the state of the link; None, and no error any more, where they
        are not finite."""
        matrix = given.float()
        if entry.error is not None:
            matrix = matrix + entry.error.view_as(matrix)
        if not bool(matrix.isfinite().all()):
            _forget(entry, op)
            return None
        start = entry.factor
        if start is None or start.shape != (self.width, rank):
            start = lowrank.first_factor(self.width, rank, self.key[-1])
        p, q = lowrank.power_step(matrix.contiguous(), start, route=route)
        rounded = lowrank.round_factors(p, q, route=route)
        if not lowrank.bounded(*rounded):
            _forget(entry, op)
            return None
        values = tensors.empty(given.numel(), given.dtype).view(given.shape)
        lowrank.product(*rounded, values, route=route)
        missing = matrix - values
        entry.factor, entry.error = q, missing if self.settings.error != "off" else None
        missed, own, sent = (sum_of_squares(one) for one in (missing, matrix, given.float()))
        counters.record_error(ROLE, op, str(self), missed, own)
        if self.settings.error != "off":
            counters.record_kept(ROLE, op, missed, sent)
        return Factored(*rounded, values.view(shape))


def _forget(entry: Entry, op: str) -> None:
    """Forget the error of a message that goes exact as it is not finite. The factor stays."""
    counters.record_exact(ROLE, op, "not finite", 1)
    entry.error = None
