"""Selection and report of Transformer Engine and Apex: installed, missing, broken, or a different project."""

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
    """Folder of test packages, each with a name, a version and modules."""

    folder: Path

    def put(self, name: str, version: str, **modules: str) -> None:
        worlds.fake_package(self.folder, name, version)
        for module, body in modules.items():
            (self.folder / name / module).mkdir()
            (self.folder / name / module / "__init__.py").write_text(body)


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shelf]:
    """Simulate a machine with CUDA, without previous imports of these packages."""
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


def findings(accelerations: Accelerations, *overrides: str) -> list[tuple[str, str, str, str]]:
    config = load_config(worlds.ROOT / worlds.QUICKSTART, ["model.dtype=bfloat16", *(overrides or SELECTED)])
    return [(f.check, f.state, f.text, f.remedy) for f in acceleration_findings(accelerations, config)]


def test_both_packages_are_used(shelf: Shelf) -> None:
    shelf.put("transformer_engine", "2.10.0", pytorch="")
    shelf.put("apex", "26.9", optimizers="")
    (shelf.folder / f"{FUSED_GRADIENTS}.py").write_text("")
    accelerations = find_accelerations("auto")
    every = dict.fromkeys(accelerations.switches(torch.bfloat16), True)
    assert accelerations.switches(torch.bfloat16) == every
    assert every.keys() <= {field.name for field in fields(TransformerConfig)}
    assert not any(accelerations.switches(torch.float32).values()), (
        "attention for packed sequences does not support float32"
    )
    own = accelerations.for_model(own_layers=True)  # a model with features that the layers of Transformer Engine lack
    assert accelerations.uses_engine_layers(torch.bfloat16) and not own.uses_engine_layers(torch.bfloat16)
    assert own.sentence(torch.bfloat16).startswith("torch's layers, because the layers of Transformer Engine")
    ((check, state, message, _),) = findings(accelerations)
    assert (check, state) == ("layers", "fine")
    assert message == (
        "Transformer Engine 2.10.0 (attention, norms, rope); "
        f"Apex 26.9 adds up weight gradients; Transformer Engine's Adam; {UNTESTED}"
    )


def test_missing_packages_are_reported(shelf: Shelf) -> None:
    accelerations = find_accelerations("auto")
    assert not any(accelerations.switches(torch.bfloat16).values())
    ((check, state, message, remedy),) = findings(accelerations)
    assert (check, state) == ("layers", "slow")
    assert message == "torch's layers, because Transformer Engine is not installed; torch's Adam"
    assert remedy.startswith(
        f"pip install '.[te]' in megappo's repository and build NVIDIA's Apex with {FUSED_GRADIENTS}; see launch/README"
    )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise OSError('libcudnn.so.9: cannot open shared object file')", "libcudnn.so.9: cannot open shared object"),
        ("import transformer_engine_torch", "No module named 'transformer_engine_torch'"),
        ("raise RuntimeError('built for torch 2.9')", "built for torch 2.9"),
    ],
)
def test_broken_package_is_reported_and_hidden(shelf: Shelf, body: str, message: str) -> None:
    """Megatron-Core handles only ImportError. Other exceptions would end the run."""
    shelf.put("transformer_engine", "2.10.0", pytorch=body)
    shelf.put("apex", "26.9", optimizers="")
    accelerations = find_accelerations("auto")
    assert not accelerations.uses_engine_layers(torch.bfloat16) and accelerations.adam == "Apex"
    with pytest.raises(ImportError):
        importlib.import_module("transformer_engine.pytorch")
    ((_, state, sentence, remedy),) = findings(accelerations)
    assert state == "slow" and f"Transformer Engine 2.10.0 cannot be imported ({message}" in sentence
    assert f"torch adds up weight gradients, because {FUSED_GRADIENTS} is not installed; Apex's Adam" in sentence
    assert "reinstall Transformer Engine, or uninstall it" in remedy


def test_unsupported_version_is_not_used(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    from megappo.runtime import accelerations

    shelf.put("transformer_engine", "2.20.2", pytorch="")
    real, versions = accelerations.installed_version, {"megatron-core": "0.16.1"}
    monkeypatch.setattr(accelerations, "installed_version", lambda name: versions.get(name) or real(name))
    refused = find_accelerations("auto")
    assert not refused.engine.is_used
    assert "2.20.2 is not in >=2.9.0a0,<2.12, the range of Megatron-Core 0.16.1; 0.19" in findings(refused)[0][2]
    find_accelerations.cache_clear()
    for name in HIDDEN:
        sys.modules.pop(name, None)
    versions["megatron-core"] = "0.19.2"
    assert find_accelerations("auto").engine.is_used


def test_different_project_is_not_used_as_apex(shelf: Shelf) -> None:
    shelf.put("apex", "0.9.10")
    accelerations = find_accelerations("auto")
    assert not accelerations.apex.is_used and accelerations.adam == "torch"
    assert findings(accelerations)[0][:3] == (
        "apex",
        "slow",
        "version 0.9.10 is a different project with the same name",
    )


def test_settings_select_torch(shelf: Shelf) -> None:
    shelf.put("transformer_engine", "2.10.0", pytorch="")
    shelf.put("apex", "26.9", optimizers="")
    accelerations = find_accelerations("torch")
    assert accelerations.adam == "torch" and not any(accelerations.switches(torch.bfloat16).values())
    for package in ("transformer_engine", "apex"):
        with pytest.raises(ImportError):
            importlib.import_module(package)
    ((_, state, message, _),) = findings(accelerations, "model.accelerations=torch")
    assert state == "fine" and "Transformer Engine 2.10.0 is not selected by model.accelerations" in message


def test_packages_are_unused_by_default(shelf: Shelf) -> None:
    """Both are unused by default, and if Megatron-Core was imported before the configuration was read."""
    shelf.put("transformer_engine", "2.10.0", pytorch="")
    shelf.put("apex", "26.9", optimizers="")
    default = load_config(worlds.ROOT / worlds.QUICKSTART, ["model.dtype=bfloat16"])
    assert default.model.accelerations == "torch"
    decide_accelerations()
    with pytest.raises(ImportError):
        importlib.import_module("transformer_engine")
    late = find_accelerations("auto")
    assert not late.engine.is_used and not late.uses_engine_layers(torch.bfloat16) and late.adam == "torch"
    assert "Transformer Engine 2.10.0 is hidden, because this process imported Megatron-Core" in findings(late)[0][2]


def test_selection_persists_after_import_of_megatron(shelf: Shelf) -> None:
    shelf.put("transformer_engine", "2.10.0", pytorch="")
    assert find_accelerations("auto").engine.is_used
    decide_accelerations()
    assert importlib.import_module("transformer_engine.pytorch")


def test_packages_are_not_imported_without_cuda(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    shelf.put("transformer_engine", "2.10.0", pytorch="raise AssertionError('imported')")
    accelerations = find_accelerations("auto")
    assert accelerations.engine.problem == "needs CUDA" and accelerations.adam == "torch"
    assert [(check, state) for check, state, _, _ in findings(accelerations)] == [
        ("layers", "fine"),
        ("optimizer", "fine"),
    ]
