"""``plan`` and ``doctor`` of LoRA: few parameters are trained, and ZeRO-3 gathers the frozen rest out of copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_doctor import FAST, NORMAL, written
from test_plan import GATHER, fast, planned

from ds_zipccl.__main__ import main
from ds_zipccl.cli.planning import job as job_plan
from ds_zipccl.cli.planning import speeds, user_job
from ds_zipccl.cli.planning.operations import TOTAL
from ds_zipccl.policy.cost_model import predict

__all__ = ["fast"]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [  # what: GB plain, coded; 1e8 of 1e9 parameters are trained
        ("--zero 2", {"gradients": (GATHER / 5, GATHER / 20), "parameters": (GATHER / 10, GATHER / 40)}),
        (
            "--zero 3 --live 5e8",
            {
                "frozen, forward": (0.9 * GATHER, 0),
                "frozen, backward": (0.45 * GATHER, 0),
                "parameters, forward": (0.1 * GATHER, 0.05 * GATHER),
                "parameters, backward": (0.05 * GATHER, 0.025 * GATHER),
                "gradients": (0.1 * GATHER, 0.05 * GATHER),
            },
        ),
        (
            "--zero 3 --zero3-base off",
            {
                "frozen, forward": (0.9 * GATHER, 0.45 * GATHER),
                "frozen, backward": (0.9 * GATHER, 0.45 * GATHER),
                "parameters, forward": (0.1 * GATHER, 0.05 * GATHER),
                "parameters, backward": (0.1 * GATHER, 0.05 * GATHER),
                "gradients": (0.1 * GATHER, 0.05 * GATHER),
            },
        ),
    ],
)
def test_frozen_parameters(words: str, wanted: dict[str, tuple[float, float]], tmp_path: Path, fast: str) -> None:
    """Only trained parameters have gradients. Frozen ones come from copies, and nothing of them is sent."""
    fixed = "--gpus-per-node 1 --ratio 2 --trainable 1e8 --profile".split()
    rows = planned(tmp_path, *fixed, fast, *words.split())
    found = {(row["what"], row["variant"]): row["wire_gb"] for row in rows if row["what"] != TOTAL}
    for what, (plain, coded) in wanted.items():
        assert found.pop((what, "plain")) == pytest.approx(plain)
        assert found.pop((what, "coded")) == pytest.approx(coded)
    assert not found


def test_a_job_with_frozen_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LoRA: gathers of frozen parameters are copies in any mode but never. Nothing but adapters has gradients."""
    monkeypatch.setattr(speeds, "measured_copies", lambda: (1e10, 1e10))
    live = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}

    def rows(**section: Any) -> dict[str, dict[str, Any]]:
        changes = {"zero_optimization": {"stage": 3} | live, "gradient_accumulation_steps": 1}
        job = user_job.read(written(tmp_path, zipccl={"enabled": True} | section, **changes))
        return {row["what"]: row for row in job_plan.predict(job, 10**8, 2, FAST, NORMAL, trainable=10**6)}

    found = rows()
    assert list(found) == [
        *("frozen, forward", "frozen, backward", "parameters, forward", "parameters, backward", "gradients", "total")
    ]
    copied = 1e3 * (4e-6 / 2 + 1.98e8 / 1e10 + 0.99e8 / 1e10)
    assert found["frozen, backward"]["ms"] == pytest.approx(copied, rel=1e-3)
    assert found["frozen, backward"]["choice"] == rows(mode="always")["frozen, backward"]["choice"] == "copies"
    assert found["frozen, backward"]["plain_ms"] == pytest.approx(
        1e3 * predict("all_gather", "plain", 1.98e8, 2, FAST), rel=1e-3
    )
    assert found["gradients"]["plain_ms"] == pytest.approx(1e3 * predict("reduce_scatter", "gloo", 2e6, 2, FAST))
    assert rows(mode="never")["frozen, forward"]["choice"] == "plain"
    assert rows(zero3_base="off")["frozen, forward"]["choice"] == "coded"


def test_the_headline_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    """7B with adapters of 20M parameters, two nodes of 8 GPUs, 10 Gbit/s a node: one sentence with seconds."""
    assert (
        main("plan --params 7e9 --trainable 20e6 --gpus 16 --network 10gbit-tcp/node --gpu-profile assumed-1.0".split())
        == 0
    )
    printed = capsys.readouterr().out
    assert "memory: zero3_base auto keeps 6.98e+09 frozen parameters: 13.96 GB of every node" in printed
    assert printed.splitlines()[-1] == (
        "answer, 10gbit-tcp/node: communication takes 23 s a step uncoded, with the default config as long (NCCL groups pass uncoded), "
        'with "nccl": "on" 0.585 s (39.3 times less)'
    )
    assert main("plan --params 7e9 --trainable 20e6 --gpus 16 --network 1.25gbit-tcp/gpu".split()) == 0
    assert "answer, 1.25gbit-tcp/gpu: communication takes 23 s a step uncoded" in capsys.readouterr().out
