"""The part of the packaging that pyproject.toml cannot express; the metadata is there.

``op_builder`` and ``examples`` stand at the top of the repository, as DeepSpeed's own do, and become packages inside ``ds_zipccl``.
pyproject.toml can either search packages or list them, and this needs both. Nothing is installed at top level beside ``ds_zipccl``.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["ds_zipccl", "ds_zipccl.*"]), "ds_zipccl.examples", "ds_zipccl.op_builder"],
    package_dir={"ds_zipccl.op_builder": "op_builder", "ds_zipccl.examples": "examples"},
)
