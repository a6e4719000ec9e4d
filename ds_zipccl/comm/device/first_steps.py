"""The first steps of a job with ``nccl`` auto: plain collectives write the results, and coded ones copies, which the device compares.

Each role is compared until it has been in :data:`STEPS` optimizer steps. Then all ranks agree: where every word was right on every rank,
the moves of the role are coded from the next step on; otherwise they stay plain for as long as the job runs. Nothing unproven reaches the
model. Every :data:`LOOK_STEPS` steps a plain step compares again, and stops all ranks where a word has become wrong.

Sums that are ours have our order from the first step on, which the canary has proven, and go without coding until coded sums have been
compared with them: the bits are equal. The backend's own sum is beside them in these steps. Where rounding does not explain their
distance, all ranks stop before the optimizer step.

Frames are those without a base: a difference is proven by the hashes of its base, see :mod:`.bases.proof`.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ds_zipccl import tensors
from ds_zipccl.comm.device import gather, sums
from ds_zipccl.comm.device.context import DeviceContext
from ds_zipccl.comm.device.exchange import exchange_even, exchange_uneven
from ds_zipccl.comm.device.gather import Shard
from ds_zipccl.comm.device.reports import Reports
from ds_zipccl.comm.device.sizes import REMEDY, Refused, largest
from ds_zipccl.comm.device.streams import Stage
from ds_zipccl.comm.device.sums import Part
from ds_zipccl.comm.group_state import resolve_group
from ds_zipccl.comm.request import Request, logical_order
from ds_zipccl.comm.shadow_check import beyond_rounding, bits, word_text
from ds_zipccl.comm.topology import Levels, tell
from ds_zipccl.comm.work import CommError
from ds_zipccl.config import ROLES, ZipcclConfig
from ds_zipccl.kernels import self_test
from ds_zipccl.ops import OPS
from ds_zipccl.policy.admission import PassReason

#: Steps in which the calls of a role are compared (seed: later ones have the same sizes and schedules). The first step of a job is not one
#: of them: it shows how much memory is left.
STEPS = 3
#: Calls of a kind that are compared in a step, and kinds of a group (seed: all schedules and sizes, at a small part of a step's bytes).
CALLS, KINDS = 2, 64
#: Steps after which no further role is decided on (admission: ranks tell each other texts, which takes seconds with a thousand of them).
LAST = 32
#: Steps after which a plain step compares proven roles again (seed: a thousandth of the gain).
LOOK_STEPS = 1000
#: Bytes of the outputs of a call that are compared at most; half of the staging buffers where that is less (admission: a copy, its words
#: and a mask take some three and a half times as much memory, equal on all ranks, beside the model).
MOST_BYTES = 64 << 20
#: The part of it that a sum takes, which has two more sums beside it, in fp64.
_SUM_PART = 8
#: What is said of a sum that rounding does not explain.
_APART = (
    "is further from the backend's own than rounding explains, in the first steps of a job: nothing of it is in the model; look at the "
    'hardware, or set "reduction": "plain"'
)

#: A kind of calls: operation, role, dtype, group, size class.
_Kind = tuple[str, str, torch.dtype, str, int]


def sums_of(role: str) -> str:
    """Return the name of the sums of a role, which are proven apart from its moves."""
    return f"sums of {role}"


class FirstSteps:
    """The comparisons of this rank, and what all ranks have agreed on: ``proven`` roles, and roles with ``wrong`` words. The sums of a role
    are a role of their own, see :func:`sums_of`."""

    def __init__(self, config: ZipcclConfig, device: torch.device) -> None:
        self._config, self._device = config, device
        self.proven: set[str] = set()
        self.wrong: dict[str, str] = {}
        self._calls: Counter[_Kind] = Counter()
        #: Role -> what :func:`_difference` has found in the first call with a wrong word; on the device.
        self._found: dict[str, torch.Tensor] = {}
        self._compared: list[_Kind] = []  # of each call
        self._failed: dict[str, str] = {}  # role -> the error of its frames, or of this rank's memory
        self._steps: Counter[str] = Counter()
        self._now: set[str] = set()  # roles of the step that runs
        self._ended, self._due = 0, 1 + STEPS
        self._looking = False  # the step that runs compares proven roles too
        #: Role -> its reports, apart from those of the job, which a refused frame stops.
        self._reports = {name: Reports(device) for role in ROLES for name in (role, sums_of(role))}
        for dtype in (torch.bfloat16, torch.float32):  # the kernels are loaded now, not beside collectives
            _difference(words := tensors.filled(8, 0, dtype, device), words, 0)
            beyond_rounding(words, words, words, 1).any()

    def reason(self, role: str) -> PassReason | None:
        """Return why the moves of a role pass in the step that runs; None if they are proven."""
        if role in self.proven and not self._looking:
            return None
        return PassReason.WRONG_WORDS if role in self.wrong else PassReason.UNPROVEN

    def codes_sums(self, role: str) -> bool:
        """Return whether the sums of a role are coded in the step that runs; otherwise they go without coding, with equal bits."""
        return sums_of(role) in self.proven and not self._looking

    @property
    def compares(self) -> bool:
        """Return whether the step that runs may compare; equal on all ranks."""
        return bool(self._ended) and (self._looking or self._due <= LAST)

    @tensors.undisturbed()
    @torch.inference_mode()
    def check(self) -> None:
        """Raise if a rank has refused a frame, or has a wrong sum. A collective of all ranks; the host waits.

        Raises:
            CommError: on all ranks.
        """
        largest(DeviceContext("first steps", resolve_group(None), self._config, "dp", self._config.codec, self._device))

    @tensors.undisturbed()
    @torch.inference_mode()
    def compare(self, request: Request, handle: Any) -> None:
        """Put the coded form of a plain call on the streams, and compare its words with the plain outputs. The current stream waits for
        both, the host for the sizes of frames. A collective of the group.

        Args:
            handle: of the plain call; None: the current stream has waited for it.
        """
        role = request.options.role
        kind = self._counted(request, role)
        if kind is None:
            return
        ctx, lacks = self._context(request, kind), 0
        with ctx.streams.on(Stage.DECODE):
            if handle is not None:
                handle.wait()
            try:
                sources, wanted = _parts(request, ctx)
                want = [part.contiguous() for part in wanted]
                got = [tensors.empty(part.numel(), part.dtype, part.device) for part in want]
            except RuntimeError as error:  # torch.OutOfMemoryError is one; the other ranks must not wait for this one
                lacks = self._fail(role, error)
        ctx.streams.order(Stage.DECODE, Stage.ENCODE)
        try:
            if not largest(ctx, lacks)[0]:
                _move(ctx, request, sources, got)
                with ctx.streams.on(Stage.DECODE):
                    self._look(kind, got, want)
        except Refused as error:  # on all ranks of the group
            self._failed.setdefault(role, str(error).removesuffix(REMEDY))
        ctx.streams.join(ctx.streams.record_all())

    def _counted(self, request: Request, role: str) -> _Kind | None:
        """Count a call, and return its kind; None where it is not compared. Equal on all ranks of the group."""
        if not self._ended or (self._due > LAST and role not in self.proven):  # nothing would be decided any more
            return None
        size = 0 if request.numel is None else max(1, request.nbytes()).bit_length()
        kind = request.op, role, request.tensor.dtype, str(resolve_group(request.group).group_name), size
        self._now.add(role)
        kinds = sum(other[3] == kind[3] for other in self._calls)  # of the group: its ranks must count alike
        if self._calls[kind] >= CALLS or (kind not in self._calls and kinds >= KINDS):
            return None
        self._calls[kind] += 1
        return kind

    def _context(self, request: Request, kind: _Kind) -> DeviceContext:
        """Return the context of a coded call that is compared."""
        ctx = DeviceContext(*request.call(self._config.codec), request.tensor.device)
        ctx.reports = self._reports[kind[1]]
        if (self._ended + self._calls[kind]) % 2 and ctx.cut.levels_from < math.inf:
            # parts of calls may be too small for a schedule that whole ones take
            ctx.cut = ctx.cut._replace(levels_from=0)
        return ctx

    @contextmanager
    def beside_sum(
        self, call: DeviceContext, request: Request, parts: Sequence[Part], out: Part, *, gathered: bool
    ) -> Iterator[None]:
        """Surround a sum that goes without coding: make the coded one and the backend's own of the first words of each rank's part, and
        compare. A collective of the group; the host waits for the sizes of frames.

        Args:
            call: the context of the sum, which overwrites words.
            parts, out: as for :func:`.sums.reduce_scatter`. ``gathered``: every rank gets all parts.
        """
        kind, longest = self._counted(request, sums_of(request.options.role)), max(part.numel for part in parts)
        if kind is None or not longest:
            yield
            return
        streams, ranks, dtype, summed = call.streams, call.size, request.tensor.dtype, request.sum
        nbytes = min(MOST_BYTES, call.budget // 2) // _SUM_PART
        count, lacks = min(longest, max(1, nbytes // (ranks * dtype.itemsize))), 0
        places = [part.cut(0, count) for part in (parts if gathered else [out])]
        with streams.on(Stage.DECODE):
            try:
                own, theirs, most, *wanted = (
                    tensors.empty(numel, dtype, call.device)
                    for numel in (count, count, count, *(one.numel for one in places))
                )
                rows, magnitudes, whole = (tensors.filled(ranks * count, 0, dtype, call.device) for _ in range(3))
                for part, row in zip(parts, rows.view(ranks, -1), strict=True):
                    part.cut(0, count).pack(row)
                torch.abs(rows, out=magnitudes)
            except RuntimeError as error:  # torch.OutOfMemoryError is one; the other ranks must not wait for this one
                lacks = self._fail(kind[1], error)
        yield  # the decoding stream alone writes to the places of the words, or a gather that waits for it
        ctx = self._context(request, kind)
        try:
            if not largest(ctx, lacks)[0]:
                with streams.wire():
                    ctx.transport.reduce_scatter(theirs, rows, summed.op)
                    ctx.transport.reduce_scatter(most, magnitudes, summed.op)
                with streams.on(Stage.DECODE):
                    for place, want in zip(places, wanted, strict=True):
                        place.pack(want)
                    mine = wanted[ctx.rank if gathered else 0]
                    try:
                        apart = beyond_rounding(mine, theirs[: len(mine)], most[: len(mine)], ranks).any().expand(2)
                        call.reports.note_changes(call.where(), ("the sum",), apart, torch.zeros_like(apart), _APART)
                    except RuntimeError as error:  # torch.OutOfMemoryError is one
                        self._fail(kind[1], error)
                levels, every = Levels.of(summed.nodes, ctx.rank, ranks), list(rows.view(ranks, -1))
                sums.reduce_scatter(ctx, levels, list(map(Part.of, every)), Part.of(own), summed.reduction.divisor)
                if gathered:
                    streams.order(Stage.DECODE, Stage.ENCODE)
                    gather.gather(ctx, [Shard(own, whole, [count])])
                with streams.on(Stage.DECODE):
                    got = list(whole.view(ranks, -1)) if gathered else [own]
                    self._look(kind, [one[: len(want)] for one, want in zip(got, wanted, strict=True)], wanted)
        except Refused as error:  # on all ranks of the group
            self._failed.setdefault(kind[1], str(error).removesuffix(REMEDY))
        streams.join(streams.record_all())

    def _fail(self, role: str, error: Exception) -> int:
        """Note that this rank could not compare a role, which stays plain, or proven where it was proven before."""
        if role not in self.proven:
            self._failed.setdefault(role, f"{type(error).__name__}: {error}")
        return 1

    def _look(self, kind: _Kind, got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> None:
        """Find the first wrong word of a call, and keep it unless an earlier call of the role had one. Work of the current stream."""
        if not sum(map(len, got)):
            return
        try:
            found, before = _difference(_joined(got), _joined(want), len(self._compared)), self._found.get(kind[1])
            self._found[kind[1]] = found if before is None else torch.where(before[:1] > 0, before, found)
            self._compared.append(kind)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            self._fail(kind[1], error)

    def end_step(self) -> str:
        """Note that an optimizer step has ended; return the line for the user where roles were decided on, "" otherwise. A collective of
        all ranks, which call at the same place of the program; the host waits after the first :data:`STEPS` steps that compare, then each
        time that as many steps more have ended as before, up to :data:`LAST`, and every :data:`LOOK_STEPS` steps.

        Raises:
            CommError: a role that was proven has wrong words now, on all ranks.
        """
        self._ended += 1
        self._steps.update(self._now)
        self._now, self._calls = set(), Counter()
        looked, due = self._looking, self._ended == self._due <= LAST
        self._looking = bool(self.proven) and self._ended % LOOK_STEPS == 0
        if due:
            self._due *= 2
        if not due and not looked:
            return ""
        said = {role: self._said(role) for role in self._steps if role not in self.wrong}
        if not due and not self._on_any_rank(any(said.values())):
            self._found.clear()
            return ""
        told = tell(resolve_group(None), json.dumps({role: [self._steps[role], text] for role, text in said.items()}))
        lines, ranks = [], {rank: json.loads(text) for rank, text in told.items()}
        for role in sorted({role for one in ranks.values() for role in one}):
            seen = {rank: one[role] for rank, one in ranks.items() if role in one}
            wrong = next((f"rank {rank}: {text}" for rank, (_, text) in sorted(seen.items()) if text), "")
            if wrong and role in self.proven:
                self_test.forget_stamps()
                raise CommError(
                    f"nccl: coded calls of role {role} have wrong words after {self._ended} steps, {wrong}; wrong words may be in the "
                    f"model since step {max(1, self._ended - LOOK_STEPS)}: look at the hardware, and restart from an earlier checkpoint"
                )
            if wrong:
                self.wrong[role] = wrong
                stays = "go without coding" if role.startswith(sums_of("")) else "stays plain"
                lines.append(f"{role} {stays}, {wrong}")
            elif role not in self.proven and min(steps for steps, _ in seen.values()) >= STEPS:
                self.proven.add(role)
                lines.append(f"{role} coded from step {self._ended + 1} on, as all words compared were right")
        self._found = {role: one for role, one in self._found.items() if role not in {*self.proven, *self.wrong}}
        return "; ".join(lines)

    def _on_any_rank(self, found: bool) -> bool:
        ctx = DeviceContext("first steps", resolve_group(None), self._config, "dp", self._config.codec, self._device)
        with torch.inference_mode():
            return bool(largest(ctx, int(found))[0])

    def _said(self, role: str) -> str:
        """Return the first mistake in the frames of a role, "" where there is none. Waits for the device."""
        said = [self._failed.get(role) or self._reports[role].describe()]
        count, place, call, *both = self._found[role].tolist() if role in self._found else (0, 0, 0)
        if count:
            op, _, dtype, *_ = self._compared[call]
            words = "got {}, wanted {}".format(*(word_text(word, dtype.itemsize) for word in both))
            said.append(f"{op} of {str(dtype).removeprefix('torch.')}: {count} words wrong, first at {place}: {words}")
        return "; ".join(filter(None, said))


def _parts(request: Request, ctx: DeviceContext) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the words that this rank sends, flat, and the plain outputs that the coded ones are compared with: of large calls the first
    words of each rank's part. Work of the decoding stream."""
    ranks = ctx.size
    inputs, outputs = ([logical_order(one) for one in some] for some in (request.inputs, request.outputs))
    nbytes = min(MOST_BYTES, ctx.budget // 2)
    most = max(1, nbytes // (ranks * max(1, len(outputs)) * request.tensor.itemsize))
    if OPS[request.op].traffic == "all_gather":
        if request.op == "all_gather":
            outputs = [torch.cat(outputs)]
        return [one[:most] for one in inputs], [_rows(one, ranks, most) for one in outputs]
    if request.op != "all_to_all":
        if request.numel is not None:
            return [_rows(inputs[0], ranks, most)], [_rows(outputs[0], ranks, most)]
        segments = request.segments
        inputs, outputs = [*inputs[0].split(list(segments.leaving))], [*outputs[0].split(list(segments.coming))]
    return [one[:most] for one in inputs], [one[:most] for one in outputs]


def _rows(flat: torch.Tensor, ranks: int, most: int) -> torch.Tensor:
    """Return the first elements of each rank's part of a tensor, end to end."""
    return flat.view(ranks, -1)[:, :most].reshape(-1)


def _move(ctx: DeviceContext, request: Request, sources: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
    if OPS[request.op].traffic == "all_gather":
        gather.gather(ctx, [Shard(own, whole, [own.numel()]) for own, whole in zip(sources, outs, strict=True)])
    elif request.numel is not None and request.op != "all_to_all":
        exchange_even(ctx, sources[0], outs[0])
    else:
        exchange_uneven(ctx, sources, outs)


def _joined(some: Sequence[torch.Tensor]) -> torch.Tensor:
    return some[0] if len(some) == 1 else torch.cat(list(some))


def _difference(got: torch.Tensor, want: torch.Tensor, call: int) -> torch.Tensor:
    """Return, int64 and on the device, the number of words that differ, the place of the first one, the number of the call, and the words
    there."""
    got, want = bits(got), bits(want)
    wrong = (got != want).to(torch.uint8)
    first = wrong.argmax().view(1)
    words = [one.index_select(0, first).to(torch.int64) for one in (got, want)]
    return torch.cat([wrong.sum().view(1), first, tensors.filled(1, call, torch.int64, got.device), *words])
