"""The part of the packaging that pyproject.toml cannot express; the metadata is there.

``op_builder``, ``examples`` and ``benchmarks`` stand at the top of the repository and become packages inside ``ds_zipccl``.
pyproject.toml can either search packages or list them, and this needs both. Nothing is installed at top level beside ``ds_zipccl``.
"""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["ds_zipccl", "ds_zipccl.*"]),
        *(f"ds_zipccl.{name}" for name in find_packages(include=["benchmarks", "benchmarks.*"])),
        "ds_zipccl.examples",
        "ds_zipccl.op_builder",
    ],
    package_dir={f"ds_zipccl.{name}": name for name in ("op_builder", "examples", "benchmarks")},
)
