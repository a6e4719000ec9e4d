"""Speeds of networks as the user names them, of codecs of GPUs from a file or assumed, and of the codec of this CPU, measured."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ds_zipccl.policy import cost_model
from ds_zipccl.policy.cost_model import DELTA_RATIO
from ds_zipccl.tools import ToolError, data, tables

if TYPE_CHECKING:
    import torch

#: The rows of ``bench codec`` that count. Rows of CUDA name no data, because their data are normal.
CODEC, DATA = "cascade", "normal"
_NUMEL = 1 << 20  # elements of the tensor whose ratio is measured
#: Deviation of a step / deviation of the weights (seed: bf16 then shrinks by DELTA_RATIO, as measured in trainings).
_STEP = 0.008
#: The networks of a node that ``--network`` without values stands for.
NETWORKS = (
    "8x400gbit/node", "8x200gbit/node", "8x100gbit/node", "400gbit/node", "200gbit/node", "100gbit/node", "25gbit-tcp/node",
    "10gbit-tcp/node",
)  # fmt: skip
#: Unit of a rate -> bytes per second.
_BYTES = {"mbit": 1e6 / 8, "gbit": 1e9 / 8}
#: Names of ``--gpu-profile`` -> bytes of words per second that are assumed for encoding and for decoding.
ASSUMED = {"assumed-0.5": 0.5e12, "assumed-1.0": cost_model.CODEC, "assumed-1.5": 1.5e12}
#: Measured figures of a checkout; they take the place of assumed ones.
MEASURED = Path(__file__).parents[3] / "docs" / "results" / "cuda.json"
_CHECKOUT = f"{Path(__file__).parents[3]}/"  # is not said: files with results have no path of a machine


def no_differences() -> str:
    """The reason why this machine's kernels have no differences, so that a job with a rank here sends none; "" where they have."""
    from ds_zipccl import kernels

    return kernels.lacking(lambda: kernels.delta_route("auto", "cpu"))


def measured_differences() -> tuple[float, float]:
    """Bytes per second that one thread of this machine encodes and decodes against a base, hashes included; takes about 0.1 s."""
    from ds_zipccl.comm.transport import calibration

    before, after = _step(_NUMEL // 2, "bfloat16")
    encode, decode = calibration.difference_seconds(before, after)
    return after.nbytes / encode, after.nbytes / decode


def measured_copies() -> tuple[float, float]:
    """Bytes per second that one thread of this machine copies out of a base into new memory, and compares with it; takes about 0.1 s."""
    from ds_zipccl.comm.bases.shared import same_bits
    from ds_zipccl.comm.transport import calibration

    base, _ = _step(2 * _NUMEL, "bfloat16")
    copy, compare = calibration.copy_seconds(base, same_bits)
    return base.nbytes / copy, base.nbytes / compare


def delta_ratio(dtype: str) -> float:
    """Ratio of parameters against those of the last step: of bf16 as in trainings, of other dtypes measured on a step like theirs."""
    from ds_zipccl.codecs import compress

    if dtype == "bfloat16" or no_differences():
        return DELTA_RATIO
    before, after = _step(_NUMEL, dtype)
    return after.nbytes / compress(after, "delta", base=before, shaped=False, checksum=False).nbytes


def _step(numel: int, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights before and after a step."""
    import torch

    weights, change = (data.Spec(DATA).make(numel, "float32", seed) for seed in range(2))
    wanted = getattr(torch, dtype)
    return weights.to(wanted), (weights + _STEP * change).to(wanted)


def normal_ratio(dtype: str) -> float:
    """Bytes of normal values / bytes of their frame; the same on every machine."""
    from ds_zipccl.codecs import compress

    tensor = data.Spec(DATA).make(_NUMEL, dtype)
    return tensor.nbytes / compress(tensor, CODEC, shaped=False, checksum=False).nbytes


# ---- networks and codecs of devices ------------------------------------------------------------------


class Network(NamedTuple):
    """A network as the user typed it: ``rate``, bytes per second each way of ``whose``, a "node" with all of its network cards or a "gpu";
    ``reach``: part of it that NCCL's collectives reach."""

    text: str
    rate: float
    whose: str
    reach: float

    def of_node(self, gpus_per_node: int) -> float:
        """Bytes per second each way of a node."""
        return self.rate * (gpus_per_node if self.whose == "gpu" else 1)


class DeviceCodec(NamedTuple):
    """Bytes of words per second of one GPU, and their source for the user."""

    encode: float
    decode: float
    about: str


def network(text: str) -> Network:
    """``[CARDSx]RATE[-tcp]/node`` or ``.../gpu`` (argparse type).

    Raises:
        ArgumentTypeError: the text is not a network, or does not say whose rate it is; says how to write it.
    """
    match = re.fullmatch(r"(?:([1-9]\d*)x)?(\d+(?:\.\d+)?)([mg]bit)(-tcp)?(?:/(node|gpu))?", text.lower())
    if match is None or not float(match[2]):
        wanted = f"[CARDSx]RATE[-tcp]/node or RATE[-tcp]/gpu: {', '.join(NETWORKS)} or 1gbit/gpu"
        raise argparse.ArgumentTypeError(f"{text!r} is not a network; write {wanted}")
    if match[5] is None:
        wanted = f"{text}/node for all cards of a node, or {text}/gpu for the part of one GPU"
        raise argparse.ArgumentTypeError(f"{text!r} does not say whose rate it is: write {wanted}")
    rate = int(match[1] or 1) * float(match[2]) * _BYTES[match[3]]
    return Network(match[0], rate, match[5], cost_model.TCP_REACH if match[4] else cost_model.RDMA_REACH)


def device_codec(name: str | None, dtype: str) -> DeviceCodec:
    """The codec of ``--gpu-profile``: a name of :data:`ASSUMED`, or a file of ``bench codec --device cuda --json``; None: :data:`MEASURED`.

    Raises:
        ToolError: the file cannot be read, or has no row for the dtype; where that is :data:`MEASURED`, the codec is assumed.
    """
    found = None
    with nullcontext() if name else suppress(ToolError):
        found = None if name in ASSUMED else _read(name or str(MEASURED), dtype)
    if found is None:
        speed = ASSUMED[name or "assumed-1.0"]
        return DeviceCodec(speed, speed, f"{speed / 1e12:.1f} TB/s, assumed")
    encode, decode = found
    about = f"encode {encode / 1e12:.2f}, decode {decode / 1e12:.2f} TB/s, measured in {name or str(MEASURED).removeprefix(_CHECKOUT)}"
    return DeviceCodec(encode, decode, about)


def _read(path: str, dtype: str) -> tuple[float, float]:
    """Bytes of words per second of encoding and of decoding, of the row for cascade and normal data; of several sizes the largest."""
    rows, keys = tables.read_json(path).get("rows"), {"codec", "dtype", "encode_gbps", "decode_gbps"}
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) and keys <= set(row) for row in rows):
        raise ToolError(f"{path} holds no speeds; wanted is a file of bench codec --device cuda --json")
    fit = [row for row in rows if (row["codec"], row["dtype"], row.get("data", DATA)) == (CODEC, dtype, DATA)]
    if not fit:
        raise ToolError(f"{path} has no row for {CODEC} of {DATA} {dtype}: bench codec --device cuda --json FILE")
    row = max(fit, key=lambda row: row.get("mib", row.get("numel", 0)))
    return row["encode_gbps"] * 1e9, row["decode_gbps"] * 1e9
