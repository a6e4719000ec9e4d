"""``make gpu`` asks for what exists. Run without a GPU: its tests are only collected."""

from __future__ import annotations

import subprocess
import sys

import gpu

from ds_zipccl.__main__ import parse

#: With a GPU in sight, which adds its routes to the parameters of tests.
COLLECT = """
import sys, pytest, torch
torch.cuda.is_available = lambda: True
sys.exit(pytest.main(["--collect-only", *sys.argv[1:]]))
"""


def test_every_file_of_tests_exists_and_has_tests_for_a_gpu() -> None:
    python, option, module, *arguments = gpu.steps()["tests"][0]
    assert (python, option, module) == (sys.executable, "-m", "pytest")
    wanted = {f"tests/{name}" for name in gpu.CUDA_TESTS}
    missing = {name for name in wanted if not (gpu.ROOT / name).is_file()}
    assert not missing, "tests/gpu.py names files that do not exist"
    assert wanted <= set(arguments)
    command = [sys.executable, "-c", COLLECT, *arguments]
    result = subprocess.run(command, cwd=gpu.ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    selected = {line.partition("::")[0] for line in result.stdout.splitlines() if "::" in line}
    assert selected == wanted, "-k selects nothing in the other files"


def test_the_other_commands_parse() -> None:
    for name in ("build and report", "bench"):
        python, _, module, *words = gpu.steps()[name][0]
        assert (python, module) == (sys.executable, "ds_zipccl")
        assert callable(parse(words).main)
    compile(gpu.ROUND, "round", "exec")
    assert gpu.RESULTS.parent.is_dir()
