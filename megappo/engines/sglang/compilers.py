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
"""Where SGLang looks last."""
_RUNTIMES = "lib/libcudart.so.*"


def toolkit(environment: Mapping[str, str]) -> Path:
    """Where SGLang will look for one; whatever is there."""
    named = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    if named:
        return Path(named)
    nvcc = shutil.which("nvcc", path=environment.get("PATH"))
    return Path(nvcc).parent.parent if nvcc is not None else DEFAULT


def missing(environment: Mapping[str, str]) -> list[str]:
    """What a server would not find to compile with, by names that a reader can look for; none where all is there."""
    home, path = toolkit(environment), environment.get("PATH")
    packaged = packaged_toolkit() if not _is_whole(home) and not _is_named(environment) else None
    found = [] if packaged is not None or _is_whole(home) else [f"nvcc and lib64/libcudart.so in {home}"]
    if not any(shutil.which(name, path=path) for name in (environment.get("CXX") or "c++", "g++")):
        found.append("a C++ compiler")
    if shutil.which("ninja", path=path) is None:
        found.append("ninja")
    return found


def cuda_home(environment: Mapping[str, str], folder: Path) -> str | None:
    """CUDA_HOME for a server that would find no toolkit: the packages', linked in `folder` under the usual names.

    None where nothing is to be set: there is one, somebody named one, or the packages have none either.
    """
    packaged = packaged_toolkit()
    if packaged is None or _is_named(environment) or _is_whole(toolkit(environment)):
        return None
    if folder.exists():  # asked before
        return str(folder)
    (folder / "lib64").mkdir(parents=True)
    for name in ("bin", "include", "nvvm"):
        (folder / name).symlink_to(packaged / name)
    (folder / "lib64" / "libcudart.so").symlink_to(next(packaged.glob(_RUNTIMES)))
    return str(folder)


def packaged_toolkit() -> Path | None:
    """The one of torch's packages; None where they have no compiler."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(found) for found in (spec.submodule_search_locations or [] if spec is not None else [])]
    homes = [home for folder in folders for home in sorted(folder.glob("cu*"), reverse=True)]
    return next((home for home in homes if (home / "bin" / "nvcc").is_file() and list(home.glob(_RUNTIMES))), None)


def _is_named(environment: Mapping[str, str]) -> bool:
    return bool(environment.get("CUDA_HOME") or environment.get("CUDA_PATH"))


def _is_whole(home: Path) -> bool:
    return (home / "bin" / "nvcc").is_file() and (home / "lib64" / "libcudart.so").exists()
