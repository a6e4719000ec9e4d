"""Backends of ``bench comm`` and ``bench train``, and the GPUs that ranks share."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ds_zipccl.benchmarks.links import NODE, SLOTS
from ds_zipccl.ops import OPS
from ds_zipccl.tools import ToolError, gpus


@dataclass(frozen=True)
class Backend:
    """A value of ``--backend``.

    ``name``: in torch.distributed. ``device``: type of the tensors. ``streams``: whether calls run in stream order.
    ``settings``: keys of the ``"zipccl"`` section that let messages of every size be coded. ``nodes``: on loopback, nodes
    that ranks take themselves to be in, one after the other; 0: no choice.
    """

    name: str
    device: str = "cpu"
    streams: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    nodes: int = 0

    def on(self, nodes: int | None) -> Backend:
        """Return this backend with ranks in so many nodes, where that is a choice on loopback."""
        return replace(self, nodes=nodes) if self.nodes and nodes else self

    @property
    def devices(self) -> int:
        """Number of GPUs for the ranks; 0 for a CPU backend."""
        return gpus.devices() if self.device == "cuda" else 0

    def local_rank(self, rank: int) -> int:
        """Return the device index of a rank; on a CPU backend, the rank."""
        return gpus.local_rank(rank) if self.device == "cuda" else rank

    def environment(self, ranks: int, rank: int, linked: bool = False) -> dict[str, str]:
        """Variables of a rank that shares its GPU, uses a shaped network, or takes itself to be in a node."""
        if self.nodes and not linked:
            return {NODE: str(rank * self.nodes // ranks)}
        return gpus.environment(ranks, rank, linked) if self.device == "cuda" else {}

    def codes(self, kind: str) -> bool:
        """Whether ds_zipccl has a schedule for an operation of ``kind`` (:data:`ds_zipccl.ops.TRAFFIC`)."""
        return not self.streams or any(op.on_device for op in OPS.values() if op.traffic == kind)

    def about(self, ranks: int, linked: bool = False) -> dict[str, Any]:
        """Keys of a results file: backend, GPUs, and the variables of :meth:`environment`."""
        if self.device != "cuda":
            return {"backend": self.name}
        import torch

        found = torch.cuda.get_device_properties(0)
        device = {"name": found.name, "count": self.devices, "memory_bytes": found.total_memory}
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        shared = self.environment(ranks, 0, linked)
        shared |= {gpus.HOST_ID: "rank<RANK>"} if shared else {}
        return {"backend": self.name, "device": device, "nccl": nccl, "cuda": torch.version.cuda, "environment": shared}

    def lines(self, ranks: Sequence[int], linked: bool = False) -> list[str]:
        """Lines above a table: the GPUs, and the variables of :meth:`environment`."""
        about = self.about(max(ranks), linked)
        if "device" not in about:
            return []
        found = [
            f"# {about['device']['count']} x {about['device']['name']}, NCCL {about['nccl']}, CUDA {about['cuda']}"
        ]
        if about["environment"]:
            words = shlex.join(f"{name}={value}" for name, value in about["environment"].items()).replace("'", "")
            found.append(f"# ranks share GPUs or a shaped network, and communicate over sockets with {words}")
        return found

    def prepare(self) -> None:
        """Register the backend in this process if torch does not know it."""
        if self.name == SLOTS:
            from ds_zipccl.benchmarks.links import slots

            slots.install()

    def between(self) -> int:
        """Bytes that the node of this rank has sent to other nodes in coded calls, where the backend counts them."""
        if self.name != SLOTS:
            return 0
        from ds_zipccl.benchmarks.links import slots

        return slots.Transport.between

    def check(self) -> None:
        """Check that the backend works here.

        Raises:
            ToolError: it needs a GPU; the message says what to do.
        """
        if self.device == "cuda" and not self.devices:
            raise ToolError(
                "--backend nccl needs a GPU, torch sees none here; use a machine with a GPU and torch for CUDA, check "
                "CUDA_VISIBLE_DEVICES, or take --backend gloo"
            )


#: Value of ``--backend`` -> backend.
BACKENDS: dict[str, Backend] = {
    "gloo": Backend("gloo"),
    "nccl": Backend("nccl", "cuda", streams=True, settings={"nccl": "on", "nccl_min_bytes": 0}),
    SLOTS: Backend(SLOTS, streams=True, settings={"nccl": "on", "nccl_min_bytes": 0}, nodes=1),
}
