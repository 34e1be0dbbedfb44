"""Transformer Engine and Apex: present, absent, broken or another project; which of them is used, and the report."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megappo.config.load import load_config
from megappo.doctor.software import acceleration_findings
from megappo.runtime.accelerations import (
    FUSED_GRADIENTS,
    UNTESTED,
    Accelerations,
    decide_accelerations,
    find_accelerations,
)
from tests.support import worlds

HIDDEN = ("transformer_engine", "apex", FUSED_GRADIENTS)
SELECTED = ("model.accelerations=auto",)


@dataclass
class Shelf:
    """Packages that can be imported, each of a name, a version and modules with a body."""

    folder: Path

    def put(self, name: str, version: str, **modules: str) -> None:
        worlds.fake_package(self.folder, name, version)
        for module, body in modules.items():
            (self.folder / name / module).mkdir()
            (self.folder / name / module / "__init__.py").write_text(body)


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shelf]:
    """A machine with CUDA where nothing was imported yet."""
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] in HIDDEN}
    for name in before:
        del sys.modules[name]
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    find_accelerations.cache_clear()
    yield Shelf(tmp_path)
    find_accelerations.cache_clear()
    for name in [n for n in sys.modules if n.split(".")[0] in HIDDEN]:
        del sys.modules[name]
    sys.modules.update(before)


def said(found: Accelerations, *overrides: str) -> list[tuple[str, str, str, str]]:
    config = load_config(worlds.ROOT / worlds.QUICKSTART, ["model.dtype=bfloat16", *(overrides or SELECTED)])
    return [(f.check, f.state, f.words, f.remedy) for f in acceleration_findings(found, config)]


def test_both_are_there(shelf: Shelf) -> None:
    shelf.put("transformer_engine", "2.10.0", pytorch="")
    shelf.put("apex", "26.9", optimizers="")
    (shelf.folder / f"{FUSED_GRADIENTS}.py").write_text("")
    found = find_accelerations("auto")
    every = dict.fromkeys(found.switches(torch.bfloat16), True)
    assert found.switches(torch.bfloat16) == every
    assert every.keys() <= {field.name for field in fields(TransformerConfig)}
    assert not any(found.switches(torch.float32).values()), "no attention for packs in float32"
    own = found.for_model(own_layers=True)  # of a model that has what Transformer Engine's layers have not
    assert found.uses_engine_layers(torch.bfloat16) and not own.uses_engine_layers(torch.bfloat16)
    assert own.sentence(torch.bfloat16).startswith("torch's layers, because the layers of Transformer Engine")
    ((check, state, words, _),) = said(found)
    assert (check, state) == ("layers", "fine")
    assert words == (
        "Transformer Engine 2.10.0 (attention, norms, rope); "
        f"Apex 26.9 adds up weight gradients; Transformer Engine's Adam; {UNTESTED}"
    )


def test_neither_is_there(shelf: Shelf) -> None:
    found = find_accelerations("auto")
    assert not any(found.switches(torch.bfloat16).values())
    ((check, state, words, remedy),) = said(found)
    assert (check, state) == ("layers", "slow")
    assert words == "torch's layers, because Transformer Engine is not installed; torch's Adam"
    assert remedy.startswith(
        f"pip install '.[te]' in megappo's repository and build NVIDIA's Apex with {FUSED_GRADIENTS}; see launch/README"
    )


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise OSError('libcudnn.so.9: cannot open shared object file')", "libcudnn.so.9: cannot open shared object"),
        ("import transformer_engine_torch", "No module named 'transformer_engine_torch'"),
        ("raise RuntimeError('built for torch 2.9')", "built for torch 2.9"),
    ],
)
def test_a_broken_one_is_told_and_hidden(shelf: Shelf, body: str, words: str) -> None:
    """Megatron-Core guards against ImportError alone, and would end the run with anything else."""
    shelf.put("transformer_engine", "2.10.0", pytorch=body)
    shelf.put("apex", "26.9", optimizers="")
    found = find_accelerations("auto")
    assert not found.uses_engine_layers(torch.bfloat16) and found.adam == "Apex"
    with pytest.raises(ImportError):
        importlib.import_module("transformer_engine.pytorch")
    ((_, state, sentence, remedy),) = said(found)
    assert state == "slow" and f"Transformer Engine 2.10.0 cannot be imported ({words}" in sentence
    assert f"torch adds up weight gradients, because {FUSED_GRADIENTS} is not installed; Apex's Adam" in sentence
    assert "reinstall Transformer Engine, or uninstall it" in remedy


def test_megatron_core_refuses_versions_that_it_was_not_made_for(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    from megappo.runtime import accelerations

    shelf.put("transformer_engine", "2.20.2", pytorch="")
    real, here = accelerations.installed_version, {"megatron-core": "0.16.1"}
    monkeypatch.setattr(accelerations, "installed_version", lambda name: here.get(name) or real(name))
    refused = find_accelerations("auto")
    assert not refused.engine.is_used
    assert "2.20.2 is not in >=2.9.0a0,<2.12, the range of Megatron-Core 0.16.1; 0.19" in said(refused)[0][2]
    find_accelerations.cache_clear()
    for name in HIDDEN:
        sys.modules.pop(name, None)
    here["megatron-core"] = "0.19.2"
    assert find_accelerations("auto").engine.is_used


def test_another_project_is_not_taken_for_apex(shelf: Shelf) -> None:
    shelf.put("apex", "0.9.10")
    found = find_accelerations("auto")
    assert not found.apex.is_used and found.adam == "torch"
    assert said(found)[0][:3] == ("apex", "slow", "version 0.9.10 is a different project with the same name")


def test_torch_alone_where_the_settings_say_so(shelf: Shelf) -> None:
    shelf.put("transformer_engine", "2.10.0", pytorch="")
    shelf.put("apex", "26.9", optimizers="")
    found = find_accelerations("torch")
    assert found.adam == "torch" and not any(found.switches(torch.bfloat16).values())
    for package in ("transformer_engine", "apex"):
        with pytest.raises(ImportError):
            importlib.import_module(package)
    ((_, state, words, _),) = said(found, "model.accelerations=torch")
    assert state == "fine" and "Transformer Engine 2.10.0 is not selected by model.accelerations" in words


def test_both_are_opt_in(shelf: Shelf) -> None:
    """They are not used by default, nor where Megatron-Core was imported before a configuration was read."""
    shelf.put("transformer_engine", "2.10.0", pytorch="")
    shelf.put("apex", "26.9", optimizers="")
    default = load_config(worlds.ROOT / worlds.QUICKSTART, ["model.dtype=bfloat16"])
    assert default.model.accelerations == "torch"
    decide_accelerations()
    with pytest.raises(ImportError):
        importlib.import_module("transformer_engine")
    late = find_accelerations("auto")
    assert not late.engine.is_used and not late.uses_engine_layers(torch.bfloat16) and late.adam == "torch"
    assert "Transformer Engine 2.10.0 is hidden, because this process imported Megatron-Core" in said(late)[0][2]


def test_a_selection_outlasts_the_import_of_megatron(shelf: Shelf) -> None:
    shelf.put("transformer_engine", "2.10.0", pytorch="")
    assert find_accelerations("auto").engine.is_used
    decide_accelerations()
    assert importlib.import_module("transformer_engine.pytorch")


def test_without_cuda_neither_is_imported(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    shelf.put("transformer_engine", "2.10.0", pytorch="raise AssertionError('imported')")
    found = find_accelerations("auto")
    assert found.engine.problem == "needs CUDA" and found.adam == "torch"
    assert [(check, state) for check, state, _, _ in said(found)] == [("layers", "fine"), ("optimizer", "fine")]
