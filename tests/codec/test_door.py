"""Tensors whose words no kernel can read are refused with the documented errors, and autograd sees what is written in place.

Calls with wrong tensors run in a process of their own, because a kernel that follows their addresses ends the process.
"""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import ds_zipccl
from ds_zipccl import codecs, sync
from ds_zipccl.codecs import lowrank, memory
from ds_zipccl.lossy import Round

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's prototypes: nested, quantized and sparse tensors


class Wrapper(torch.Tensor):
    """A tensor without data, as DTensor is one."""

    @staticmethod
    def __new__(cls, like: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)

    @classmethod
    def __torch_dispatch__(cls, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{call} was called on a tensor that ought to be refused at the door")


def resized(words: torch.Tensor, size: int) -> torch.Tensor:
    words = words.clone()
    words.untyped_storage().resize_(size)
    return words


def transformed(words: torch.Tensor) -> torch.Tensor:
    kept: list[torch.Tensor] = []
    torch.vmap(lambda row: kept.append(row) or row)(torch.stack([words, words]))  # type: ignore[func-returns-value]
    return kept[0]


def sparse(layout: torch.layout) -> Callable[[torch.Tensor], torch.Tensor]:
    more = {"blocksize": (1, 1)} if layout in (torch.sparse_bsr, torch.sparse_bsc) else {}
    return lambda words: words.view(4, -1).to_sparse(layout=layout, **more)


#: Kind -> a tensor of that kind, like the good one.
KINDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "bytes": lambda words: bytes(words.view(torch.uint8).numpy()),
    "none": lambda words: 3,
    "numpy": lambda words: words.numpy(),
    "fake": lambda words: FakeTensorMode().from_tensor(words),
    "wrapper": Wrapper,
    "functional": torch._to_functional_tensor,  # type: ignore[attr-defined]
    "transformed": transformed,
    "freed": lambda words: resized(words, 0),
    "cut": lambda words: resized(words, words.nbytes - 1),
    "zeros": lambda words: torch._efficientzerotensor(words.shape, dtype=words.dtype),  # type: ignore[attr-defined]
    "quantized": lambda words: torch.quantize_per_tensor(words.float(), 0.1, 0, torch.quint8),
    "meta": lambda words: words.to("meta"),
    "nested": lambda words: torch.nested.nested_tensor([words, words]),
}
#: Every layout of torch but the dense one.
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "torch._mkldnn": lambda words: words.float().to_mkldnn(),
    "torch.jagged": lambda words: torch.nested.nested_tensor([words, words[:9]], layout=torch.jagged),
    **{
        str(one): sparse(one)
        for one in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
    },
}
KINDS |= LAYOUTS

WORDS = torch.arange(5000.0)
FRAME = ds_zipccl.compress(WORDS)
DELTA = ds_zipccl.compress(WORDS, "delta", base=WORDS)


#: Argument -> the good tensor, the call with another one, the error for a tensor that is not taken.
DOORS: dict[str, tuple[torch.Tensor, Callable[[Any], object], type[Exception]]] = {
    "compress": (WORDS, ds_zipccl.compress, ValueError),
    "compress(row_width)": (WORDS, lambda x: ds_zipccl.compress(x, row_width=2), ValueError),
    "compress(lossy)": (WORDS, lambda x: ds_zipccl.compress(x, Round(3), lossy=True), ValueError),
    "compress(base)": (WORDS, lambda x: ds_zipccl.compress(WORDS, "delta", base=x), ValueError),
    "compress(out)": (torch.zeros(1 << 16, dtype=torch.uint8), lambda x: ds_zipccl.compress(WORDS, out=x), ValueError),
    "compress_segments": (WORDS, lambda x: ds_zipccl.compress_segments([x], [FRAME]), ValueError),
    "project": (WORDS, lambda x: codecs.project(x, Round(3)), ValueError),
    "project(out)": (WORDS, lambda x: codecs.project(WORDS, Round(3), out=x), ValueError),
    "RowSegment": (WORDS, lambda x: codecs.RowSegment(x, 2), ValueError),
    "product": (WORDS.view(-1, 1), lambda x: lowrank.product(x, WORDS[:1].view(1, 1), WORDS.clone()), ValueError),
    "decompress": (FRAME, ds_zipccl.decompress, TypeError),
    "decompress(out)": (WORDS, lambda x: ds_zipccl.decompress(FRAME, x), TypeError),
    "decompress(base)": (WORDS, lambda x: ds_zipccl.decompress(DELTA, base=x), TypeError),
    "decompress_add": (FRAME, lambda x: ds_zipccl.decompress_add(x, WORDS.clone()), TypeError),
    "decompress_add(sums)": (WORDS, lambda x: ds_zipccl.decompress_add(FRAME, x), TypeError),
    "region_hash": (WORDS, ds_zipccl.region_hash, TypeError),
    "Receiver.apply": (FRAME, lambda x: sync.Receiver().apply([x]), TypeError),
}  # fmt: skip


