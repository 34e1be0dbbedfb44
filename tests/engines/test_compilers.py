"""Tests of the CUDA toolkit that servers compile with. Torch's packages may contain the only toolkit."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from megappo.doctor.engines import compiler_finding
from megappo.engines.sglang.servers import compilers

KERNEL = """
#include <cuda_runtime.h>
__global__ void twice(float *x) { x[threadIdx.x] *= 2; }
extern "C" int run(float *x) { twice<<<1, 32>>>(x); return cudaGetLastError(); }
"""


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the variables of a node with only a driver: PATH has a C++ compiler and ninja, and no toolkit."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("c++", "g++", "gcc", "cc", "ninja", "sh", "ld", "as", "rm", "cat"):
        program = shutil.which(name)
        if program is not None:
            (programs / name).symlink_to(program)
    monkeypatch.setattr(compilers, "DEFAULT", tmp_path / "nowhere")
    return {"PATH": str(programs)}


def toolkit_in(folder: Path) -> Path:
    """Create a toolkit with the layout of /usr/local/cuda."""
    (folder / "bin").mkdir(parents=True)
    (folder / "lib64").mkdir()
    for name in ("bin/nvcc", "lib64/libcudart.so"):
        (folder / name).touch(mode=0o755)
    return folder


@pytest.mark.waits
@pytest.mark.skipif(compilers.packaged_toolkit() is None, reason="torch's packages contain no nvcc")
def test_packaged_toolkit_compiles_and_links(bare: dict[str, str], tmp_path: Path) -> None:
    """The linker options are those of SGLang: `-L$CUDA_HOME/lib64 -lcudart`."""
    assert compilers.missing(bare) == []
    home = compilers.cuda_home(bare, tmp_path / "cuda")
    assert home is not None
    (tmp_path / "kernel.cu").write_text(KERNEL)
    command = [f"{home}/bin/nvcc", "-arch=sm_90", "-shared", "-Xcompiler", "-fPIC", "-cudart", "none"]
    command += [f"-I{home}/include", str(tmp_path / "kernel.cu"), "-o", str(tmp_path / "kernel.so")]
    command += [f"-L{home}/lib64", "-lcudart"]
    environment = {**bare, "CUDA_HOME": home, "PATH": os.pathsep.join([bare["PATH"], f"{home}/bin"])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "kernel.so").stat().st_size > 0


def test_existing_or_configured_toolkit_takes_precedence(bare: dict[str, str], tmp_path: Path) -> None:
    own = toolkit_in(tmp_path / "own")
    on_path = {"PATH": os.pathsep.join([bare["PATH"], str(own / "bin")])}
    for environment in (on_path, {**bare, "CUDA_HOME": str(own)}, {**bare, "CUDA_PATH": "/not/there"}):
        assert compilers.cuda_home(environment, tmp_path / "cuda") is None
    assert not (tmp_path / "cuda").exists()
    assert compilers.toolkit(on_path) == own
    assert compilers.missing({**bare, "CUDA_HOME": str(own)}) == []
    assert compilers.missing({**bare, "CUDA_PATH": "/not/there"}) == ["nvcc and lib64/libcudart.so in /not/there"]


def test_doctor_reports_missing_compilers(
    bare: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(compilers, "packaged_toolkit", lambda: None)
    finding = compiler_finding({"PATH": ""})
    assert finding.state == "broken"
    nowhere = tmp_path / "nowhere"
    assert finding.text.endswith(f"does not have nvcc and lib64/libcudart.so in {nowhere}, a C++ compiler, ninja")
    assert "module load cuda" in finding.remedy
    own = toolkit_in(tmp_path / "own")
    finding = compiler_finding({**bare, "CUDA_HOME": str(own)})
    assert (finding.state, finding.text) == ("fine", f"servers compile kernels with {own}")
