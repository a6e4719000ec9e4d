"""Run the script that the first argument names, with an Accelerate that shards on CPUs too: it decides that by the kind of device alone."""

import os
import runpy
import sys

import torch.distributed as dist
from accelerate import state

os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
state.PartialState._prepare_backend = lambda *_: ("gloo", state.DistributedType.MULTI_GPU)
dist.init_process_group("gloo")
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
