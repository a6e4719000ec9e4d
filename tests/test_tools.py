"""The command line: what it prints and writes is true, and it fails when something is wrong."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ds_zipccl import codecs, kernels
from ds_zipccl.__main__ import COMMANDS, main
from ds_zipccl.frame import FrameError, FrameErrorCode
from ds_zipccl.tools import bench_codec, comm_trial, data
from ds_zipccl.tools.exponents import Fields, block_tables, differing, entropy, exponents

CODEC_KEYS = (
    "route codec dtype data numel ratio entropy_ratio encode_gbps decode_gbps memcpy_gbps wrong".split()
)  # fmt: skip
COMM_KEYS = "op dtype numel ranks link variant time_us raw_bytes wire_bytes wrong".split()
SIGMAS = ("1e-6", "0.0003", "1", "30", "1e3")
MILLION = 1 << 20


def command(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m ds_zipccl``, as a user would."""
    return subprocess.run(
        [sys.executable, "-m", "ds_zipccl", *words],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        cwd=Path(__file__).parents[1],
    )


def content(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


def shannon(tensor: torch.Tensor) -> float:
    """Entropy of the exponents in bits, from the bit layout alone."""
    word, mantissa, mask = {
        torch.bfloat16: (np.uint16, 7, 255),
        torch.float16: (np.uint16, 10, 31),
        torch.float32: (np.uint32, 23, 255),
    }[tensor.dtype]
    words = np.frombuffer(tensor.contiguous().view(torch.uint8).numpy().tobytes(), dtype=word)
    _, counts = np.unique((words >> mantissa) & mask, return_counts=True)
    shares = counts / len(words)
    return float(-(shares * np.log2(shares)).sum())


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
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    printed = " ".join(result.stdout.split())
    for words, (_, about) in COMMANDS.items():
        assert f"{' '.join(words)} [-h]" in printed
        assert about in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bench", "codec", "--data", "nosuch"], "known: normal"),
        (["bench", "codec", "--data", "normal:0"], "number above 0"),
        (["bench", "codec", "--data", "zeros:2"], "has no scale"),
        (["bench", "codec", "--numel", "1.5M"], "64K"),
        (["bench", "codec", "--route", "nosuch"], "native"),
        (["bench", "codec", "--dtype", "bf16", "--data", "bf16_in_fp32"], "for fp32"),
        (["bench", "comm", "--ranks", "1"], "at least 2"),
        (["bench", "comm", "--op", "nosuch"], "all_gather"),
        (["analyze", "/nonexistent/file"], "cannot read"),
        (["analyze", __file__], "neither"),
        (["analyze", __file__, "--data", "normal"], "write - instead"),
        (["nosuch"], "report"),
        ([], "required"),
    ],
)
def test_bad_requests_exit_2_with_what_to_do(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(words)
    except SystemExit as leave:
        status = leave.code
    assert status == 2
    assert message in capsys.readouterr().err


# ---------------------------------------------------------------- bench codec


@pytest.fixture(scope="module")
def codec_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """Contents of the JSON file and stdout of one real run."""
    path = tmp_path_factory.mktemp("codec") / "codec.json"
    words = ["bench", "codec", "--numel", "1M", "--dtype", "bf16", "--repeats", "1", "--json", str(path)]
    result = command(*words, "--data", "normal", "random", "zeros", "--sigma", *SIGMAS)
    assert result.returncode == 0, result.stderr
    return content(path), result.stdout


def test_codec_json_has_all_rows(codec_run: tuple[dict[str, Any], str]) -> None:
    found = codec_run[0]
    assert set(found) >= {"rows", "machine", "versions", "command"}
    assert found["command"].startswith("python -m ds_zipccl bench codec --numel 1M")
    assert found["versions"]["torch"] == torch.__version__
    usable = [name for name, reason in kernels.why().items() if not reason]
    sets = [*(f"normal:{float(sigma):g}" for sigma in SIGMAS), "random", "zeros"]
    wanted = [(name, *pair) for name in sets for pair in [("raw", "none"), *(("exponent", route) for route in usable)]]
    assert [(row["data"], row["codec"], row["route"]) for row in found["rows"]] == wanted
    for row in found["rows"]:
        assert list(row) == CODEC_KEYS
        assert (row["numel"], row["dtype"], row["wrong"]) == (MILLION, "bfloat16", 0)
        assert min(row["encode_gbps"], row["decode_gbps"]) > 0
        assert 0.1 < row["memcpy_gbps"] < 1000


def test_codec_ratios_are_true(codec_run: tuple[dict[str, Any], str]) -> None:
    for row in codec_run[0]["rows"]:
        tensor = data.spec(row["data"]).make(row["numel"], row["dtype"])
        frame = codecs.compress(tensor, row["codec"], shaped=False, checksum=False)
        assert row["ratio"] == pytest.approx(tensor.nbytes / frame.nbytes, rel=1e-12)
        assert row["entropy_ratio"] == pytest.approx(16 / (8 + shannon(tensor)), rel=1e-9)


def test_codec_ratio_claims(codec_run: tuple[dict[str, Any], str]) -> None:
    rows = [row for row in codec_run[0]["rows"] if row["codec"] == "exponent"]
    gaussian = [row for row in rows if row["data"].startswith("normal")]
    assert len(gaussian) >= len(SIGMAS)
    for row in gaussian:
        assert 1.47 <= row["ratio"] < row["entropy_ratio"] < 1.53
    assert all(1 / row["ratio"] <= 1.01 for row in rows if row["data"] == "random")
    assert all(row["ratio"] > 100 for row in rows if row["data"] == "zeros")


def test_table_and_json_agree(codec_run: tuple[dict[str, Any], str]) -> None:
    found, printed = codec_run
    head, *lines = printed.splitlines()
    assert head.split() == CODEC_KEYS
    assert len(lines) == len(found["rows"])
    for line, row in zip(lines, found["rows"], strict=True):
        assert line.split()[:5] == [str(row[key]) for key in CODEC_KEYS[:4]] + [f"{row['numel']:,}"]
        assert line.split()[5] == f"{row['ratio']:.3f}"
        assert len(line) == len(head)


def test_codec_counts_wrong_elements(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = codecs.decompress

    def flips_three(frame: torch.Tensor, out: torch.Tensor | None = None, **more: Any) -> torch.Tensor:
        result = right(frame, out, **more)
        result.view(torch.int16)[[1, 70, 4000]] ^= 0x0100
        return result

    monkeypatch.setattr(codecs, "decompress", flips_three)
    path = tmp_path / "wrong.json"
    words = ["bench", "codec", "--numel", "4K", "--dtype", "bf16", "--data", "random", "--repeats", "1"]
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    assert main([*words, "--json", str(path)]) == 1
    assert torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)
    assert {row["wrong"] for row in content(path)["rows"]} == {3}
    assert "elements came back with other bits" in capsys.readouterr().err

    calls = []

    def works_once(frame: torch.Tensor, out: torch.Tensor, **more: Any) -> torch.Tensor:
        calls.append(frame)
        return right(frame, out, **more) if len(calls) == 1 else out

    # What one call left in the buffer must not count for the next.
    monkeypatch.setattr(codecs, "decompress", works_once)
    words += ["--codec", "raw"]
    assert main([*words, "--json", str(path)]) == 1
    assert {row["wrong"] for row in content(path)["rows"]} == {4096}

    def refuses(frame: torch.Tensor, out: torch.Tensor, **more: Any) -> torch.Tensor:
        raise FrameError(FrameErrorCode.BLOCK, "planted")

    monkeypatch.setattr(codecs, "decompress", refuses)
    assert main([*words, "--json", str(path)]) == 1
    assert {row["wrong"] for row in content(path)["rows"]} == {4096}
    assert "planted" in capsys.readouterr().err


def test_codec_speeds_are_bytes_of_tensor_over_median_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Three calls that find out how often to call, then memcpy, encode and decode in turn.
    times = iter([0.01] * 3 + [0.001, 0.006, 0.004] + [0.003, 0.007, 0.5] + [0.002, 0.0005, 0.001])
    monkeypatch.setattr(bench_codec, "_seconds", lambda step, calls=1: (step(), next(times))[1])
    path = tmp_path / "speed.json"
    words = ["bench", "codec", "--numel", "1000", "--dtype", "fp32", "--data", "normal", "--codec", "raw"]
    assert main([*words, "--repeats", "3", "--json", str(path)]) == 0
    (row,) = content(path)["rows"]
    assert row["memcpy_gbps"] == pytest.approx(4000 / 0.002 / 1e9)
    assert row["encode_gbps"] == pytest.approx(4000 / 0.006 / 1e9)
    assert row["decode_gbps"] == pytest.approx(4000 / 0.004 / 1e9)


# ---------------------------------------------------------------- analyze


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    scales = torch.exp2(torch.randint(-6, 7, (64, 1)))
    return {
        "layer.weight": (torch.randn(64, 512) * scales).bfloat16(),
        "layer.bias": torch.randn(5000),
        "ids": torch.arange(4000),
    }


def analysis(path: Path, *words: str) -> list[dict[str, Any]]:
    target = path.with_suffix(".json")
    assert main(["analyze", str(path), "--json", str(target), *words]) == 0
    return list(content(target)["rows"])


def check(rows: list[dict[str, Any]], tensors: dict[str, torch.Tensor]) -> None:
    """Rows against figures computed here."""
    assert {row["name"] for row in rows[:-1]} == set(tensors)
    raw = coded = 0
    for row in rows[:-1]:
        tensor = tensors[row["name"]]
        raw += tensor.nbytes
        assert (row["numel"], row["wrong"]) == (tensor.numel(), 0)
        assert f"torch.{row['dtype']}" == str(tensor.dtype)
        if tensor.is_floating_point():
            frame = codecs.compress(tensor, shaped=False, checksum=False)
            coded += frame.nbytes
            assert row["ratio"] == pytest.approx(tensor.nbytes / frame.nbytes)
            assert row["entropy"] == pytest.approx(shannon(tensor))
            assert row["zeros"] == pytest.approx(float((tensor == 0).double().mean()))
            bits = 8 * tensor.element_size()
            assert row["bound"] == pytest.approx(bits / (bits - 8 + row["block_entropy"]))
        else:
            coded += tensor.nbytes
            assert (row["ratio"], row["bound"], row["entropy"]) == (1, 1, None)
    assert rows[-1]["name"] == "total"
    assert rows[-1]["ratio"] == pytest.approx(raw / coded)
    coded_rows = [row for row in rows[:-1] if row["entropy"] is not None]
    mean = sum(row["entropy"] * row["numel"] for row in coded_rows) / sum(row["numel"] for row in coded_rows)
    assert rows[-1]["entropy"] == pytest.approx(mean)
    assert rows[-1]["numel"] == sum(tensor.numel() for tensor in tensors.values())


def test_analyze_safetensors(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    rows = analysis(path)
    check(rows, tensors)
    weight = next(row for row in rows if row["name"] == "layer.weight")
    assert weight["entropy"] > weight["block_entropy"] + 0.5  # every row, which is one block, has a scale of its own
    assert weight["block_entropy"] == pytest.approx(2.545, abs=0.02)


@pytest.mark.parametrize("zipped", [True, False])
def test_analyze_torch_file(tensors: dict[str, torch.Tensor], tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "model.pt"
    nested = {
        "model": {"layer": {"weight": tensors["layer.weight"]}},
        "state": [{"bias": tensors["layer.bias"]}, 3, ("text", tensors["ids"])],
    }
    torch.save(nested, path, _use_new_zipfile_serialization=zipped)
    names = {"layer.weight": "model.layer.weight", "layer.bias": "state.0.bias", "ids": "state.2.1"}
    check(analysis(path), {names[name]: tensor for name, tensor in tensors.items()})


def test_analyze_takes_any_tensor(tmp_path: Path) -> None:
    path = tmp_path / "odd.pt"
    odd = {
        "transposed": torch.randn(30, 40).t(),
        "empty": torch.empty(0),
        "scalar": torch.tensor(1.5),
        "sparse": torch.eye(4).to_sparse(),
        "float8": torch.randn(64).to(torch.float8_e4m3fn),
        "uint16": torch.zeros(9, dtype=torch.uint16),
        "nan": torch.full((700,), float("nan"), dtype=torch.float16),
    }
    torch.save(odd, path)
    rows = {row["name"]: row for row in analysis(path)}
    assert {name: rows[name]["numel"] for name in odd} == {name: tensor.numel() for name, tensor in odd.items()}
    assert rows["total"]["wrong"] == 0
    assert rows["float8"]["ratio"] == rows["uint16"]["ratio"] == rows["sparse"]["ratio"] == rows["empty"]["ratio"] == 1


class Payload:
    """Unpickling one creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("zipped", [True, False])
def test_analyze_never_executes_a_pickle(tmp_path: Path, zipped: bool, capsys: pytest.CaptureFixture[str]) -> None:
    path, proof = tmp_path / "model.pt", tmp_path / "executed"
    torch.save({"x": torch.zeros(3), "y": Payload(proof)}, path, _use_new_zipfile_serialization=zipped)
    assert main(["analyze", str(path)]) == 2
    complaint = capsys.readouterr().err
    assert "refused" in complaint and "safetensors" in complaint
    assert "weights_only" not in complaint  # torch's text tells how to execute it after all
    assert not proof.exists()
    torch.load(path, weights_only=False)
    assert proof.exists()  # the trap was a real one


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_analyze_refuses_half_a_file(
    tensors: dict[str, torch.Tensor], tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    torch.save(tensors, path) if path.suffix == ".pt" else save_file(tensors, path)
    path.write_bytes(path.read_bytes()[:3000])
    assert main(["analyze", str(path)]) == 2
    assert "not a sound" in capsys.readouterr().err


def test_analyze_counts_wrong_elements(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = codecs.decompress

    def negates_the_first(frame: torch.Tensor, **more: Any) -> torch.Tensor:
        result = right(frame, **more)
        result[0] = -result[0]  # zeros: 0.0 == -0.0, only the bits differ
        return result

    monkeypatch.setattr(codecs, "decompress", negates_the_first)
    path = tmp_path / "rows.json"
    assert main(["analyze", "-", "--data", "zeros", "--numel", "4K", "--json", str(path)]) == 1
    assert [row["wrong"] for row in content(path)["rows"]] == [1, 1]


def test_plot_is_a_picture(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    path = tmp_path / "plot.png"
    result = command("analyze", "-", "--data", "normal:1e-3", "zeros", "--numel", "64K", "--plot", str(path))
    assert result.returncode == 0, result.stderr
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    pixels = image.imread(path)
    assert pixels.shape[0] > 300 and pixels.shape[1] > 1000
    assert 0.5 < float((pixels[..., :3].min(axis=-1) > 0.99).mean()) < 0.99  # white paper with something on it


def test_plot_knows_the_format() -> None:
    pytest.importorskip("matplotlib")
    from ds_zipccl.tools import plot

    # FORMAT.md 2.1: k = top + 1 - exponent; ranks 0 to 2 are tier 1, and so on.
    tiers = {1 - k: rank // 3 for rank, k in enumerate((2, 3, 4, 1, 5, 6, 7, 8, 9, 0, 10))}
    assert {distance: plot._tier(distance) for distance in range(-12, 4)} == {
        distance: tiers.get(distance) for distance in range(-12, 4)
    }
    drawing = plot.Histograms(512)
    tensor = torch.cat([data.spec("normal:0.01").make(5120, "bfloat16"), torch.zeros(512, dtype=torch.bfloat16)])
    drawing.add(tensor, codecs.compress(tensor))
    counts = drawing._found[torch.bfloat16]
    assert counts.plain.sum() == 5632 and counts.plain[0] == 512
    assert counts.aligned.sum() == 5120
    assert counts.aligned[plot._REACH - 3 : plot._REACH].sum() > 0.7 * 5120  # the three commonest binades of a Gaussian
    assert dict(zip(plot.MODES, counts.modes, strict=True)) == {"FILL": 1, "RAW": 0, "CASCADE": 10, "SPARSE": 0}


def test_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "ds_zipccl.tools.plot", raising=False)
    assert main(["analyze", "-", "--numel", "4K", "--plot", "x.png"]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


# ---------------------------------------------------------------- data and statistics


@pytest.mark.parametrize("name", data.DATA)
def test_data_repeats_and_says_its_name(name: str) -> None:
    entry = data.DATA[name]
    spec = data.spec(f"{name}:0.25" if entry.scaled else name)
    assert data.spec(str(spec)) == spec
    for dtype in entry.dtypes:
        tensor = spec.make(3001, dtype)
        assert (tensor.numel(), str(tensor.dtype)) == (3001, f"torch.{dtype}")
        assert not differing(tensor, spec.make(3001, dtype))
        if name not in ("zeros", "constant"):
            assert differing(tensor, spec.make(3001, dtype, seed=1)) > 50


def test_data_is_what_it_is_called() -> None:
    make = {name: data.spec(f"{name}:0.5" if entry.scaled else name) for name, entry in data.DATA.items()}
    x = {name: spec.make(1 << 18, "float32") for name, spec in make.items()}
    assert x["normal"].std().item() == pytest.approx(0.5, rel=0.01)
    assert x["laplace"].abs().mean().item() == pytest.approx(0.5, rel=0.01)
    assert x["student_t3"].abs().median().item() == pytest.approx(0.5 * 0.7649, rel=0.01)  # upper quartile of t3
    assert (x["sparse20"] == 0).float().mean().item() == pytest.approx(0.2, abs=0.005)
    assert (x["embedding"] == 0).float().mean().item() == pytest.approx(0.97, abs=0.04)
    assert not differing(x["bf16_in_fp32"], x["bf16_in_fp32"].bfloat16().float())
    assert not x["zeros"].any() and (x["constant"] == 0.5).all()
    assert shannon(x["random"]) > 7.99
    assert shannon(x["rows"]) > shannon(x["normal"]) + 0.5


def test_exponent_statistics() -> None:
    two_scales = torch.cat([torch.full((512,), 1.0), torch.full((512,), 4.0)])
    found = exponents(two_scales, 512)
    assert (found.entropy, found.within_blocks) == (pytest.approx(1.0), 0.0)
    mixed = torch.tensor([1.0, 4.0]).repeat(256)
    assert exponents(mixed, 512).within_blocks == pytest.approx(1.0 + 1 / (2 * 512 * math.log(2)))
    tensor = data.spec("normal").make(100_003, "float16")  # the last block is a part
    assert exponents(tensor).entropy == pytest.approx(shannon(tensor))
    assert exponents(tensor).counts.sum() == 100_003
    assert exponents(torch.empty(0)).entropy == exponents(torch.empty(0)).within_blocks == 0
    assert float(entropy(np.array([4, 4, 4, 4]))) == 2.0
    for dtype, bits in ((torch.bfloat16, (8, 7)), (torch.float16, (5, 10)), (torch.float32, (8, 23))):
        assert (Fields.of(dtype).exponent, Fields.of(dtype).mantissa) == bits


def test_block_tables_read_what_the_encoder_chose() -> None:
    normal = data.spec("normal").make(512, "bfloat16")
    noise = data.spec("random").make(512, "bfloat16")
    sparse = data.spec("sparse20").make(300, "bfloat16")
    tensor = torch.cat([torch.zeros(512).bfloat16(), noise, normal, normal * 16, *[noise] * 30, sparse])
    tops, modes = block_tables(codecs.compress(tensor))
    assert modes.tolist() == [0, 1, 2, 2, *[1] * 30, 3]
    assert int(tops[3]) - int(tops[2]) == 4  # 16 = 2**4
    assert int(tops[2]) in (127, 128)  # a Gaussian of deviation 1 has its top at 1 to 4


def test_choices_are_those_of_the_codec() -> None:
    assert data.BLOCKS == codecs.exponent.BLOCKS
    assert [getattr(torch, name) for name in data.DEFAULT_DTYPES] == list(codecs.CODED_DTYPES)
    assert set(bench_codec.CODECS) == set(codecs.CODECS)


def test_differing_looks_at_bits() -> None:
    assert differing(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])) == 1
    nans = torch.tensor([0x7FC0, 0x7FC1], dtype=torch.int16).view(torch.bfloat16)
    assert differing(nans, nans) == 0
    assert differing(nans, nans.flip(0)) == 2
    assert differing(nans, nans.flip(0), any_nan=True) == 0
    assert differing(nans, torch.ones(2, dtype=torch.bfloat16), any_nan=True) == 2


# ---------------------------------------------------------------- bench comm


def test_comm_rows(tmp_path: Path) -> None:
    path = tmp_path / "comm.json"
    result = command("bench", "comm", "--numel", "60001", "--ranks", "3", "--repeats", "1", "--json", str(path))
    assert result.returncode == 0, result.stderr
    found = content(path)
    assert set(found) >= {"rows", "machine", "versions", "command"}
    shares = {"all_gather": 2 / 3, "reduce_scatter": 2 / 3, "all_reduce": 4 / 3, "all_to_all": 2 / 3, "broadcast": 1}
    variants = ("plain", "raw", "coded")
    assert [(row["op"], row["variant"]) for row in found["rows"]] == [(op, v) for op in shares for v in variants]
    nbytes = 60_000 * 2
    for row in found["rows"]:
        assert list(row) == COMM_KEYS
        assert (row["numel"], row["ranks"], row["link"], row["wrong"]) == (60_000, 3, "loopback", 0)
        assert row["raw_bytes"] == round(shares[row["op"]] * nbytes)
        assert 20 < row["time_us"] < 60e6
        sent = row["raw_bytes"] * (2 if row["op"] == "broadcast" else 1)  # the source sends to both others
        if row["variant"] == "plain":
            assert row["wire_bytes"] == row["raw_bytes"]
        elif row["variant"] == "raw":
            assert 0 < row["wire_bytes"] - sent <= 256  # headers
        else:
            assert 1.4 < sent / row["wire_bytes"] < 1.53


def faulty_part(rank: int, *more: Any) -> None:
    """``take_part`` with a gather that flips one bit on rank 1."""
    right = comm_trial.comm.all_gather_into_tensor

    def gather(output: torch.Tensor, *args: Any, **keywords: Any) -> None:
        right(output, *args, **keywords)
        if rank == 1 and keywords["config"].codec == "exponent":
            output.view(torch.int16)[7] ^= 1

    comm_trial.comm.all_gather_into_tensor = gather
    REAL_PART(rank, *more)


def failing_part(rank: int, *more: Any) -> None:
    """Rank 1 fails; rank 0 waits for it."""
    if rank == 1:
        raise RuntimeError("planted failure")
    REAL_PART(rank, *more)


REAL_PART = comm_trial.take_part


def test_comm_counts_wrong_elements(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(comm_trial, "take_part", faulty_part)
    path = tmp_path / "wrong.json"
    assert main(["bench", "comm", "--op", "all_gather", "--numel", "8K", "--repeats", "1", "--json", str(path)]) == 1
    assert [row["wrong"] for row in content(path)["rows"]] == [0, 0, 1]


def test_comm_ends_when_a_rank_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(comm_trial, "take_part", failing_part)
    assert main(["bench", "comm", "--op", "all_gather", "--numel", "8K", "--timeout", "100"]) == 2
    assert "planted failure" in capsys.readouterr().err


# ---------------------------------------------------------------- report


def test_report_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    assert main(["report", "--json", str(path)]) == 0
    found = content(path)
    reasons = {(row["device"], row["route"]): row["reason"] for row in found["rows"]}
    assert reasons == {(device, name): why for device in kernels.ROUTES for name, why in kernels.why(device).items()}
    assert all(row["usable"] == (not row["reason"]) for row in found["rows"])
    printed = capsys.readouterr().out
    for text in (torch.__version__, "zipccl_cpu", "DS_ZIPCCL_CACHE", "entry point in torch.backends", "cpu native"):
        assert text in printed


def test_report_where_everything_is_broken(tmp_path: Path) -> None:
    probe = """
import sys
for name in ("deepspeed", "numba", "pydantic"):
    sys.modules[name] = None
from ds_zipccl.__main__ import main
sys.exit(main(["report"]))
"""
    broken = {"CXX": "/nonexistent/c++", "DS_ZIPCCL": "{", "DS_ZIPCCL_CACHE": str(tmp_path), "DS_ACCELERATOR": "cpu"}
    result = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, timeout=120, env={**os.environ, **broken}
    )
    assert result.returncode == 0, result.stderr
    assert "no C++ compiler (/nonexistent/c++" in result.stdout
    for missing in ("numba", "pydantic"):
        assert f"import of {missing} halted" in result.stdout
    assert "usable\n" not in result.stdout.partition("routes\n")[2].partition("builders\n")[0]
