"""Wheel: the quickstart runs from any folder, all commands run with the dependencies of the wheel, and the package
`kernels` of Hugging Face can still be imported."""

from __future__ import annotations

import ast
import email
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from megappo import __version__
from megappo.commands.guide import TOPICS
from tests.support.places import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.waits]

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
NO_DEPENDENCIES = ["--no-deps", "--no-build-isolation"]
SMALL = ("rollout.prompts_per_step=4", "rollout.samples_per_prompt=2", "actor.minibatch_sequences=8",
         "critic.minibatch_sequences=8")  # fmt: skip


def clean() -> None:
    """Remove the build files from the repository."""
    for leftover in ("build", "megappo.egg-info"):
        shutil.rmtree(ROOT / leftover, ignore_errors=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run([*PIP, "wheel", *NO_DEPENDENCIES, "-w", str(out), str(ROOT)], check=True, cwd=out)
    clean()
    return next(out.glob("megappo-*.whl"))


def test_wheel_contains_both_packages_and_no_kernels(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {"megappo", "megappo_kernels"} <= tops
    assert "kernels" not in tops
    sources = {str(p.relative_to(ROOT / "kernels")) for p in (ROOT / "kernels").rglob("*.py")}
    assert sources <= set(names), "the wheel lacks modules of the kernels"
    assert {"megappo/py.typed", "megappo_kernels/py.typed"} <= set(names), "type checkers need the marker py.typed"
    assert "megappo/requirements.txt" in names, "the doctor reads this file"
    page = ROOT / "megappo/observe/page"
    assert {str(p.relative_to(ROOT)) for p in page.iterdir() if p.is_file()} <= set(names), (
        "the wheel lacks files of the report page"
    )
    assert {f"megappo/guides/{topic}.md" for topic in TOPICS} <= set(names), (
        "the wheel lacks documents for megappo guide"
    )
    scripts = {str(p.relative_to(ROOT)) for p in (ROOT / "launch").rglob("*.sh")} - {"launch/image.sh"}
    assert {f"megappo/shipped/{script}" for script in scripts} <= set(names), "the wheel lacks launch scripts"
    entry = next(n for n in names if n.endswith("entry_points.txt"))
    assert "megappo = megappo.__main__:start" in zipfile.ZipFile(wheel).read(entry).decode()


def test_wheel_metadata_is_correct(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    text = archive.read(next(n for n in archive.namelist() if n.endswith("METADATA"))).decode()
    about = email.message_from_string(text)
    assert (about["Name"], about["Version"]) == ("megappo", __version__)
    assert about.get_payload() == (ROOT / "README.md").read_text()
    assert about["Description-Content-Type"] == "text/markdown"
    assert about["License-Expression"] == "Apache-2.0" and "Typing :: Typed" in about.get_all("Classifier", [])
    runtime = [r for r in about.get_all("Requires-Dist", []) if "extra ==" not in r]
    lines = (ROOT / "megappo" / "requirements.txt").read_text().splitlines()
    assert {str(Requirement(r)) for r in runtime} == {str(Requirement(r)) for r in lines if not r.startswith("#")}


def test_quickstart_runs_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    """Start in an empty folder, without a clone of the repository in the path."""
    site, folder = tmp_path / "site", tmp_path / "here"
    folder.mkdir()
    subprocess.run([*PIP, "install", "--no-deps", "--target", str(site), str(wheel)], check=True, cwd=folder)
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(site), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "megappo", "quickstart", "run.steps=1", "evaluation=null", *SMALL]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    (run,) = (folder / "runs").glob("quickstart-*")
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["model"]["path"] == str(site / "megappo" / "shipped" / "configs" / "models" / "tiny_arithmetic")
    assert (run / "final" / "model.safetensors").exists()
    assert [path.name for path in folder.iterdir()] == ["runs"]


def required(names: Iterable[str]) -> dict[str, metadata.Distribution]:
    """Return the distributions of this environment that pip would install for these requirements."""
    distributions: dict[str, metadata.Distribution] = {}
    visited, todo = set(), [(Requirement(name), "") for name in names]
    while todo:
        requirement, extra = todo.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        distributions[name] = metadata.distribution(name)
        for extra_name in ("", *requirement.extras):
            if (name, extra_name) not in visited:
                visited.add((name, extra_name))
                todo += [(Requirement(inner), extra_name) for inner in distributions[name].requires or ()]
    return distributions


def link_distributions(distributions: dict[str, metadata.Distribution], site: Path) -> None:
    """Link the files of the distributions into another site-packages folder."""

    def entries(distribution: metadata.Distribution) -> set[str]:
        return {line.split(",")[0] for line in (distribution.read_text("RECORD") or "").splitlines() if line[0] != "."}

    others: set[str] = set()
    for distribution in metadata.distributions():
        if canonicalize_name(distribution.name) not in distributions:
            others |= {entry.split("/")[0] for entry in entries(distribution)}
    for distribution in distributions.values():
        tops = {tuple(entry.split("/")[: 2 if entry.split("/")[0] in others else 1]) for entry in entries(distribution)}
        for parts in tops:
            link, target = site.joinpath(*parts), Path(str(distribution.locate_file("/".join(parts))))
            link.parent.mkdir(exist_ok=True)
            if "__pycache__" not in parts and not link.exists():
                link.symlink_to(target)


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of an environment with only the packages of `pip install .`."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site = next(folder.glob("lib/python*/site-packages"))
    zipfile.ZipFile(wheel).extractall(site)
    (installed,) = metadata.distributions(name="megappo", path=[str(site)])
    link_distributions(required(r for r in installed.requires or () if "extra ==" not in r), site)
    return folder / "bin" / "python"


EVERY_COMMAND = """
import contextlib, importlib, importlib.util, pkgutil, sys
for extra in ("sglang", "wandb", "hypothesis", "math_verify"):
    assert importlib.util.find_spec(extra) is None, extra
from megappo.cli import main
config = sys.argv[1]
for command in ("quickstart", "train", "plan", "doctor", "serve", "eval", "export", "report"):
    with contextlib.suppress(SystemExit):
        main([command, "--help"])
codes = {
    "plan": main(["plan", config, "--gpus", "2"]),
    "dry run": main(["train", config, "--dry-run", "run.directory=" + sys.argv[2]]),
    "doctor": main(["doctor", config, "run.directory=" + sys.argv[2]]),
    "report": main(["report", sys.argv[2]]),
    "export": main(["export", sys.argv[2], sys.argv[2] + "-out"]),
}
for package in ("megappo", "megappo_kernels"):
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
print(codes)
"""


def test_every_command_runs_without_extras(bare: Path, tmp_path: Path) -> None:
    """Extras add engines, tasks and loggers. All subcommands start without extras."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for name in ("models", "quickstart.yaml"):
        (tmp_path / "configs").mkdir(exist_ok=True)
        (tmp_path / "configs" / name).symlink_to(ROOT / "configs" / name)
    arguments = [str(bare), "-c", EVERY_COMMAND, "configs/quickstart.yaml", str(tmp_path / "run")]
    done = subprocess.run(
        arguments, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    codes = ast.literal_eval(done.stdout.splitlines()[-1])
    assert (codes["plan"], codes["dry run"]) == (0, 0), done.stdout + done.stderr
    assert codes["doctor"] in (0, 1)  # the machine of this test may have problems
    assert (codes["report"], codes["export"]) == (2, 2)  # the run does not exist
    assert done.stdout.count("usage: megappo") == 8


@pytest.fixture(scope="module", params=["editable", "wheel"])
def interpreter(
    request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """Return the Python of an environment with megappo and the kernels of Hugging Face. Other packages are shared."""
    folder = tmp_path_factory.mktemp(request.param)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "parent.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    target = ["-e", str(ROOT)] if request.param == "editable" else [str(wheel)]
    install = [*PIP, "--python", str(python), "install", *NO_DEPENDENCIES]
    # Remove the path of the repository. Otherwise pip finds the files of a build and regards megappo as installed.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([*install, "kernels==0.17.2", *target], check=True, cwd=folder, env=environment)
    yield python
    clean()


@pytest.mark.parametrize("inside", [True, False])
def test_both_kernel_packages_can_be_imported(interpreter: Path, tmp_path: Path, inside: bool) -> None:
    code = (
        "import kernels, megappo\n"
        "from megappo_kernels.lm_head import linear_logprob\n"
        "print(kernels.__version__, megappo.__version__, linear_logprob.__name__)\n"
    )
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    where = ROOT if inside else tmp_path
    done = subprocess.run(
        [str(interpreter), "-c", code], cwd=where, env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["0.17.2", __version__, "linear_logprob"], done.stderr
