"""The package on the simulated GPU and NCCL of ``tests/sim``: every order of streams that a seed finds."""
