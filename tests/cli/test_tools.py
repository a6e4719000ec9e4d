"""The command line: what it prints and writes is true, and it fails when something is wrong."""

from __future__ import annotations

import contextlib
import io
import json
import zipfile
from fractions import Fraction
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import variants
from commands import Capture, assert_refused, outcome, python, shannon

from ds_zipccl import codecs, kernels, ops
from ds_zipccl.__main__ import COMMANDS, main
from ds_zipccl.benchmarks.codec import trial as codec_trial
from ds_zipccl.benchmarks.comm import cases
from ds_zipccl.cli import report
from ds_zipccl.frame import FrameError, FrameErrorCode
from ds_zipccl.kernels import build
from ds_zipccl.kernels.cuda import cupy_kernels
from ds_zipccl.tools import data
from ds_zipccl.tools.exponents import Fields

CODEC_KEYS = "route codec dtype data numel ratio entropy_ratio encode_gbps decode_gbps memcpy_gbps".split()
CODEC_KEYS += ["encode_memcpy", "decode_memcpy", "wrong"]
CODED = codec_trial.CODECS[1:]
COMM_KEYS = "op dtype numel ranks nodes link variant time_us algbw busbw logical_bytes wire_bytes wrong".split()
SIGMAS = ("1e-6", "0.0003", "1", "30", "1e3")
NUMEL = 1 << 18


# ---------------------------------------------------------------- the commands as such


def test_help_is_fast_and_names_every_command() -> None:
    probe = """
import sys, contextlib, io
from ds_zipccl.__main__ import COMMANDS, main
out = io.StringIO()
with contextlib.redirect_stdout(out):
    for words in ((), ("bench",), *COMMANDS):
        try:
            main([*words, "--help"])
        except SystemExit as leave:
            assert leave.code == 0, words
heavy = {"torch", "deepspeed", "numpy", "numba", "matplotlib"} & set(sys.modules)
assert not heavy, heavy
print(out.getvalue())
"""
    result = python("-c", probe)
    assert result.returncode == 0, result.stderr
    printed = " ".join(result.stdout.split())
    for words, (_, about) in COMMANDS.items():
        assert f"{' '.join(words)} [-h]" in printed
        assert about in printed


# ---------------------------------------------------------------- bench codec


@pytest.fixture(scope="module")
def codec_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """Contents of the JSON file and stdout of one real run."""
    words = "bench codec --numel 256K --dtype bf16 --repeats 1 --data normal random zeros --sigma"
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        routes = {name: load for name, load in kernels.ROUTES["cpu"].items() if name not in variants.FOR_TESTS}
        patch.setitem(kernels.ROUTES, "cpu", routes)
        found = outcome(tmp_path_factory.mktemp("codec"), words, *SIGMAS)
    return found, printed.getvalue()


def test_codec_json_has_all_rows(codec_run: tuple[dict[str, Any], str]) -> None:
    found = codec_run[0]
    assert set(found) >= {"rows", "machine", "versions", "command"}
    assert found["command"].startswith("python -m ds_zipccl bench codec --numel 256K")
    assert found["versions"]["torch"] == metadata.version("torch")
    usable = [name for name, reason in kernels.why().items() if not reason and name not in variants.FOR_TESTS]
    sets = [*(f"normal:{float(sigma):g}" for sigma in SIGMAS), "random", "zeros"]
    pairs = [("raw", "none"), *((codec, route) for codec in CODED for route in usable)]
    wanted = [(name, *pair) for name in sets for pair in pairs]
    assert [(row["data"], row["codec"], row["route"]) for row in found["rows"]] == wanted
    for row in found["rows"]:
        assert list(row) == CODEC_KEYS
        assert (row["numel"], row["dtype"], row["wrong"]) == (NUMEL, "bfloat16", 0)
        assert min(row["encode_gbps"], row["decode_gbps"]) > 0
        assert 0.1 < row["memcpy_gbps"] < 1000
        for name in ("encode", "decode"):
            assert row[f"{name}_memcpy"] == pytest.approx(row[f"{name}_gbps"] / row["memcpy_gbps"])


