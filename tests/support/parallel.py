"""Support for tests of trainings whose ranks share out experts, sequences, tensors or layers: cases, the program of a rank, comparisons.

A launch runs all its cases in the processes of its ranks, one after the other, each with groups and an engine of its own. One launch is
plain (``DS_ZIPCCL=0``), the others are coded; a case must leave the same losses and parameters in all of them.
"""

from __future__ import annotations

import functools
import gc
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import engines
import megatron
import pytest
import tiers
import torch
import torch.distributed as dist
from places import EXAMPLES, PACKAGE
from programs import launch, reference
from torch import nn

from ds_zipccl.telemetry import counters, table

STEPS = 3
WIDTH, BATCH, CONTEXT, VOCABULARY = 64, 2, 32, 128
#: Sections of the coded launches. The messages of the models here are small.
SECTIONS = {
    "always": '{"enabled": true, "mode": "always", "min_bytes": 1024}',
    "data alone": '{"enabled": true, "mode": "always", "min_bytes": 1024, '
    '"roles": {"tp": "never", "sp": "never", "pp": "never", "ep": "never"}}',
}
#: Roles of data parallelism.
OF_DATA = {"dp", "zero_param", "zero_grad"}
#: Sources of the results of a plain run, beside the test's file.
SOURCES = (Path(__file__), Path(engines.__file__), Path(megatron.__file__), EXAMPLES, PACKAGE / "telemetry")


@dataclass
class Lab:
    """One case on one rank. ``mode``: "plain", or one of :data:`SECTIONS`."""

    mode: str
    rank: int
    ranks: int
    losses: list[str] = field(default_factory=list)
    engine: Any = None
    #: Further results of the case.
    more: dict[str, Any] = field(default_factory=dict)

    def start(self, model: nn.Module, zero: Mapping[str, Any] | int = 2, **more: Any) -> Any:
        """Return an engine for the model. ``zero``: the stage, or the section; ``more``: of the config, or ``initialize``'s own."""
        import deepspeed

        given = {key: more.pop(key) for key in ("model_parameters", "mpu") if key in more}
        config = {
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_optimization": dict(zero) if isinstance(zero, Mapping) else {"stage": zero},
        }
        given.setdefault("model_parameters", [one for one in model.parameters() if one.requires_grad])
        self.engine, *_ = deepspeed.initialize(model=model, config=config | more, **given)
        counters.reset()  # the start is not of interest
        return self.engine

    def train(
        self, data: Callable[[int], tuple[Any, ...]], loss: Callable[..., torch.Tensor] = lambda found, *given: found
    ) -> None:
        """Take all steps. ``data(step)``: the arguments of the model; ``loss``: of its result and these arguments."""
        for step in range(STEPS):
            given = data(step)
            found = loss(self.engine(*given), *given)
            self.losses.append(found.item().hex())
            self.engine.backward(found)
            self.engine.step()

    def tokens(self, step: int, rank: int | None = None) -> torch.Tensor:
        """Return the tokens of a step, ``[BATCH, CONTEXT]``; those of this rank, unless a rank is named."""
        source = torch.Generator().manual_seed(1000 * step + (self.rank if rank is None else rank))
        return torch.randint(VOCABULARY, (BATCH, CONTEXT), generator=source)

    def end(self) -> dict[str, Any]:
        """Return what the case leaves on this rank, and free its engine and groups."""
        from deepspeed.utils import groups

        found = {
            "losses": self.losses,
            "sha256": engines.digest(self.engine.module.parameters()),
            "calls": calls(),
        } | self.more
        found |= {"sent": sent(), "roles": roles(), "table": table.render()}
        found["whole"] = any(one["whole"] for one in counters.rows())  # sums that lack the owners of their slices
        self.engine.destroy()
        self.engine = None
        getattr(groups, "_release_process_group_references", lambda: None)()  # DeepSpeed 0.18 keeps its groups
        gc.collect()
        return found


Cases = Mapping[str, Callable[[Lab], None]]


def calls() -> dict[str, int]:
    """Return the number of coded calls by operation, and of expert exchanges by kind."""
    found: dict[str, int] = {}
    for row in counters.rows():
        name = f"{row['op']} {row['kind']}".rstrip()
        found[name] = found.get(name, 0) + row["calls"]
    return {name: count for name, count in found.items() if count}


def roles() -> dict[str, list[str]]:
    """Return the operations of each role that is not one of data, coded and plain, sorted."""
    names = {row["role"] for row in counters.rows()} - OF_DATA
    found = {role: sorted({row["op"] for row in rows(role) if row["calls"] or row["passed"]}) for role in names}
    return {role: ops for role, ops in found.items() if ops}


def rows(role: str) -> list[dict[str, Any]]:
    return [row for row in counters.rows() if row["role"] == role]


