"""Fast start of processes: fewer imports for CUDA and compilers, no garbage collection, faster package scans."""

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
from megappo.engines.sglang.servers import cpu_platform
from megappo.runtime.memory.allocator import collect_as_usual, put_off_collections
from megappo.runtime.packages import packages_distributions, quicken_transformers, show_torch
from tests.support.harness import environment, start
from tests.support.places import ROOT

PROGRAM = """
import gc, json, runpy, sys
from importlib import metadata, util
before, freeze, callers = gc.get_threshold(), gc.freeze, []
gc.freeze = lambda: [callers.append(sys._getframe(2).f_code.co_name), freeze()]
sys.argv[1:] = {arguments}
try:
    runpy.run_module("megappo", run_name="__main__", alter_sys=True)
except SystemExit as ended:
    code = ended.code
loaded = [name for name in {modules} if sys.modules.get(name) is not None]
report = {{"code": code, "loaded": loaded, "usual": gc.get_threshold() == before}}
report |= {{"images": util.find_spec.__module__}}
report |= {{"scan": metadata.packages_distributions.__module__, "frozen": gc.get_freeze_count(), "callers": callers}}
print("RESULT", json.dumps(report))
"""
COMMANDS_ALONE = """
import json, sys
from megappo.__main__ import start
heavy = ["torch", "transformers", "pydantic", "yaml", "importlib.metadata"]
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["megappo", *arguments]
    try:
        code = start()
    except SystemExit as ended:
        code = ended.code
    listing = getattr(sys.modules.get("transformers.utils.import_utils"), "create_import_structure_from_path", start)
    print("RESULT", json.dumps([code, [name for name in heavy if name in sys.modules], listing.__module__]))
"""
EXCLUDED = ["torch._inductor.lowering", "flash_attn", "flashinfer"]


@pytest.fixture
def usual() -> Iterator[None]:
    """Restore the thresholds of the garbage collector after the test."""
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_package_scan_equals_the_standard_library() -> None:
    """The scan may also list missing packages, such as the packages in the metadata of setuptools."""
    packages, expected = packages_distributions(), dict(importlib.metadata.packages_distributions())
    assert {name: packages[name] for name in expected} == expected and "torch" in packages
    assert len(packages) < len(expected) + 5


def test_package_scan_reads_all_metadata_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    """Restore the current functions after the test."""
    monkeypatch.setattr(importlib.util, "find_spec", importlib.util.find_spec)
    monkeypatch.setattr(importlib.metadata, "packages_distributions", importlib.metadata.packages_distributions)


def test_transformers_reads_model_files_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files are read once for all spellings of the folder. Unpatched transformers reads them for each spelling."""
    from transformers.utils import import_utils

    folder = Path(import_utils.__file__).parents[1] / "models/llama"
    spellings, read = [folder, str(folder), str(folder / "__init__.py")], list[str]()
    listing = inspect.unwrap(import_utils.create_import_structure_from_path)
    spread = inspect.unwrap(import_utils.define_import_structure)
    monkeypatch.setattr(import_utils, "create_import_structure_from_path", functools.lru_cache(listing))
    real = builtins.open

    def noted(path: str, *how: Any, **options: Any) -> IO[Any]:
        read.append(path)
        return real(path, *how, **options)

    monkeypatch.setattr(builtins, "open", noted)
    expected = [spread(path, prefix) for path in spellings for prefix in (None, "models")]
    by_itself = len(read)
    restored(monkeypatch)
    quicken_transformers()
    eval("importlib.util.find_spec('torch')", vars(import_utils))
    read.clear()
    assert [spread(path, prefix) for path in spellings for prefix in (None, "models")] == expected
    assert 0 < len(read) == len(set(read)) == by_itself / 3


def test_image_packages_are_hidden_from_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other modules can import these packages, and transformers finds all other packages."""
    restored(monkeypatch)
    places = ("transformers.utils.import_utils", "transformers.utils", "program_of_mine")

    def seen(name: str) -> list[bool]:
        statement = "result = find(name) is not None"
        namespaces: list[dict[str, Any]] = [
            {"__name__": place, "name": name, "find": importlib.util.find_spec} for place in places
        ]
        for variables in namespaces:
            exec(statement, variables)
        return [variables["result"] for variables in namespaces]

    quicken_transformers()
    for name in ("scipy", "torchvision"):
        is_installed = importlib.machinery.PathFinder.find_spec(name) is not None
        assert seen(name) == [False, is_installed, is_installed]
    assert (seen("torch"), seen("no_such_package")) == ([True] * 3, [False] * 3)
    quicken_transformers(builds_models=False)
    assert seen("torch") == [False, True, True]
    show_torch()
    assert (seen("torch"), seen("scipy")[0]) == ([True] * 3, False)