def test_codec_ratios_are_true(codec_run: tuple[dict[str, Any], str], tmp_path: Path) -> None:
    words = "bench codec --route native --numel 64K --dtype e4m3 e5m2 --data normal random --repeats 1"
    fp8 = outcome(tmp_path, words)["rows"]
    assert {row["dtype"] for row in fp8} == {"float8_e4m3fn", "float8_e5m2"}
    for row in codec_run[0]["rows"] + fp8:
        tensor = data.spec(row["data"]).make(row["numel"], row["dtype"])
        frame = codecs.compress(tensor, row["codec"], shaped=False, checksum=False)
        assert row["wrong"] == 0 and row["ratio"] == pytest.approx(tensor.nbytes / frame.nbytes, rel=1e-12)
        bits, exponent = 8 * tensor.itemsize, Fields.of(tensor.dtype).exponent
        assert row["entropy_ratio"] == pytest.approx(bits / (bits - exponent + shannon(tensor)), rel=1e-9)


def test_table_and_json_agree(codec_run: tuple[dict[str, Any], str]) -> None:
    found, printed = codec_run
    head, *lines = printed.splitlines()
    assert head.split() == CODEC_KEYS
    assert len(lines) == len(found["rows"])
    for line, row in zip(lines, found["rows"], strict=True):
        assert line.split()[:5] == [str(row[key]) for key in CODEC_KEYS[:4]] + [f"{row['numel']:,}"]
        assert line.split()[5] == f"{row['ratio']:.3f}"
        assert len(line) == len(head)


def test_codec_counts_wrong_elements(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture) -> None:
    right = codecs.decompress

    def flips_three(frame: torch.Tensor, out: torch.Tensor | None = None, **more: Any) -> torch.Tensor:
        result = right(frame, out, **more)
        result.view(torch.int16)[[1, 70, 4000]] ^= 0x0100
        return result

    monkeypatch.setattr(codecs, "decompress", flips_three)

    def wrong(words: str = "") -> set[int]:
        found = outcome(
            tmp_path, f"bench codec --route native --numel 4K --dtype bf16 --data random --repeats 1 {words}", status=1
        )
        return {row["wrong"] for row in found["rows"]}

    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    assert wrong() == {3}
    assert torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)
    assert "elements came back with other bits" in capsys.readouterr().err

    calls = []

    def works_once(frame: torch.Tensor, out: torch.Tensor, **more: Any) -> torch.Tensor:
        calls.append(frame)
        return right(frame, out, **more) if len(calls) == 1 else out

    # What one call left in the buffer must not count for the next.
    monkeypatch.setattr(codecs, "decompress", works_once)
    assert wrong("--codec raw") == {4096}

    def refuses(frame: torch.Tensor, out: torch.Tensor, **more: Any) -> torch.Tensor:
        raise FrameError(FrameErrorCode.BLOCK, "planted")

    monkeypatch.setattr(codecs, "decompress", refuses)
    assert wrong("--codec raw") == {4096}
    assert "planted" in capsys.readouterr().err


def test_codec_speeds_are_bytes_of_tensor_over_median_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Three calls that find out how often to call, then memcpy, encode and decode in turn.
    times = iter([0.01] * 3 + [0.001, 0.006, 0.004] + [0.003, 0.007, 0.5] + [0.002, 0.0005, 0.001])
    monkeypatch.setattr(codec_trial, "seconds_of", lambda step, calls=1: (step(), next(times))[1])
    words = "bench codec --numel 1000 --dtype fp32 --data normal --codec raw --repeats 3"
    (row,) = outcome(tmp_path, words)["rows"]
    for step, seconds in (("memcpy", 0.002), ("encode", 0.006), ("decode", 0.004)):
        assert row[f"{step}_gbps"] == pytest.approx(4000 / seconds / 1e9), step
    assert (row["encode_memcpy"], row["decode_memcpy"]) == (pytest.approx(1 / 3), pytest.approx(1 / 2))


