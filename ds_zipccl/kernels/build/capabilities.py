"""Compute capabilities: the devices for which the CUDA kernels are built."""

from __future__ import annotations

import os
import re

from ds_zipccl.kernels import build

#: The oldest compute capability that has the instructions of the kernels.
LEAST_CAPABILITY = (8, 0)

#: Names of architectures in ``TORCH_CUDA_ARCH_LIST``, as torch.utils.cpp_extension reads them.
_NAMED = {
    "Kepler+Tesla": "3.7", "Kepler": "3.5+PTX", "Maxwell+Tegra": "5.3", "Maxwell": "5.0 5.2+PTX", "Pascal": "6.0 6.1+PTX",
    "Volta+Tegra": "7.2", "Volta": "7.0+PTX", "Turing": "7.5+PTX", "Ampere+Tegra": "8.7", "Ampere": "8.0 8.6+PTX",
    "Ada": "8.9+PTX", "Hopper": "9.0+PTX", "Blackwell+Tegra": "11.0", "Blackwell": "10.0 10.3 12.0 12.1+PTX",
}  # fmt: skip


def architectures() -> list[str]:
    """Return the compute capabilities to build the CUDA kernels for: those of the visible devices, such as "9.0".

    Where no device is visible: those of ``TORCH_CUDA_ARCH_LIST``, as torch reads the variable, such as "9.0a" or "8.6+PTX". Capabilities
    below 8.0 are left out.

    Raises:
        BuildError: none is left; or there is no device, and the variable is not set or has an unknown entry.
    """
    import torch

    if torch.cuda.is_available():
        devices = range(torch.cuda.device_count())
        found = ["{}.{}".format(*torch.cuda.get_device_capability(device)) for device in devices]
    else:
        found = _listed(os.environ.get("TORCH_CUDA_ARCH_LIST", ""))
        if not found:
            raise build.BuildError("torch sees no CUDA device; to build for one elsewhere set TORCH_CUDA_ARCH_LIST")
    good = [one for one in found if is_supported(capability_of(one))]
    if not good:
        raise build.BuildError(needs_capability(", ".join(dict.fromkeys(found))))
    return sorted(set(good), key=lambda one: (capability_of(one), one))


def _listed(text: str) -> list[str]:
    """Return the entries of a value of ``TORCH_CUDA_ARCH_LIST``, names replaced by their capabilities."""
    entries = text.replace(";", " ").split()
    found = [one for entry in entries if entry != "native" for one in _NAMED.get(entry, entry).split()]
    for one in found:
        if not re.fullmatch(r"\d+\.\d[af]?(\+PTX)?", one):
            raise build.BuildError(
                f"TORCH_CUDA_ARCH_LIST has compute capabilities such as 9.0, 9.0a or 8.6+PTX, and names such as Hopper; got {one!r}"
            )
    return found


def capability_of(architecture: str) -> tuple[int, int]:
    """Return the numbers of a compute capability such as "9.0a+PTX"."""
    major, minor = re.findall(r"\d+", architecture)
    return int(major), int(minor)


def is_supported(capability: tuple[int, int]) -> bool:
    """Return whether devices of a compute capability have the instructions of the kernels."""
    return capability >= LEAST_CAPABILITY


def needs_capability(got: str) -> str:
    """Return the sentence that refuses a compute capability."""
    return f"the CUDA kernels need compute capability {'{}.{}'.format(*LEAST_CAPABILITY)} or later, got {got}"
