"""``doctor``: its predictions are those of trainings that were measured; real ranks meet, measure, and tell the reason of a failure."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import assert_refused, command, content
from places import EXAMPLES, ROOT
from programs import launch
from safetensors.torch import save_file

from ds_zipccl.__main__ import main
from ds_zipccl.benchmarks.train import doctor as doctor_check
from ds_zipccl.cli import cluster_report, doctor_ranks, explain
from ds_zipccl.cli.doctor_ranks import RankReport, Ranks
from ds_zipccl.cli.planning import job as job_plan
from ds_zipccl.cli.planning import operations as step_plan
from ds_zipccl.cli.planning import speeds, user_job
from ds_zipccl.config import ZipcclConfig
from ds_zipccl.integration import autoload, canary, hook_points
from ds_zipccl.policy.admission import PassReason
from ds_zipccl.policy.cost_model import DeviceProfile, LinkProfile, Topology, lossy_size, predict
from ds_zipccl.policy.settled import Settled, Sums
from ds_zipccl.tools import ToolError, link, namespaces

FAST = LinkProfile(((1.0, 1e-5), (1e9, 1.0)), 1e12, 1e12, 1e12, 1e12, 1e12, 1e-6)
NORMAL = job_plan.Ratios(1.5, 4.0, "")
#: A config with buckets of its own.
JOB = {
    "bf16": {"enabled": True},
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 4e6, "allgather_bucket_size": 2e6},
    "zipccl": {"enabled": True},
}
PARAMS = 10_000_000
#: What no file of --report may have.
SECRETS = ("gpu17.corp.example", "10.1.2.3", "/home/alice", "job-4711")
SECRET = " ".join(SECRETS)


def written(folder: Path, **changes: Any) -> str:
    """Path of :data:`JOB` with other values of its keys; None removes a key."""
    path = folder / "ds_config.json"
    path.write_text(json.dumps({key: value for key, value in (JOB | changes).items() if value is not None}))
    return str(path)


# ---------------------------------------------------------------- the config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"zipccl": {"mod": "auto"}}, 'the "zipccl" section is invalid: .*mod.*docs/configuration.md has the keys'),
        ({"zipccl": None, "zipcl": {"enabled": True}}, 'unknown key "zipcl": did you mean "zipccl"'),
        ({"zero_optimization": {"stage": 4}}, "stage of zero_optimization is one of .*, got 4"),
        ({"zero_optimization": [2]}, "zero_optimization must be an object"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps must be a whole number of at least 1"),
        ({"gradient_accumulation_steps": 1.5}, "gradient_accumulation_steps must be a whole number"),
    ],
)
def test_a_wrong_config_says_what_to_do(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ToolError, match=message):
        user_job.read(written(tmp_path, **changes))


def test_files_that_are_no_config(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match=r"cannot read the DeepSpeed config of the job .*: No such file"):
        user_job.read(str(tmp_path / "missing.json"))
    for text, message in (("{", "cannot read the .* Expecting"), ("[]", "holds a list, wanted is a JSON object")):
        (tmp_path / "wrong.json").write_text(text)
        with pytest.raises(ToolError, match=message):
            user_job.read(str(tmp_path / "wrong.json"))


def test_values_that_a_trainer_fills_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"zipccl": None, "bf16": {"enabled": "auto"}, "gradient_accumulation_steps": "auto"}
    job = user_job.read(written(tmp_path, **changes, tensor_parallel={"autotp_size": 2}))
    assert (job.dtype, job.accumulation) == ("bfloat16", 1)
    assert (job.buckets.reduce, job.buckets.gather) == (4_000_000, 2_000_000)
    said = "\n".join(job.notes)
    assert 'no "zipccl" section' in said and 'bf16 is "auto"' in said and "role tp" in said
    notes = user_job.read(written(tmp_path, zipccl={"mode": "auto"})).notes
    assert notes[0] == '"zipccl" is off and codes nothing; add "enabled": true'
    monkeypatch.setenv("DS_ZIPCCL", '{"enabled": true, "mode": "never"}')
    assert user_job.read(written(tmp_path)).config.mode == "never"


# ---------------------------------------------------------------- the prediction


@pytest.mark.parametrize("results", ["train", "train_zero2", "train_zero2_4"])
def test_predictions_are_within_20_percent_of_measured_trainings(results: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainings of docs/results on shaped links. The link is the nominal one, and the codec that of docs/results/codec.json: the speed of
    this machine does not matter."""
    encode, decode = speeds._read(str(ROOT / "docs/results/codec.json"), "bfloat16")
    monkeypatch.setattr(speeds, "measured_differences", lambda: (encode, decode))
    trained = content(ROOT / f"docs/results/{results}.json")
    parameters = {(one["workload"], one["ranks"], one["link"]): one["parameters"] for one in trained["verdicts"]}
    rows = {(row["workload"], row["ranks"], row["link"], row["variant"]): row for row in trained["rows"]}
    compared = 0
    for (workload, ranks, name), numel in parameters.items():
        spec = link.parse(name)
        if spec is None or workload not in doctor_check.WORKLOADS:
            continue
        plain, coded = (rows[workload, ranks, name, variant] for variant in ("plain", "coded"))
        transfer = ((1.0, 1e-4), (1e9, 1e-4 + 8e9 / spec.rate))
        profile = LinkProfile(transfer, encode, decode, decode, decode, decode, 50e-6)
        job = user_job.read(str(EXAMPLES / f"ds_config_{workload}.json"))
        total = job_plan.predict(job, numel, ranks, profile, job_plan.Ratios(1.5, None, ""))[-1]
        assert total["speedup"] == pytest.approx(coded["comm_speedup"], rel=0.2)
        step = job_plan.step_speedup(total, plain["step_ms"] - plain["comm_ms"])
        assert step == pytest.approx(coded["speedup"], rel=0.2)
        compared += 1
    assert compared