def test_codec_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right, seen = codec_trial.seconds_of, set()
    monkeypatch.setattr(codec_trial, "seconds_of", lambda *of: (seen.add(torch.get_num_threads()), right(*of))[1])
    before = torch.get_num_threads()
    for count in (1, 2):
        found = outcome(tmp_path, f"bench codec --numel 4K --dtype bf16 --data normal --codec raw --threads {count}")
        assert (found["threads"], torch.get_num_threads(), seen) == (count, before, {count})
        seen.clear()


# ---------------------------------------------------------------- bench comm


@pytest.mark.full(reason="twelve seconds")
def test_comm_rows(tmp_path: Path) -> None:
    found = outcome(tmp_path, "bench comm --numel 60001 --ranks 3 --repeats 1")
    shares = {"all_gather": 2 / 3, "reduce_scatter": 2 / 3, "all_reduce": 4 / 3, "all_to_all": 2 / 3, "broadcast": 1}
    variants = ("plain", "raw", "coded")
    assert [(row["op"], row["variant"]) for row in found["rows"]] == [(op, v) for op in shares for v in variants]
    nbytes = 60_000 * 2
    for row in found["rows"]:
        assert list(row) == COMM_KEYS
        assert (row["numel"], row["ranks"], row["nodes"], row["link"], row["wrong"]) == (60_000, 3, 1, "loopback", 0)
        assert row["logical_bytes"] == round(shares[row["op"]] * nbytes)
        assert 20 < row["time_us"] < 60e6
        assert row["algbw"] == pytest.approx(nbytes / row["time_us"] / 1e3)  # GB/s
        assert row["busbw"] == pytest.approx(shares[row["op"]] * row["algbw"])
        sent = row["logical_bytes"] * (2 if row["op"] == "broadcast" else 1)  # the source sends to both others
        if row["variant"] == "plain":
            assert row["wire_bytes"] == row["logical_bytes"]
        elif row["variant"] == "raw":
            assert 0 < row["wire_bytes"] - sent <= 256  # headers
        else:
            assert 1.4 < sent / row["wire_bytes"] < 1.53


