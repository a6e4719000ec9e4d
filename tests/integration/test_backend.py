"""Activation of the backend in DeepSpeed, agreement of ranks on its section, and the cases in which it stays away. Real processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiers
from backend_programs import succeed
from commands import python
from places import ROOT


def test_section_table_and_monitor(tmp_path: Path) -> None:
    """The section alone switches coding on; table, step log and monitor come from rank 0 only and count optimizer steps."""
    log = tmp_path / "steps.jsonl"
    first, second = succeed(
        tmp_path,
        f"""
e = engine({{"enabled": True, "mode": "always", "min_bytes": 1024, "log_interval": 2, "step_log": {str(log)!r}}},
           csv_monitor={{"enabled": True, "output_path": {str(tmp_path)!r}, "job_name": "run"}},
           gradient_accumulation_steps=2, scheduler={{"type": "WarmupLR", "params": {{"warmup_num_steps": 100}}}})
assert backend() == "ZipcclBackend", backend()
rates = []
for _ in range(5):
    rates.append(e.get_lr())
    steps(e, 2)
print("RATES", json.dumps(rates))
leave()
""",
    )
    assert first.count("[ds_zipccl 0.2.0] on, codes cpu tensors over gloo; kernels: ") == 1
    for when in ("after 2 steps", "after 4 steps", "at the end"):
        assert first.count(f"traffic of rank 0 {when}") == 1, first
    assert "zero_grad" in first and "zero_param" in first
    assert "[ds_zipccl" not in second
    for name in ("ratio", "zero_param_ratio", "zero_grad_ratio"):
        header, *values = (tmp_path / "run" / f"Train_zipccl_{name}.csv").read_text().split()
        assert header == "step,ratio" and len(values) == 2
        assert all(float(value.split(",")[1]) > 1.3 for value in values)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    rates = [line["lr"] for line in lines]
    assert f"RATES {json.dumps(rates)}" in first and rates[1] < rates[2], "those of the step itself, not of the next"
    assert all(line["roles"]["zero_param"]["logical_bytes"] == 256 * 257 for line in lines)  # rank 0's half, in bf16


@pytest.mark.full(reason="seven seconds")
def test_backend_that_is_up_already_is_adopted(tmp_path: Path) -> None:
    """install() works after init_distributed, and on process groups that the user has made."""
    succeed(
        tmp_path,
        """
import ds_zipccl
torch.distributed.init_process_group("gloo")
deepspeed.init_distributed()
assert backend() == "TorchBackend", backend()
ds_zipccl.install({"enabled": True, "mode": "always", "min_bytes": 0})
assert backend() == "ZipcclBackend", backend()
steps(engine(None), 2)
from ds_zipccl.telemetry import counters
assert counters.totals()["wire_bytes"] > 0
leave()
""",
        fresh=True,
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )


def test_off_means_untouched(tmp_path: Path) -> None:
    succeed(
        tmp_path,
        """
