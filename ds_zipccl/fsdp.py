"""PyTorch FSDP2 with coded communication: ``from ds_zipccl import fsdp; fsdp.apply(model)``. DeepSpeed need not be installed."""

from ds_zipccl.integration.fsdp.model import apply, remove

__all__ = ["apply", "remove"]