def test_the_lines_of_a_step(tmp_path: Path) -> None:
    job = user_job.read(written(tmp_path, zipccl={"enabled": True, "mode": "always", "delta": "off"}))
    gradients, parameters, total = job_plan.predict(job, PARAMS, 4, FAST, NORMAL)
    # Buckets of 8 MB and of 4 MB; gradients travel in each of two micro-batches.
    buckets = 2 * predict("all_reduce", "gloo", 8e6, 4, FAST) + predict("all_reduce", "gloo", 4e6, 4, FAST)
    assert gradients["plain_ms"] == pytest.approx(2e3 * buckets)
    assert parameters["plain_ms"] == pytest.approx(5e3 * predict("all_gather", "gloo", 4e6, 4, FAST))
    assert parameters["ms"] == pytest.approx(5e3 * predict("all_gather", "coded", 4e6, 4, FAST, 1.5))
    assert {row["choice"] for row in (gradients, parameters)} == {"coded"}
    assert total["ms"] == pytest.approx(gradients["ms"] + parameters["ms"])
    assert job_plan.step_speedup(total, 0.0) == pytest.approx(total["speedup"])
    assert job_plan.step_speedup(total, total["ms"]) == pytest.approx((total["speedup"] + 1) / 2)


@pytest.mark.parametrize(
    ("zero", "volume"),
    [
        ({"max_live_parameters": 8e6, "max_reuse_distance": 4e6}, 2.3113),  # `bench train --workload zero3`: 2.3121
        ({}, 2.0),  # DeepSpeed's defaults keep a model of this size
        ({"max_live_parameters": 0, "max_reuse_distance": 0}, 3.0),
        ({"max_live_parameters": 8e6, "max_reuse_distance": 0, "prefetch_bucket_size": 0}, 3.0),
        ({"max_live_parameters": 0, "max_reuse_distance": 11_615_680}, 2.5),
    ],
)
@pytest.mark.parametrize("base", ["off", "host"])
def test_zero3_keeps_parameters_for_the_backward_pass(
    zero: dict[str, Any], volume: float, base: str, tmp_path: Path
) -> None:
    changes = {"zipccl": {"enabled": True, "zero3_base": base}, "gradient_accumulation_steps": 1}
    changes["zero_optimization"] = {"stage": 3} | {f"stage3_{key}": value for key, value in zero.items()}
    job = user_job.read(written(tmp_path, **changes))
    args = argparse.Namespace(**job.options(), params=11_615_680, trainable=None)
    moved = sum(line.part * line.times for line in step_plan.traffic(args))
    assert moved == pytest.approx(volume, abs=2e-4)
    predicted = job_plan.predict(job, args.params, 2, FAST, NORMAL)
    spent = sum(row["plain_ms"] for row in predicted if row["what"].startswith("parameters"))
    once = predict("all_gather", "gloo", 2 * args.params, 2, FAST)
    assert spent == pytest.approx(1e3 * once * (volume - 1), rel=0.05)


