"""Frozen weights of real engines with adapters that change behind the back of DeepSpeed: never a wrong bit.

Between steps a change costs a full gather. In the middle of a step a change may stop all ranks with the parameter's name.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from programs import launch, reference

pytest.importorskip("transformers")
pytest.importorskip("peft")

import torch
from engines import SOURCES, rank_program
from places import TESTS
from tiny_llama import LlamaLab, digest, frozen, gathered, llama, section, with_adapters

from ds_zipccl.comm import CommError
from ds_zipccl.comm.bases import versions
from ds_zipccl.comm.host import gather as host_gather
from ds_zipccl.comm.host.buffer_pool import PooledBuffers
from ds_zipccl.telemetry import counters

# ---- changes of a weight -------------------------------------------------------------------------------------------


def by_deepspeed(weight: Any, edits: bool) -> None:
    with gathered([weight], rank=1):
        if edits:
            weight.data.mul_(0.5)


def dropped(weight: Any, edits: bool) -> None:
    """Words that were gathered to be read are overwritten: plain DeepSpeed forgets them."""
    with gathered([weight], rank=None):
        weight.data.fill_(7.0)


def by_copy(weight: Any, edits: bool) -> None:
    if edits:
        weight.ds_tensor.copy_(weight.ds_tensor * 0.5)


def one_bit(weight: Any, edits: bool) -> None:
    """The last bit of the last word changes, through memory that moves no version counter of the shard."""
    if edits:
        before = weight.ds_tensor._version
        weight.ds_tensor.data.view(torch.int16)[-1] ^= 1
        assert weight.ds_tensor._version == before


def by_numpy(weight: Any, edits: bool) -> None:
    if edits:
        weight.ds_tensor.data.view(torch.int16).numpy()[:100] ^= 64


def reloaded(weight: Any, edits: bool) -> None:
    """Other memory with other words: that of a file, for example."""
    if edits:
        weight.ds_tensor.data = weight.ds_tensor.detach() * 0.5


def and_back(weight: Any, edits: bool) -> None:
    """A bit changes, and changes back: nothing is to be told."""
    if edits:
        weight.ds_tensor.data.view(torch.int16)[5] ^= 1
        weight.ds_tensor.data.view(torch.int16)[5] ^= 1


#: Each changes a weight of its own, on rank 1, between two steps of one engine.
CHANGES: dict[str, Callable[[Any, bool], None]] = {
    "self_attn.k_proj": by_deepspeed,
    "self_attn.o_proj": by_copy,
    "mlp.gate_proj": one_bit,
    "mlp.up_proj": by_numpy,
    "mlp.down_proj": reloaded,
    "self_attn.v_proj.base_layer": dropped,
    "self_attn.q_proj.base_layer": and_back,
}
#: Changes of words of which nobody tells the other ranks.
SILENT = {change.__name__ for change in (by_copy, one_bit, by_numpy, reloaded)}

# ---- cases ---------------------------------------------------------------------------------------------------------


def start(lab: LlamaLab, **config: Any) -> Any:
    engine = lab.start(with_adapters(llama(num_hidden_layers=1)), **config)
    for name in CHANGES:
        lab.watch(engine, name)
    lab.train_phase(engine, 2, "two steps")
    return engine


def between_steps(lab: LlamaLab) -> None:
    engine = start(lab)
    for name, change in CHANGES.items():
        weight = frozen(engine, f"{name}.weight")
        with torch.no_grad():
            change(weight, lab.rank == 1)
        lab.train_phase(engine, 1, change.__name__)
    lab.train_phase(engine, 1, "after")


@contextlib.contextmanager
def may_stop(lab: LlamaLab, engine: Any) -> Iterator[None]:
    """Surround the rest of a step. Its error ends the case, without the losses and words that the error makes void."""
    trained = [param for param in engine.module.parameters() if param.requires_grad]
    before, losses, seen = digest(trained), len(lab.losses), len(lab.seen)
    try:
        yield
    except CommError as error:
        assert digest(trained) == before
        del lab.losses[losses:], lab.seen[seen:]
        lab.phase("stopped", str(error))


#: Nothing is prefetched: plain DeepSpeed reads a shard while the program changes it, if a gather is in flight then.
TWO_BATCHES: dict[str, Any] = {"gradient_accumulation_steps": 2, "zero": {"stage3_prefetch_bucket_size": 0}}


def in_a_step(lab: LlamaLab, name: str, in_a_batch: bool) -> None:
    """A change comes between the batches of a step, or between the forward and the backward pass of its second batch."""
    engine = start(lab, **TWO_BATCHES)
    lab.backward(engine)
    engine.step()
    with may_stop(lab, engine):
        loss = lab.loss(engine) if in_a_batch else None
        with torch.no_grad():
            CHANGES[name](frozen(engine, f"{name}.weight"), lab.rank == 1)
        engine.backward(lab.loss(engine) if loss is None else loss)
        engine.step()
        lab.phase("changed")
        lab.train_phase(engine, 1, "after")


def for_a_batch(lab: LlamaLab, name: str) -> None:
    """Other words for one loss in the middle of a step, and then the same words as before."""
    engine = start(lab, **TWO_BATCHES)
    with may_stop(lab, engine):
        lab.backward(engine)
        engine.step()
        words = frozen(engine, f"{name}.weight").ds_tensor.data
        saved = words.clone()
        if lab.rank == 1:
            words.mul_(0.5)
        lab.backward(engine)
        if lab.rank == 1:
            words.copy_(saved)
        engine.step()
        lab.phase("changed")


CASES: dict[str, Callable[[LlamaLab], None]] = {
    "between steps": between_steps,
    "for a batch, mlp.up_proj": functools.partial(for_a_batch, name="mlp.up_proj"),
    "between batches, mlp.gate_proj": functools.partial(in_a_step, name="mlp.gate_proj", in_a_batch=False),
    "in a batch, mlp.down_proj": functools.partial(in_a_step, name="mlp.down_proj", in_a_batch=True),
}

# ---- planted mistakes ----------------------------------------------------------------------------------------------

_gather = host_gather.gather_differences


def blind_gather(ctx: Any, own: torch.Tensor, places: Any, base: Any) -> None:
    """A gather with a base that claims that no word has ever changed."""
    buffers = PooledBuffers()
    last = base.begin(ctx, places, buffers)
    if last is None:
        _gather(ctx, own, places, base)
    else:
        places[ctx.rank].copy_(last)
        counters.record_difference(ctx.role, ctx.op, "")
    buffers.release()


#: Each makes a frozen weight that has changed look unchanged, to agreements or to gathers by messages.
MISTAKES: dict[str, tuple[Any, str, Any]] = {
    "agreements": (versions, "same_words", lambda *tensors: True),
    "gathers": (host_gather, "gather_differences", blind_gather),
}

# ---- tests ---------------------------------------------------------------------------------------------------------

Run = dict[str, list[dict[str, Any]]]


def coded(folder: Path, *cases: str, **environment: str) -> Run:
    return launch(__file__, 2, folder, *cases, DS_ZIPCCL=section(), HF_HUB_OFFLINE="1", **environment)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Run:
    sources = [*SOURCES, TESTS / "support" / "tiny_llama.py"]
    return reference(__file__, 2, tmp_path_factory.mktemp("plain"), *CASES, sources=sources, HF_HUB_OFFLINE="1")


def wrong(plain: Run, run: Run, case: str) -> set[str]:
    """Return the phases of a case in which a rank has wrong bits: those of losses, of shards, or of weights that modules have seen."""
    found = set()
    stops = [rank["phases"][-1] for rank in run[case] if rank["phases"][-1]["phase"] == "stopped"]
    if stops:
        name = case.partition(", ")[2]
        legal = name and len(stops) == len(run[case]) and all(f"{name}.weight" in stop["bits"][-1] for stop in stops)
        found |= set() if legal else {f"stopped: {[stop['sha256'][-1] for stop in stops]}"}
    for expected, rank in zip(plain[case], run[case], strict=True):
        for one, other in zip(expected["phases"], rank["phases"], strict=not stops):
            if other["phase"] != "stopped" and any(one[key] != other[key] for key in ("bits", "seen", "losses")):
                found.add(one["phase"])
    return found


@pytest.mark.full(reason="the tests of test_peft.py are the short ones")
def test_no_bit_is_wrong(plain: Run, tmp_path: Path) -> None:
    run = coded(tmp_path, *CASES)
    assert {case: wrong(plain, run, case) for case in CASES} == {case: set() for case in CASES}
    for rank in run["between steps"]:
        missed = {phase["phase"] for phase in rank["phases"] if phase["differences"].get(versions.CHANGED)}
        assert missed == SILENT


@pytest.mark.full(reason="the tests of test_peft.py are the short ones")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistakes_are_found(plain: Run, tmp_path: Path, mistake: str) -> None:
    # within a step agreements find a change before gathers do
    cases = ["between steps"] + (
        ["for a batch, mlp.up_proj", "in a batch, mlp.down_proj"] if mistake == "agreements" else []
    )
    run = coded(tmp_path, *cases, MISTAKE=mistake)
    found = {case: wrong(plain, run, case) for case in cases}
    assert found.pop("between steps") >= SILENT
    assert all(found.values())


if __name__ == "__main__":
    if os.environ.get("MISTAKE"):
        setattr(*MISTAKES[os.environ["MISTAKE"]])
    rank_program(CASES, make=LlamaLab)
