"""Packaging of megappo and its kernels.

`kernels/` has no `__init__.py`: Hugging Face ships a package of that name, which one here would shadow. The package
in it is mapped by name instead.
"""

from pathlib import Path

from setuptools import find_packages, setup

REQUIREMENTS = Path(__file__).parent / "megappo" / "requirements.txt"

setup(
    name="megappo",
    version="0.1.0",
    description="PPO for large language models on Megatron-Core and SGLang",
    license="Apache-2.0",
    python_requires=">=3.11,<3.13",
    packages=[*find_packages(include=["megappo", "megappo.*"]), "megappo_kernels", "megappo_kernels.gpu"],
    package_dir={"megappo_kernels": "kernels/megappo_kernels"},
    package_data={"megappo": ["py.typed", "requirements.txt"], "megappo_kernels": ["py.typed"]},
    install_requires=[line for line in REQUIREMENTS.read_text().splitlines() if not line.startswith("#")],
    extras_require={
        "datasets": ["datasets>=4"],
        "sglang": ["sglang==0.5.23"],
        # What a Megatron-Core was made for (ENGINES in runtime/accelerations.py); with the core of torch's CUDA.
        "te": [
            "transformer-engine[pytorch]>=2.9,<2.12; python_version<'3.12'",
            "transformer-engine[core_cu13,pytorch]>=2.12; python_version>='3.12'",
        ],
        "tasks": ["math-verify", "reasoning-gym"],
        "wandb": ["wandb"],
        "test": [
            "hypothesis",
            "math-verify",
            "mypy",
            "peft>=0.21",
            "pytest",
            "pytest-timeout",
            "reasoning-gym",
            "ruff",
        ],
    },
    entry_points={
        "console_scripts": ["megappo=megappo.cli:main"],
        # Let SGLang run where there is no CUDA; do nothing where there is.
        "sglang.srt.platforms": ["megappo_cpu = megappo.runtime.sglang_cpu:activate"],
        "sglang.srt.plugins": ["megappo_cpu = megappo.runtime.sglang_cpu:register_hooks"],
    },
)