def apart(calls: Mapping[str, Callable[[], object]]) -> dict[str, str]:
    """The error of each call, all of them in one process, or the signal that ended the process."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forks beside threads: the child leaves before it needs one
        child = os.fork()
    if not child:
        for call in calls.values():
            try:
                call()
                said = "no error"
            except BaseException as error:
                said = f"{type(error).__name__}: {error}"
            os.write(writing, said[:2000].encode() + b"\0")
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read().split("\0")
    status = os.waitpid(child, 0)[1]
    end = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else ""
    return dict(zip(calls, [*said[:-1], end], strict=False))


@pytest.mark.parametrize("door", DOORS)
def test_the_door(door: str) -> None:
    good, call, error = DOORS[door]
    wrong = {kind: make(good) for kind, make in KINDS.items()}
    if door == "Receiver.apply":
        del wrong["bytes"]  # a part may be bytes
    if door.partition("(")[0] in ("compress", "decompress", "decompress_add", "region_hash", "Receiver.apply"):
        del wrong["numpy"]  # test_arrays.py
    said = apart({kind: partial(call, tensor) for kind, tensor in wrong.items()})
    for kind, tensor in wrong.items():
        wanted = error.__name__ if isinstance(tensor, torch.Tensor) else "TypeError"
        text = said.get(kind, "the process had ended")
        assert text.startswith(f"{wanted}: ") and ("must be a" in text or "a part is" in text), f"{kind}: {text}"


def test_kinds_are_all_layouts_of_torch() -> None:
    found = {str(value) for value in vars(torch).values() if isinstance(value, torch.layout)}
    assert found == {*LAYOUTS, "torch.strided"}


def test_views_have_words() -> None:
    """A conjugate or negative view has words, which are not its values."""
    plain, conj = torch.zeros(9), torch.zeros(9, dtype=torch.complex64).conj()
    views = [torch._neg_view(plain), conj, conj.imag]  # type: ignore[attr-defined]
    assert all(map(memory.has_words, [plain, plain[::2], plain[:0], *views]))


@pytest.mark.parametrize("width", [1.5, True, "3", torch.tensor(3), 0, -1, 1 << 32], ids=repr)
def test_row_width_is_an_int_in_range(width: Any) -> None:
    error, wanted = (ValueError, "at least 1 and less than") if type(width) is int else (TypeError, "an int")
    with pytest.raises(error, match=f"wanted {wanted}"):
        ds_zipccl.compress(WORDS, row_width=width)


def test_modes_and_subclasses_with_data_are_taken() -> None:
    class Logged(TorchDispatchMode):
        def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return call(*args, **(kwargs or {}))

    class Named(torch.Tensor):
        pass

    weight = torch.nn.Parameter(WORDS.clone())
    for words in (WORDS.as_subclass(Named), weight, WORDS.expand(3, 5000), WORDS[5:5], WORDS[::7]):
        for mode in (Logged(), FakeTensorMode()):
            with mode:
                frame = ds_zipccl.compress(words)
            assert torch.equal(ds_zipccl.decompress(frame), words)


# --- writes that autograd sees


def fives(out: torch.Tensor) -> torch.Tensor:
    return torch.full(out.shape, 5.0)


#: What writes in place, and torch's call of the same meaning.
WRITES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
    "decompress": (
        lambda out: ds_zipccl.decompress(ds_zipccl.compress(fives(out)), out), lambda out: out.copy_(fives(out)),
    ),
    "decompress_add": (
        lambda out: ds_zipccl.decompress_add(ds_zipccl.compress(fives(out)), out), lambda out: out.add_(fives(out)),
    ),
    "project": (lambda out: codecs.project(fives(out), Round(3), out=out), lambda out: out.copy_(fives(out))),
}  # fmt: skip
each_write = pytest.mark.parametrize(("write", "like"), WRITES.values(), ids=list(WRITES))


@each_write
def test_saved_tensors_that_are_overwritten(write: Any, like: Any) -> None:
    weight, saved = torch.randn(64, 64, requires_grad=True), torch.ones(64, 64)
    loss, view = (weight * saved).sum(), saved[3:9]
    before = saved._version
    with torch.no_grad():
        assert write(view) is view
    assert saved._version == before + 1 and saved[3, 0] >= 5
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@each_write
def test_outputs_that_require_grad(write: Any, like: Any) -> None:
    def refusal(call: Any, out: torch.Tensor) -> str:
        with pytest.raises(RuntimeError) as caught:
            call(out)
        return str(caught.value)

    with torch.inference_mode():
        inference = torch.zeros(4, 4)
    leaf = torch.zeros(4, 4, requires_grad=True)
    for out in (leaf, leaf[1:], inference, torch.zeros(4, 4, requires_grad=True).unbind()[0]):
        said = refusal(write, out)
        assert not out.any()
        wanted = refusal(like, out)
        assert said == wanted or write is WRITES["decompress_add"][0]  # which names a view
    with torch.no_grad():
        assert bool((write(torch.zeros(4, 4, requires_grad=True)) == 5).all())
    with torch.inference_mode():
        assert bool((write(torch.zeros(4, 4)) == 5).all())


@each_write
def test_gradients_through_outputs(write: Any, like: Any) -> None:
    """The values of a computed tensor are replaced, and so is its gradient; a sum with a constant passes the gradient on."""
    grads = []
    for call in (write, like):
        weight = torch.ones(4, 4, requires_grad=True)
        computed = weight * 2
        call(computed[1:])
        (computed * 3).sum().backward()
        grads.append(weight.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("numel", [100, 1 << 19], ids=["together", "alone"])
def test_a_received_state_that_autograd_has_saved(numel: int) -> None:
    sender, receiver = sync.Sender(), sync.Receiver()
    state = receiver.apply(sender.pack({"a": torch.zeros(numel), "b": torch.zeros(100)}))
    weight = torch.nn.Parameter(torch.ones(numel))
    loss = (weight * torch.nn.Parameter(state["a"])).sum()
    receiver.apply(sender.pack({"a": torch.ones(numel), "b": torch.zeros(100)}))
    assert bool((state["a"] == 1).all())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
