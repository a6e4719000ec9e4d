"""Mistakes in the kernels that the tests of gathers, sums and status words must notice."""

from __future__ import annotations

import os
import subprocess
import sys
from types import ModuleType

import emulation
import pytest
import test_cuda_sanitizers
import test_cuda_waves
from places import PYTHONPATH, ROOT

from ds_zipccl.kernels import build

#: A file of csrc, its text, the mistake, and the tests that must notice it.
MISTAKES: dict[str, tuple[str, str, str, str]] = {
    "the skipped rank is decoded": (
        "cuda/decode.cuh",
        "blockIdx.y >= jobs.skip",
        "blockIdx.y > jobs.skip",
        "calls.py -k one_launch and bf16",
    ),
    "every rank gets the payload of the first": (
        "cuda/decode.cuh",
        "job.payload + rank * jobs.rank_bytes",
        "job.payload",
        "calls.py -k one_launch and bf16",
    ),
    "a base without its stride": (
        "cuda/decode.cuh",
        "(kDelta ? rank * job.stride + first : 0)",
        "(kDelta ? first : 0)",
        "calls.py -k differences_in_place",
    ),
    "a wrong job for the last item": (
        "cuda/frame.cuh",
        "first_item <= item",
        "first_item < item",
        "calls.py -k one_output",
    ),
    "frames counted from each launch": (
        "cuda/decode.cuh",
        "jobs.first_frame + number",
        "number",
        "calls.py -k counts_over_launches",
    ),
    "ranks and frames swapped": (
        "cuda/frame.cuh",
        "uint64_t(least(rank, 0xffff)) << 48 | uint64_t(least(frame, 0xffff)) << 32",
        "uint64_t(least(frame, 0xffff)) << 48 | uint64_t(least(rank, 0xffff)) << 32",
        "calls.py -k refused_frame",
    ),
    "refused words stay": ("cuda/frame.cuh", "words[at] = Word(~Word(0))", "(void)words", "calls.py -k refused_frame"),
    "a raw frame that claims blocks": (
        "cuda/encode.cuh",
        "jobs.dtype, 1, job.numel",
        "jobs.dtype, jobs.block, job.numel",
        "calls.py -k sizes",
    ),
    "own words one place late": ("cuda/sum.cuh", "k == job.own_at", "k == job.own_at + 1", "sums.py -k listed"),
    "own words of the first chunk for all": (
        "cuda/sum.cuh",
        "reinterpret_cast<const Word*>(from) + at",
        "reinterpret_cast<const Word*>(from)",
        "sums.py -k rows and bf16",
    ),
    "only the first group of summands": (
        "cuda/sum.cuh",
        "group < job.count; group +=",
        "group < 1; group +=",
        "sums.py -k rows and bf16",
    ),
    "each group begins anew": (
        "cuda/sum.cuh",
        "start = group + member == 0",
        "start = member == 0",
        "sums.py -k rows and bf16",
    ),
    "the second turn of warps has the tables of the last group": (
        "cuda/sum.cuh",
        "b0 == begin || job.count > kMaxFrames",
        "b0 == begin",
        "sums.py -k refused",
    ),
    "a summand counted in its group": (
        "cuda/sum.cuh",
        "place_of(kNone, group + member, chunk), status)",
        "place_of(kNone, member, chunk), status)",
        "sums.py -k refused",
    ),
    "a sum of gaps for another r": (
        "cuda/delta/encode_list.cuh",
        "gap >> (2 * i + 1) << 16",
        "gap >> (2 * i) << 16",
        "lists.py -k forms_of and bfloat16",
    ),
    "a list that is compared with nothing": (
        "cuda/delta/encode_list.cuh",
        "bits > plan.table_bits ? TABLE : lost || list_certain(n, first, escapes) ? LIST : EITHER",
        "LIST",
        "lists.py -k as_many_bytes",
    ),
    "a table of as many bytes as the list": (
        "cuda/encode.cuh",
        "shared.plan.bytes / 16 > shared.units",
        "shared.plan.bytes / 16 >= shared.units",
        "lists.py -k as_many_bytes",
    ),
    "a place behind its set": (
        "cuda/delta/decode_list.cuh",
        "if (place >= (level ?",
        "if (place > (level ?",
        "lists.py -k limits",
    ),
    "ones behind the window are not seen": (
        "cuda/delta/decode_list.cuh",
        "count = kLevels * kListWords + 1;",
        "(void)count;",
        "lists.py -k limits",
    ),
    "a level with more words than the one before": (
        "cuda/delta/decode_list.cuh",
        "m >= 1 && m <= most && r",
        "m >= 1 && r",
        "lists.py -k limits",
    ),
    "words of a level counted in their u32 alone": (
        "cuda/delta/decode_list.cuh",
        "at = scratch.before[size - 1][at / 32] + uint32_t",
        "at = uint32_t",
        "lists.py -k larger",
    ),
    "words for elements in a header": (
        "cuda/decode.cuh",
        "job.numel >> jobs.element_log2, sizeof(Word) << jobs.element_log2",
        "job.numel, sizeof(Word)",
        "lists.py -k raw_frames",
    ),
    "a slot keeps the row that came first": (
        "cuda/rows.cuh",
        "if (there > entry) atomicMin",
        "if (false) atomicMin",
        "rows.py -k order_of",
    ),
    "rows with equal samples are equal": (
        "cuda/rows.cuh",
        "may_be && are_equal",
        "may_be || are_equal",
        "rows.py -k first_of_equal",
    ),
    "only the first words of rows are compared": (
        "cuda/rows.cuh",
        "if (__any_sync(kEveryLane, at < units && !is_same(a[at], b[at]))) return false;",
        "return !__any_sync(kEveryLane, at < units && !is_same(a[at], b[at]));",
        "rows.py -k equal_samples",
    ),
    "a way that depends on the row's number": (
        "cuda/rows.cuh",
        "? uint32_t(row_hash(row, units)) : slot + 1",
        "? entry : slot + 1",
        "rows.py -k equal_samples",
    ),
    "vectors of rows at any address": (
        "cuda/rows.cuh",
        "case 2: return place_rows<uint16_t>(job);",
        "case 2: return place_rows<uint32_t>(job);",
        "rows.py -k first_of_equal",
    ),
    "repeats counted once for a warp": (
        "cuda/rows.cuh",
        "atomicAdd(job.repeats, repeats)",
        "atomicAdd(job.repeats, 1u)",
        "rows.py -k first_of_equal",
    ),
    "lanes added from the last one on": (
        "cuda/rows.cuh",
        "__dadd_rn(sum, double_of_lane(own[which], lane))",
        "__dadd_rn(sum, double_of_lane(own[which], kLanes - lane))",
        "rows.py -k factors and bfloat16",
    ),
    "a prediction from the next word": (
        "cuda/rows.cuh",
        "predict<F>(from[at], factor)",
        "predict<F>(from[at + 1], factor)",
        "rows.py -k predictions and bfloat16",
    ),
    "a zero that becomes infinity": (
        "common/scaled_row.cuh",
        "e_a == 0 || e < 1 ? sign",
        "e < 1 ? sign",
        "rows.py -k predictions and bfloat16",
    ),
    "the largest exponents among the usual ones": (
        "cuda/words.cuh",
        "return exponent + 1 < F::exponent_mask;",
        "return exponent < F::exponent_mask;",
        "rounded.py -k largest_exponents and bf16",
    ),
    "RAW blocks as they are": (
        "cuda/encode.cuh",
        "    grid.octet(octet);\n    octet.store_whole(body",
        "    octet.store_whole(body",
        "rounded.py -k mantissa_bits and bf16",
    ),
    "a trim of the lower word of each pair": (
        "cuda/words.cuh",
        "return two | two >> 16;",
        "return two & 0xffffu;",
        "rounded.py -k mantissa_bits and bf16",
    ),
    "sizes without trims that forget sparse blocks": (
        "cuda/lossy/rounded.cuh",
        "if (entry.mode == SPARSE) read_zero_map",
        "if (false) read_zero_map",
        "rounded.py -k mantissa_bits and bf16",
    ),
    "a trim above M": (
        "cuda/decode_block.cuh",
        "trim <= F::M && ",
        "",
        "rounded.py -k refused_payloads",
    ),
    "a difference the other way around": (
        "cuda/lossy/scaled.cuh",
        "__fsub_rn(other, value)",
        "__fsub_rn(value, other)",
        "scaled.py -k every_group and bf16",
    ),
    "strides between the words of a lane left out": (
        "cuda/lossy/scaled.cuh",
        "stride < kMostValues; stride *= 2",
        "stride < 1; stride *= 2",
        "scaled.py -k every_group and bf16",
    ),
    "ties of E4M3 go up": (
        "cuda/lossy/scaled.cuh",
        "size + 0x7ffff + (size >> 20 & 1)",
        "size + 0x80000",
        "scaled.py -k every_group and bf16",
    ),
    "a tensor's end read as words": (
        "cuda/lossy/scaled.cuh",
        "value = i < numel ? Values<F>::from(from[i]) : 0.0f",
        "value = Values<F>::from(from[i])",
        "scaled.py -k any_address and bf16",
    ),
    "codes in the places of all groups": (
        "cuda/lossy/scaled.cuh",
        "job.places ? job.places[number] - 1 : number",
        "number",
        "scaled.py -k any_address and bf16",
    ),
    "a NaN among codes": ("cuda/lossy/scaled.cuh", "good &= (code & 127) != 127;", "", "scaled.py -k refused_codes"),
    "a number above 2m": (
        "cuda/lossy/scaled.cuh",
        "good &= code <= uint32_t(2 * half_range(s));",
        "",
        "scaled.py -k refused_codes",
    ),
    "a group that stays is coded": (
        "common/scaling.cuh",
        "if (largest >= kInfinite) return kStays;",
        "if (largest >= kInfinite) return 1;",
        "scaled.py -k stay_as_they_are",
    ),
    "codes of ZFP without the padding": (
        "cuda/lossy/zfp.cuh",
        "(blocks * kZfpValues * job.rate + 63) / 64 * 2",
        "(blocks * kZfpValues * job.rate + 31) / 32",
        "zfp.py -k rates_and_sizes and bf16",
    ),
    "codes of ZFP past the end": (
        "cuda/lossy/zfp.cuh",
        "left < kZfpValues * job.rate ? left : kZfpValues * job.rate",
        "kZfpValues * job.rate",
        "zfp.py -k any_address and bf16",
    ),
    "half a code of ZFP": (
        "cuda/lossy/zfp.cuh",
        "if (at > 56) high |=",
        "if (at > 64) high |=",
        "zfp.py -k rates_and_sizes and bf16",
    ),
    "an infinity coded": ("cuda/lossy/zfp.cuh", "finite &= block.finite();", "", "zfp.py -k not_finite"),
    "a hash without its region": ("cuda/hash.cuh", "jobs.work + 3 * number", "jobs.work", "calls.py -k hashes"),
}
#: ZIPCCL_PARTS that suffice for the tests of a file, and compile faster: bfloat16 with bytes, or with hashes and rows of any dtype;
#: or rounded words, scaled payloads or ZFP.
PARTS = {"lists.py": emulation.BF16 | emulation.BYTES}
PARTS |= dict.fromkeys(("calls.py", "sums.py", "rows.py"), emulation.BF16 | emulation.HASH) | {
    "rounded.py": emulation.ROUNDED,
    "scaled.py": emulation.SCALED,
    "zfp.py": emulation.ZFP,
}
PROGRAM = """
import sys
import emulation, pytest
made = emulation.launcher
emulation.launcher = lambda: made({{{file!r}: ({change!r},)}}, {parts})
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-k", "emulated and " + {tests!r}, {path!r}]))
"""


