"""The self-test of a CUDA backend in a process of its own: ``python -m ds_zipccl.kernels.self_test NAME DEVICE``.

Prints the number of cases, or the error of a wrong byte; statuses are those of :mod:`ds_zipccl.kernels.self_test`.
"""

from __future__ import annotations

import sys

import torch

from ds_zipccl.kernels import self_test
from ds_zipccl.kernels.cuda import load


def main(name: str, index: str) -> int:
    device = torch.device("cuda", int(index))
    try:
        torch.cuda.init()
        torch.cuda.set_device(device)
        torch.cuda.synchronize()
    except (
        RuntimeError,
        AssertionError,
    ) as error:  # a device in exclusive mode belongs to the process that waits for this one
        print(error, file=sys.stderr)
        return self_test.UNREACHED
    try:
        backend, _ = load.LOADERS[name]()
        print(self_test.prove(backend(), device))
    except self_test.SelfTestError as error:
        print(error)
        return self_test.WRONG
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
