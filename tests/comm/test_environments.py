"""What a program has done to torch must not change a bit: every operation under every mode, against the plain one in the same place."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import corpus
import pytest
import ranks as runner
import torch
import torch.distributed as dist
from moves import AUTO, CODED, turn, wait
from operations import Coded, arguments
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import ds_zipccl
from ds_zipccl import comm, kernels, tensors
from ds_zipccl.kernels.sums import flushes_here

MODES = {"always": CODED, "auto": AUTO, "raw": replace(CODED, codec="raw")}
#: Elements of a shard: more than one block, not a multiple of anything.
NUMEL = 9001
_CONSTRUCTORS = ("empty", "full", "zeros", "tensor", "frombuffer", "new_empty", "empty_like")


# ---- environments --------------------------------------------------------------------------------------------------


class _Casting(TorchFunctionMode):
    """Whatever is made comes out as float64."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result.double() if getattr(function, "__name__", "") in _CONSTRUCTORS else result


class _Dispatching(TorchDispatchMode):
    """As :class:`_Casting`, a floor below."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result.double() if function.overloadpacket.__name__ in _CONSTRUCTORS else result


@contextmanager
def _setting(change: Callable[[Any], None], on: Any, off: Any) -> Iterator[None]:
    change(on)
    try:
        yield
    finally:
        change(off)


def _zero_init(dtype: torch.dtype) -> AbstractContextManager[Any]:
    import deepspeed

    return deepspeed.zero.Init(dtype=dtype)


ENVIRONMENTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "nothing": nullcontext,
    "zero.Init of bf16": partial(_zero_init, torch.bfloat16),
    "zero.Init of fp16": partial(_zero_init, torch.float16),
    "default dtype fp64": partial(_setting, torch.set_default_dtype, torch.float64, torch.float32),
    "default dtype bf16": partial(_setting, torch.set_default_dtype, torch.bfloat16, torch.float32),
    "default device meta": partial(_setting, torch.set_default_device, "meta", None),
    "device meta": partial(torch.device, "meta"),
    "deterministic with fill": partial(_setting, torch.use_deterministic_algorithms, True, False),
    "function mode": _Casting,
    "dispatch mode": _Dispatching,
    "inference mode": torch.inference_mode,
    "anomaly mode": torch.autograd.detect_anomaly,
    "flush denormal": partial(_setting, torch.set_flush_denormal, True, False),
    "autocast": partial(torch.autocast, "cpu", torch.bfloat16),
}


# ---- operations: api is torch.distributed or ours; what is left in the tensors is compared ---------------------------

OPERATIONS = (
    "all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter_tensor", "reduce_scatter", "all_gather",
    "all_gather_into_tensor", "broadcast", "all_to_all", "all_to_all_single", "send_and_receive",
)  # fmt: skip


def call_of(name: str, api: Any, mine: torch.Tensor, later: bool) -> tuple[list[torch.Tensor], Callable[[], Any]]:
    """The tensors that hold the result, and the call. Gathers are in place."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if name == "send_and_receive":
        out = mine.clone()
        return [out], lambda: [
            handle.wait() for handle in [api.isend(mine, (rank + 1) % ranks), api.irecv(out, (rank - 1) % ranks)]
        ]
    in_place = name == "all_gather_into_tensor"
    given = (mine, mine.split(NUMEL)[rank]) if in_place else arguments(mine, ranks)[name]
    outputs = given[0] if isinstance(given[0], list) else [given[0]]

    def call() -> None:
        wait(getattr(api, name)(*given, async_op=later))

    return outputs if name != "reduce" or rank == 1 else [], call


