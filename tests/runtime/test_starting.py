"""What a process leaves out while it starts: modules for CUDA and compilers, searches for garbage, a scan of files."""

from __future__ import annotations

import builtins
import functools
import gc
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from megappo.cli import main
from megappo.runtime import sglang_cpu
from megappo.runtime.heap import collect_as_usual, put_off_collections
from megappo.runtime.packages import packages_distributions, quicken_transformers, show_torch
from tests.support.harness import environment, start
from tests.support.places import ROOT

PROGRAM = """
import gc, json, runpy, sys
from importlib import metadata, util
before, freeze, callers = gc.get_threshold(), gc.freeze, []
gc.freeze = lambda: [callers.append(sys._getframe(2).f_code.co_name), freeze()]
sys.argv[1:] = {words}
try:
    runpy.run_module("megappo", run_name="__main__", alter_sys=True)
except SystemExit as ended:
    code = ended.code
loaded = [name for name in {modules} if sys.modules.get(name) is not None]
found = {{"code": code, "loaded": loaded, "usual": gc.get_threshold() == before}}
found |= {{"images": util.find_spec.__module__}}
found |= {{"scan": metadata.packages_distributions.__module__, "frozen": gc.get_freeze_count(), "callers": callers}}
print("found", json.dumps(found))
"""
COMMANDS_ALONE = """
import json, sys
from megappo.__main__ import start
heavy = ["torch", "transformers", "pydantic", "yaml", "importlib.metadata"]
for words in json.loads(sys.argv[1]):
    sys.argv = ["megappo", *words]
    try:
        code = start()
    except SystemExit as ended:
        code = ended.code
    listing = getattr(sys.modules.get("transformers.utils.import_utils"), "create_import_structure_from_path", start)
    print("found", json.dumps([code, [name for name in heavy if name in sys.modules], listing.__module__]))
"""
UNWANTED = ["torch._inductor.lowering", "flash_attn", "flashinfer"]


@pytest.fixture
def usual() -> Iterator[None]:
    """Python's collector is as it was."""
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_the_scan_finds_what_the_standard_librarys_finds() -> None:
    """And packages that are listed and not there, as in what setuptools brings along."""
    found, expected = packages_distributions(), dict(importlib.metadata.packages_distributions())
    assert {name: found[name] for name in expected} == expected and "torch" in found
    assert len(found) < len(expected) + 5


def test_a_distribution_may_list_its_files_in_other_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, files in {
        "declared-one": {"top_level.txt": "first\nsecond\n"},
        "listed": {"RECORD": "third/__init__.py,,\nfourth.py,,\nlisted-1.dist-info/RECORD,,\nbare,,\n"},
        "neither": {},
    }.items():
        folder = tmp_path / f"{name}-1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        for file, text in files.items():
            (folder / file).write_text(text)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert packages_distributions() == {"first": ["declared-one"], "second": ["declared-one"], "third": ["listed"],
                                        "fourth": ["listed"]}  # fmt: skip


def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the test the functions are what they are now."""
    monkeypatch.setattr(importlib.util, "find_spec", importlib.util.find_spec)
    monkeypatch.setattr(importlib.metadata, "packages_distributions", importlib.metadata.packages_distributions)


def test_transformers_reads_the_files_of_a_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However the folder is spelled, and with what they define; by itself it reads them again for each spelling."""
    from transformers.utils import import_utils

    folder = Path(import_utils.__file__).parents[1] / "models/llama"
    spellings, read = [folder, str(folder), str(folder / "__init__.py")], list[str]()
    listing = inspect.unwrap(import_utils.create_import_structure_from_path)
    spread = inspect.unwrap(import_utils.define_import_structure)
    monkeypatch.setattr(import_utils, "create_import_structure_from_path", functools.lru_cache(listing))
    real = builtins.open

    def noted(path: str, *how: Any, **said: Any) -> IO[Any]:
        read.append(path)
        return real(path, *how, **said)

    monkeypatch.setattr(builtins, "open", noted)
    expected = [spread(path, prefix) for path in spellings for prefix in (None, "models")]
    by_itself = len(read)
    restored(monkeypatch)
    quicken_transformers()
    eval("importlib.util.find_spec('torch')", vars(import_utils))
    read.clear()
    assert [spread(path, prefix) for path in spellings for prefix in (None, "models")] == expected
    assert 0 < len(read) == len(set(read)) == by_itself / 3