@pytest.mark.parametrize(
    "module", [sys.modules[__name__], test_cuda_sanitizers, test_cuda_waves], ids=lambda it: it.__name__
)
def test_every_mistake_can_be_planted(module: ModuleType) -> None:
    """The mistakes themselves are planted in the long tier only."""
    places = {name: (build.CSRC / file).read_text().count(good) for name, (file, good, *_) in module.MISTAKES.items()}
    assert set(places.values()) == {1}, places


@pytest.mark.full(reason="each has an emulation of its own to compile")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(mistake: str) -> None:
    file, good, bad, where = MISTAKES[mistake]
    result = _run(file, good, bad, where)
    assert result.returncode, result.stdout
    killed = result.returncode < 0  # by a wild address
    assert killed or " failed" in result.stdout, result.stdout + result.stderr


@pytest.mark.full(reason="an emulation of its own to compile")
@pytest.mark.parametrize("file", PARTS)
def test_a_file_passes_without_a_mistake(file: str) -> None:
    """Its tests have the kernels of some parts alone; none of them may fail for that."""
    tests = {where.partition(" -k ")[2] for *_, where in MISTAKES.values() if where.startswith(file)}
    result = _run("cuda/frame.cuh", "kVersion = 2", "kVersion = 2", f"{file} -k ({') or ('.join(sorted(tests))})")
    assert result.returncode == 0, result.stdout


def _run(file: str, good: str, bad: str, where: str) -> subprocess.CompletedProcess[str]:
    """Run tests over the emulation with a mistake in it."""
    name, _, tests = where.partition(" -k ")
    path = f"tests/codec/test_cuda_{name}"
    program = PROGRAM.format(file=file, change=(good, bad), parts=PARTS[name], tests=tests, path=path)
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
