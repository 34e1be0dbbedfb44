"""Tests of files of experience: exact round trips, several ranks, and rejection of invalid files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow
import pytest
import torch
from pyarrow import parquet
from torch import Tensor

from megappo.config import ConfigError, derive, load_config
from megappo.config.rules.experience import held_out
from megappo.observe.saved_samples import MARKER, saved_steps
from megappo.ppo.assembly.components import RunComponents
from megappo.ppo.records.experience_files import SavedSamples, read_samples, sample_ids_of, write_samples
from megappo.ppo.records.later_steps import forget_experience
from megappo.ppo.records.saved import ExperienceRecord, check_tokens, read_some
from tests.support.config import SHAPE
from tests.support.data import character_tokenizer
from tests.support.places import BASE
from tests.support.saved import samples


def flat(value: Any, mask_BR: Tensor | None = None) -> Any:
    """Return the content without padding, for comparison."""
    if isinstance(value, SavedSamples):
        rollouts = value.experience.scored.rollouts
        mask_BR = torch.arange(rollouts.response_mask_BR.shape[1])[None] < rollouts.response_lengths_B[:, None]
    if isinstance(value, Tensor):
        is_padded = mask_BR is not None and value.dim() == 2
        return (str(value.dtype), (value[mask_BR] if is_padded else value).tolist())
    if hasattr(value, "__dataclass_fields__"):
        return {name: flat(getattr(value, name), mask_BR) for name in value.__dataclass_fields__}
    if isinstance(value, tuple):
        return [flat(inner) for inner in value]
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("lengths", [(4, 1, 6), (), (1,)])
def test_saved_samples_are_read_exactly(tmp_path: Path, lengths: tuple[int, ...], whole: bool) -> None:
    """Every field is compared, for samples with all optional fields and with none. Half of a surrogate pair is
    replaced."""
    saved, path = samples(lengths, 4, whole=whole), tmp_path / "rank-00000.parquet"
    write_samples(path, saved, range(len(lengths)), str)
    loaded = read_samples(path)
    assert flat(loaded) == flat(saved)
    assert sample_ids_of(path) == saved.sample_ids
    ratios = (saved.experience.scored.old_logprob_BR - saved.experience.scored.rollouts.engine_logprob_BR).exp()
    rows = parquet.read_table(path).to_pylist()
    assert [row["ratios"] for row in rows] == [ratios[b, :n].tolist() for b, n in enumerate(lengths)]
    assert all(row["data_source"] == "math" for row in rows)
    assert [row["response_token_texts"] for row in rows] == [[str(10 + i) for i in range(n)] for n in lengths]


def test_selected_samples_of_several_ranks_are_read(tmp_path: Path) -> None:
    """The samples are selected by id from the files of two ranks, in the order of ids. A missing sample is an error."""
    folder = tmp_path / "step-000003"
    folder.mkdir()
    of_ranks = [samples((2, 3), 2), samples((5, 1), 0)]
    marker = {"step": 3, "run": "/runs/a", "ranks": 2, "saved": 4, "prompts_per_step": 2, "samples_per_prompt": 2}
    (folder / MARKER).write_text(json.dumps(marker | {"temperature": 1.0}))
    saved = saved_steps(tmp_path)[3]
    for rank, of_rank in enumerate(of_ranks):
        write_samples(saved.file(rank), of_rank, range(2), str)
    selected = read_some(saved, [1, 3])
    assert selected.sample_ids == [1, 3] and selected.experience.scored.rollouts.response_lengths_B.tolist() == [1, 3]
    assert selected.given_B.tolist() == [float(of_ranks[1].given_B[1]), float(of_ranks[0].given_B[1])]
    assert read_some(saved, []).sample_ids == []
    with pytest.raises(ValueError, match=r"step-000003 lacks samples that are listed in step\.json"):
        read_some(saved, [3, 4])
    assert check_tokens(selected, 16) is selected
    with pytest.raises(ValueError, match=r"saved samples contain token 12, but the models have 12 tokens; load"):
        check_tokens(selected, 12)


def test_invalid_files_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.parquet"
    parquet.write_table(pyarrow.table({"sample_id": [1]}), path)
    message = r"contains no saved samples \(.*prompt_tokens.*\); name the saved experience of a run"
    with pytest.raises(ValueError, match=message):
        read_samples(path)
    path.write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"is not a readable parquet file"):
        read_samples(path)
    (tmp_path / "step-000001").mkdir()
    (tmp_path / "step-000001" / MARKER).write_text("{}")
    with pytest.raises(ValueError, match=r"step\.json cannot be read .*; restore the folder as it was saved"):
        saved_steps(tmp_path)


@pytest.fixture
def record(tmp_path: Path, world_of_one: None) -> ExperienceRecord:
    """Return the record of a run that saves the first three samples of steps 1 and 2."""
    del world_of_one
    config = load_config(
        BASE, [f"run.directory={tmp_path / 'run'}", "logging.save_experience={steps: [1, 2], samples: 3}"]
    )
    runtime = SimpleNamespace(is_main=True, rank=0, world_size=1)
    return ExperienceRecord(
        cast(RunComponents, SimpleNamespace(config=config, runtime=runtime, tokenizer=character_tokenizer()))
    )


def test_record_contains_only_finished_steps(record: ExperienceRecord, tmp_path: Path) -> None:
    """The record has no steps that a resumed run repeats, no steps of other runs, and no files of unfinished steps."""
    folder, saved_samples = tmp_path / "run" / "experience", samples((2, 3, 1, 2))
    config = load_config(BASE, [f"run.directory={tmp_path / 'run'}", "logging.save_experience={}"])
    forget_experience(0, config)
    record.note(saved_samples.given_B)
    (folder / ".step-000002").mkdir(parents=True)
    (folder / ".step-000002" / "rank-00007.parquet").write_text("of a run with more ranks")
    assert [record.write(step, saved_samples.experience) for step in (1, 2, 3)] == ["", "", ""]
    assert [(step, saved.saved) for step, saved in saved_steps(folder).items()] == [(1, 3), (2, 3)]
    assert sorted(path.name for path in (folder / "step-000002").iterdir()) == ["rank-00000.parquet", MARKER]
    assert read_samples(folder / "step-000002" / "rank-00000.parquet").sample_ids == [0, 1, 2]
    forget_experience(1, config)
    assert list(saved_steps(folder)) == [1]
    marker = json.loads((folder / "step-000001" / MARKER).read_text())
    (folder / "step-000001" / MARKER).write_text(json.dumps(marker | {"run": "/runs/other"}))
    with pytest.raises(ValueError, match=r"experience has experience of /runs/other; set a different folder"):
        forget_experience(1, config)


def test_failed_save_returns_one_message(record: ExperienceRecord, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "experience").write_text("a file in its place")
    saved_samples = samples((2, 3))
    record.note(saved_samples.given_B)
    assert record.write(1, saved_samples.experience).startswith("the experience of step 1 is not saved: ")


def save(folder: Path, step: int, **other: Any) -> None:
    """Write the marker of a step with the base settings."""
    marker = {"step": step, "run": "/runs/a", "ranks": 1, "saved": 16, "prompts_per_step": 4, "samples_per_prompt": 4}
    (folder / f"step-{step:06d}").mkdir(parents=True)
    (folder / f"step-{step:06d}" / MARKER).write_text(json.dumps(marker | {"temperature": 1.0} | other))


def problems(*overrides: str) -> str:
    """Return the errors of the base settings with these overrides, on one rank."""
    sizes = [
        "rollout.prompts_per_step=4", "rollout.samples_per_prompt=4", "evaluation=null", "run.steps=2",
        "actor.optimizer.warmup_updates=0",
    ]  # fmt: skip
    roles = [f"{role}.{x}" for role in ("actor", "critic") for x in ("layout={}", "minibatch_sequences=16")]
    try:
        derive(load_config(BASE, [*sizes, *roles, *overrides]), 1, SHAPE)
    except ConfigError as error:
        return " | ".join(error.problems)
    return ""


def test_unusable_saved_steps_are_rejected(tmp_path: Path) -> None:
    """The errors come before the samples are loaded. Valid settings give no error."""
    load = f"rollout.load_from={tmp_path}"
    assert "holds no saved step" in problems(load)
    for step in (1, 2):
        save(tmp_path, step)
    assert problems(load) == ""
    assert "has no step 3, 4; set run.steps to 2, or save all steps" in problems(load, "run.steps=4")
    assert "has steps of 4 prompts x 4 samples, but the run has 8 x 4" in problems(load, "rollout.prompts_per_step=8")
    message = "rollout.temperature is 0.5, but the log-probabilities in rollout.load_from were computed at 1; set"
    assert message in problems(load, "rollout.temperature=0.5")
    marker = tmp_path / "step-000001" / MARKER
    recorded = marker.read_text()
    marker.write_text(json.dumps({**json.loads(recorded), "min_response_tokens": 3}))
    message = "rollout.min_response_tokens is 0, but the log-probabilities in rollout.load_from were computed with 3"
    assert message in problems(load)
    marker.write_text(recorded)
    assert "starts no engine, but evaluation needs one" in problems(load, "evaluation={every_steps: 1}")
    message = "draws no prompts, but data.curriculum selects prompts"
    assert message in problems(load, "data.curriculum={right_above: 0.9}")
    message = f"experience would be saved to {tmp_path}, which rollout.load_from reads"
    assert message in problems(load, f"rollout.save_to={tmp_path}")
    assert "both given" in problems(load, "rollout.replay_arrivals=runs/a")
    assert "there is no data to train on; set rollout.load_from" in problems("critic.pretraining={}")
    assert problems(load, "critic.pretraining={}", "run.steps=50") == ""
    message = "has 32 samples, of which 20 are held out; fewer than the 16 samples of a step remain"
    assert message in problems(load, "critic.pretraining={held_out_samples: 20}")
    save(tmp_path, 3, saved=5)
    message = "has 5 of the 16 samples of step 3; save all samples (logging.save_experience without samples)"
    assert message in problems(load, "run.steps=3")
    config = load_config(BASE, [load, "critic.pretraining={}"])
    assert [held_out(config, n) for n in (5, 40, 10**6)] == [1, 4, 16]
    with pytest.raises(ConfigError, match=r"logging\.save_experience\.samples"):
        load_config(BASE, ["logging.save_experience={samples: 0}"])
    assert replace(saved_steps(tmp_path)[3], saved=16).is_whole


@pytest.mark.parametrize(
    "other",
    [
        {"ranks": "2"}, {"ranks": 0}, {"ranks": 10**15}, {"saved": -1}, {"samples_per_prompt": 1.5},
        {"temperature": None},
    ],
)  # fmt: skip
def test_invalid_markers_are_rejected(tmp_path: Path, other: dict[str, Any]) -> None:
    save(tmp_path, 1, **other)
    assert "step.json cannot be read" in problems(f"rollout.load_from={tmp_path}", "run.steps=1")
