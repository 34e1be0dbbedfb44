"""The CUDA toolkit with which a server compiles kernels at startup on a GPU.

SGLang and FlashInfer look at CUDA_HOME, then for nvcc on PATH, then at /usr/local/cuda. They link with
lib64/libcudart.so of the toolkit (SGLang 0.5.23, kernels/jit/utils/compile/toolchain.py). A node with only a driver
still has the compiler of torch's packages under nvidia/cu13, whose folders have other names.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Mapping
from pathlib import Path

DEFAULT = Path("/usr/local/cuda")
"""Last folder in which SGLang looks for a toolkit."""
_RUNTIMES = "lib/libcudart.so.*"


def where_looked(environment: Mapping[str, str]) -> Path:
    """Return the folder that SGLang uses as the CUDA toolkit by default. The folder may not exist."""
    named = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    if named:
        return Path(named)
    nvcc = shutil.which("nvcc", path=environment.get("PATH"))
    return Path(nvcc).parent.parent if nvcc is not None else DEFAULT


def toolkit(environment: Mapping[str, str]) -> Path | None:
    """Return the toolkit of a server, or None if there is no toolkit. The default is the choice of SGLang. The
    toolkit of torch's packages is the fallback, unless the environment selects another toolkit."""
    home = where_looked(environment)
    if (home / "bin" / "nvcc").is_file() and (home / "lib64" / "libcudart.so").exists():
        return home
    return None if environment.get("CUDA_HOME") or environment.get("CUDA_PATH") else packaged_toolkit()


def missing(environment: Mapping[str, str]) -> list[str]:
    """Return the missing compilers and files that a server needs to compile kernels. The list is empty if the
    toolchain is complete."""
    path, found = environment.get("PATH"), list[str]()
    if toolkit(environment) is None:
        found.append(f"nvcc and lib64/libcudart.so in {where_looked(environment)}")
    if not any(shutil.which(name, path=path) for name in (environment.get("CXX") or "c++", "g++")):
        found.append("a C++ compiler")
    if shutil.which("ninja", path=path) is None:
        found.append("ninja")
    return found


def cuda_home(environment: Mapping[str, str], folder: Path) -> str | None:
    """Return CUDA_HOME for a server that would not find a toolkit. The value is `folder`, which links to the toolkit
    of torch's packages under the usual names.

    Returns None if SGLang finds a toolkit itself, or if there is no toolkit.
    """
    found = toolkit(environment)
    if found is None or found == where_looked(environment):
        return None
    if folder.exists():  # created by an earlier call
        return str(folder)
    (folder / "lib64").mkdir(parents=True)
    for name in ("bin", "include", "nvvm"):
        (folder / name).symlink_to(found / name)
    (folder / "lib64" / "libcudart.so").symlink_to(next(found.glob(_RUNTIMES)))
    return str(folder)


def packaged_toolkit() -> Path | None:
    """Return the toolkit of torch's packages, or None if the packages contain no compiler."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(found) for found in (spec.submodule_search_locations or [] if spec is not None else [])]
    homes = [home for folder in folders for home in sorted(folder.glob("cu*"), reverse=True)]
    return next((home for home in homes if (home / "bin" / "nvcc").is_file() and list(home.glob(_RUNTIMES))), None)
