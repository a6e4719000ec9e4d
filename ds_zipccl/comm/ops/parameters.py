"""Gathers of ZeRO's parameters whose bases may be valid, and agreements on the sizes of their frames, see :mod:`.host.versions` and
:mod:`.device.bases.agreed`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ds_zipccl import tensors
from ds_zipccl.comm import engine, work
from ds_zipccl.comm.bases.state import GATHER, Way
from ds_zipccl.comm.context import Call, OpContext
from ds_zipccl.comm.decision import decide
from ds_zipccl.comm.engine import Agreed, Kept, SharedBase
from ds_zipccl.comm.execution import execute, sent_to_peers
from ds_zipccl.comm.group_state import group_state, resolve_group
from ds_zipccl.comm.ops.all_gather import request_shards
from ds_zipccl.comm.request import CallOptions, Request, equal_shards
from ds_zipccl.comm.shadow_check import Shadow
from ds_zipccl.config import DEFAULT, ZipcclConfig
from ds_zipccl.telemetry import counters


def agree_sizes(
    parameters: Iterable[tuple[Agreed, torch.Tensor]],
    group: dist.ProcessGroup | None = None,
    *,
    config: ZipcclConfig = DEFAULT,
    role: str = "zero_param",
) -> int:
    """Agree on the sizes of the frames of parameters that have none, for gathers with ``agreed``. A collective; the host waits once.

    Nothing happens where a gather of all these parameters would not be coded in the order of streams, or where all of them have sizes.

    Args:
        parameters: with the own shards, flat, contiguous, all on one device, in an order that is equal on all ranks.

    Returns:
        The number of parameters that got sizes.

    Raises:
        CommError: a rank has refused a frame of an earlier operation, or did not come within the group's timeout. All ranks raise.
    """
    state = group_state(group)
    if state is None:
        return 0
    found: dict[torch.dtype, list[tuple[Agreed, torch.Tensor]]] = {}
    for one, words in parameters:
        found.setdefault(one.dtype or words.dtype, []).append((one, words))
    coded: list[tuple[Agreed, torch.Tensor]] = []
    codec: str = config.codec
    for dtype, some in found.items():
        like = tensors.empty(0, dtype, some[0][1].device)
        # decided on, not executed
        request = request_shards(GATHER, [like], [like], group, False, CallOptions(config, role))
        request.numel = sum(words.numel() for _, words in some) * state.size
        decision = decide(request).decision
        if decision.on_device and decision.codec != "raw":
            codec = decision.codec
            coded += some
    return engine.agree_ahead(coded, resolve_group(group), config, role, codec) if coded else 0


class Part(NamedTuple):
    """A parameter of a gather: the elements of a shard, and its versions; None: it has no base that fits the gather."""

    numel: int
    kept: Kept | None = None


def gather_parts(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    parts: Sequence[Part],
    config: ZipcclConfig = DEFAULT,
    role: str = "zero_param",
    uncompressed_call: Callable[[], Any] | None = None,
) -> Any:
    """``torch.distributed.all_gather_into_tensor`` of flat CPU tensors whose shards lie end to end, one for each of ``parts``.

    Parameters with valid bases are copied before the call returns. All others go together in one gather, which fills the bases of
    those that have one, whatever its schedule is. The first call after an event that ends versions waits for one small message of all
    ranks.

    Raises:
        CommError: a parameter was written to within its version, or see :func:`.execution.execute`.
        ValueError: the parts are not those of the tensors.
    """
    state = group_state(group)
    if state is None or sum(part.numel for part in parts) != input_tensor.numel():
        raise ValueError(
            f"parts have {[part.numel for part in parts]} elements, the input has {input_tensor.numel()}; "
            "call on ranks of the group, and name all parameters of the input, in their order"
        )
    for keeper in dict.fromkeys(part.kept.keeper for part in parts if part.kept is not None):
        keeper.agree([part.kept for part in parts if part.kept is not None and part.kept.keeper is keeper])
    gather = _Gather(Call(GATHER, resolve_group(group), config, role), output_tensor, input_tensor, parts)
    copied = gather.copy()
    if copied and not gather.rest:
        gather.compare()
        return work.done(GATHER, [output_tensor]) if async_op else None
    if copied:
        gather.lay_out()
    options = CallOptions(config, role, None if copied else uncompressed_call)
    return gather.send(request_shards(GATHER, [gather.whole], [gather.own], group, async_op, options))


class _Gather:
    """One gather: the parameters that are copied, and ``rest``, the numbers of those that are sent, from ``own`` to ``whole``; the bases of
    ``_filled`` are filled then."""

    def __init__(self, call: Call, output: torch.Tensor, own: torch.Tensor, parts: Sequence[Part]) -> None:
        self._call, self._output, self._input, self._parts = call, output, own, parts
        kept = {number: part.kept for number, part in enumerate(parts) if part.kept is not None}
        self._valid = {number: one for number, one in kept.items() if one.way is Way.COPY}
        self._filled = {number: one for number, one in kept.items() if number not in self._valid}
        self.rest = [number for number in range(len(parts)) if number not in self._valid]
        self.whole, self.own = output, own
        sizes = [part.numel for part in parts]
        with torch.inference_mode():
            self._rows = output.view(call.size, -1).split(sizes, 1)
            self._shards = own.view(-1).split(sizes)
        self._check: tuple[OpContext, Shadow] | None = None

    @tensors.undisturbed()
    @torch.inference_mode()
    def copy(self) -> bool:
        """Copy the parameters with valid bases, and return whether there are any. Blocks."""
        if not self._valid:
            return False
        call, nbytes = self._call, 0
        if call.config.check == "shadow":
            options = CallOptions(call.config, call.role)
            whole = request_shards(GATHER, [self._output], [self._input], call.group, False, options)
            shadow = Shadow(whole.plain, whole.inputs, whole.outputs, whole.sum.tolerance, call.size)
            self._check = _raw_context(call), shadow
        for number, one in self._valid.items():
            rows, shard = self._rows[number], self._shards[number]
            one.copy(rows, call.rank, shard)
            if rows[call.rank].data_ptr() != shard.data_ptr():
                rows[call.rank].copy_(shard)
            nbytes += rows.numel() * rows.element_size()
        counters.record(call.role, GATHER, sent_to_peers(nbytes, call.group), 0)
        counters.record_difference(call.role, GATHER, "")
        return True

    @tensors.undisturbed()
    @torch.no_grad()
    def lay_out(self) -> None:
        """Lay the shards of the parameters that are sent end to end, in memory of their own. It is no tensor of inference mode: plain
        collectives write to it outside of that mode."""
        numel = sum(self._parts[number].numel for number in self.rest)
        self.whole = tensors.empty(self._call.size * numel, self._output.dtype, self._output.device)
        self.own = equal_shards(self.whole, self._call.size)[self._call.rank]
        torch.cat([self._shards[number] for number in self.rest], out=self.own)

    def send(self, request: Request) -> Any:
        """Gather the rest, and fill the bases of the rest. Returns as torch.distributed does."""
        filled = self._filled
        for one in filled.values():
            one.fill()
        base = SharedBase([slot for one in filled.values() if (slot := one.slot()) is not None]) if filled else None
        request.base = base if len(filled) == len(self.rest) else None
        choice = decide(request)
        fills = base is not None and not choice.decision.with_base  # such a schedule does
        ctx = _raw_context(self._call) if fills else None
        telling = functools.partial(_telling, base, ctx, None if self._check is None else self._check[0])

        def end(wait: Callable[[], Any]) -> None:
            with telling():
                wait()
                self._spread()
            if base is not None and ctx is not None:
                with torch.inference_mode(), tensors.undisturbed():
                    base.keep(ctx, [[self._rows[number][rank] for number in filled] for rank in range(ctx.size)])
            self.compare()

        if not request.async_op:
            end(lambda: execute(choice, request))
            return None
        with telling():
            handle = execute(choice, request)
        if fills or self.whole is not self._output:
            sent = handle
            handle = work.start(GATHER, [self._output], lambda: end(sent.wait))
        for one in filled.values():
            one.filled_by(handle)
        return handle

    def compare(self) -> None:
        """Compare the output with the plain collective's, if parameters were copied and the config asks for a check."""
        if self._check is not None:
            engine.host.compare_on_all_ranks(*self._check, [self._output])

    @tensors.undisturbed()
    @torch.inference_mode()
    def _spread(self) -> None:
        """Copy the parameters that were sent to their columns of the output."""
        if self.whole is self._output:
            return
        columns = self.whole.view(self._call.size, -1).split([self._parts[number].numel for number in self.rest], 1)
        for number, column in zip(self.rest, columns, strict=True):
            self._rows[number].copy_(column)


def _raw_context(call: Call) -> OpContext:
    """Return a context with the next tags of the group, which every rank takes in program order."""
    return OpContext(GATHER, call.group, call.config, call.role, "raw", tensors.CPU)


@contextlib.contextmanager
def _telling(base: SharedBase | None, ctx: OpContext | None, checked: OpContext | None) -> Iterator[None]:
    """If the body fails, tell the ranks that share bases, and those that wait for the outcome of a check, so that they do not wait for
    this rank."""
    try:
        with contextlib.nullcontext() if checked is None else engine.host.telling_failures(checked):
            yield
    except BaseException:
        if base is not None and ctx is not None:
            base.abandon(ctx)
        raise
