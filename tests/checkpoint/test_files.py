"""Checkpoints on disk: complete writing, rules of deletion, and detection of damage."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from megappo.checkpoint import files
from megappo.checkpoint.files import (
    MARKER,
    CheckpointError,
    DamagedError,
    Marker,
    Stamp,
    folders,
    problems,
    prune,
    read_marker,
    write_marker,
)
from megappo.checkpoint.randomness import random_states, restore_random_states
from megappo.checkpoint.select import NoCheckpointError, select_checkpoint
from megappo.checkpoint.writer import CheckpointWriter
from megappo.config.schema import CheckpointSettings
from megappo.ppo.replay import replay
from megappo.runtime.process import Runtime
from tests.support.checkpoints import snapshot, write

CORRUPTIONS = 200


def remaining_steps(directory: Path) -> list[int]:
    return [step for step, _ in folders(directory)]


def selected(directory: Path, runtime: Runtime) -> tuple[int, list[str]]:
    """Return the step of the selected checkpoint, and the messages about skipped checkpoints."""
    chosen = select_checkpoint(directory, runtime)
    assert chosen is not None
    return chosen[1].step, chosen[2]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_newest_and_best_checkpoints_remain(tmp_path: Path, runtime: Runtime, asynchronous: bool) -> None:
    write(tmp_path, runtime, *range(1, 7), keep_last=2, keep_best="reward/mean", asynchronous=asynchronous)
    assert remaining_steps(tmp_path) == [6, 5, 2]
    prune(tmp_path, keep_last=1, keep_best="-reward/mean")
    assert remaining_steps(tmp_path) == [6]
    prune(tmp_path, keep_last=1, keep_best="x")  # the metric is missing
    assert remaining_steps(tmp_path) == [6]


def test_skipped_checkpoints_do_not_displace_complete_ones(tmp_path: Path, runtime: Runtime) -> None:
    """A run that continues from before damaged checkpoints keeps its new checkpoints, until it has replaced the damaged
    ones."""
    write(tmp_path, runtime, 1, 2, 3, keep_last=3, keep_best=None)
    for step in (2, 3):
        next((tmp_path / f"step-{step:06d}").glob("*.distcp")).write_bytes(b"")
    prune(tmp_path, keep_last=1, keep_best="reward/mean", newest=1)
    assert remaining_steps(tmp_path) == [3, 2, 1]
    write(tmp_path, runtime, 2, keep_last=1, keep_best=None)
    assert remaining_steps(tmp_path) == [3, 2]
    assert selected(tmp_path, runtime)[0] == 2
    write(tmp_path, runtime, 3, keep_last=1, keep_best=None)
    assert remaining_steps(tmp_path) == [3]


def test_milestones_remain(tmp_path: Path, runtime: Runtime) -> None:
    write(tmp_path, runtime, *range(1, 9), keep_last=2, keep_best=None, keep_every_steps=3)
    assert remaining_steps(tmp_path) == [8, 7, 6, 3]


def test_writing_thread_uses_the_device_of_the_rank(
    tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On GPUs, a new thread uses the first device, and the writer of torch would create a context there."""
    devices: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: devices.append((threading.current_thread().name, device))
    )
    third = Runtime(0, 1, 0, torch.device("cuda", 2))
    write(tmp_path, third, 1)
    assert devices == [("checkpoint", third.device)] and remaining_steps(tmp_path) == [1]


def test_minus_keeps_the_lowest(tmp_path: Path, runtime: Runtime) -> None:
    writer = CheckpointWriter(tmp_path, CheckpointSettings(keep_last=1, keep_best="-reward/mean"), runtime, 60)
    for step, reward in enumerate((0.5, -3.0, 2.0, 1.0), start=1):
        writer.save(snapshot(step, reward), wait=True)
    assert remaining_steps(tmp_path) == [4, 2]


