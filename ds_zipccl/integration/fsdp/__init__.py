"""PyTorch FSDP2 (``fully_shard``): coded gathers of parameters and coded reduce-scatters of gradients. Nothing here knows DeepSpeed."""
