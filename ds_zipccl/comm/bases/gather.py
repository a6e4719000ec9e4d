"""all_gather_into_tensor of parameters, of which the settled ones are local copies of their bases, see
:mod:`ds_zipccl.comm.bases.versions`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ds_zipccl import tensors
from ds_zipccl.comm import work
from ds_zipccl.comm.bases.shared import SharedBase
from ds_zipccl.comm.bases.versions import GATHER, Kept
from ds_zipccl.comm.context import Call, OpContext
from ds_zipccl.comm.decision import decide
from ds_zipccl.comm.execution import execute, sent_to_peers
from ds_zipccl.comm.group_state import group_state, resolve_group
from ds_zipccl.comm.host.engine import compare_on_all_ranks, telling_failures
from ds_zipccl.comm.ops.all_gather import request_shards
from ds_zipccl.comm.request import CallOptions, Request, equal_shards
from ds_zipccl.comm.shadow_check import Shadow
from ds_zipccl.config import DEFAULT, ZipcclConfig
from ds_zipccl.telemetry import counters


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

    Settled parameters are copied from their bases before the call returns. All others go together in one gather, which fills the bases of
    those that have one, whatever its schedule is. The first call after an event that ends versions waits for one small message of all
    ranks.

    Raises:
        CommError: a settled parameter was written to, or see :func:`.execution.execute`.
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
    """One gather: the parameters that are copied, and ``rest``, the numbers of those that are sent, from ``own`` to ``whole``."""

    def __init__(self, call: Call, output: torch.Tensor, own: torch.Tensor, parts: Sequence[Part]) -> None:
        self._call, self._output, self._input, self._parts = call, output, own, parts
        self.rest = [number for number, part in enumerate(parts) if part.kept is None or not part.kept.settled]
        self.whole, self.own = output, own
        sizes = [part.numel for part in parts]
        with torch.inference_mode():
            self._rows = output.view(call.size, -1).split(sizes, 1)
            self._shards = own.view(-1).split(sizes)
        self._check: tuple[OpContext, Shadow] | None = None

    @tensors.undisturbed()
    @torch.inference_mode()
    def copy(self) -> bool:
        """Copy the settled parameters. Blocks.

        Returns:
            Whether there are settled parameters.
        """
        rank, nbytes = self._call.rank, 0
        copied = [part.kept is not None and part.kept.settled for part in self._parts]
        if not any(copied):
            return False
        if self._call.config.check == "shadow":
            plain = self._plain_request()
            self._check = (
                _raw_context(self._call),
                Shadow(plain.plain, plain.inputs, plain.outputs, plain.tolerance, self._call.size),
            )
        for part, rows, shard in zip(self._parts, self._rows, self._shards, strict=True):
            if part.kept is None or not part.kept.settled:
                continue
            part.kept.copy(rows, rank, shard)
            if rows[rank].data_ptr() != shard.data_ptr():
                rows[rank].copy_(shard)
            nbytes += rows.numel() * rows.element_size()
        counters.record(self._call.role, GATHER, sent_to_peers(nbytes, self._call.group), 0)
        counters.record_difference(self._call.role, GATHER, "")
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
        keeping = [number for number in self.rest if self._parts[number].kept is not None]
        kept = [one for number in keeping if (one := self._parts[number].kept) is not None]
        for one in kept:
            one.fill()
        base = SharedBase([slot for one in kept if (slot := one.slot()) is not None]) if kept else None
        based = base if len(keeping) == len(self.rest) else None
        if based is not None:
            request.based, request.token, request.base = True, based.token(), based
        choice, fills = decide(request), base is not None
        if choice.decision.with_base and based is not None:
            fills = False  # the schedule does
        ctx = _raw_context(self._call) if fills else None
        telling = functools.partial(_telling, base, ctx, None if self._check is None else self._check[0])

        def end(wait: Callable[[], Any]) -> None:
            with telling():
                wait()
                self._spread()
            if base is not None and ctx is not None:
                with torch.inference_mode(), tensors.undisturbed():
                    base.keep(ctx, [[self._rows[number][rank] for number in keeping] for rank in range(ctx.size)])
            self.compare()

        if not request.async_op:
            end(lambda: execute(choice, request))
            return None
        with telling():
            handle = execute(choice, request)
        if fills or self.whole is not self._output:
            sent = handle
            handle = work.start(GATHER, [self._output], lambda: end(sent.wait))
        for one in kept:
            one.filled_by(handle)
        return handle

    def compare(self) -> None:
        """Compare the output with the plain collective's, if settled parameters were copied and the config asks for a check."""
        if self._check is not None:
            compare_on_all_ranks(*self._check, [self._output])

    def _plain_request(self) -> Request:
        call = self._call
        options = CallOptions(call.config, call.role)
        return request_shards(GATHER, [self._output], [self._input], call.group, False, options)

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
        with contextlib.nullcontext() if checked is None else telling_failures(checked):
            yield
    except BaseException:
        if base is not None and ctx is not None:
            base.abandon(ctx)
        raise
