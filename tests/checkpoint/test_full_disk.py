"""Every writer of a run reports a full disk with the file and the free space."""

from __future__ import annotations

import errno
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException

from megappo.checkpoint.storage import storage_writer
from megappo.errors import verdict_of, writing
from megappo.files.appending import AppendedFile
from megappo.files.plain_files import synced

pytestmark = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")

LARGE = {"a": torch.zeros(10**6)}
SMALL = {"a": torch.zeros(10)}


def torch_file(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    with synced(path) as file:
        torch.save(tensors, file)


def appended(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    AppendedFile(path).append(bytes(8 * tensors["a"].numel()))


def rust_file(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    with writing(path):
        save_file(tensors, path)


@pytest.mark.parametrize("write", [torch_file, appended])
@pytest.mark.parametrize("tensors", [SMALL, LARGE], ids=["small", "large"])
def test_file_without_room_is_named(
    tmp_path: Path, write: Callable[[Path, dict[str, torch.Tensor]], None], tensors: dict[str, torch.Tensor]
) -> None:
    (tmp_path / "file").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device \(\d+ bytes free of \d+\)") as caught:
        write(tmp_path / "file", tensors)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path / "file"))
    (sentence,) = verdict_of(caught.value).sentences
    assert sentence.startswith(f"writing failed, {tmp_path}/file: No space left on device (")


@pytest.mark.parametrize("tensors", [SMALL, LARGE], ids=["small", "large"])
def test_checkpoint_without_room_is_named(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    (tmp_path / "__0_0.distcp").symlink_to("/dev/full")
    with pytest.raises(CheckpointException) as caught:
        dcp.save(tensors, storage_writer=storage_writer(tmp_path), no_dist=True)
    ((error, _),) = caught.value.failures.values()
    assert isinstance(error, OSError) and error.errno == errno.ENOSPC
    assert re.search(rf"No space left on device .\d+ bytes free of \d+.: '{tmp_path}/__0_0.distcp'", str(error))


def test_written_checkpoint_can_be_read(tmp_path: Path) -> None:
    dcp.save(LARGE, storage_writer=storage_writer(tmp_path), no_dist=True)
    loaded = {"a": torch.ones(10**6)}
    dcp.load(loaded, checkpoint_id=str(tmp_path), no_dist=True)
    assert torch.equal(loaded["a"], LARGE["a"])


ALL_WRITERS = """
import sys
from pathlib import Path
from megappo.reshard.writer import save_tensors
from tests.checkpoint.test_full_disk import LARGE, rust_file, torch_file
for write in (torch_file, rust_file, lambda path, tensors: save_tensors(tensors, path)):
    path = Path(sys.argv[1]) / "file"
    try:
        write(path, LARGE)
    except OSError as error:
        print(error)
    path.unlink(missing_ok=True)
"""


@pytest.mark.waits
def test_real_disk_of_a_megabyte(tmp_path: Path) -> None:
    """On a real disk, writers fail in the middle of a file."""
    line = 'mount -t tmpfs -o size=1m tmpfs "$2" && exec "$0" -c "$1" "$2"'
    command = ["unshare", "--mount", "bash", "-c", line, sys.executable, ALL_WRITERS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    if done.returncode and re.search("unshare|mount", done.stderr):
        pytest.skip(f"mounts are not permitted: {done.stderr.strip()}")
    lines = done.stdout.splitlines()
    for printed in lines:
        # safetensors removes its file before the error.
        assert re.fullmatch(
            rf"\[Errno 28\] No space left on device \((0|1048576) bytes free of 1048576\): '{tmp_path}/file'", printed
        )
    assert len(lines) == 3, done.stderr
