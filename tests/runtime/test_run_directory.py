"""Lock of a run directory: one job owns the directory, and detects the loss of the directory."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from megappo.errors import RunError
from megappo.runtime import lock as room
from megappo.runtime.lock import locked_directory
from megappo.runtime.process import Runtime


def test_unchanged_directory_passes_the_check(
    tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    with locked_directory(tmp_path / "run", runtime, private=True) as directory:
        assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700, "run.private must restrict access to the directory"
        directory.check()
        (tmp_path / "run" / "metrics.jsonl").write_text("{}")
        (tmp_path / "link").symlink_to(tmp_path / "run")
        directory.check()

        def silent(path: object) -> os.stat_result:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(os, "stat", silent)  # a temporary error
        directory.check()


@pytest.mark.parametrize("name", ["lock", "metrics.jsonl", "checkpoints", "profile/step-000001.md", "a.partial"])
@pytest.mark.parametrize("what", ["file", "nothing", "folder", "pipe", "device"])
def test_links_out_of_the_directory_are_refused(tmp_path: Path, runtime: Runtime, name: str, what: str) -> None:
    """Links of other users in a directory are not followed. A pipe does not block the run."""
    place, victim, folder = tmp_path / "run" / name, tmp_path / "victim", tmp_path / "folder"
    place.parent.mkdir(parents=True)
    victim.write_text("mine")
    folder.mkdir()
    if what == "pipe":
        os.mkfifo(place)
    else:
        leads = {"file": victim, "nothing": tmp_path / "new", "folder": folder, "device": Path("/dev/zero")}
        place.symlink_to(leads[what])
    message = f"{place} is (a link to .*, and the run would write outside its directory|not a regular file)"
    with pytest.raises(ValueError, match=message), locked_directory(tmp_path / "run", runtime):
        pass
    assert victim.read_text() == "mine" and os.listdir(folder) == [] and not (tmp_path / "new").exists()


def test_links_within_the_directory_are_allowed(tmp_path: Path, runtime: Runtime) -> None:
    (tmp_path / "real/checkpoints").mkdir(parents=True)
    (tmp_path / "real/latest").symlink_to("checkpoints")
    (tmp_path / "run").symlink_to(tmp_path / "real")
    with locked_directory(tmp_path / "run", runtime) as directory:
        directory.check()


@pytest.mark.parametrize("how", ["removed", "replaced", "lock removed", "lock renamed", "another job"])
def test_lost_directory_ends_the_run(
    tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    run = tmp_path / "run"
    with locked_directory(run, runtime) as directory:
        if how == "lock removed":
            (run / "lock").unlink()
        elif how == "lock renamed":  # NFS renames an open file that is removed
            (run / "lock").rename(run / ".nfs0001")
        else:
            shutil.rmtree(run)
        if how == "replaced":
            run.mkdir()
            (run / "lock").touch()
        if how != "another job":
            with pytest.raises(RunError, match="or the file `lock` in it was removed or replaced during the run"):
                directory.check()
            return
        with locked_directory(run, runtime) as second:
            with pytest.raises(RunError, match=f"run.directory '{run}' .* may belong to another job now; restore"):
                directory.check()
            second.check()
            monkeypatch.setattr(room, "PATIENCE_SECONDS", 0.0)
            with pytest.raises(ValueError, match="is in use by process"), locked_directory(run, runtime):
                raise AssertionError("a third job is accepted")


def test_moved_directory_is_reported_with_new_path(tmp_path: Path, runtime: Runtime) -> None:
    run = tmp_path / "run"
    with locked_directory(run, runtime) as directory:
        run.rename(tmp_path / "elsewhere")
        message = f"was moved to '{tmp_path / 'elsewhere'}' during .*; move it back and start"
        with pytest.raises(RunError, match=message):
            directory.check()
        (tmp_path / "elsewhere").rename(run)
        directory.check()