def test_a_job_with_frozen_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LoRA: gathers of frozen parameters are copies in any mode but never. Nothing but adapters has gradients."""
    monkeypatch.setattr(speeds, "measured_copies", lambda: (1e10, 1e10))
    live = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}

    def rows(**section: Any) -> dict[str, dict[str, Any]]:
        changes = {"zero_optimization": {"stage": 3} | live, "gradient_accumulation_steps": 1}
        job = user_job.read(written(tmp_path, zipccl={"enabled": True} | section, **changes))
        return {row["what"]: row for row in job_plan.predict(job, 10**8, 2, FAST, NORMAL, trainable=10**6)}

    found = rows()
    passes = [f"{what}, {when}" for what in ("frozen", "parameters") for when in ("forward", "backward")]
    assert list(found) == [*passes, "gradients", "total"]
    copied = 1e3 * (4e-6 / 2 + 1.98e8 / 1e10 + 0.99e8 / 1e10)
    assert found["frozen, backward"]["ms"] == pytest.approx(copied, rel=1e-3)
    assert found["frozen, backward"]["choice"] == rows(mode="always")["frozen, backward"]["choice"] == "copies"
    gathered = 1e3 * predict("all_gather", "plain", 1.98e8, 2, FAST)
    assert found["frozen, backward"]["plain_ms"] == pytest.approx(gathered, rel=1e-3)
    assert found["gradients"]["plain_ms"] == pytest.approx(1e3 * predict("reduce_scatter", "gloo", 2e6, 2, FAST))
    assert rows(mode="never")["frozen, forward"]["choice"] == "plain"
    assert rows(zero3_base="off")["frozen, forward"]["choice"] == "coded"
    part = rows(zero3_base_mib=63)  # a third of them has bases: the rest, coded, stands last
    assert part["frozen, backward"]["choice"] == "coded"
    assert part["frozen, backward"]["plain_ms"] == pytest.approx(gathered * (1 - 63 * 2**20 / 1.98e8), rel=1e-3)
    assert part["total"]["plain_ms"] == pytest.approx(found["total"]["plain_ms"], rel=1e-3)


def test_lines_that_pass_and_why(tmp_path: Path) -> None:
    def reasons(**section: Any) -> dict[str, str]:
        job = user_job.read(written(tmp_path, zipccl={"enabled": True, "delta": "off"} | section))
        return {row["role"]: row["reason"] for row in job_plan.predict(job, PARAMS, 2, FAST, NORMAL)[:-1]}

    assert set(reasons(mode="always").values()) == {""}
    never = reasons(mode="always", roles={"zero_grad": "never"})
    assert never == {"zero_grad": PassReason.ROLE.value, "zero_param": ""}
    assert reasons(mode="always", min_bytes=6_000_000) == {"zero_grad": "", "zero_param": PassReason.SMALL.value}
    assert reasons(mode="always", reduction="plain")["zero_grad"] == PassReason.PLAIN_SUMS.value
    assert set(reasons(enabled=False).values()) == {PassReason.DISABLED.value}
    slow = LinkProfile.from_json(FAST.to_json() | dict.fromkeys(("encode", "decode", "add"), 1e7))
    job = user_job.read(written(tmp_path, zipccl={"enabled": True, "delta": "off"}))
    *lines, total = job_plan.predict(job, PARAMS, 2, slow, NORMAL)
    assert all(row["reason"].startswith(PassReason.LINK_IS_FASTER.value) for row in lines)
    assert total["speedup"] == 1
    settled = Settled("cuda", Topology(2, 1), DeviceProfile(1e8), None, Sums(("bfloat16",)), 0.0)
    for least, reason in ((4_000_000, ""), (4_000_001, PassReason.SMALL.value)):
        on = {"enabled": True, "delta": "off", "nccl": "on", "nccl_min_bytes": least}
        rows = job_plan.predict_on_device(user_job.read(written(tmp_path, zipccl=on)), PARAMS, settled, NORMAL)
        assert [row["reason"] for row in rows] == ["", reason, ""]


def test_lines_whose_coding_the_speeds_choose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Differences count at their measured speed, and exponents take their place where they are faster. Lossy lines do not."""
    monkeypatch.setattr(speeds, "measured_differences", lambda: (1e8, 1e8))
    job = user_job.read(written(tmp_path))
    gradients, parameters, _ = job_plan.predict(job, PARAMS, 2, FAST, NORMAL)
    assert parameters["choice"] == "exponents" and parameters["ms"] < parameters["plain_ms"] < parameters["coded_ms"]
    rounded = {"enabled": True, "lossy": True, "roles": {"zero_grad": {"codec": "int", "bits": 8}}}
    lossy = user_job.read(written(tmp_path, zipccl=rounded))
    bits = lossy_size(lossy.config.lossy_of("zero_grad"), "bfloat16", 16 / 1.5).bits
    row = job_plan.predict(lossy, PARAMS, 2, FAST, NORMAL)[0]
    assert row["ms"] / gradients["ms"] == pytest.approx(bits / (16 / 1.5), rel=0.05)
    slow = replace(FAST, encode=1e7, decode=1e7, add=1e7)
    assert job_plan.predict(lossy, PARAMS, 2, slow, NORMAL)[0]["choice"] == "coded"
    with pytest.raises(ToolError, match=r"without loss it is 5[.]33: take the codec out"):
        job_plan.predict(lossy, PARAMS, 2, FAST, job_plan.Ratios(3.0, 4.0, ""))


