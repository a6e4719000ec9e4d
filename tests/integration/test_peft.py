"""Engines of a tiny Llama with adapters under ZeRO-3 and ZeRO-2: the bits of plain DeepSpeed, and gathers of frozen weights that send
next to nothing.

One launch runs all cases. ``test_bases_of_engines.py`` has checkpoints, and changes of frozen weights behind the back of DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import programs
import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

import torch
import torch.distributed as dist
from engines import DIFFERENCE, SOURCES, rank_program
from peft import load_peft_weights, set_peft_model_state_dict
from places import TESTS
from tiers import mostly_full
from tiny_llama import LlamaLab, digest, frozen, gathered, llama, of_files, quantise, section, with_adapters

KEYS = ("phase", "losses", "bits")
#: The least ratio of the bytes of frozen weights that plain DeepSpeed sends to those that are sent, in phases that change no such weight.
LEAST = 200

# ---- cases ---------------------------------------------------------------------------------------------------------


def adapters(lab: LlamaLab) -> None:
    """Two adapters: trained, merged and unmerged between steps, switched, saved and loaded."""
    engine = lab.start(with_adapters(llama(), "one", "two"))
    model = engine.module
    lab.train_phase(engine, 1, "first step")
    lab.train_phase(engine, 2, "steady")
    targets = [param for name, param in model.named_parameters() if "q_proj" in name or "v_proj" in name]
    with gathered(targets):
        model.merge_adapter()
    lab.ask(engine)
    lab.phase("merged")
    with gathered(targets):
        model.unmerge_adapter()
    lab.train_phase(engine, 1, "unmerged")
    model.set_adapter("two")
    for name, param in model.named_parameters():
        param.requires_grad_("lora" in name)  # both adapters stay parameters of the optimizer
    lab.train_phase(engine, 2, "steady: switched")
    with gathered(model.parameters(), rank=None):
        if lab.rank == 0:
            model.save_pretrained(lab.folder)
    dist.barrier()
    lab.train_phase(engine, 1, "steady: saved", of_files(lab.folder))
    with gathered([param for name, param in model.named_parameters() if ".one." in name]):
        set_peft_model_state_dict(model, load_peft_weights(str(lab.folder / "two"), device="cpu"), adapter_name="one")
    model.set_adapter("one")
    lab.train_phase(engine, 1, "steady: loaded")


def quantised(lab: LlamaLab) -> None:
    """Frozen weights of int8 and uint8, with and without adapters; a weight of each dtype is changed between steps."""
    engine = lab.start(with_adapters(quantise(llama())))
    lab.train_phase(engine, 1, "first step")
    lab.train_phase(engine, 2, "steady")
    for name, dtype in (("k_proj.weight", torch.int8), ("down_proj.weight", torch.uint8)):
        with gathered([weight := frozen(engine, f"1.self_attn.{name}" if "k_" in name else f"1.mlp.{name}")]):
            assert weight.dtype is dtype
            weight.data[:3] += 1
    lab.train_phase(engine, 1, "changed")
    lab.train_phase(engine, 1, "steady: changed")


def evaluated(lab: LlamaLab) -> None:
    """Tied embeddings; losses without gradients, generated tokens and the whole model in a file, between steps. A frozen weight is written
    to directly between two evaluations."""
    zero = {"overlap_comm": True, "stage3_gather_16bit_weights_on_model_save": True}
    engine = lab.start(with_adapters(llama(tie_word_embeddings=True), checkpointing=False), zero=zero)
    lab.train_phase(engine, 2, "two steps")

    def generate() -> str:
        tokens = torch.arange(4).view(1, 4) + lab.rank
        words = engine.module.generate(
            input_ids=tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=2 + lab.rank, do_sample=False,
            synced_gpus=True, pad_token_id=0, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        return digest([words.sequences, *words.logits])

    engine.eval()
    words = generate()
    lab.ask(engine)
    lab.phase("steady: evaluated", words)
    for name, rank in (("0.mlp.up_proj.weight", 1), ("1.mlp.down_proj.weight", 0)):
        if lab.rank == rank:
            frozen(engine, name).ds_tensor.data.mul_(1.5)
        words += generate()
    lab.phase("written and generated", words)
    lab.train_phase(engine, 1, "steady: trained")
    assert engine.save_16bit_model(str(lab.folder), "pytorch_model.bin")
    dist.barrier()  # rank 0 writes the file
    lab.train_phase(engine, 2, "steady: saved", of_files(lab.folder))


def dora(lab: LlamaLab) -> None:
    """peft gathers base weights in each forward pass, as if to change them."""
    engine = lab.start(with_adapters(llama(), use_dora=True))
    lab.train_phase(engine, 1, "first step")
    lab.train_phase(engine, 2, "steady")


def zero2(lab: LlamaLab) -> None:
    engine = lab.start(with_adapters(llama()), zero={"stage": 2})
    lab.train_phase(engine, 3, "three steps")


CASES: dict[str, Callable[[LlamaLab], None]] = {
    case.__name__: case for case in (adapters, quantised, evaluated, dora, zero2)
}


#: The short tier runs these.
SHORT = ("adapters", "quantised")
NAMES = mostly_full(CASES, SHORT, "the others have seconds of their own each")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """Results of all cases of the tier with plain DeepSpeed, and with ds_zipccl."""
    names = SHORT if programs.KEEP_REFERENCES else tuple(CASES)
    folders = [tmp_path_factory.mktemp(name) for name in ("plain", "coded")]
    sources = [*SOURCES, TESTS / "support" / "tiny_llama.py"]
    plain = programs.reference(__file__, 2, folders[0], *names, sources=sources)
    coded = programs.launch(__file__, 2, folders[1], *names, DS_ZIPCCL=section())
    return plain, coded


@pytest.mark.parametrize("case", NAMES)
def test_bits_are_those_of_plain_deepspeed(runs: tuple[dict[str, Any], dict[str, Any]], case: str) -> None:
    plain, coded = (run[case] for run in runs)
    assert len(set(plain[0]["losses"])) == len(plain[0]["losses"])
    for one, other in zip(plain, coded, strict=True):
        for expected, found in zip(one["phases"], other["phases"], strict=True):
            assert {key: expected[key] for key in KEYS} == {key: found[key] for key in KEYS}
            assert expected["plain"] == expected["sent"]


@pytest.mark.parametrize("case", NAMES)
def test_frozen_weights_send_a_proof(runs: tuple[dict[str, Any], dict[str, Any]], case: str) -> None:
    for rank in runs[1][case]:
        for phase in rank["phases"]:
            assert case == "zero2" or phase["differences"][DIFFERENCE] > 0
            if phase["phase"].startswith("steady"):
                assert phase["plain"] >= LEAST * phase["sent"] > 0, phase
                assert set(phase["differences"]) == {DIFFERENCE}


if __name__ == "__main__":
    rank_program(CASES, make=LlamaLab)
