"""Reading a checkpoint executes no code. Checkpoints of other versions of torch have the same values or are refused."""

from __future__ import annotations

import io
import pickle
import random
import re
import tarfile
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from megappo.checkpoint import versions
from megappo.checkpoint.files import Marker, read_marker, stamp, write_marker
from megappo.checkpoint.randomness import random_states, restore_random_states, seed_generators
from megappo.checkpoint.reader import load_values
from megappo.checkpoint.select import select_checkpoint
from megappo.checkpoint.shards import read_tensors
from megappo.checkpoint.versions import TORCH_VERSIONS, require_readable
from megappo.runtime.process import Runtime
from tests.support.checkpoints import ARCHIVES, SHAPES, TRACES, Payload, write
from tests.support.places import ROOT


def empty_shards() -> dict[str, ShardedTensor]:
    return {key: ShardedTensor.from_rank_offsets(key, torch.zeros(shape)) for key, shape in SHAPES.items()}


def in_a_field(metadata: Metadata, folder: Path) -> None:
    metadata.planner_data = Payload("planner_data")


def in_a_key(metadata: Metadata, folder: Path) -> None:
    metadata.storage_data[Payload("storage_data")] = None


def in_bytes(metadata: Metadata, folder: Path) -> None:
    """Replace a tensor with bytes in a shard. The loader of torch reads such bytes with pickle."""
    key = next(iter(SHAPES))
    metadata.state_dict_metadata[key] = BytesStorageMetadata()
    content = io.BytesIO()
    torch.save(Payload("bytes"), content)
    (folder / "__0_0.distcp").write_bytes(content.getvalue())
    for index, place in metadata.storage_data.items():
        if index.fqn == key:
            metadata.storage_data = {type(index)(key): place}
            place.offset, place.length = 0, len(content.getvalue())
            return


def in_another_folder(metadata: Metadata, folder: Path) -> None:
    for place in metadata.storage_data.values():
        place.relative_path = "../elsewhere/__0_0.distcp"


def with_negative_sizes(metadata: Metadata, folder: Path) -> None:
    for entry in metadata.state_dict_metadata.values():
        assert isinstance(entry, TensorStorageMetadata)
        entry.size = torch.Size([-1, 8])


CRAFTED: dict[str, tuple[Callable[[Metadata, Path], None], str]] = {
    "a call in a field": (in_a_field, r"\.metadata names \S+\.leave_a_trace, which no checkpoint contains"),
    "a call in a key": (in_a_key, r"\.metadata names \S+\.leave_a_trace, which no checkpoint contains"),
    "a call in bytes": (in_bytes, r"\.metadata names torch\.\S+\.BytesStorageMetadata, which no checkpoint contains"),
    "another folder": (in_another_folder, r"\.metadata has invalid content .*tensors in '\.\./elsewhere/__0_0"),
    "negative sizes": (with_negative_sizes, r"\.metadata has invalid content .*-1 instead of a count"),
}


@pytest.mark.parametrize("how", CRAFTED)
def test_crafted_metadata_execute_no_code(tmp_path: Path, runtime: Runtime, how: str) -> None:
    """The marker has the checksum of the crafted file. A writer of `.metadata` can also write the marker."""
    craft, sentence = CRAFTED[how]
    write(tmp_path, runtime, 1)
    folder = tmp_path / "step-000001"
    metadata = FileSystemReader(folder).read_metadata()
    craft(metadata, folder)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    marker = read_marker(folder)
    write_marker(folder, Marker(1, {name: stamp(folder / name) for name in marker.files}, marker.content))
    chosen = select_checkpoint(tmp_path, runtime)
    assert chosen is not None and not chosen[2]
    TRACES.clear()
    with pytest.raises(ValueError, match=f"step-000001 is damaged: {sentence}") as raised:
        read_tensors(folder, empty_shards())
    assert "\n" not in str(raised.value)
    assert TRACES == []