@pytest.mark.usefixtures("usual")
def test_deferred_garbage_collection_is_resumed() -> None:
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    collect_as_usual()
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, frozen)
    put_off_collections()
    put_off_collections()
    assert gc.get_threshold()[0] > 100 * before[0]
    collect_as_usual()
    assert gc.get_threshold() == before and gc.get_freeze_count() > frozen


@pytest.mark.waits
def test_command_starts_without_unused_modules(tmp_path: Path) -> None:
    """Garbage collection is enabled again when the ranks are connected or the command ends. The imported objects are
    frozen."""
    run = ["train", "configs/quickstart.yaml", "actor.layout={}", "critic.layout={}"]
    wrong = [*run, f"run.directory={tmp_path / 'run'}", "data.train.source=tests.support.no_such:module"]
    for arguments, code, frozen_by in ((["settings", "actor.offload"], 0, "start"), (wrong, 2, "start_runtime")):
        (tmp_path / "program.py").write_text(PROGRAM.format(arguments=arguments, modules=EXCLUDED))
        done = start(tmp_path / "program.py")
        report = json.loads(done.stdout.rpartition("RESULT ")[2])
        assert (report["code"], report["loaded"]) == (code, []), done.stdout + done.stderr
        assert report["scan"] == report["images"] == "megappo.runtime.packages"
        assert report["usual"] and report["callers"] == [frozen_by] and report["frozen"] > 100_000


@pytest.mark.slow
@pytest.mark.waits
def test_commands_without_models_do_not_import_torch() -> None:
    """Each command runs in a separate process: `--help` without settings, plans of families with different layers,
    plans of estimators without a critic, and a search."""
    plans = [["configs/quickstart.yaml"], ["configs/quickstart.yaml", "algorithm.estimator=grpo", "critic=null"],
        ["configs/quickstart.yaml", "--search", "--gpus=2"], ["configs/gemma4_31b_2node_math.yaml"],
        ["configs/gpt_oss_20b_8gpu_gsm8k.yaml", "--gpus=8"],
        ["configs/deepseek_v3_32node_dapo_math.yaml", "--gpus=256", "--machine=h200"]]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS_ALONE, json.dumps([["--help"], *(["plan", *settings] for settings in plans)])],
        cwd=ROOT, env=environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    reports = [
        json.loads(line.removeprefix("RESULT ")) for line in done.stdout.splitlines() if line.startswith("RESULT ")
    ]
    assert all(code in (0, 1) for code, *_ in reports)  # 1: the plan does not fit
    of_plans = ["transformers", "pydantic", "yaml", "importlib.metadata"]
    assert [loaded for _, loaded, _ in reports] == [[]] + [of_plans] * len(plans)
    assert [listing for *_, listing in reports] == ["megappo.__main__"] + ["megappo.runtime.packages"] * len(plans)


def test_plan_with_model_code_can_import_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr("megappo.commands.plan.show_torch", lambda: shown.append("torch"))
    monkeypatch.chdir(ROOT)
    for trusted in ("false", "true"):
        assert main(["plan", "configs/quickstart.yaml", f"model.trust_remote_code={trusted}"]) == 0
        assert shown == ["torch"] * (trusted == "true")


@pytest.mark.usefixtures("usual")
@pytest.mark.parametrize(("chosen", "cuda"), [(True, False), (False, False), (True, True)])
def test_server_on_cpu_starts_without_cuda_modules(chosen: bool, cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """This applies to servers that megappo starts on a CPU. Garbage collection is enabled before the server forks."""
    monkeypatch.setenv("SGLANG_PLATFORM", cpu_platform.PLATFORM_NAME if chosen else "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(importlib.metadata, "packages_distributions", dict)
    monkeypatch.setattr(importlib.util, "find_spec", find_spec := importlib.util.find_spec)
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.delitem(sys.modules, "flashinfer")
    before = gc.get_threshold()
    assert (cpu_platform.activate() is None) == cuda
    hastened = chosen and not cuda
    assert ("flashinfer" in sys.modules) == hastened == (gc.get_threshold() != before)
    assert (importlib.metadata.packages_distributions is packages_distributions) == hastened
    assert (importlib.util.find_spec is not find_spec) == hastened
