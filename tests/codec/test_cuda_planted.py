"""Mistakes in the CUDA kernels that the tests of their emulation must notice."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator

import emulation
import pytest
import test_cuda_sanitizers
from places import PYTHONPATH, ROOT

from ds_zipccl.kernels import build

#: The tests that must notice them -> mistakes: a file of csrc, its text, and the mistake.
#:
#: Not here: what makes the kernels right in any order of threads beside a shuffle or ballot, which order memory in the emulation.
MISTAKES: dict[str, dict[str, tuple[str, str, str]]] = {
    "cuda_kernels.py -k any_order_of_threads": {
        "chunks start in any order": ("cuda/encode.cuh", "atomicAdd(jobs.ticket, 1u)", "blockIdx.x"),
        "forms are read before they are written": (
            "cuda/encode.cuh", "    __syncthreads();\n    if (!jobs.split) break;", "    if (!jobs.split) break;",
        ),
        "copied before it is known where": ("cuda/encode.cuh", "  __syncthreads();\n\n  const uint64_t end", "\n  const uint64_t end"),
        "the table is used before it is read": (
            "cuda/decode.cuh", "  __syncthreads();\n  if (shared.content == NOTHING) return;", "  if (shared.content == NOTHING) return;",
        ),
        "exponents are read before they are listed": (
            "cuda/decode_block.cuh", "k.word[2], k.word[3]);\n  __syncwarp();", "k.word[2], k.word[3]);",
        ),
        "elements are read before all lanes have put them": (
            "cuda/encode_block.cuh", "  __syncwarp();\n  const uint4 octets", "  const uint4 octets",
        ),
        "bits are put before the string is zero": (
            "cuda/encode_block.cuh", "  __syncwarp();\n  uint32_t bit = 8 * at;", "  uint32_t bit = 8 * at;",
        ),
        "look-back does not wait": (
            "cuda/encode.cuh", " : 2ull << 32;\n    while (__any_sync(kEveryLane, seen == 0))", " : 2ull << 32;\n    while (false)",
        ),
        "the sizes of other parts are not waited for": (
            "cuda/encode.cuh", " : part_sizes(0, 0);\n    while (__any_sync(kEveryLane, seen == 0))",
            " : part_sizes(0, 0);\n    while (false)",
        ),
        "a part is taken before the last one is told of": ("cuda/encode.cuh", "    __syncthreads();\n  } while (", "  } while ("),
        "lanes of a warp disagree": (
            "cuda/warp.cuh", "sum = add_from_below(sum, distance);", "if (lane_id() >= distance) sum = add_from_below(sum, distance);",
        ),
    },
    "cuda_calls.py -k one_launch and bf16": {
        "the skipped rank is decoded": ("cuda/decode.cuh", "blockIdx.y >= jobs.skip", "blockIdx.y > jobs.skip"),
        "every rank gets the payload of the first": ("cuda/decode.cuh", "job.payload + rank * jobs.rank_bytes", "job.payload"),
    },
    "cuda_calls.py -k differences_in_place and bfloat16": {
        "a base without its stride": ("cuda/decode.cuh", "(kDelta ? rank * job.stride + first : 0)", "(kDelta ? first : 0)"),
    },
    "cuda_calls.py -k one_output": {
        "a wrong job for the last item": ("cuda/frame.cuh", "first_item <= item", "first_item < item"),
    },
    "cuda_calls.py -k counts_over_launches": {
        "frames counted from each launch": ("cuda/decode.cuh", "jobs.first_frame + number", "number"),
    },
    "cuda_calls.py -k refused_frame": {
        "ranks and frames swapped": (
            "cuda/frame.cuh", "uint64_t(least(rank, 0xffff)) << 48 | uint64_t(least(frame, 0xffff)) << 32",
            "uint64_t(least(frame, 0xffff)) << 48 | uint64_t(least(rank, 0xffff)) << 32",
        ),
        "refused words stay": ("cuda/frame.cuh", "words[at] = Word(~Word(0))", "(void)words"),
    },
    "cuda_calls.py -k sizes": {
        "a raw frame that claims blocks": ("cuda/encode.cuh", "jobs.dtype, 1, job.numel", "jobs.dtype, jobs.block, job.numel"),
    },
    "cuda_sums.py -k listed_slots": {
        "own words one place late": ("cuda/sum.cuh", "k == job.own_at", "k == job.own_at + 1"),
    },
    "cuda_sums.py -k rows and bf16": {
        "own words of the first chunk for all": (
            "cuda/sum.cuh", "reinterpret_cast<const Word*>(from) + at", "reinterpret_cast<const Word*>(from)",
        ),
        "only the first group of summands": ("cuda/sum.cuh", "group < job.count; group +=", "group < 1; group +="),
        "each group begins anew": ("cuda/sum.cuh", "start = group + member == 0", "start = member == 0"),
    },
    "cuda_sums.py -k refused": {
        "the second turn of warps has the tables of the last group": (
            "cuda/sum.cuh", "b0 == begin || job.count > kMaxFrames", "b0 == begin",
        ),
        "a summand counted in its group": (
            "cuda/sum.cuh", "place_of(kNone, group + member, chunk), status)", "place_of(kNone, member, chunk), status)",
        ),
    },
    "cuda_lists.py -k forms_of and bfloat16": {
        "a sum of gaps for another r": ("cuda/delta/encode_list.cuh", "gap >> (2 * i + 1) << 16", "gap >> (2 * i) << 16"),
    },
    "cuda_lists.py -k as_many_bytes": {
        "a list that is compared with nothing": (
            "cuda/delta/encode_list.cuh", "bits > plan.table_bits ? TABLE : lost || list_certain(n, first, escapes) ? LIST : EITHER",
            "LIST",
        ),
        "a table of as many bytes as the list": (
            "cuda/encode.cuh", "shared.plan.bytes / 16 > shared.units", "shared.plan.bytes / 16 >= shared.units",
        ),
    },
    "cuda_lists.py -k limits": {
        "a place behind its set": ("cuda/delta/decode_list.cuh", "if (place >= (level ?", "if (place > (level ?"),
        "ones behind the window are not seen": ("cuda/delta/decode_list.cuh", "count = kLevels * kListWords + 1;", "(void)count;"),
        "a level with more words than the one before": ("cuda/delta/decode_list.cuh", "m >= 1 && m <= most && r", "m >= 1 && r"),
    },
    "cuda_lists.py -k larger": {
        "words of a level counted in their u32 alone": (
            "cuda/delta/decode_list.cuh", "at = scratch.before[size - 1][at / 32] + uint32_t", "at = uint32_t",
        ),
    },
    "cuda_lists.py -k raw_frames": {
        "words for elements in a header": (
            "cuda/decode.cuh", "job.numel >> jobs.element_log2, sizeof(Word) << jobs.element_log2", "job.numel, sizeof(Word)",
        ),
    },
    "cuda_rows.py -k order_of": {
        "a slot keeps the row that came first": ("cuda/rows.cuh", "if (there > entry) atomicMin", "if (false) atomicMin"),
    },
    "cuda_rows.py -k first_of_equal": {
        "rows with equal samples are equal": ("cuda/rows.cuh", "may_be && are_equal", "may_be || are_equal"),
        "vectors of rows at any address": (
            "cuda/rows.cuh", "case 2: return place_rows<uint16_t>(job);", "case 2: return place_rows<uint32_t>(job);",
        ),
        "repeats counted once for a warp": ("cuda/rows.cuh", "atomicAdd(job.repeats, repeats)", "atomicAdd(job.repeats, 1u)"),
    },
    "cuda_rows.py -k equal_samples": {
        "only the first words of rows are compared": (
            "cuda/rows.cuh", "if (__any_sync(kEveryLane, at < units && !is_same(a[at], b[at]))) return false;",
            "return !__any_sync(kEveryLane, at < units && !is_same(a[at], b[at]));",
        ),
        "a way that depends on the row's number": ("cuda/rows.cuh", "? uint32_t(row_hash(row, units)) : slot + 1", "? entry : slot + 1"),
    },
    "row_kernels.py -k factors and emulated and bf16": {
        "lanes added from the last one on": (
            "cuda/rows.cuh", "__dadd_rn(sum, double_of_lane(own[which], lane))",
            "__dadd_rn(sum, double_of_lane(own[which], kLanes - lane))",
        ),
    },
    "row_kernels.py -k predictions and emulated and bf16": {
        "a prediction from the next word": ("cuda/rows.cuh", "predict<F>(from[at], factor)", "predict<F>(from[at + 1], factor)"),
        "a zero that becomes infinity": ("common/scaled_row.cuh", "e_a == 0 || e < 1 ? sign", "e < 1 ? sign"),
    },
    "cuda_lossy.py -k rounded_largest_exponents and bf16": {
        "the largest exponents among the usual ones": (
            "cuda/words.cuh", "return exponent + 1 < F::exponent_mask;", "return exponent < F::exponent_mask;",
        ),
    },
    "cuda_lossy.py -k rounded_mantissa_bits and bf16": {
        "RAW blocks as they are": ("cuda/encode.cuh", "    grid.octet(octet);\n    octet.store_whole(body", "    octet.store_whole(body"),
        "a trim of the lower word of each pair": ("cuda/words.cuh", "return two | two >> 16;", "return two & 0xffffu;"),
        "sizes without trims that forget sparse blocks": (
            "cuda/lossy/rounded.cuh", "if (entry.mode == SPARSE) read_zero_map", "if (false) read_zero_map",
        ),
    },
    "cuda_lossy.py -k rounded_payloads_that_are_refused": {
        "a trim above M": ("cuda/decode_block.cuh", "trim <= F::M && ", ""),
    },
    "cuda_lossy.py -k scaled_groups and bf16": {
        "a difference the other way around": ("cuda/lossy/scaled.cuh", "__fsub_rn(other, value)", "__fsub_rn(value, other)"),
        "strides between the words of a lane left out": (
            "cuda/lossy/scaled.cuh", "stride < kMostValues; stride *= 2", "stride < 1; stride *= 2",
        ),
        "ties of E4M3 go up": ("cuda/lossy/scaled.cuh", "size + 0x7ffff + (size >> 20 & 1)", "size + 0x80000"),
    },
    "cuda_lossy.py -k scaled and any_address and bf16": {
        "a tensor's end read as words": (
            "cuda/lossy/scaled.cuh", "value = i < numel ? Values<F>::from(from[i]) : 0.0f", "value = Values<F>::from(from[i])",
        ),
        "codes in the places of all groups": ("cuda/lossy/scaled.cuh", "job.places ? job.places[number] - 1 : number", "number"),
    },
    "cuda_lossy.py -k scaled_codes_that_are_refused": {
        "a NaN among codes": ("cuda/lossy/scaled.cuh", "good &= (code & 127) != 127;", ""),
        "a number above 2m": ("cuda/lossy/scaled.cuh", "good &= code <= uint32_t(2 * half_range(s));", ""),
    },
    "cuda_lossy.py -k scaled_groups_that_stay_as_they_are": {
        "a group that stays is coded": (
            "common/scaling.cuh", "if (largest >= kInfinite) return kStays;", "if (largest >= kInfinite) return 1;",
        ),
    },
    "cuda_lossy.py -k zfp_rates_and_sizes and bf16": {
        "codes of ZFP without the padding": (
            "cuda/lossy/zfp.cuh", "(blocks * kZfpValues * job.rate + 63) / 64 * 2", "(blocks * kZfpValues * job.rate + 31) / 32",
        ),
        "half a code of ZFP": ("cuda/lossy/zfp.cuh", "if (at > 56) high |=", "if (at > 64) high |="),
    },
    "cuda_lossy.py -k zfp and any_address and bf16": {
        "codes of ZFP past the end": (
            "cuda/lossy/zfp.cuh", "left < kZfpValues * job.rate ? left : kZfpValues * job.rate", "kZfpValues * job.rate",
        ),
    },
    "cuda_lossy.py -k zfp_blocks_that_are_not_finite": {
        "an infinity coded": ("cuda/lossy/zfp.cuh", "finite &= block.finite();", ""),
    },
    "cuda_calls.py -k hashes": {
        "a hash without its region": ("cuda/hash.cuh", "jobs.work + 3 * number", "jobs.work"),
    },
    "cuda_waves.py -k parts_fit_together and bf16": {
        "a block of threads waits for parts that have not started": (
            "cuda/encode.cuh", "next = next_ticket(jobs.ticket, shared.ticket, end_ticket);", "next = end_ticket;",
        ),
        "a part takes tickets of the next chunk": (
            "cuda/encode.cuh", "end_ticket = (shared.item + 1) << jobs.split,", "end_ticket = (shared.item + 2) << jobs.split,",
        ),
        "a part that was taken is forgotten": ("cuda/encode.cuh", "shared.own |=", "shared.own ="),
        "every part writes the header": ("cuda/encode.cuh", "const bool leads = shared.own & 1;", "const bool leads = true;"),
        "decoded parts leave a gap": (
            "cuda/decode.cuh", "shared.end = least((part + 1) * per_part,", "shared.end = least((part + 1) * per_part - 1,",
        ),
        "summed parts leave a gap": ("cuda/sum.cuh", "least(begin + per_part, blocks)", "least(begin + per_part - 1, blocks)"),
        "a raw part is short": ("cuda/decode.cuh", "end = least(shared.end * jobs.block", "end = least(shared.end * jobs.block - 1"),
    },
    "cuda_kernels.py -k words_at_any_address and bf16": {
        "16-bit words are shifted by a byte": ("cuda/words.cuh", "__funnelshift_r(b, c, 16)", "__funnelshift_r(b, c, 8)"),
        "the last word is missing": ("cuda/words.cuh", "uint32_t(from[7]) << 16", "uint32_t(from[6]) << 16"),
        "vectors at any address": ("cuda/decode.cuh", "copy_bytes<kWhole ? 4 : 1>(", "copy_bytes<kWhole ? 4 : 1>(8 + "),
        "a raw frame's end is rounded up": ("cuda/frame.cuh", "words = (bytes - head) / 4;", "words = (bytes - head + 3) / 4;"),
        "sums stay in the scratch": ("cuda/sum.cuh", "    if (staged) {", "    if (false) {"),
    },
    "cuda_kernels.py -k words_at_any_address and e4m3": {
        "bytes are shifted by a wrong phase": (
            "cuda/words.cuh", "__funnelshift_r(middle[0], after, 8 * phase)", "__funnelshift_r(middle[0], after, 8 * head)",
        ),
        "words at the end are written twice": ("cuda/warp.cuh", "words = (bytes - head) / 4;", "words = (bytes - head + 3) / 4;"),
        "a raw frame is shifted the other way": ("cuda/frame.cuh", "source[i + 1], 8 * phase)", "source[i + 1], 32 - 8 * phase)"),
    },
}  # fmt: skip
#: Tests -> ZIPCCL_PARTS that suffice for them, and compile faster: bfloat16 with bytes, or with hashes and rows of any dtype; or a
#: lossy codec.
PARTS = {
    **dict.fromkeys(("cuda_waves.py", "cuda_kernels.py -k any_order"), emulation.BF16),
    **dict.fromkeys(("cuda_lists.py", "cuda_kernels.py -k words"), emulation.BF16 | emulation.BYTES),
    **dict.fromkeys(
        ("cuda_calls.py", "cuda_sums.py", "cuda_rows.py", "row_kernels.py"), emulation.BF16 | emulation.HASH
    ),
    "cuda_lossy.py -k rounded": emulation.ROUNDED,
    "cuda_lossy.py -k scaled": emulation.SCALED,
    "cuda_lossy.py -k zfp": emulation.ZFP,
}
#: Imports what the tests need once, and forks for each mistake, of which a line tells.
PROGRAM = """
import json, os, sys
import emulation, hypothesis, pytest, variants
made = emulation.launcher
for line in sys.stdin:
    file, change, parts, words = json.loads(line)
    if not (child := os.fork()):
        emulation.launcher = lambda: made({file: (tuple(change),)}, parts)
        status = pytest.main(["-q", "-x", "-p", "no:cacheprovider", *words])
        sys.stdout.flush()
        os._exit(status)
    print("\\nSTATUS", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
#: (File, text, mistake), file of tests, expression of their names, parts -> what the tests say over the emulation with the mistake, and how
#: they end.
Tested = Callable[[tuple[str, str, str], str, str, int], tuple[str, int]]


@pytest.fixture(scope="module")
def tested() -> Iterator[Tested]:
    """Runs tests in processes of their own, as some mistakes end them."""
    command, pipe = [sys.executable, "-c", PROGRAM], subprocess.PIPE
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True
    ) as server:
        assert server.stdin is not None and server.stdout is not None

        def run(change: tuple[str, str, str], test_file: str, tests: str, parts: int) -> tuple[str, int]:
            words = ["-k", f"not cuda- and ({tests})", f"tests/codec/test_{test_file}"]
            print(json.dumps([change[0], change[1:], parts, words]), file=server.stdin, flush=True)
            said = ""
            for line in server.stdout:
                if status := re.fullmatch(r"STATUS (-?\d+)\n", line):
                    return said, int(status[1])
                said += line
            raise AssertionError(said)

        yield run
        server.stdin.close()