class OlderPickler(pickle.Pickler):
    """A pickler for members of enumerations as in Python 3.11.0 to 3.11.3, such as in Debian 12."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


def test_metadata_of_older_pythons_are_read(tmp_path: Path, runtime: Runtime) -> None:
    write(tmp_path, runtime, 1)
    folder = tmp_path / "step-000001"
    with (folder / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    with (folder / ".metadata").open("wb") as file:
        OlderPickler(file).dump(metadata)
    assert b"getattr" in (folder / ".metadata").read_bytes()
    shards = empty_shards()
    read_tensors(folder, shards)
    for key, shape in SHAPES.items():
        assert torch.equal(shards[key].data, torch.full(shape, 1.0)), key


@pytest.mark.parametrize(
    "content",
    [b"", b"\x80", b"no pickle", pickle.dumps(None), pickle.dumps({"a": 1}), pickle.dumps([1] * 9)[:-3],
     b"\x80\x04\x8c\x05torch\x8c\x11nn.Module.forward\x93.", b"\x80\x04cposix\nsystem\n.",
     b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n}\x8c\x01aK\x01sb."],
    ids=range(9),
)  # fmt: skip
def test_invalid_metadata_is_reported(tmp_path: Path, runtime: Runtime, content: bytes) -> None:
    write(tmp_path, runtime, 1)
    (tmp_path / "step-000001" / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match=r"step-000001 is damaged: \.metadata"):
        read_tensors(tmp_path / "step-000001", empty_shards())
    (tmp_path / "step-000001" / ".metadata").unlink()
    with pytest.raises(ValueError, match=r"\.metadata cannot be read: No such file"):
        read_tensors(tmp_path / "step-000001", empty_shards())


@pytest.mark.parametrize("broken", ["call", "truncated", "empty", "missing"])
def test_files_of_ranks_contain_only_plain_values(tmp_path: Path, broken: str) -> None:
    path = tmp_path / "random-00000.pt"
    torch.save(Payload("values") if broken == "call" else {"a": torch.ones(3)}, path)
    if broken in ("truncated", "empty"):
        path.write_bytes(path.read_bytes()[: 100 if broken == "truncated" else 0])
    elif broken == "missing":
        path.unlink()
    TRACES.clear()
    with pytest.raises(ValueError, match=r"random-00000\.pt must contain only tensors and plain values: ") as raised:
        load_values(path)
    assert TRACES == [] and "\n" not in str(raised.value)


def test_missing_tensors_are_reported(tmp_path: Path, runtime: Runtime) -> None:
    write(tmp_path, runtime, 1)
    folder = tmp_path / "step-000001"
    other = {"actor.weight.c": ShardedTensor.from_rank_offsets("actor.weight.c", torch.zeros(2))}
    message = "step-000001 does not contain the tensors of this model and layout: .*actor.weight.c"
    with pytest.raises(ValueError, match=message):
        read_tensors(folder, other)
    wide = {"actor.weight.a": ShardedTensor.from_rank_offsets("actor.weight.a", torch.zeros(64, 9))}
    message = "does not contain the tensors of this model and layout: .*shape mismatch"
    with pytest.raises(ValueError, match=message) as raised:
        read_tensors(folder, wide)
    assert "Traceback" not in str(raised.value)


def unpack(version: str, folder: Path) -> Path:
    with tarfile.open(ARCHIVES / f"torch-{version}.tar.xz") as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # missing in Python before 3.11.4
        archive.extractall(folder)
    return folder / "step-000007"


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0", "2.14.1"])
def test_checkpoints_of_other_torch_versions_are_read(tmp_path: Path, runtime: Runtime, version: str) -> None:
    """The versions are those of the light environment, of the full one, and the first compatible one
    (support/checkpoints.py)."""
    unpack(version, tmp_path)
    chosen = select_checkpoint(tmp_path, runtime)
    assert chosen is not None
    folder, marker, sentences = chosen
    assert not sentences and marker.content["versions"]["torch"].startswith(version)
    shards = empty_shards()
    read_tensors(folder, shards)
    for key, shape in SHAPES.items():
        assert torch.equal(shards[key].data, torch.full(shape, 7.0)), key
    before = random_states()
    seed_generators(3, 0)  # the state at the time of writing
    drawn = (random.random(), float(np.random.rand()), float(torch.rand(())))
    restore_random_states(load_values(folder / "random-00000.pt"))
    assert drawn == (random.random(), float(np.random.rand()), float(torch.rand(())))
    restore_random_states(before)


def test_checkpoint_of_an_unknown_torch_is_refused(tmp_path: Path, runtime: Runtime) -> None:
    """Torch 2.15 writes metadata that torch 2.14 cannot read."""
    unpack("2.15.0", tmp_path)
    installed = re.escape(str(torch.__version__))
    with pytest.raises(
        ValueError,
        match=rf"step-000007 was written with torch 2\.15\.0\+\S+, this is torch {installed}; checkpoints are "
        r"compatible from torch 2\.11 to 2\.14: continue with torch 2\.15\.0",
    ):
        select_checkpoint(tmp_path, runtime)


@pytest.mark.parametrize(
    ("written", "installed", "loads"),
    [("2.13.0+cpu", "2.14.1+cu130", True), ("2.11.0a0+x", "2.14.9", True), ("2.15.0", "2.15.1+cpu", True),
     ("2.10.2", "2.13.0", False), ("2.13.0", "2.15.0", False), ("3.13.0", "2.13.0", False),
     ("unknown", "2.13.0", False)],
)  # fmt: skip
def test_compatible_versions_of_torch_are_accepted(
    monkeypatch: pytest.MonkeyPatch, written: str, installed: str, loads: bool
) -> None:
    monkeypatch.setattr(versions.torch, "__version__", installed)
    marker = Marker(1, {}, {"versions": {"torch": written}})
    if loads:
        require_readable(Path("step-000001"), marker)
    else:
        with pytest.raises(ValueError, match=f"written with torch {re.escape(written)}, this is torch"):
            require_readable(Path("step-000001"), marker)


def test_required_versions_are_tested() -> None:
    """The requirements allow only versions of torch whose checkpoints are tested."""
    required = (ROOT / "megappo" / "requirements.txt").read_text()
    (first_major, first_minor), (last_major, last_minor) = TORCH_VERSIONS
    assert f"torch>={first_major}.{first_minor},<{last_major}.{last_minor + 1}" in required.splitlines()
    tested = {path.name.removeprefix("torch-").removesuffix(".tar.xz") for path in ARCHIVES.glob("*.tar.xz")}
    for release in TORCH_VERSIONS:
        assert any(version.startswith(".".join(map(str, release)) + ".") for version in tested)
    for package in ("torch", "megatron-core", "transformers"):
        bounds = re.findall(rf"^{package}(.*)$", required, re.MULTILINE)
        assert bounds and all("<" in bound and ">=" in bound for bound in bounds), package
