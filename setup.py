"""Package folders and data files, which pyproject.toml cannot describe.

`kernels/` has no `__init__.py`, because this package would hide the package `kernels` of Hugging Face. The package in
this folder is therefore mapped by name. The quickstart and the launchers are also mapped by name, so that their
relative paths do not change.
"""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["megappo", "megappo.*"]),
        "megappo.shipped.configs",
        "megappo.shipped.configs.models.tiny_arithmetic",
        "megappo.shipped.launch",
        "megappo.shipped.launch.slurm",
        "megappo_kernels",
        "megappo_kernels.gpu",
    ],
    package_dir={
        "megappo.shipped.configs": "configs",
        "megappo.shipped.launch": "launch",
        "megappo_kernels": "kernels/megappo_kernels",
    },
    package_data={
        "megappo": ["py.typed", "requirements.txt", "guides/*.md"],
        "megappo.observe.page": ["*.html", "*.css", "*.js", "*.LICENSE"],
        "megappo.shipped.configs": ["quickstart.yaml", "examples/*/*.yaml", "examples/*/*.py", "examples/*/README.md"],
        "megappo.shipped.configs.models.tiny_arithmetic": ["*.json"],
        "megappo.shipped.launch": ["environment.sh", "quickstart.sh", "torchrun.sh"],
        "megappo.shipped.launch.slurm": ["*.sh", "ppo*.sbatch"],
        "megappo_kernels": ["py.typed"],
    },
)
