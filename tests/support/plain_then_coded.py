"""A rank of a recipe: a fork runs it plain, and then this process coded. Both have the modules that were imported before.

    python tests/support/plain_then_coded.py MODULE,... RECIPE [ARGUMENT ...] FOLDER

Accelerate shards on CPUs too: it decides that by the kind of device alone.
"""

import importlib
import json
import os
import runpy
import sys

import torch.distributed as dist

names, *sys.argv = sys.argv[1:]
modules = {name: importlib.import_module(name) for name in names.split(",")}
if coded := os.fork():
    assert not os.waitpid(coded, 0)[1], "the plain run failed"
os.environ["DS_ZIPCCL"] = json.dumps(json.loads(os.environ["DS_ZIPCCL"]) | {"enabled": bool(coded)})
sys.argv[-1] += "/coded" if coded else "/plain"
if state := modules.get("accelerate.state"):
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    state.PartialState._prepare_backend = lambda *_: ("gloo", state.DistributedType.MULTI_GPU)
if state or not coded:  # groups of the two runs have one store, the launcher's
    address, port, rank, ranks = (os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"))
    store = dist.PrefixStore(f"coded {bool(coded)}", dist.TCPStore(address, int(port), is_master=False))
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(ranks))
runpy.run_path(sys.argv[0], run_name="__main__")
