"""``examples/train_gpt.py`` over groups in stream order on CPUs, which stand for NCCL's: the script of ``bench train`` in a dry run."""

from __future__ import annotations

import os
import runpy
import sys

import shim
from places import EXAMPLES

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
shim.install()
sys.path.insert(0, str(EXAMPLES))
runpy.run_path(str(EXAMPLES / "train_gpt.py"), run_name="__main__")