import ds_zipccl
ds_zipccl.install({"enabled": True})
steps(engine({"enabled": True}), 1)
assert backend() == "TorchBackend", backend()
assert not any("ds_zipccl" in type(finder).__module__ for finder in sys.meta_path)
leave()
""",
        fresh=True,
        ranks=1,
        DS_ZIPCCL="0",
    )


# ---- lossy roles: the line about them, the switch of the environment

ROLES = {"tp": {"codec": "int", "bits": 6, "when": "forward"}}
SECTION = {"enabled": True, "mode": "always", "lossy": True, "roles": ROLES}

STARTS = """
e = engine(SECTION)
config = deepspeed.comm.comm.cdb.job.config
print("CODECS", config.lossy_of("tp", "forward"), config.lossy_of("tp"), config.lossy_of("zero_grad"))
leave()
"""


def test_the_line_comes_last_and_from_rank_0(tmp_path: Path) -> None:
    first, second = succeed(tmp_path, STARTS.replace("SECTION", repr(SECTION)))
    lines = [line for line in first.splitlines() if line.startswith("[ds_zipccl")]
    assert " on, codes cpu tensors over gloo; " in lines[0]
    assert lines[1] == "[ds_zipccl] LOSSY by config: tp int bits 6 group 128 forward only; all other roles bit-exact"
    assert "LOSSY" not in second and "CODECS int bits 6 group 128 None None" in first and "CODECS int" in second


@pytest.mark.full(reason="the sections are tested without ranks in the short tier")
def test_the_switch_of_the_environment_is_never_lossy(tmp_path: Path) -> None:
    """DS_ZIPCCL=1 precedes the section of the config, and allows nothing."""
    for text in succeed(tmp_path, STARTS.replace("SECTION", repr(SECTION)), DS_ZIPCCL="1"):
        assert "LOSSY" not in text
        assert "CODECS None None None" in text


TRAINS = """
from ds_zipccl.telemetry import counters
section = {**json.load(open(EXAMPLE))["zipccl"], "mode": "always", "log_interval": 2}
e = engine({**section, "step_log": STEPS}, 1, csv_monitor={"enabled": True, "output_path": FOLDER, "job_name": "run"})
for _ in range(20):
    e.backward(e(torch.randn(1, 256).bfloat16()).float().mean())
    e.step()
print("LOSSY ROWS", json.dumps(counters.lossy()))
leave()
"""


@pytest.mark.full(reason="the parts have tests of their own in the short tier")
def test_a_hybrid_policy_trains_and_tells_its_error(tmp_path: Path) -> None:
    """The example of MZHybrid: the line at the start, the table, the step log and the monitor of a job with ZeRO-1."""
    values = {"EXAMPLE": ROOT / "examples" / "ds_config_mzhybrid.json", "STEPS": tmp_path / "steps", "FOLDER": tmp_path}
    program = TRAINS
    for name, value in values.items():
        program = program.replace(name, repr(str(value)))
    first, second = succeed(tmp_path, program)
    assert "LOSSY by config: zero_grad round mantissa 2; dp round mantissa 2; all other roles bit-exact\n" in first
    for text in (first, second):
        (row,) = json.loads(text.split("LOSSY ROWS ")[1].splitlines()[0])
        assert (row["role"], row["op"], row["codec"]) == ("zero_grad", "reduce_to_owners", "round mantissa 2")
        assert row["frames"] >= 20 and 0.02 < row["error"] < 0.08 and row["ratio"] > 2
    assert "zero_grad reduce_to_owners: round mantissa 2, relative L2 error 0.0" in first
    steps = [json.loads(line)["roles"] for line in (tmp_path / "steps").read_text().splitlines()]
    errors = [roles["zero_grad"]["error"] for roles in steps if "error" in roles["zero_grad"]]
    assert errors and all(0.02 < error < 0.08 for error in errors)
    assert not any("error" in roles.get("zero_param", {}) for roles in steps)
    assert (tmp_path / "run" / "Train_zipccl_zero_grad_error.csv").exists()


# ---- sections that are refused, imports

#: Sections of the two ranks -> parts of the error that each of them raises.
REFUSED: dict[str, tuple[Any, Any, list[str]]] = {
    "keys": (*[{"enabled": True, "min_byte": 1, "reduction": "sum"}] * 2,
             ['did you mean "min_bytes"?', '"auto" | "match" | "fp32" | "plain", got "sum"']),
    "no object": (True, True, ['"zipccl" must be an object such as {"enabled": true}, got True']),
    "values": ({"enabled": True, "block": 512}, {"enabled": True, "block": 256, "oops": 1},
               ["block: 512 on ranks [0]; 256 on ranks [1]", "oops: not set on ranks [0]; 1 on ranks [1]"]),
    "one has none": ({"enabled": True}, None, ["no section at all: ranks [1]"]),
    "codecs": (*({"lossy": True, "roles": {"tp": {"codec": "round", "mantissa": kept}}} for kept in (3, 4)),
               ['roles: {"tp": {"codec": "round", "mantissa": 3}} on ranks [0]']),
    "versions": ({"enabled": True}, {"enabled": True}, ['"0.2.0" on ranks [0]; "0.0.9" on ranks [1]']),
}  # fmt: skip


@pytest.mark.full(reason="six seconds")
def test_sections_that_every_rank_refuses(tmp_path: Path) -> None:
    """Invalid ones, and those on which ranks differ: an error on each rank, and no hang. So is a second section of a job."""
    succeed(
        tmp_path,
        f"""