def test_every_mistake_can_be_planted() -> None:
    """The mistakes themselves are planted in the long tier only."""
    found = [
        *test_cuda_sanitizers.MISTAKES.items(),
        *(mistake for each in MISTAKES.values() for mistake in each.items()),
    ]
    places = {name: (build.CSRC / file).read_text().count(good) for name, (file, good, *_) in found}
    assert set(places.values()) == {1}, places


@pytest.mark.by_turns
@pytest.mark.full(reason="each has an emulation of its own to compile")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("where", MISTAKES)
def test_mistakes_are_noticed(where: str, tested: Tested) -> None:
    file, _, tests = where.partition(" -k ")
    parts = next(parts for start, parts in PARTS.items() if where.startswith(start))
    for mistake, change in MISTAKES[where].items():
        said, status = tested(change, file, tests, parts)
        assert status, (mistake, said)
        assert status < 0 or " failed" in said or "emulation: block" in said, (mistake, said)  # < 0: by a wild address


@pytest.mark.full(reason="an emulation of its own to compile")
@pytest.mark.parametrize("start", PARTS)
def test_tests_pass_without_a_mistake(start: str, tested: Tested) -> None:
    """They have the kernels of some parts alone; none of them may fail for that."""
    tests = sorted({where.partition(" -k ")[2] for where in MISTAKES if where.startswith(start)})
    nothing = ("cuda/frame.cuh", "kVersion = 2", "kVersion = 2")
    said, status = tested(nothing, start.split()[0], f"({') or ('.join(tests)})", PARTS[start])
    assert status == 0, said
