"""A user's job as the doctor reads it from the DeepSpeed config: stage, dtype, buckets and the ``"zipccl"`` section."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ds_zipccl.cli.planning.operations import BUCKET, LIVE, PREFETCH, SWITCHES, Buckets
from ds_zipccl.config import SECTION, ConfigError, ZipcclConfig, environment_section, near_misses, parse_section
from ds_zipccl.tools import ToolError, tables

#: DeepSpeed's word for a value that its caller fills in.
AUTO = "auto"
STAGES = (0, 1, 2, 3)
#: Section that switches a half precision on -> torch name of its dtype.
_HALVES = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16"}
#: Key -> what Trainer and Accelerate of Hugging Face fill in for "auto", in squares of the model's width.
_FILLED = {"reduce_bucket_size": 1.0, "stage3_prefetch_bucket_size": 0.9}
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu")
#: Key of a config with traffic that depends on the layers of the model -> roles of this traffic.
_LAYERED = {"tensor_parallel": "tp", "sequence_parallel_size": "sp", "pipeline": "pp"}


@dataclass(frozen=True)
class UserJob:
    """The parts of a DeepSpeed config that decide on the traffic of a step.

    ``notes``: values that the config leaves open, and the values taken in their place; traffic that no model predicts. ``content``: the
    whole config.
    """

    config: ZipcclConfig
    stage: int
    dtype: str
    accumulation: int
    buckets: Buckets
    round_robin: bool
    expert_parallel: int
    notes: tuple[str, ...]
    content: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def options(self) -> dict[str, Any]:
        """Return the options of ``plan`` that stand for the job."""
        own = {
            key: getattr(self, key) for key in ("dtype", "accumulation", "round_robin", "expert_parallel", "buckets")
        }
        own |= {key: getattr(self.config, key) for key in SWITCHES} | {"section": self.config}
        return own | {"zero": self.stage, "live": self.buckets.kept, "gradients": self.config.lossy_of("zero_grad")}


def read(path: str, ranks: int | None = None, hidden: int | None = None) -> UserJob:
    """Return the job of the DeepSpeed config at ``path``. ``DS_ZIPCCL`` precedes the section of the file, as in the job. ``ranks``: of the
    whole job, for a number of micro-batches that follows from batch sizes. ``hidden``: width of the model, for buckets that are "auto".

    Raises:
        ToolError: the file cannot be read or is no JSON object, the section is invalid or misspelled, or a value is not possible.
    """
    content = tables.read_json(path, "the DeepSpeed config of the job ")
    reader = Reader(path, [], filled={key: int(x * hidden * hidden) for key, x in _FILLED.items()} if hidden else {})
    config = _section(path, content, reader.notes)
    zero = reader.section(content, "zero_optimization")
    stage = reader.whole(zero, "stage", 0, least=0)
    if stage not in STAGES:
        raise ToolError(f"{path}: the stage of zero_optimization is one of {STAGES}, got {stage}")
    for key, role in _LAYERED.items():
        if content.get(key) not in (None, False, 1, {}):
            reader.notes.append(f"{key}: traffic of role {role} depends on the model's layers and is not predicted")
    experts = reader.section(content, "expert_parallel")
    prefetch = reader.whole(zero, "stage3_prefetch_bucket_size", PREFETCH, least=0)
    return UserJob(
        config,
        stage,
        reader.dtype(content),
        _accumulation(reader, content, ranks),
        Buckets(
            reader.whole(zero, "reduce_bucket_size", BUCKET),
            reader.whole(zero, "allgather_bucket_size", BUCKET),
            prefetch or PREFETCH,  # 0: a gather for each module, whose size the config does not tell
            _kept(reader, zero, prefetch),
        ),
        zero.get("round_robin_gradients") is True,
        reader.whole(experts, "autoep_size", 1) if experts.get("enabled") is True else 1,
        tuple(reader.notes),
        content,
    )


def _accumulation(reader: Reader, content: Mapping[str, Any], ranks: int | None) -> int:
    """Micro-batches of a step. Where the key is absent they follow from the batch sizes, as in ``deepspeed/runtime/config.py``."""
    key, sizes = "gradient_accumulation_steps", [content.get(name) for name in _BATCH]
    if ranks is None or content.get(key) is not None or None in sizes or AUTO in sizes:
        return reader.whole(content, key, 1)
    batch, micro = (reader.whole(content, name) for name in _BATCH)
    tensor = reader.whole(reader.section(content, "tensor_parallel"), "autotp_size", 1, least=0)
    replicas = max(1, ranks // (reader.whole(content, "sequence_parallel_size", 1) * max(1, tensor)))
    if batch % (micro * replicas):
        wanted = f"{_BATCH[1]} x {replicas} data-parallel ranks x a whole number; DeepSpeed refuses this job"
        raise ToolError(f"{reader.path}: {_BATCH[0]} is {batch}, wanted is {wanted}")
    return batch // (micro * replicas)


def _kept(reader: Reader, zero: Mapping[str, Any], prefetch: int) -> int:
    """Elements that ZeRO-3 keeps from the forward pass for the backward pass.

    The prefetcher of DeepSpeed's ``partitioned_param_coordinator`` runs ahead over the end of the forward pass, and keeps the parameters
    that it meets, until as many as ``max_live_parameters`` are gathered. A module is also kept while at most ``max_reuse_distance``
    elements lie between its two uses: half of them behind it in the forward pass, the same half before it in the backward pass.
    """
    live = reader.whole(zero, "stage3_max_live_parameters", LIVE, least=0)
    reuse = reader.whole(zero, "stage3_max_reuse_distance", LIVE, least=0)
    return max(live if prefetch else 0, reuse // 2)


def _section(path: str, content: Mapping[str, Any], notes: list[str]) -> ZipcclConfig:
    if SECTION not in content and (close := near_misses(content)):
        raise ToolError(f'{path}: unknown key "{close[0]}": did you mean "{SECTION}"? Rename it')
    try:
        override = environment_section()
        section = content.get(SECTION) if override is None else override
        if section is None:
            notes.append(f'no "{SECTION}" section: predicted as with "{SECTION}": {{"enabled": true}}; add it')
            section = {"enabled": True}
        config = parse_section(section)
        notes += [] if config.enabled else [f'"{SECTION}" is off and codes nothing; add "enabled": true']
        return config
    except ConfigError as error:
        where = path if override is None else "DS_ZIPCCL"
        keys = "docs/configuration.md has the keys"
        raise ToolError(f'{where}: the "{SECTION}" section is invalid: {error}; {keys}') from error


@dataclass(frozen=True)
class Reader:
    """Reads values of the config at ``path``, and notes those that are open. ``remedy``: for a missing key. ``filled``: values that the
    trainer fills in for "auto"."""

    path: str
    notes: list[str]
    remedy: str = ""
    filled: Mapping[str, int] = field(default_factory=dict)

    def section(self, content: Mapping[str, Any], key: str) -> Mapping[str, Any]:
        found = content.get(key) or {}
        if not isinstance(found, Mapping):
            raise ToolError(f"{self.path}: {key} must be an object, got {found!r}")
        return found

    def whole(self, content: Mapping[str, Any], key: str, default: int | None = None, least: int = 1) -> int:
        """A whole number; 5e8 is one too. Without a default the key must be there."""
        found = default if content.get(key) is None else content[key]
        if found is None:
            raise ToolError(f'{self.path} has no key "{key}"; {self.remedy}')
        if found == AUTO and default is not None:
            whence = "the default; the trainer may fill in another"
            if key in self.filled:
                default, whence = self.filled[key], "as Trainer and Accelerate fill it in by hidden_size"
            self.notes.append(f'{key} is "{AUTO}": {default} taken, {whence}')
            return default
        if isinstance(found, bool) or not isinstance(found, (int, float)) or found != found // 1 or found < least:
            raise ToolError(f'{self.path}: {key} must be a whole number of at least {least} or "{AUTO}", got {found!r}')
        return int(found)

    def dtype(self, content: Mapping[str, Any]) -> str:
        for key, name in _HALVES.items():
            enabled = self.section(content, key).get("enabled", False)
            if enabled == AUTO:
                self.notes.append(f'{key} is "{AUTO}": {name} taken')
            if enabled in (True, AUTO):
                return name
        return "float32"
