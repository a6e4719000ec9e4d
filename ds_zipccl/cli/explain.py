"""The verdict of the doctor in whole sentences, made from the content of its file (``--json``) and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ds_zipccl.policy.admission import PassReason

#: A factor that is nearer to 1 counts as no gain, as in ``plan``.
GAIN = 1.02
#: Choice of a line -> its predicate.
_SAID = {
    "coded": "are coded",
    "exponents": "are coded, without differences",
    "copies": "are copied out of a base, and are not sent",
    "plain": "stay plain",
}


def sentences(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield sentences about the coded traffic, the plain traffic and why, the traffic that bypasses us, the gain, and what to change.
    ``found``: the content of the doctor's file, with its ``rows``."""
    changes = [f"repair the hooks: {found['remedy']}"] if found["missing"] else []
    if changes:
        yield f"Hooks in DeepSpeed are missing ({len(found['missing'])}), and their traffic is not coded as predicted."
    if "covered" not in found:
        yield "No job is known: name its config with --ds-config."
        return
    does = "ds_zipccl " if found["covered"].startswith("codes") else ""
    yield f"On {found['backend']} groups of {found['ranks']} ranks {does}{found['covered']}."
    for row in found["rows"][:-1]:  # the last one is their total
        name, _, when = row["what"].capitalize().replace("Frozen", "Frozen parameters").partition(", ")
        plain = "" if row["choice"] == "plain" else f" in place of {row['plain_ms']:,.1f}"
        why = f", because of this: {row['reason']}" if row["reason"] else ""
        times = f"({row['ms']:,.1f} ms per step{plain})"
        yield f"{name}{f' ({when})' if when else ''} {_SAID[row['choice']]} {times}{why}."
        because = [one for one in PassReason if row["reason"] and row["reason"].startswith(one.value.partition("{")[0])]
        changes += [one.remedy.rstrip(".") for one in because if not one.remedy.startswith("None")]
    for one in found["bypassed"]:
        yield f"{one['name']} bypasses ds_zipccl: {one['cost']}."
        changes.append(f"{one['name']}: {one['remedy']}")
    if not found["bypassed"]:
        yield "No feature that the config names bypasses ds_zipccl."
    if "unpredicted" in found:
        yield f"The gain is not predicted, because of this: {found['unpredicted']}."
    else:
        yield from _gain(found)
    yield from (f"Note: {note}." for note in found["notes"] if not note.startswith("bypassed: "))
    yield f"To change: {'; '.join(dict.fromkeys(changes)) or 'nothing'}."


def _gain(found: Mapping[str, Any]) -> Iterator[str]:
    total, factor, step = found["rows"][-1], found["comm_speedup"], found["step_speedup"]
    times = f"it takes {total['ms']:,.1f} ms per step, plain {total['plain_ms']:,.1f} ms"
    yield f"Communication gains {'nothing' if factor < GAIN else f'a factor of {factor:.2f}'}: {times}."
    if step is None:
        yield "The gain of the step is open: give its time without communication by --step-ms."
    else:
        yield f"The step gains {'nothing' if step < GAIN else f'a factor of {step:.2f}, if communication hides behind no computing'}."