@pytest.mark.parametrize("op", ops.TRAFFIC)
def test_comm_counts_are_exact(op: str) -> None:
    """Elements and bandwidths against fractions, for sizes at which a rounded share would be off by one."""
    for ranks in (2, 3, 5, 6, 7, 24, 49, 1021, 4095):
        rest, shard = Fraction(ranks - 1, ranks), Fraction(1, ranks)
        factor = {"all_reduce": 2 * rest, "broadcast": Fraction(1)}.get(op, rest)
        traffic = ops.TRAFFIC[op]
        shares = {traffic.plain: factor, traffic.inputs: shard if op == "all_gather" else Fraction(1)}
        if traffic.outputs is not None:
            shares[traffic.outputs] = shard if op == "reduce_scatter" else Fraction(1)
        for numel in (ranks, 3 * ranks, (1 << 33) // ranks * ranks, ((1 << 40) + 12345) // ranks * ranks):
            for share, exact in shares.items():
                assert cases.elements(numel, share, ranks) == exact * numel
        found = cases.bandwidths(op, 3_000_000_000, ranks, 2.0)
        assert found == {"algbw": 1.5, "busbw": pytest.approx(float(1.5 * factor), rel=1e-15)}


# ---------------------------------------------------------------- report


def test_report_here(tmp_path: Path, capsys: Capture) -> None:
    found = outcome(tmp_path, "report")
    reasons = {(row["device"], row["route"]): row["reason"] for row in found["rows"]}
    assert reasons == {(device, name): why for device in kernels.ROUTES for name, why in kernels.why(device).items()}
    assert all(row["usable"] == (not row["reason"]) for row in found["rows"])
    printed = capsys.readouterr().out
    coverage = "on groups that DeepSpeed makes here"
    for text in (metadata.version("torch"), "zipccl_cpu", "DS_ZIPCCL_CACHE", "torch.backends", "cpu native", coverage):
        assert text in printed


def test_routes_are_named_first(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    said: list[str] = []
    monkeypatch.setattr(kernels, "ROUTES", {"cpu": {"native": WORKS}, "cuda": {"cupy": FAILS}})
    monkeypatch.setattr(kernels, "why", lambda _, name: {name: said.append(capsys.readouterr().err[:27]) or ""})
    report.routes()
    assert said == ["# trying cpu native, 1 of 2", "# trying cuda cupy, 2 of 2;"]


def test_a_bundle_for_a_bug_report(tmp_path: Path, capsys: Capture) -> None:
    """The report, and what the user names; nothing else of the folders."""
    config, bundle = tmp_path / "ds_config.json", tmp_path / "bundle.zip"
    config.write_text("{}")
    outcome(tmp_path, "report", "--bundle", str(bundle), "--attach", str(config))
    with zipfile.ZipFile(bundle) as found:
        assert found.namelist() == ["report.json", "0-ds_config.json"]
        content = json.loads(found.read("report.json"))
    assert content["kernels"]["cpu native"].startswith("proven by")
    assert content["versions"]["torch"] and content["routes"]
    assert f"bundle: {bundle}, with report.json" in capsys.readouterr().out
    assert_refused(["report", "--bundle", str(bundle), "--attach", "missing"], "--attach missing: no such file", capsys)
    assert_refused(["report", "--attach", str(config)], "--attach is for --bundle", capsys)
    assert_refused(["report", "--bundle", str(tmp_path)], f"--bundle {tmp_path}: ", capsys)


def test_report_where_everything_is_broken(tmp_path: Path) -> None:
    probe = """
import sys
for name in ("deepspeed", "numba"):
    sys.modules[name] = None
from ds_zipccl.__main__ import main
sys.exit(main(["report"]))
"""
    broken = {"CXX": "/nonexistent/c++", "DS_ZIPCCL": "{", "DS_ZIPCCL_CACHE": str(tmp_path), "DS_ACCELERATOR": "cpu"}
    result = python("-c", probe, **broken)
    assert result.returncode == 1, result.stderr
    assert result.stdout.splitlines()[-1].startswith("no route for CPU tensors works here"), result.stdout
    assert "no C++ compiler (/nonexistent/c++" in result.stdout
    assert "import of numba halted" in result.stdout
    assert "ConfigError: DS_ZIPCCL must be 0, 1 or the section as a JSON object, got '{'" in result.stdout
    assert "usable\n" not in result.stdout.partition("routes\n")[2].partition("builders\n")[0]


WORKS, FAILS = object, None  # loaders: object() stands for a route, None cannot be called
Loaders = tuple[object, ...]
GONE = build.BuildError("no CuPy (gone); pip install cupy-cuda13x")


def load(monkeypatch: pytest.MonkeyPatch, cpu: Loaders, cuda: Loaders, device: bool = False) -> None:
    """Let the routes for CPU and CUDA tensors have these loaders, and let there be a GPU or not."""
    table = {"cpu": dict(zip(("native", "numba"), cpu)), "cuda": dict(zip(("native", "cupy"), cuda))}
    monkeypatch.setattr(kernels, "ROUTES", table)
    monkeypatch.setattr(kernels, "_loaded", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


NO_ROUTE = "no route for {} tensors works here"
NOT_EVERY = "not every route for CUDA tensors works here, as --require wants"


@pytest.mark.parametrize(
    ("cpu", "cuda", "gpu", "required", "last"),
    [
        ((WORKS, FAILS), (FAILS, FAILS), False, "", ""),
        ((FAILS, WORKS), (FAILS, WORKS), True, "", ""),
        ((FAILS, FAILS), (FAILS, FAILS), False, "", NO_ROUTE.format("CPU")),
        ((FAILS, FAILS), (WORKS, WORKS), True, "", NO_ROUTE.format("CPU")),
        ((WORKS, FAILS), (FAILS, FAILS), True, "", NO_ROUTE.format("CUDA")),
        ((FAILS, FAILS), (FAILS, FAILS), True, "", NO_ROUTE.format("CPU and CUDA")),
        ((WORKS,), (WORKS, WORKS), False, "cuda", ""),
        ((WORKS,), (WORKS, FAILS), False, "cuda", NOT_EVERY),
        ((WORKS,), (FAILS, WORKS), False, "cuda", NOT_EVERY),
        ((WORKS,), (FAILS, FAILS), False, "cuda", NOT_EVERY),
        ((WORKS,), (WORKS, FAILS), False, "", ""),
        ((WORKS,), (WORKS, FAILS), False, "cpu", ""),
        ((WORKS,), (), False, "cuda", NOT_EVERY),
        ((WORKS,), (FAILS, FAILS), False, "cpu cuda cuda", NOT_EVERY),
    ],
)
def test_status_of_report(
    cpu: Loaders, cuda: Loaders, gpu: bool, required: str, last: str,
    monkeypatch: pytest.MonkeyPatch, capsys: Capture,
) -> None:  # fmt: skip
    load(monkeypatch, cpu, cuda, gpu)
    words = [word for device in required.split() for word in ("--require", device)]
    assert main(["report", *words]) == (1 if last else 0)
    said = capsys.readouterr().out.splitlines()[-1]
    assert last in said if last else not said.startswith(("no route", "not every"))


@pytest.mark.parametrize(
    ("route", "compiles", "status", "wanted"),
    [
        ("native", None, 0, "cpu native   usable"),
        ("numba", None, 1, "no route numba works here; the reasons are under routes"),
        ("cupy", None, 0, "cuda cupy  compiles for sm_80, 90, 100, 120; no device here"),
        ("cupy", GONE, 1, f"BuildError: {GONE}"),
        ("cupy", GONE, 1, "no route cupy works here; the reasons are under routes"),
    ],
)
def test_report_of_one_route(
    route: str, compiles: Exception | None, status: int, wanted: str,
    monkeypatch: pytest.MonkeyPatch, capsys: Capture,
) -> None:  # fmt: skip
    """CuPy compiles where no device is, once for each architecture."""
    capabilities: list[tuple[int, int]] = []

    def cubins(capability: tuple[int, int]) -> list[bytes]:
        capabilities.append(capability)
        if compiles:
            raise compiles
        return []

    monkeypatch.setattr(cupy_kernels, "cubins", cubins)
    monkeypatch.setattr(cupy_kernels, "architecture", lambda capability: "{}{}".format(*capability))
    load(monkeypatch, (WORKS, FAILS), (FAILS, FAILS))
    assert main(["report", "--route", route]) == status
    assert wanted in capsys.readouterr().out
    assert len(capabilities) == (0 if route != "cupy" else 1 if compiles else 4)


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ('{"nccl": "on"}', "on, in DS_ZIPCCL: NCCL groups are coded"),
        ("1", "auto, in DS_ZIPCCL: NCCL groups are coded when the first steps of a job have compared them"),
        ("", "auto, the default; DS_ZIPCCL is unset, and the config file decides: NCCL groups are coded when"),
        ('{"nccl": "off"}', "off, in DS_ZIPCCL: NCCL groups pass through"),
        ('{"nccl": "yes"}', "ConfigError: "),
    ],
)
def test_nccl_in_report(
    section: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture, tmp_path: Path
) -> None:
    monkeypatch.setenv("DS_ZIPCCL", section)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    load(monkeypatch, (WORKS,), ())
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    found = outcome(tmp_path, "report")["nccl"]
    assert found["version"] == "2.29.7" and found['key "nccl"'].startswith(said)
    assert found["CUDA_DEVICE_MAX_CONNECTIONS"].startswith("1 ")
    assert found["TORCH_NCCL_BLOCKING_WAIT"].startswith("(unset)")
    assert "NCCL_LAUNCH_ORDER_IMPLICIT" in capsys.readouterr().out
