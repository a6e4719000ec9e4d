"""Tensors to frames and back: calls in :mod:`.api`, the table of codecs in :mod:`.registry`, a module for each codec."""

from ds_zipccl.codecs import lowrank
from ds_zipccl.codecs.api import (
    SUMMED_DTYPES,
    compress,
    compress_bound,
    compress_segments,
    decompress,
    decompress_add,
    project,
    region_hash,
)
from ds_zipccl.codecs.known import bits_frame
from ds_zipccl.codecs.memory import DEVICES
from ds_zipccl.codecs.registry import BASE_CODECS, CODEC_SPECS, CODECS, CODED_DTYPES
from ds_zipccl.codecs.row_segment import RowSegment
from ds_zipccl.codecs.spec import LOSSY_DTYPES, CodecSpec, LossySpec

__all__ = [
    "BASE_CODECS",
    "CODECS",
    "CODEC_SPECS",
    "CODED_DTYPES",
    "DEVICES",
    "LOSSY_DTYPES",
    "SUMMED_DTYPES",
    "CodecSpec",
    "LossySpec",
    "RowSegment",
    "bits_frame",
    "compress",
    "compress_bound",
    "compress_segments",
    "decompress",
    "decompress_add",
    "lowrank",
    "project",
    "region_hash",
]
