"""What pyproject.toml cannot say: where the packages are, and what of other files they bring along.

`kernels/` has no `__init__.py`: Hugging Face ships a package of that name, which one here would shadow. The package
in it is mapped by name instead. So are the quickstart and the launchers, which keep their places beside each other.
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
        "megappo.shipped.configs": ["quickstart.yaml"],
        "megappo.shipped.configs.models.tiny_arithmetic": ["*.json"],
        "megappo.shipped.launch": ["environment.sh", "quickstart.sh", "torchrun.sh"],
        "megappo.shipped.launch.slurm": ["*.sh", "ppo*.sbatch"],
        "megappo_kernels": ["py.typed"],
    },
)