from ds_zipccl.integration import config_agreement
def refused(case, section, parts, **more):
    try:
        engine(section, **more)
    except ValueError as error:  # ConfigError is one
        assert all(part in str(error) for part in parts), (case, error)
    else:
        raise AssertionError(f"accepted: {{case}}")
for case, (*sections, parts) in {REFUSED!r}.items():
    version = config_agreement.__version__
    if (case, rank) == ("versions", 1):
        config_agreement.__version__ = "0.0.9"
    refused(case, sections[rank], parts)
    config_agreement.__version__ = version
refused("misspelt", None, ['unknown key "zipcl"', 'did you mean "zipccl"?'], zipcl={{"enabled": True}})
section = {{"enabled": True}}
engine(section); engine(dict(section)); engine(None)
refused("second", {{"enabled": True, "block": 256}}, ["another engine"])
leave()
""",
    )


IMPORT_ORDERS = {
    "deepspeed first": "import deepspeed",
    "probe first": "import torch, importlib.util as u; assert u.find_spec('deepspeed.comm.comm'); import deepspeed",
    "backend first": "import ds_zipccl.integration.backend; import deepspeed",
    "hooks first": "import ds_zipccl.integration.hooks; import deepspeed",
    "job first": "import ds_zipccl.integration.job; import deepspeed",
    "install first": "import ds_zipccl; ds_zipccl.install(); import deepspeed",
    "engine only": "from deepspeed.runtime.engine import DeepSpeedEngine; import deepspeed",
}


def interpreted(program: str, *options: str) -> Any:
    return python(*options, "-c", program, DS_ACCELERATOR="cpu", DS_ZIPCCL="")


@pytest.mark.parametrize(
    "order", tiers.mostly_full(IMPORT_ORDERS, ["deepspeed first"], "each imports DeepSpeed once more")
)
def test_every_import_order_is_seen(order: str) -> None:
    program = f"""
{IMPORT_ORDERS[order]}
import deepspeed.comm.comm as comm, deepspeed.runtime.engine as engine
assert comm.TorchBackend.__name__ == "ZipcclBackend", comm.TorchBackend
import deepspeed.runtime.zero.stage_1_and_2 as zero12
reduce = zero12.DeepSpeedZeroOptimizer.allreduce_and_copy_with_multiple_ranks
for adopted in (deepspeed.comm.configure, engine.DeepSpeedEngine._take_model_step, reduce):
    assert hasattr(adopted, "ds_zipccl"), adopted
"""
    done = interpreted(program, "-W", "error::RuntimeWarning")
    assert done.returncode == 0, done.stderr


def test_the_entry_point_is_light_and_a_broken_hook_never_breaks_the_import() -> None:
    """It must not pull DeepSpeed or numba into every process that imports torch."""
    done = interpreted("""
import sys
import torch  # and our entry point
assert not {"deepspeed", "numba", "pydantic"} & set(sys.modules), sys.modules
sys.modules["ds_zipccl.integration.hooks"] = None
import deepspeed.comm.comm as comm
assert comm.TorchBackend.__name__ == "TorchBackend"
""")
    assert done.returncode == 0 and "ds_zipccl stays off" in done.stderr, done.stderr
