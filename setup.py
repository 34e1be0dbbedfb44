"""Packaging of megappo and its kernels.

`kernels/` has no `__init__.py`: Hugging Face ships a package of that name, which one here would shadow. The package
in it is mapped by name instead.
"""

from setuptools import find_packages, setup

setup(
    name="megappo",
    version="0.1.0",
    description="PPO for large language models on Megatron-Core and SGLang",
    license="Apache-2.0",
    python_requires=">=3.11,<3.13",
    packages=[*find_packages(include=["megappo", "megappo.*"]), "megappo_kernels", "megappo_kernels.gpu"],
    package_dir={"megappo_kernels": "kernels/megappo_kernels"},
    install_requires=[
        # What the tests have run with; a newer one may write checkpoints that this one cannot read.
        "torch>=2.11,<2.15",
        "megatron-core>=0.16.1,<0.17; python_version<'3.12'",
        "megatron-core>=0.19.2,<0.20; python_version>='3.12'",
        "transformers>=5.17,<5.20",
        "accelerate",
        "aiohttp",
        "einops",
        "httpx",
        "huggingface-hub>=1",
        "jinja2",
        "numpy",
        "packaging",
        "psutil",
        "pyarrow",
        "pydantic>=2.11,<3",
        "pyyaml",
        "rich",
        "safetensors",
        "setuptools<81",
        "tensorboard",
    ],
    extras_require={
        "sglang": ["sglang==0.5.23"],
        "te": ["transformer-engine[pytorch]"],
        "tasks": ["math-verify", "reasoning-gym"],
        "wandb": ["wandb"],
        "test": ["hypothesis", "math-verify", "mypy", "pytest", "pytest-timeout", "reasoning-gym", "ruff"],
    },
    entry_points={
        "console_scripts": ["megappo=megappo.cli:main"],
        # Let SGLang run where there is no CUDA; do nothing where there is.
        "sglang.srt.platforms": ["megappo_cpu = megappo.runtime.sglang_cpu:activate"],
        "sglang.srt.plugins": ["megappo_cpu = megappo.runtime.sglang_cpu:register_hooks"],
    },
)
