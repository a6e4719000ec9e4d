"""A machine with torch, and with neither DeepSpeed nor pydantic: everything but the integration with DeepSpeed works there, FSDP2 too.

The environment is a real one, with the packages of this one but for these two, so that processes started there lack them too.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import environments
import pytest
from places import ROOT

LACKING = ("deepspeed", "pydantic")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of an environment without the packages of LACKING."""
    return environments.without(tmp_path_factory.mktemp("bare"), *LACKING)


def run(python: str, *arguments: str, status: int = 0, **environment: str) -> str:
    """The output of a command there, which must end with ``status``."""
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests" / "support")))
    inherited = {name: value for name, value in os.environ.items() if name != "DS_ZIPCCL"}
    result = subprocess.run(
        [python, *arguments], env={**inherited, "PYTHONPATH": paths, **environment}, capture_output=True, text=True, timeout=400
    )  # fmt: skip
    assert result.returncode == status, result.stdout + result.stderr
    return result.stdout


IMPORTS = """
import importlib, importlib.metadata, importlib.util, pkgutil, sys, warnings
warnings.simplefilter("error", RuntimeWarning)  # autoload's, where a hook fails
for name in ("deepspeed", "pydantic"):
    assert importlib.util.find_spec(name) is None, name
import torch, ds_zipccl
from ds_zipccl.integration import autoload
for point in importlib.metadata.entry_points(group="torch.backends"):
    point.load()()
autoload.autoload()
for module in pkgutil.walk_packages(ds_zipccl.__path__, "ds_zipccl."):
    if not module.name.startswith(("ds_zipccl.integration", "ds_zipccl.op_builder", "ds_zipccl.examples")):
        importlib.import_module(module.name)
        print(module.name)
try:
    ds_zipccl.install()
except ModuleNotFoundError as error:
    print(error)
"""


def test_every_module_but_those_for_deepspeed_is_imported(python: str) -> None:
    lines = run(python, "-c", IMPORTS).splitlines()
    assert "DeepSpeed, which is not installed; pip install deepspeed" in lines.pop()
    package = ROOT / "ds_zipccl"
    files = {path for path in package.rglob("*.py") if path.name != "__init__.py" and "op_builder" not in path.parts}
    wanted = {"ds_zipccl." + ".".join(path.relative_to(package).with_suffix("").parts) for path in files}
    assert {name for name in wanted if not name.startswith("ds_zipccl.integration")} <= set(lines)


FSDP = """
import os, sys
assert not any(name.partition(".")[0] == "deepspeed" for name in sys.modules)
import torch.distributed as dist
from fsdp_lab import Lab, bits
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
def train(lab):
    model = lab.start(section={"zero3_base": "host", "log_interval": 2, "step_log": sys.argv[3]})
    lab.train(model)
    return model
said, (plain, sent), _ = bits(rank, 2, train, "")
if not os.fork():
    sys.exit(0)  # and no table of the child
os.wait()
assert plain > 2 * sent and (rank or "on, codes cpu tensors over gloo" in said and "after 2 steps" in said), said
dist.destroy_process_group()
"""


@pytest.mark.full(reason="six seconds; the imports stay")
def test_fsdp(python: str, tmp_path: Path) -> None:
    """The start-up line, a table between the steps and one at the end, and the step log."""
    store, log = str(tmp_path / "store"), tmp_path / "log"
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests" / "support")))
    environment = {**os.environ, "PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "lo"}
    words = [[python, "-c", FSDP, str(rank), store, str(log)] for rank in range(2)]
    ranks = [subprocess.Popen(one, env=environment, stdout=subprocess.PIPE, text=True) for one in words]
    said = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert said[0].count("traffic of rank 0 at the end") == 1 and not said[1]
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3] and lines[1]["lr"] == [3e-5]
    assert lines[1]["differences"]["as differences"] and lines[1]["roles"]["zero_grad"]["ratio"] > 1.3


@pytest.mark.full(reason="six seconds; the imports stay")
def test_doctor(python: str) -> None:
    """One line for both ranks and the remedy, in place of a line for each hook."""
    said = run(python, "-m", "ds_zipccl", "doctor", status=1).splitlines()
    at = next(number for number, line in enumerate(said) if line.startswith("hooks: "))
    problem, remedy, *rest = (line.strip() for line in said[at + 1 :])
    assert problem.startswith("deepspeed: not installed (rank 0 on ") and "rank 1 on " in problem
    assert remedy.startswith("to do: pip install deepspeed") and not rest