def test_transformers_does_not_find_what_it_has_for_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else is told so, and it finds all else."""
    restored(monkeypatch)
    places = ("transformers.utils.import_utils", "transformers.utils", "program_of_mine")

    def seen(name: str) -> list[bool]:
        asked = "found = find(name) is not None"
        found: list[dict[str, Any]] = [
            {"__name__": place, "name": name, "find": importlib.util.find_spec} for place in places
        ]
        for variables in found:
            exec(asked, variables)
        return [variables["found"] for variables in found]

    quicken_transformers()
    for name in ("scipy", "torchvision"):
        is_here = importlib.machinery.PathFinder.find_spec(name) is not None
        assert seen(name) == [False, is_here, is_here]
    assert (seen("torch"), seen("no_such_package")) == ([True] * 3, [False] * 3)
    quicken_transformers(builds_models=False)
    assert seen("torch") == [False, True, True]
    show_torch()
    assert (seen("torch"), seen("scipy")[0]) == ([True] * 3, False)


@pytest.mark.usefixtures("usual")
def test_collections_that_were_put_off_are_made_again() -> None:
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    collect_as_usual()
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, frozen)
    put_off_collections()
    put_off_collections()
    assert gc.get_threshold()[0] > 100 * before[0]
    collect_as_usual()
    assert gc.get_threshold() == before and gc.get_freeze_count() > frozen


@pytest.mark.waits
def test_a_command_starts_without_what_it_has_no_use_for(tmp_path: Path) -> None:
    """Garbage is looked for as usual again, but not in what was imported, where ranks have met, as in a run that is
    refused then, or where the command ends."""
    run = ["train", "configs/quickstart.yaml", "actor.layout={}", "critic.layout={}"]
    wrong = [*run, f"run.directory={tmp_path / 'run'}", "data.train.source=tests.support.no_such:module"]
    for words, code, frozen_by in ((["settings", "actor.offload"], 0, "start"), (wrong, 2, "start_runtime")):
        (tmp_path / "program.py").write_text(PROGRAM.format(words=words, modules=UNWANTED))
        done = start(tmp_path / "program.py")
        found = json.loads(done.stdout.rpartition("found ")[2])
        assert (found["code"], found["loaded"]) == (code, []), done.stdout + done.stderr
        assert found["scan"] == found["images"] == "megappo.runtime.packages"
        assert found["usual"] and found["callers"] == [frozen_by] and found["frozen"] > 100_000


@pytest.mark.slow
@pytest.mark.waits
def test_commands_that_build_nothing_import_no_torch() -> None:
    """In a process of their own, as a user's are: `--help` without settings too, plans of families whose layers differ
    in what Megatron is told of them, of estimators without a critic, and a search."""
    plans = [
        ["configs/quickstart.yaml"],
        ["configs/quickstart.yaml", "algorithm.estimator=grpo", "critic=null"],
        ["configs/quickstart.yaml", "--search", "--gpus=2"],
        ["configs/gemma4_31b_2node_math.yaml"],
        ["configs/gpt_oss_20b_8gpu_gsm8k.yaml", "--gpus=8"],
        ["configs/deepseek_v3_32node_dapo_math.yaml", "--gpus=256", "--machine=h200"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS_ALONE, json.dumps([["--help"], *(["plan", *words] for words in plans)])],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line.removeprefix("found ")) for line in done.stdout.splitlines() if line.startswith("found ")]
    assert all(code in (0, 1) for code, *_ in found)  # 1: it does not fit
    of_plans = ["transformers", "pydantic", "yaml", "importlib.metadata"]
    assert [loaded for _, loaded, _ in found] == [[]] + [of_plans] * len(plans)
    assert [listing for *_, listing in found] == ["megappo.__main__"] + ["megappo.runtime.packages"] * len(plans)


def test_code_of_a_model_has_torch_when_it_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr("megappo.commands.plan.show_torch", lambda: shown.append("torch"))
    monkeypatch.chdir(ROOT)
    for trusted in ("false", "true"):
        assert main(["plan", "configs/quickstart.yaml", f"model.trust_remote_code={trusted}"]) == 0
        assert shown == ["torch"] * (trusted == "true")


@pytest.mark.usefixtures("usual")
@pytest.mark.parametrize(("chosen", "cuda"), [(True, False), (False, False), (True, True)])
def test_a_server_starts_without_what_is_for_cuda(chosen: bool, cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it was started by us, on a CPU; its collections go on before it forks."""
    monkeypatch.setenv("SGLANG_PLATFORM", sglang_cpu.PLATFORM_NAME if chosen else "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(importlib.metadata, "packages_distributions", dict)
    monkeypatch.setattr(importlib.util, "find_spec", find_spec := importlib.util.find_spec)
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.delitem(sys.modules, "flashinfer")
    before = gc.get_threshold()
    assert (sglang_cpu.activate() is None) == cuda
    hastened = chosen and not cuda
    assert ("flashinfer" in sys.modules) == hastened == (gc.get_threshold() != before)
    assert (importlib.metadata.packages_distributions is packages_distributions) == hastened
    assert (importlib.util.find_spec is not find_spec) == hastened