def explained(job: user_job.UserJob, **changes: Any) -> str:
    rows = job_plan.predict(job, PARAMS, 2, FAST, NORMAL)
    features = [{"name": "DeepEP", "cost": "rows go plain", "remedy": "leave it out"}]
    found = {"backend": "gloo", "ranks": 2, "missing": [], "remedy": "", "covered": "codes cpu tensors over gloo", "rows": rows,
             "bypassed": features, "notes": ["bypassed: DeepEP: all", "open"], "comm_speedup": rows[-1]["speedup"],
             "step_speedup": 1.25}  # fmt: skip
    return "\n".join(explain.sentences(found | changes))


def test_the_verdict_in_sentences_is_that_of_the_table(tmp_path: Path) -> None:
    job = user_job.read(written(tmp_path, zipccl={"enabled": True, "mode": "always", "delta": "off"}))
    gradients, parameters, total = job_plan.predict(job, PARAMS, 2, FAST, NORMAL)
    said = explained(job)
    assert said.splitlines() == [
        "On gloo groups of 2 ranks ds_zipccl codes cpu tensors over gloo.",
        f"Gradients are coded ({gradients['ms']:,.1f} ms per step in place of {gradients['plain_ms']:,.1f}).",
        f"Parameters are coded ({parameters['ms']:,.1f} ms per step in place of {parameters['plain_ms']:,.1f}).",
        "DeepEP bypasses ds_zipccl: rows go plain.",
        f"Communication gains a factor of {total['speedup']:.2f}: it takes {total['ms']:,.1f} ms per step, "
        f"plain {total['plain_ms']:,.1f} ms.",
        "The step gains a factor of 1.25, if communication hides behind no computing.",
        "Note: open.",
        "To change: DeepEP: leave it out.",
    ]
    job = user_job.read(written(tmp_path, zipccl={"enabled": True, "mode": "never", "delta": "off"}))
    said = explained(job, bypassed=[], step_speedup=None)
    assert (
        f"Gradients stay plain ({gradients['plain_ms']:,.1f} ms per step), because of this: {PassReason.ROLE.value}."
        in said
    )
    assert "Communication gains nothing" in said and "give its time without communication by --step-ms" in said
    assert "No feature that the config names bypasses ds_zipccl." in said
    assert said.endswith(f"To change: {PassReason.ROLE.remedy}")
    said = explained(job, unpredicted="no --params", rows=[], bypassed=[], missing=["one"], remedy="pip install it")
    assert "The gain is not predicted, because of this: no --params." in said and said.startswith(
        "Hooks in DeepSpeed are missing (1)"
    )
    assert said.endswith("To change: repair the hooks: pip install it.")
    assert "\n".join(explain.sentences({"missing": []})) == ("No job is known: name its config with --ds-config.")


