"""Compile caches are in a folder of this user on the local disk of the node."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from megappo.engines.sglang.servers.spec import COMPILE_CACHES
from megappo.errors import ConfigError
from megappo.runtime.compile_caches import rank_caches, server_caches


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the default cache folder in a temporary folder of the node."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / f"megappo-caches-{os.getuid()}"


def test_caches_are_on_the_local_disk(node: Path) -> None:
    caches = {
        "TRITON_CACHE_DIR": str(node / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(node / "inductor"),
        "FLASHINFER_WORKSPACE_BASE": str(node / "flashinfer"),
    }
    assert rank_caches({}) == caches
    assert server_caches({}, COMPILE_CACHES) == caches | {"SGLANG_CACHE_DIR": str(node / "sglang")}
    assert node.stat().st_mode & 0o777 == 0o700


def test_variables_of_the_user_are_not_changed(node: Path) -> None:
    own = {"TRITON_HOME": "/x", "TORCHINDUCTOR_CACHE_DIR": "/y"}
    assert rank_caches(own) == {"FLASHINFER_WORKSPACE_BASE": str(node / "flashinfer")}
    assert "SGLANG_CACHE_DIR" not in server_caches({"SGLANG_CACHE_DIR": "/z"}, COMPILE_CACHES)


def test_variable_sets_the_folder(tmp_path: Path) -> None:
    caches = rank_caches({"MEGAPPO_COMPILE_CACHE": str(tmp_path / "fast")})
    assert caches["TRITON_CACHE_DIR"] == str(tmp_path / "fast" / "triton") and (tmp_path / "fast").is_dir()


@pytest.mark.parametrize("kind", ["writable by others", "a file"])
def test_unusable_folder_is_refused(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "caches"
    if kind == "a file":
        folder.touch()
    else:
        folder.mkdir()
        folder.chmod(0o777)
    for caches in (rank_caches, partial(server_caches, own=COMPILE_CACHES)):
        with pytest.raises(ConfigError, match=f"MEGAPPO_COMPILE_CACHE is '{folder}', must be a folder that only you"):
            caches({"MEGAPPO_COMPILE_CACHE": str(folder)})


@pytest.mark.parametrize("kind", ["writable by others", "a link", "a file"])
def test_folder_with_foreign_write_access_is_not_used(node: Path, tmp_path: Path, kind: str) -> None:
    """Compilers execute files of a cache."""
    if kind == "a link":
        (tmp_path / "elsewhere").mkdir()
        node.symlink_to(tmp_path / "elsewhere")
    elif kind == "a file":
        node.touch()
    else:
        node.mkdir()
        node.chmod(0o777)
    assert rank_caches({}) == {} == server_caches({}, COMPILE_CACHES)


@pytest.mark.waits
def test_triton_and_inductor_use_the_folders(tmp_path: Path) -> None:
    """The start of a run sets the variables before a compiler reads them."""
    program = (
        "import os\n"
        "from megappo.config.schema import RuntimeSettings\n"
        "from megappo.runtime.process import start_runtime\n"
        "with start_runtime(RuntimeSettings(device='cpu')):\n"
        "    from torch._inductor.runtime.cache_dir_utils import cache_dir\n"
        "    from triton import knobs\n"
        "    print(knobs.cache.dir, cache_dir())\n"
    )
    environment = {n: v for n, v in os.environ.items() if n not in rank_caches({}) and n != "TRITON_HOME"}
    environment["MEGAPPO_COMPILE_CACHE"] = str(tmp_path / "caches")
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(tmp_path / "caches" / name) for name in ("triton", "inductor")]
