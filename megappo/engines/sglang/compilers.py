"""The CUDA toolkit with which a server compiles kernels of its own when it starts on a GPU.

SGLang and FlashInfer look at CUDA_HOME, then for nvcc on PATH, then at /usr/local/cuda, and link with its
lib64/libcudart.so (SGLang 0.5.23, kernels/jit/utils/compile/toolchain.py). On a node that has a driver alone there is
still the compiler that torch's packages bring, under nvidia/cu13, in folders of other names.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Mapping
from pathlib import Path

DEFAULT = Path("/usr/local/cuda")
"""Folder in which SGLang looks for a toolkit last."""
_RUNTIMES = "lib/libcudart.so.*"


def where_looked(environment: Mapping[str, str]) -> Path:
    """The folder that SGLang takes for the CUDA toolkit by itself, whether or not there is one."""
    named = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    if named:
        return Path(named)
    nvcc = shutil.which("nvcc", path=environment.get("PATH"))
    return Path(nvcc).parent.parent if nvcc is not None else DEFAULT


def toolkit(environment: Mapping[str, str]) -> Path | None:
    """The toolkit that a server compiles with: SGLang's own choice, or that of torch's packages unless the environment
    names another; None: there is none."""
    home = where_looked(environment)
    if (home / "bin" / "nvcc").is_file() and (home / "lib64" / "libcudart.so").exists():
        return home
    return None if environment.get("CUDA_HOME") or environment.get("CUDA_PATH") else packaged_toolkit()


def missing(environment: Mapping[str, str]) -> list[str]:
    """Names of compilers and files that a server needs to compile kernels and would not find; empty where nothing is
    missing."""
    path, found = environment.get("PATH"), list[str]()
    if toolkit(environment) is None:
        found.append(f"nvcc and lib64/libcudart.so in {where_looked(environment)}")
    if not any(shutil.which(name, path=path) for name in (environment.get("CXX") or "c++", "g++")):
        found.append("a C++ compiler")
    if shutil.which("ninja", path=path) is None:
        found.append("ninja")
    return found


def cuda_home(environment: Mapping[str, str], folder: Path) -> str | None:
    """CUDA_HOME for a server that would find no toolkit: that of torch's packages, linked in `folder` under the usual
    names.

    None where nothing has to be set: SGLang finds a toolkit itself, or there is none.
    """
    found = toolkit(environment)
    if found is None or found == where_looked(environment):
        return None
    if folder.exists():  # asked before
        return str(folder)
    (folder / "lib64").mkdir(parents=True)
    for name in ("bin", "include", "nvvm"):
        (folder / name).symlink_to(found / name)
    (folder / "lib64" / "libcudart.so").symlink_to(next(found.glob(_RUNTIMES)))
    return str(folder)


def packaged_toolkit() -> Path | None:
    """The toolkit of torch's packages; None where they bring no compiler."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(found) for found in (spec.submodule_search_locations or [] if spec is not None else [])]
    homes = [home for folder in folders for home in sorted(folder.glob("cu*"), reverse=True)]
    return next((home for home in homes if (home / "bin" / "nvcc").is_file() and list(home.glob(_RUNTIMES))), None)