def test_jobs_without_a_prediction(tmp_path: Path) -> None:
    def why(device: str = "cpu", backend: str = "gloo", **changes: Any) -> str:
        return job_plan.unpredicted(user_job.read(written(tmp_path, **changes)), device, backend)

    assert why() == ""
    assert "ZeRO stage 0" in why(zero_optimization={"stage": 0})
    assert "nothing of this job is coded" in why("cuda", "nccl")
    assert "backend ccl" in why("cpu", "ccl")


def test_the_ratio_of_a_sample(tmp_path: Path) -> None:
    path = str(tmp_path / "weights.safetensors")
    constant, other = torch.ones(1 << 16, dtype=torch.bfloat16), torch.randn(1 << 16)
    save_file({"a": constant, "b": other}, path)
    found = job_plan.ratios("bfloat16", path, None)
    assert found.values > 50 and "0.1 MB of bfloat16" in found.about
    with pytest.raises(ToolError, match="holds no tensor of float16, the dtype of the job"):
        job_plan.ratios("float16", path, None)
    assert "default: normal bfloat16 values" in job_plan.ratios("bfloat16", None, None).about


# ---------------------------------------------------------------- the command


def test_names_that_do_not_fit_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "DeepSpeedZeroOptimizer_Stage3.step"
    assert not [found for found in doctor_ranks.hooks_found() if found.endswith(name)]
    monkeypatch.setitem(hook_points._unfit, name, f"has no {name}")
    (problem,) = [why for found, why in doctor_ranks.hooks_found().items() if found.endswith(name)]
    assert problem.startswith(f"has no {name}: gathers of ZeRO-3 are coded without agreed sizes")


def test_half_a_launcher(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "0")
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert_refused(["doctor"], "RANK are set, WORLD_SIZE and MASTER_ADDR and MASTER_PORT not", capsys)


def test_reports_of_other_machines_are_checked() -> None:
    mine = RankReport("node", "a\x1b[31mb", "c", "cpu gloo", {"module": ""})
    assert RankReport.from_bytes(1, mine.to_bytes()).error == "a?[31mb"
    shaped = b'{"host": "", "error": "", "config": "", "groups": "", "hooks": []}'
    for data in (b"{", b"[]", b'{"host": 1}', shaped, b" " * (1 << 17), b"[" * 60_000):
        with pytest.raises(ToolError, match="rank 1 sent no report of this version"):
            RankReport.from_bytes(1, data)