def test_failed_deletion_is_a_warning_and_retried(
    tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NFS, a folder cannot be deleted while another machine has one of its files open."""
    really = os.rmdir

    def busy(path: Any, **more: Any) -> None:
        if "step-000001" in str(path):
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))
        really(path, **more)

    writer = CheckpointWriter(tmp_path, CheckpointSettings(keep_last=1, keep_best=None), runtime, 60)
    with monkeypatch.context() as on_nfs:
        on_nfs.setattr(os, "rmdir", busy)
        for step in (1, 2, 3):
            writer.save(snapshot(step), wait=True)
    aside = tmp_path / "deleted-step-000001"
    sentence = f"{aside} cannot be deleted (Device or resource busy); the run tries again with the next checkpoint"
    assert writer.warnings() == [sentence] * 2 and writer.warnings() == []
    assert remaining_steps(tmp_path) == [3] and not any(aside.iterdir())
    writer.save(snapshot(4), wait=True)
    assert writer.warnings() == [] and os.listdir(tmp_path) == ["step-000004"]


def test_checkpoint_is_unchanged_if_a_move_fails(
    tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(path: Path, target: Path) -> None:
        raise OSError(errno.EACCES, "Permission denied", str(path))

    write(tmp_path, runtime, 1, 2, keep_last=2, keep_best=None)
    with monkeypatch.context() as read_only:
        read_only.setattr(Path, "rename", denied)
        assert prune(tmp_path, 1, None) == [
            f"{tmp_path / 'step-000001'} cannot be deleted (Permission denied); the run tries again with the "
            "next checkpoint"
        ]
    assert remaining_steps(tmp_path) == [2, 1] and read_marker(tmp_path / "step-000001").step == 1
    assert prune(tmp_path, 1, None) == [] and remaining_steps(tmp_path) == [2]


def test_unfinished_checkpoint_is_written_again(tmp_path: Path, runtime: Runtime) -> None:
    write(tmp_path, runtime, 1, 2)
    (tmp_path / "step-000002" / MARKER).unlink()
    (tmp_path / "step-000002" / "__9_0.distcp").write_text("of another layout")
    assert selected(tmp_path, runtime) == (1, [f"{tmp_path / 'step-000002'} was not finished and is skipped"])
    write(tmp_path, runtime, 2)
    assert not (tmp_path / "step-000002" / "__9_0.distcp").exists()
    assert selected(tmp_path, runtime) == (2, [])


def test_finished_checkpoint_remains_until_it_is_replaced(
    tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopping run may write the checkpoint of a step again with more content, and may be killed meanwhile."""
    write(tmp_path, runtime, 1)
    before = {p.name: p.read_bytes() for p in (tmp_path / "step-000001").iterdir()}

    def killed(folder: Path, marker: object) -> None:
        raise OSError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_marker", killed)
        with pytest.raises(CheckpointError, match="killed"):
            write(tmp_path, runtime, 1)
    assert {p.name: p.read_bytes() for p in (tmp_path / "step-000001").iterdir()} == before
    assert selected(tmp_path, runtime) == (1, [])
    write(tmp_path, runtime, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    assert {p.name: p.read_bytes() for p in (tmp_path / "step-000001").iterdir()} != before
    # A run that was killed between the two renames:
    (tmp_path / "step-000001").rename(tmp_path / "step-000001.new")
    (tmp_path / "step-000002.new").mkdir()  # a replacement that was not completed
    assert select_checkpoint(tmp_path, runtime) is None
    files.put_all_in_place(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000002.new"]
    assert selected(tmp_path, runtime)[0] == 1


def test_files_of_other_machines_are_awaited(tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared file system may show a file some time after another machine has written it."""
    really = files.stamp

    def hidden_for_a_while(path: Path) -> files.Stamp:
        original = really(path)
        if path.suffix == ".pt":
            elsewhere = path.rename(tmp_path / path.name)
            threading.Timer(0.3, elsewhere.rename, (path,)).start()
        return original

    with monkeypatch.context() as patch:
        patch.setattr(files, "stamp", hidden_for_a_while)
        write(tmp_path / "run", runtime, 1)
    assert selected(tmp_path / "run", runtime) == (1, [])


def test_no_complete_checkpoint_is_reported(tmp_path: Path, runtime: Runtime) -> None:
    assert select_checkpoint(tmp_path / "none", runtime) is None
    write(tmp_path, runtime, 1)
    (tmp_path / "step-000001" / MARKER).write_text("{}")
    with pytest.raises(NoCheckpointError, match="contains no whole checkpoint: .* differs from its own checksum"):
        select_checkpoint(tmp_path, runtime)


def corrupt(folder: Path, draw: random.Random) -> str:
    """Damage a checkpoint in one of many ways. Return a description of the damage."""
    files = sorted(folder.iterdir())
    first, second = draw.sample(files, 2)
    data, place = bytearray(first.read_bytes()), draw.randrange(first.stat().st_size)
    flipped, zeroed = bytearray(data), bytearray(data)
    flipped[place] ^= 1 << draw.randrange(8)
    zeroed[place : place + 512] = bytes(len(data[place : place + 512]))
    of_older = (folder.parent / "step-000001" / first.name).read_bytes()
    contents: dict[str, bytes | bytearray] = {
        "truncate": data[:place], "empty": b"", "flip": flipped, "zero": zeroed, "delete": b"",
        "swap": second.read_bytes(), "extend": data + b"\0", "replace": of_older, "permute": data,
    }  # fmt: skip
    how = draw.choice([*contents])
    if how == "permute":
        draw.shuffle(data)
    if how == "swap":
        second.write_bytes(data)
    first.write_bytes(contents[how])
    if how == "delete":
        first.unlink()
    return f"{how} {first.name} {second.name}"


def test_random_corruptions_are_detected(tmp_path: Path, runtime: Runtime) -> None:
    """A damaged newest checkpoint is skipped with the reason, or its files are unchanged."""
    pristine = tmp_path / "pristine"
    write(pristine, runtime, 1, 2, 3, keep_last=3)
    contents = {p.name: p.read_bytes() for p in (pristine / "step-000003").iterdir()}
    unharmed = 0
    for seed in range(CORRUPTIONS):
        directory = tmp_path / "copy"
        shutil.copytree(pristine, directory)
        how = corrupt(directory / "step-000003", random.Random(seed))
        step, sentences = selected(directory, runtime)
        if step == 3:
            assert {p.name: p.read_bytes() for p in (directory / "step-000003").iterdir()} == contents, how
            unharmed += 1
        else:
            assert step == 2 and len(sentences) == 1, how
            assert "step-000003 is damaged" in sentences[0] or "step-000003 was not finished" in sentences[0]
        shutil.rmtree(directory)
    assert unharmed < CORRUPTIONS / 10  # some changes have no effect, such as zeros that replace zeros


def test_marker_is_compared_with_its_checksum(tmp_path: Path, runtime: Runtime) -> None:
    """The changed marker is valid JSON with an additional entry."""
    write(tmp_path, runtime, 1)
    path = tmp_path / "step-000001" / MARKER
    written = json.loads(path.read_text())
    assert read_marker(path.parent).step == 1
    for part in (written["body"], written["body"]["content"]):
        part["noted"] = "afterwards"
        path.write_text(json.dumps(written))
        with pytest.raises(DamagedError, match="differs from its own checksum"):
            read_marker(path.parent)
        del part["noted"]
    path.write_text(json.dumps({**written, "sha256": written["sha256"][::-1]}))
    with pytest.raises(DamagedError, match="differs from its own checksum"):
        read_marker(path.parent)
    path.write_text(json.dumps(written))
    assert read_marker(path.parent).step == 1


HOSTILE_NAMES: list[Any] = [
    *({name: [1, "a"]} for name in ("/etc/passwd", "../../secret", "a/../../b", "", ".", "a\0b")),
    *({"a": written} for written in (None, 1, [1], ["1", "a"], [1, 2, 3], {"n": 1})),
    [], None, "a",
]  # fmt: skip


@pytest.mark.parametrize("files", HOSTILE_NAMES, ids=str)
def test_marker_names_only_files_of_its_folder(tmp_path: Path, files: Any) -> None:
    folder = tmp_path / "step-000001"
    folder.mkdir()
    write_marker(folder, Marker(1, {}, {}))
    written = json.loads((folder / MARKER).read_text())
    body = written["body"] | {"files": files}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    (folder / MARKER).write_text(json.dumps({"sha256": digest, "body": body}))
    with pytest.raises(DamagedError, match="names .*, which is not a file of the folder|has no size and|has no files"):
        read_marker(folder)


def test_files_without_an_end_are_not_read(tmp_path: Path) -> None:
    """Check devices and pipes in place of a file and of the marker."""
    folder = tmp_path / "step-000001"
    folder.mkdir()
    (folder / "zero").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe")
    marker = Marker(1, {name: Stamp(1, "a") for name in ("zero", "pipe", "lost")}, {})
    write_marker(folder, marker)
    reported = problems(folder, sorted(read_marker(folder).files.items()))
    reason = "cannot be read: the path is not a regular file"
    assert reported == ["lost is missing", f"pipe {reason}", f"zero {reason}"]
    (folder / MARKER).unlink()
    (folder / MARKER).symlink_to("/dev/zero")
    with pytest.raises(DamagedError, match="checkpoint.json cannot be read: the path is not a regular file"):
        read_marker(folder)


@pytest.mark.waits
@pytest.mark.parametrize("name", [MARKER, "other.pt"])
def test_temporary_read_errors_are_not_damage(tmp_path: Path, runtime: Runtime, name: str) -> None:
    """Otherwise a temporary error of a disk would return a run to an older checkpoint, and overwrite the newer one."""
    write(tmp_path, runtime, 1, 2)
    unreadable = tmp_path / "step-000002" / name
    marker = read_marker(unreadable.parent)
    write_marker(unreadable.parent, Marker(2, marker.files | {"other.pt": Stamp(1, "a")}, marker.content))
    unreadable.unlink(missing_ok=True)
    unreadable.symlink_to("/proc/self/mem")  # a plain file with an input/output error at its beginning
    with pytest.raises(ValueError, match=f"{name} cannot be read .Input/output error., but may be undamaged"):
        select_checkpoint(tmp_path, runtime)
    (sentence,) = prune(tmp_path, 1, None) if name == MARKER else ["no checkpoint is deleted"]
    assert "no checkpoint is deleted" in sentence and remaining_steps(tmp_path) == [2, 1]


def test_unreadable_written_file_fails_the_checkpoint(
    tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_file: Any, _name: str) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(hashlib, "file_digest", broken)
    with pytest.raises(CheckpointError, match="checkpoint of step 1 could not be written .*Input/output error; make"):
        write(tmp_path, runtime, 1)


@pytest.mark.waits
def test_temporary_disk_errors_are_retried(tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, runtime, 1, 2)
    digest, troubles = hashlib.file_digest, [OSError(errno.ESTALE, "Stale file handle")]

    def flaky_digest(file: Any, name: str) -> Any:
        if troubles:
            raise troubles.pop()
        return digest(file, name)

    monkeypatch.setattr(hashlib, "file_digest", flaky_digest)
    assert (selected(tmp_path, runtime), troubles) == ((2, []), [])


def test_swapped_and_renamed_checkpoints_are_detected(tmp_path: Path, runtime: Runtime) -> None:
    write(tmp_path, runtime, 1, 2)
    (tmp_path / "step-000001").rename(tmp_path / "x")
    (tmp_path / "step-000002").rename(tmp_path / "step-000001")
    (tmp_path / "x").rename(tmp_path / "step-000002")
    with pytest.raises(NoCheckpointError, match="belongs to step 1.*belongs to step 2"):
        select_checkpoint(tmp_path, runtime)


def test_missing_write_access_is_reported(tmp_path: Path, runtime: Runtime) -> None:
    (tmp_path / "checkpoints").write_text("a file is in the way")
    with pytest.raises(CheckpointError, match=r"checkpoint of step 1 could not be written in .*; make room or fix"):
        write(tmp_path / "checkpoints", runtime, 1)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_full_disk_is_reported_and_fails_one_checkpoint(
    tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    write(tmp_path, runtime, 1)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    message = r"step 2 could not be written in .*No space left on device .*free of .*make room"
    with pytest.raises(CheckpointError, match=message):
        write(tmp_path, runtime, 2, asynchronous=asynchronous)
    monkeypatch.undo()
    assert selected(tmp_path, runtime)[0] == 1


def test_random_states_are_restored(runtime: Runtime) -> None:
    import numpy as np

    random.gauss(0, 1)  # Python keeps the second number of a pair
    states = random_states()
    drawn = [(random.gauss(0, 1), random.random(), float(np.random.rand()), float(torch.rand(()))) for _ in range(3)]
    restore_random_states(states)
    assert drawn == [
        (random.gauss(0, 1), random.random(), float(np.random.rand()), float(torch.rand(()))) for _ in range(3)
    ]


def test_markers_have_the_written_content(tmp_path: Path, runtime: Runtime) -> None:
    write(tmp_path, runtime, 7)
    marker = read_marker(tmp_path / "step-000007")
    assert marker.content["trainer"] == {"step": 7}
    assert {p.name for p in (tmp_path / "step-000007").iterdir()} == marker.files.keys() | {MARKER}


def test_checkpoints_of_an_older_format_are_refused(
    tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These checkpoints lack values that this version needs. No value is guessed."""
    with monkeypatch.context() as older:
        older.setattr(files, "FORMAT", files.FORMAT - 1)
        write(tmp_path, runtime, 1)
    with pytest.raises(NoCheckpointError, match=f"has format {files.FORMAT - 1}, this version reads {files.FORMAT}"):
        select_checkpoint(tmp_path, runtime)


def test_replay_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    """The earlier version saved different data of the minibatch."""
    folder = files.step_folder(tmp_path, 3)
    folder.mkdir()
    files.write_marker(folder, Marker(3, {}, {"world_size": 1, "refused": {"role": "actor", "minibatch": 1}}))
    message = "has no batch that this version can repeat; name a folder in a run's `replay`"
    with pytest.raises(ValueError, match=message):
        replay(str(folder), world_size=1)
