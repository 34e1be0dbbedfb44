"""Tests of names of settings in older versions: `rollout.engine: sglang` and `rollout.sglang`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megappo.checkpoint.changes import Changes, compare_settings
from megappo.config import Config, ConfigError, derive_run, load_config
from megappo.config.load import save_config
from tests.support.places import QUICKSTART

OF_ENGINE = "rollout.engine: sglang is now rollout.servers.kind: sglang"
OF_SECTION = "rollout.sglang is now rollout.servers"


@pytest.fixture(autouse=True)
def in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(QUICKSTART.parents[1])


def written(folder: Path, **rollout: Any) -> Path:
    """Write the quickstart with other settings of the engine."""
    settings = yaml.safe_load(QUICKSTART.read_text())
    del settings["rollout"]["engine"]
    settings["rollout"] |= rollout
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.mark.parametrize(
    ("old", "new", "notes"),
    [
        ({"engine": "sglang"}, {"servers": {"kind": "sglang"}}, (OF_ENGINE,)),
        ({"engine": "sglang", "sglang": None}, {"servers": {"kind": "sglang"}}, (OF_ENGINE, OF_SECTION)),
        (
            {"engine": "sglang", "sglang": {"engines": 2, "threads": 1}},
            {"servers": {"count": 2, "threads": 1}},
            (OF_ENGINE, OF_SECTION),
        ),
        ({"sglang": {"nodes": 2}}, {"servers": {"nodes": 2}}, (OF_SECTION,)),
        ({"engine": "transformers", "sglang": None}, {"engine": "transformers"}, (OF_SECTION,)),
        ({"engine": None, "sglang": None}, {}, (OF_SECTION,)),
        ({"servers": {"nodes": 2}}, {"servers": {"nodes": 2}}, ()),
    ],
)
def test_old_names_in_a_file_are_replaced(
    old: dict[str, Any], new: dict[str, Any], notes: tuple[str, ...], tmp_path: Path
) -> None:
    config = load_config(written(tmp_path, **old))
    assert config.rollout == load_config(written(tmp_path, **new)).rollout
    assert config.old_names == notes
    recorded = Config.model_validate(yaml.safe_load(written(tmp_path, **old).read_text()))  # as of a checkpoint
    assert (recorded.rollout, recorded.old_names) == (config.rollout, notes)
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml").old_names == ()


@pytest.mark.parametrize(
    ("old", "new", "notes"),
    [
        (["rollout.engine=sglang"], ["rollout.servers.kind=sglang"], (OF_ENGINE,)),
        (["rollout.sglang={engines: 2}"], ["rollout.servers={count: 2}"], (OF_SECTION,)),
        (
            ["rollout.engine=sglang", "rollout.sglang.engines=2", "rollout.servers.threads=1"],
            ["rollout.servers={count: 2, threads: 1}"],
            (OF_ENGINE, "rollout.sglang.engines is now rollout.servers.count"),
        ),
        (
            ["rollout.sglang.environment.LEVEL=1"],
            ["rollout.servers.environment.LEVEL=1"],
            ("rollout.sglang.environment.LEVEL is now rollout.servers.environment.LEVEL",),
        ),
        (["rollout.engine=transformers", "rollout.sglang=null"], ["rollout.engine=transformers"], (OF_SECTION,)),
    ],
)
def test_old_names_in_overrides_are_replaced(old: list[str], new: list[str], notes: tuple[str, ...]) -> None:
    config = load_config(QUICKSTART, old)
    assert config.rollout == load_config(QUICKSTART, new).rollout
    assert config.old_names == notes


def test_old_names_in_a_second_file_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "more.yaml").write_text("rollout: {sglang: {engines: 2}}\n")
    config = load_config("configs/sglang_quickstart.yaml", [str(tmp_path / "more.yaml")])
    expected = load_config("configs/sglang_quickstart.yaml", ["rollout.servers.count=2"])
    assert (config.rollout, config.old_names) == (expected.rollout, (OF_SECTION,))


def test_one_note_names_the_current_spelling(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, engine="sglang", sglang={"threads": 1}))
    notes = [note for note in derive_run(config, 2).notes if "is now" in note]
    assert notes == [f"{OF_ENGINE}; {OF_SECTION}: use the current names"]


def test_unknown_settings_under_old_names_are_reported() -> None:
    with pytest.raises(ConfigError, match="did you mean rollout.servers.memory_fraction"):
        load_config(QUICKSTART, ["rollout.sglang.memory_fractio=0.5"])


def test_engine_and_servers_replace_each_other() -> None:
    """An override of one removes the other from the file. Both together are refused."""
    assert load_config("configs/sglang_quickstart.yaml", ["rollout.engine=transformers"]).rollout.servers is None
    servers = load_config(QUICKSTART, ["rollout.servers.threads=1"])
    assert servers.rollout.engine is None and servers.rollout.engine_name == "sglang"
    with pytest.raises(ConfigError, match="engine 'transformers' and servers are both given"):
        load_config(QUICKSTART, ["rollout.engine=transformers", "rollout.servers={}"])


def test_recorded_settings_are_compared_under_current_names() -> None:
    now = load_config("configs/sglang_quickstart.yaml").model_dump(mode="json")
    servers = dict(now["rollout"]["servers"])
    servers["engines"] = servers.pop("count")
    del servers["kind"]
    rollout = {name: value for name, value in now["rollout"].items() if name != "servers"}
    before = now | {"rollout": rollout | {"engine": "sglang", "sglang": servers}}
    assert compare_settings(before, now, (10, 10)) == Changes((), ())
    other = before | {"rollout": rollout | {"engine": "sglang", "sglang": servers | {"engines": 3}}}
    assert compare_settings(other, now, (10, 10)) == Changes(("rollout.servers.count: 3 -> 1",), ())
    defaults = load_config(QUICKSTART, ["rollout.servers={}"]).model_dump(mode="json")
    rollout = {name: value for name, value in defaults["rollout"].items() if name != "servers"}
    unset = defaults | {"rollout": rollout | {"engine": "sglang", "sglang": None}}
    assert compare_settings(unset, defaults, (10, 10)) == Changes((), ())