def test_real_ranks(tmp_path: Path) -> None:
    """Three doctors of two real ranks, one after the other: a config that only one rank has; different configs; a hook that does not fit
    on one rank, where all else is well."""
    found = launch(__file__, 2, tmp_path)
    first, second = found["rank0"], found["rank1"]
    missing, differing, unhooked = range(3)
    assert [[one["status"] for one in rank] for rank in (first, second)] == [[2, 2, 1]] * 2
    assert not any(one["text"] for one in second)  # rank 0 alone prints
    assert "rank 1 on" in first[missing]["text"] and "cannot read the DeepSpeed config" in first[missing]["text"]
    assert "the config of rank 1" in first[differing]["text"] and "same DS_ZIPCCL" in first[differing]["text"]
    said = first[unhooked]["text"]
    assert "deepspeed.runtime.zero.stage3: ValueError" in said and f"(rank 1 on {SECRETS[0]}" in said
    assert "10 modules of DeepSpeed known, 1 missing" in said
    assert "kernels: cpu native: proven by " in said
    assert "expected: communication" in said and "step not predicted" not in said
    assert "this does not hold here: 2 ranks share the cores of one machine and its loopback" in said

    written_file = found["doctor"]
    profile = LinkProfile.from_json(written_file["profile"])
    gradients = written_file["rows"][0]
    buckets = 2 * predict("all_reduce", "gloo", 8e6, 2, profile) + predict("all_reduce", "gloo", 4e6, 2, profile)
    assert gradients["plain_ms"] == pytest.approx(2e3 * buckets)
    total = written_file["rows"][-1]
    assert written_file["comm_speedup"] == total["plain_ms"] / total["ms"]
    assert all(outcome == "" for outcome in written_file["hooks"][0].values())
    step = written_file["step_speedup"]
    assert f"The step gains {'nothing' if step < explain.GAIN else f'a factor of {step:.2f}'}" in said
    assert "\n".join(written_file["explained"]) + "\nreport: plain / coded time of 2 layers: gathers " in said
    assert written_file["step_speedup"] == (100 + total["plain_ms"]) / (100 + total["ms"])

    report, text = found["cluster"], (tmp_path / "cluster.json").read_text()
    assert not [one for one in (*SECRETS, str(tmp_path)) if one in text] and '"other"' not in text
    assert report["missing"] == ["deepspeed.runtime.zero.stage3"]
    assert report["nodes"] == [{"ranks": 2, "gpu": "", "gpus": 0}]
    assert LinkProfile.from_json(report["profile"]) and report["kernels"]["cpu native"]["cases"]
    assert (report["format"], report["backend"], report["zero_stage"], report["dtype"]) == (1, "gloo", 2, "bfloat16")
    timed = report["windows"]
    assert timed["wrong"] == 0
    assert {name: len(ms) for name, ms in timed["ms"].items()} == {"plain": 6, "gathers": 6, "coded": 6}
    assert timed["gain"]["coded"][1] <= timed["gain"]["coded"][0] <= timed["gain"]["coded"][2]
    gathers, sums = timed["sent"]["all_gather_into_tensor"], timed["sent"]["reduce_scatter_tensor"]
    assert gathers[:2] == [48, 0] and sums[:2] == [12, 12] and min(gathers[2], sums[2]) > 1.2
    assert f"{tmp_path}/cluster.json has numbers" in said and "Nothing was\n        sent" in said
    assert (ROOT / ".github/ISSUE_TEMPLATE/report.yml").read_text().startswith("name: Report of a cluster\n")