def words(rank: int, ranks: int, kind: corpus.Float, seed: int) -> torch.Tensor:
    """Near-Gaussian numbers, a third of them so small that sums are denormal."""
    tensor = corpus.tensor(corpus.bell(ranks * NUMEL, kind, 100 * seed + rank), kind)
    if kind is not corpus.FP16:  # whose denormals are normal floats
        small = corpus.tensor(corpus.random_words(ranks * NUMEL // 3, kind, seed + rank), kind)
        bits = small.view(torch.int16 if kind.word().itemsize == 2 else torch.int32)
        bits &= kind.sign | (2 << kind.mantissa) - 1  # exponents 0 and 1
        tensor[::3][: small.numel()] = small
    return tensor


def left(
    operation: str, api: Any, mine: torch.Tensor, environment: Callable[..., Any], later: bool
) -> list[torch.Tensor]:
    """What an operation leaves, called in an environment on tensors that were made outside."""
    outputs, call = call_of(operation, api, mine.clone(), later)
    with environment():
        call()
    return outputs


def under_all(rank: int, ranks: int, names: list[str]) -> int:
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    os.environ["LOCAL_RANK"] = str(rank)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    kinds, compared = list(corpus.SUMMED.values()), 0
    for seed, name in enumerate(names):
        environment = ENVIRONMENTS[name]
        for mode, config in MODES.items():
            for number, operation in enumerate(OPERATIONS):
                for step in range(2):  # in mode auto plain and coded, otherwise blocking and not
                    turn(plain=bool(step))
                    kind = kinds[(seed + number + step) % 3] if mode != "auto" else kinds[(seed + number) % 3]
                    mine, later = words(rank, ranks, kind, seed + step), mode != "auto" and bool(step % 2)
                    if name == "autocast" and (operation, kind) == ("all_to_all", corpus.FP16):
                        continue  # torch's own fails there
                    wanted = left(operation, dist, mine, environment, False)
                    bases = [None, comm.IN_PLACE] if operation == "all_gather_into_tensor" else [None]
                    for base in bases:
                        api = Coded(config) if base is None else Coded(config, base=base)
                        for got, want in zip(left(operation, api, mine, environment, later), wanted, strict=True):
                            try:
                                corpus.assert_same_bits(got, want)
                            except AssertionError as error:
                                raise AssertionError(f"{operation}, {name}, {mode}, {kind}: {error}") from error
                            compared += 1
        # the codec by itself
        frame = ds_zipccl.compress(words(rank, ranks, corpus.FP16, seed), "raw")
        with environment():
            again = ds_zipccl.decompress(frame)
        corpus.assert_same_bits(again, words(rank, ranks, corpus.FP16, seed))
    return compared


@pytest.mark.full(reason="twenty seconds and more; each operation has tests of its own")
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_operation_in_every_environment(ranks: int) -> None:
    counts = runner.run(under_all, ranks, list(ENVIRONMENTS), timeout=300)
    assert min(counts) >= 4 * len(OPERATIONS) * len(ENVIRONMENTS)


def patched_empty() -> None:
    """The mistake that this file is about, planted. The kernels have proven themselves before."""
    kernels.route()
    tensors.empty = lambda numel, dtype, device="cpu": torch.empty(numel, dtype=dtype, device=device)


def test_a_patched_constructor_is_noticed() -> None:
    with pytest.raises(runner.RankFailure, match=r"zero\.Init of bf16"):
        runner.run(under_all, 2, ["zero.Init of bf16"], plant=patched_empty)


# ---- denormals -------------------------------------------------------------------------------------------------------


def before_the_group(rank: int, ranks: int, flushing: list[int]) -> None:
    """Groups made while some ranks flush denormals, sums while none does: additions are as on the rank that makes them in gloo's ring."""
    torch.set_flush_denormal(rank in flushing)
    group = dist.new_group(list(range(ranks)))
    torch.set_flush_denormal(False)
    for seed, (kind, op) in enumerate(product((corpus.BF16, corpus.FP32), (dist.ReduceOp.SUM, dist.ReduceOp.AVG)), 3):
        got = words(rank, ranks, kind, seed)
        want = got.clone()
        dist.all_reduce(want, op, group=group)
        comm.all_reduce(got, op, group=group, config=CODED)
        corpus.assert_same_bits(got, want)
    assert not flushes_here()


for ranks, flushing in ((2, [0, 1]), (2, [1]), (3, [0, 1, 2]), (3, [1]), (3, [0, 2]), (3, [])):
    runner.together(ranks, flushing)(before_the_group)


# ---- traced programs and tensors without memory ------------------------------------------------------------------------


@runner.together(2)
def fake_tensors_go_where_plain_ones_go(rank: int, ranks: int) -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode() as mode:
        tensor = mode.from_tensor(torch.randn(NUMEL))
        outcomes = []
        for api in (dist, Coded(CODED)):
            try:
                api.all_reduce(tensor)
                outcomes.append("done")
            except Exception as error:
                outcomes.append(f"{type(error).__name__}: {error}")
        assert outcomes[0] == outcomes[1], outcomes
    real = torch.ones(NUMEL)
    comm.all_reduce(real, config=CODED)
    assert real[0] == ranks


test_programs = runner.programs(__name__)
