"""Packaging. Two folders of the repository become packages inside ds_zipccl; nothing is installed at top level beside it."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+?)"', (ROOT / "ds_zipccl" / "__init__.py").read_text()).group(1)

setup(
    name="ds-zipccl",
    version=VERSION,
    description="Lossless compressed communication for DeepSpeed",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    python_requires=">=3.10",
    packages=[*find_packages(include=["ds_zipccl", "ds_zipccl.*"]), "ds_zipccl.examples", "ds_zipccl.op_builder"],
    package_dir={"ds_zipccl.op_builder": "op_builder", "ds_zipccl.examples": "examples"},
    package_data={"ds_zipccl": ["FORMAT.md", "py.typed", "csrc/*/*"], "ds_zipccl.examples": ["*.json"]},
    install_requires=[
        "torch>=2.6",
        "deepspeed>=0.18",
        "numpy",
        "numba",
        "pydantic>=2",
        "safetensors",
        "tqdm",
        "xxhash>=3",
    ],
    extras_require={
        "plot": ["matplotlib"],
        "bench": ["zipnn", "zstandard", "lz4", "pyroute2; sys_platform == 'linux'"],
        "cuda": ["cupy-cuda13x"],
        "bench-cuda": ["nvidia-nvcomp-cu13"],
        "test": [
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "hypothesis",
            "ruff",
            "mypy",
            "transformers",
            "accelerate",
            "matplotlib",
            "pyroute2; sys_platform == 'linux'",
            "nvidia-cuda-nvrtc",
        ],
    },
    entry_points={
        # torch calls this at `import torch` (documented autoload mechanism, torch 2.5 and later).
        "torch.backends": ["ds_zipccl = ds_zipccl.integration.autoload:autoload"],
        "console_scripts": ["ds_zipccl = ds_zipccl.__main__:main"],
    },
)
