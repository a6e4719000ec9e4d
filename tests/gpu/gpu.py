"""``make gpu``: everything that needs a GPU, in less than eight minutes: tests, sanitizers, and the table of docs/benchmarks.md.

Builds the kernels, runs the tests of the codec with both CUDA routes among the routes, memcheck and racecheck over a small round, and
``bench codec --device cuda``, whose results go to ``docs/results/cuda.json``. Ends with a line for every step; status 1 if one failed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time

from places import ROOT

RESULTS = ROOT / "docs" / "results" / "cuda.json"
CUDA_TESTS = (
    "codec/test_cuda_kernels.py",
    "codec/test_codec.py",
    "codec/test_codec_calls.py",
    "codec/test_golden.py",
    "codec/test_fuzz.py",
    "comm/test_host_staging.py",
)

#: A round with every mode, block size and dtype in it, small enough for a sanitizer.
ROUND = """
import torch
from ds_zipccl.codecs import compress, decompress, region_hash
for route in ("native", "nvrtc"):
    old = torch.randn(50_000).bfloat16().cuda()
    new = (old.float() + 1e-3 * torch.randn(50_000, device="cuda")).bfloat16()
    frame = compress(new, "delta", base=old, route=route, checksum=False)
    assert torch.equal(frame.cpu(), compress(new.cpu(), "delta", base=old.cpu(), checksum=False))
    assert torch.equal(decompress(frame, base=old, route=route), new)
    assert region_hash(new, route=route) == region_hash(new.cpu())
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn):
        for block in (128, 1024):
            x = torch.randn(3 * 16 * block + 77)
            x[5 * block : 6 * block] = 0
            x[7 * block : 8 * block][torch.rand(block) < 0.3] = -0.0
            x[9 * block : 10 * block] *= torch.exp(8 * torch.randn(block))
            x = x.to(dtype).cuda()
            for codec in ("cascade", "wide"):
                frame = compress(x, codec, block=block, route=route, checksum=False)
                assert torch.equal(frame.cpu(), compress(x.cpu(), codec, block=block, checksum=False))
                assert torch.equal(decompress(frame, route=route).view(torch.uint8), x.view(torch.uint8))
print("equal")
"""


def steps() -> dict[str, tuple[list[str], int]]:
    """Name -> command and its seconds at most."""
    python = sys.executable
    found = {
        "build and report": ([python, "-m", "ds_zipccl", "report"], 70),
        "tests": ([python, "-m", "pytest", "-q", "-k", "cuda or nccl", *(f"tests/{name}" for name in CUDA_TESTS)], 140),
        "round": ([python, "-c", ROUND], 30),
    }  # fmt: skip
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    for tool in ("memcheck", "racecheck"):
        found[tool] = ([sanitizer, "--tool", tool, "--error-exitcode", "9", python, "-c", ROUND], 60)
    bench = ["bench", "codec", "--device", "cuda", "--dtype", "bf16", "--peers", "--json", str(RESULTS)]
    found["bench"] = ([python, "-m", "ds_zipccl", *bench], 110)
    return found


def main() -> int:
    outcomes = {}
    for name, (command, seconds) in steps().items():
        print(f"# {name}: {' '.join(command)[:200]}", flush=True)
        start = time.monotonic()
        try:
            status = subprocess.run(command, cwd=ROOT, timeout=seconds).returncode
            outcomes[name] = "passed" if status == 0 else f"failed with status {status}"
        except (subprocess.TimeoutExpired, OSError) as error:
            outcomes[name] = f"failed: {error}"
        outcomes[name] += f", {time.monotonic() - start:.0f} s"
    for name, outcome in outcomes.items():
        print(f"{name:20} {outcome}")
    return 0 if all(outcome.startswith("passed") for outcome in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