def test_a_report_has_no_text_of_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names, addresses and paths in everything that the file is made of."""
    hooks = {SECRET: SECRET, "deepspeed.comm.comm": SECRET, "deepspeed.moe.sharded_moe": "absent"}
    ranks = Ranks(0, tuple(RankReport(host, SECRET, SECRET, f"cpu {SECRET}", hooks) for host in (SECRET, SECRETS[0])))
    versions = dict(enumerate(("2.6.0+alice.gpu17", "10.1.2.3", SECRET, "2.7.1+cu128", "3.13.0rc1")))
    timed = f"ours timed 1.25 times as fast in bfloat16, 2.50 times as fast in alice {SECRET}"
    sums = Sums(("bfloat16",), 4, timed)
    settled = Settled("cuda", Topology(2, 1), DeviceProfile(1e8), PassReason.ONE_QUEUE, sums, float("inf"))
    monkeypatch.setattr(cluster_report, "_told", lambda mine: [[SECRET, 8], ["NVIDIA H100 80GB HBM3", 8]])
    monkeypatch.setattr(cluster_report, "windows", lambda *_: SECRET)
    monkeypatch.setattr(cluster_report.tables, "versions", lambda: versions)
    monkeypatch.setattr(canary, "OUTCOMES", [canary.Outcome({1: (SECRET, "")})])
    path = tmp_path / "cluster.json"
    configs = [ZipcclConfig(enabled=True), ZipcclConfig(nccl="off", step_log=SECRET)]
    facts = {"zero_stage": 3, "dtype": SECRET, "profile": None, "settled": settled}
    assert "no layers timed: not proven" in cluster_report.make(str(path), 30, ranks, configs, facts)
    text, written = path.read_text(), content(path)
    assert not [one for one in (*SECRETS, "alice", "gpu17") if one in text]
    assert list(written["versions"].values()) == ["2.6.0", "other", "other", "2.7.1+cu128", "3.13.0rc1"]
    assert [one["gpu"] for one in written["nodes"]] == ["other", "NVIDIA H100 80GB HBM3"]
    assert (written["zero_stage"], written["dtype"]) == (3, "other")
    assert written["settled"]["sums"] == {"dtypes": ["bfloat16"], "least": 4, "timed": {"bfloat16": 1.25}}
    assert written["settled"]["reason"] == "ONE_QUEUE" and written["settled"]["least_bytes"] is None
    assert written["missing"] == ["deepspeed.comm.comm", "other"] and written["switched_off"] == ["enabled", "nccl"]
    assert written["canary"][0]["wrong"] == [1] and written["windows"] == "not proven"


@pytest.mark.full(reason="twelve seconds; gloo stays")
def test_groups_in_stream_order(tmp_path: Path) -> None:
    """Two ranks on two nodes, over the stand-in for NCCL: proven and measured as by a job; then where a rank lacks the device."""
    found = launch(__file__, 2, tmp_path, "streams")
    first, second = found["rank0"], found["rank1"]
    assert [[one["status"] for one in rank] for rank in (first, second)] == [[0, 0, 2]] * 2
    said = first[0]["text"]
    assert "canary: gather, exchanges and sums right in" in said
    assert "link:  slots, 2 ranks: 2 nodes, at most 1 ranks each; " in said and "GB/s between nodes" in said
    assert "gloo" not in said and "this does not hold here" not in said and "of slots's own schedules" in said
    rows = {row["what"]: row for row in found["doctor"]["rows"]}
    assert rows["gradients"]["reason"] == "sums are the backend's" and rows["gradients"]["speedup"] == 1.0
    assert found["doctor"]["profile"]["network"] > 0 and rows["total"]["ms"] <= rows["total"]["plain_ms"]
    assert found["always"]["profile"]["network"] > 0, "measured, though the job itself would not"
    report = found["cluster"]
    assert report["backend"] == "slots" and report["profile"] is None and report["settled"]["profile"]["network"] > 0
    assert report["canary"][0]["wrong"] == [] and report["windows"]["wrong"] == 0
    assert report["windows"]["sent"]["reduce_scatter_tensor"][:2] == [12, 12], "coded in one of two kinds"
    assert "rank 1 on" in first[2]["text"] and "has cpu gloo groups, rank 0 has cpu slots groups" in first[2]["text"]


@pytest.mark.full(reason="eight seconds of two interpreters; test_real_ranks has the ranks of a launcher")
def test_local_ranks_without_the_entry_point(tmp_path: Path) -> None:
    path = tmp_path / "doctor.json"
    ended = command("doctor", "--json", str(path), TORCH_DEVICE_BACKEND_AUTOLOAD="0", DS_ACCELERATOR="cpu")
    assert ended.returncode == 1, ended.stderr
    assert "starting 2 ranks on this machine, loopback" in ended.stderr
    assert "deepspeed.comm.comm: not adjusted: TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns the package off" in ended.stdout
    assert content(path)["profile"]["transfer"] and not content(path)["rows"]


@pytest.mark.network
@pytest.mark.skipif(bool(namespaces.why_not()), reason=namespaces.why_not() or "-")
@pytest.mark.full(reason="two trainings of some ten seconds each")
def test_a_training_on_a_shaped_link(tmp_path: Path) -> None:
    """Bits are equal, and both sides see that coding pays. How near they are is for `make doctor-check` on a quiet machine: other tests
    slow a training down."""
    path = tmp_path / "check.json"
    ended = command(*f"bench doctor --workload zero2 --link 200mbit --steps 4 --skip 1 --json {path}".split())
    found = content(path)
    (row,) = found["rows"]
    assert not found["problems"] and min(row["comm"], row["comm_predicted"]) > 1.5, ended.stderr
    assert row["comm_off"] == row["comm_predicted"] / row["comm"]
    within = all(abs(row[key] - 1) <= found["tolerance"] for key in ("comm_off", "step_off"))
    assert ended.returncode == (0 if within else 1)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_the_median_measurement_counts(order: tuple[int, ...]) -> None:
    profiles = [
        replace(FAST, transfer=tuple((size, factor * seconds) for size, seconds in FAST.transfer))
        for factor in (1, 2, 20)
    ]
    assert doctor_ranks.median([profiles[number] for number in order]) is profiles[1]


# ---------------------------------------------------------------- a rank


def _run(rank: int, config: str, *words: str) -> dict[str, Any]:
    # The store of the doctor before may still listen.
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        status = main(["doctor", "--ds-config", config, "--params", str(PARAMS), "--timeout", "60", *words])
    return {"status": status, "text": text.getvalue()}


def _rank(folder: Path, rank: int, own: Path) -> list[dict[str, Any]]:
    good = written(own)
    done = [_run(rank, good if rank == 0 else str(own / "missing.json"))]
    written(own, gradient_accumulation_steps=1 + rank)
    done.append(_run(rank, good))
    written(own)
    if rank:
        from ds_zipccl.integration import hooks

        name = "deepspeed.runtime.zero.stage3"
        module = importlib.import_module(name)

        def fails(module: Any) -> None:
            raise ValueError(SECRET)

        hooks.adopt = fails
        autoload._adjust(module)
    socket.gethostname = lambda: SECRETS[0]
    files = ["--json", str(folder / "doctor.json"), "--report", str(folder / "cluster.json")]
    return [*done, _run(rank, good, "--step-ms", "100", "--explain", *files)]


def _streams(folder: Path, rank: int, own: Path) -> list[dict[str, Any]]:
    from ds_zipccl.benchmarks.links import slots
    from ds_zipccl.comm import topology
    from ds_zipccl.integration import start_line

    slots.install()
    good = written(own, zero_optimization={"stage": 3})
    topology.here = lambda: f"node {rank}"  # type: ignore[assignment]
    start_line.device_here = lambda: ("cpu", slots.NAME)  # type: ignore[assignment]
    files = ["--json", str(folder / "doctor.json"), "--report", str(folder / "cluster.json")]
    done = [_run(rank, good, *files)]
    written(own, zero_optimization={"stage": 3}, zipccl={"enabled": True, "mode": "always"})
    done.append(_run(rank, good, "--json", str(folder / "always.json")))
    written(own, zero_optimization={"stage": 3})
    if rank:
        start_line.device_here = lambda: ("cpu", "gloo")  # type: ignore[assignment]
    return [*done, _run(rank, good)]


if __name__ == "__main__":
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    own = folder / f"configs{rank}"
    own.mkdir()
    done = (_streams if "streams" in sys.argv else _rank)(folder, rank, own)
    (folder / f"rank{rank}.json").write_text(json.dumps(done))