def sent() -> dict[str, int]:
    """Return the bytes that this rank has sent by role, coded and plain."""
    found: dict[str, int] = {}
    for row in counters.rows():
        found[row["role"]] = found.get(row["role"], 0) + row["wire_bytes"] + row["passed_bytes"]
    return found


def rank_program(cases: Cases) -> None:
    """Run the cases that the command line names. Rank 0 writes the results of all ranks to CASE.json for each."""
    import deepspeed

    folder, mode, *names = sys.argv[1:]
    deepspeed.utils.logging.logger.setLevel("ERROR")
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # DeepSpeed would compile it now, for minutes
    deepspeed.init_distributed()
    if mode == "wrong bit" and dist.get_rank() == 0:
        plant_wrong_bit()
    gc.freeze()
    for name in names:
        torch.manual_seed(1)
        counters.reset()
        lab = Lab(mode, dist.get_rank(), dist.get_world_size())
        cases[name](lab)
        everyone: list[Any] = [None] * lab.ranks
        dist.all_gather_object(everyone, lab.end())
        if lab.rank == 0:
            Path(folder, f"{name}.json").write_text(json.dumps(everyone))
    dist.barrier()
    dist.destroy_process_group()


def in_fp16() -> dict[str, Any]:
    """The config of an engine in fp16, which torch computes on CPUs all the same."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True
    return {"bf16": {"enabled": False}, "fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}


def poison(weight: torch.Tensor, value: float, now: Callable[[], bool]) -> None:
    """Let a value of the gradient of a weight be another one where ``now`` says so."""

    def hook(grad: torch.Tensor) -> torch.Tensor:
        if now():
            grad = grad.clone()
            grad.view(-1)[5] = value  # rank 0 owns the first parameters
        return grad

    weight.register_hook(hook)


def plant_wrong_bit() -> None:
    """Make the codec flip the lowest bit of the first element of each message it decodes in this process."""
    import dataclasses

    from ds_zipccl.codecs.registry import DECODERS
    from ds_zipccl.frame import CodecId

    right = DECODERS[CodecId.EXPONENT]

    def decode(payload: torch.Tensor, base: torch.Tensor | None, block: int, words: torch.Tensor, route: str) -> None:
        right.decode(payload, base, block, words, route)
        words.view(torch.int16 if words.element_size() == 2 else torch.int32)[0] ^= 1

    DECODERS[CodecId.EXPONENT] = dataclasses.replace(right, decode=decode)


def results(program: str, ranks: int, mode: str, folder: Path, names: Iterable[str]) -> dict[str, Any]:
    """Launch the program of a test's file in a mode; return the results of its cases by name, a list of all ranks each."""
    if mode == "plain":
        return reference(program, ranks, folder, mode, *names, sources=SOURCES)
    return launch(program, ranks, folder, mode, *names, DS_ZIPCCL=SECTIONS.get(mode, SECTIONS["always"]))


Trained = Callable[[int, str], dict[str, Any]]


def fixture_of(program: str, all_cases: Mapping[int, Iterable[str]]) -> Any:
    """The fixture ``trained`` of a test's file: a function (ranks, mode) -> :func:`results`.

    Its first call for a pair launches the ranks, with the cases that are parameters ``ranks`` and ``name`` of tests of this run; with all
    cases, if there are tests without parameters.
    """

    @pytest.fixture(scope="module")
    def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
        pytest.importorskip("transformers")
        wanted, others = tiers.asked(request, "ranks", "name"), tiers.without_parameters(request)

        @functools.cache
        def get(ranks: int, mode: str) -> dict[str, Any]:
            names = [name for name in all_cases[ranks] if others or (ranks, name) in wanted]
            return results(program, ranks, mode, tmp_path_factory.mktemp("parallel"), names)

        return get

    return trained


def each(all_cases: Mapping[int, Iterable[str]], short: Sequence[tuple[int, str]] = ()) -> Any:
    """Parametrize a test with ``ranks`` and ``name`` of all cases; those in ``short`` are in both tiers."""
    every = [(ranks, name) for ranks, cases in all_cases.items() for name in cases]
    reason = "launches of minutes; the short tier has a case of each kind"
    return pytest.mark.parametrize(("ranks", "name"), tiers.mostly_full(every, short, reason))


def bits(ranks: list[dict[str, Any]]) -> list[Any]:
    """Return the losses and the hash of the parameters of every rank."""
    return [(rank["losses"], rank["sha256"]) for rank in ranks]


def assert_trained(ranks: list[dict[str, Any]]) -> None:
    """Equal bits prove something only where losses change."""
    for rank in ranks:
        values = [float.fromhex(loss) for loss in rank["losses"]]
        assert len(values) >= STEPS and len(set(values)) == len(values), values
