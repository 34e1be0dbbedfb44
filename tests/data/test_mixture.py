"""Order of prompts: epochs and restarts, weighted sources, resting prompts and resumed runs."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.checkpoint.changes import Changes, compare_settings
from megappo.commands.dry_run import dry_run
from megappo.config import load_config
from megappo.config.sections.data import CurriculumSettings, DataSettings, DataSourceSettings, MixedSourceSettings
from megappo.data import Cursor, PromptDataset, read_prompts, training_cursor
from megappo.data.curriculum import Curriculum
from megappo.data.mixture import MixedCursor, MixedPrompts
from megappo.ppo.rollout.sampling import prompts_of_rank
from tests.support.data import character_tokenizer
from tests.support.places import BASE, QUICKSTART

ORDER = {"seed": 1, "shuffle": True}
LARGE_SEEDS = {
    4097: [5, 3, 0, 2, 1, 4, 7, 6, 7, 0, 1, 5, 2, 3, 4, 6],
    2**32 + 5: [3, 5, 7, 2, 6, 4, 1, 0, 5, 6, 3, 2, 4, 7, 0, 1],
    2**62 + 1: [4, 0, 2, 1, 5, 7, 3, 6, 0, 2, 6, 1, 7, 4, 5, 3],
}
"""Seeds with the expected order of two epochs over eight prompts."""


def cursor(size: int = 5, seed: int = 1, shuffle: bool = True, fingerprint: str = "f" * 64) -> Cursor:
    return Cursor(size, seed, shuffle, fingerprint=fingerprint)


def test_each_epoch_has_all_prompts_in_new_order() -> None:
    walk = cursor(size=20)
    epochs = [walk.take(20) for _ in range(3)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 3
    assert (walk.epoch, walk.position) == (3, 0)


def test_takes_cross_epochs() -> None:
    one_by_one, at_once = cursor(), cursor()
    assert [one_by_one.take(1)[0] for _ in range(13)] == at_once.take(13)
    assert (at_once.epoch, at_once.position) == (2, 3) == (one_by_one.epoch, one_by_one.position)


def test_file_order() -> None:
    assert cursor(size=3, shuffle=False).take(7) == [0, 1, 2, 0, 1, 2, 0]


def test_different_and_large_seeds() -> None:
    assert cursor(size=50, seed=1).take(50) != cursor(size=50, seed=2).take(50)
    assert sorted(cursor(seed=2**62 + 1).take(5)) == list(range(5))


def test_order_depends_on_all_bits_of_a_seed() -> None:
    """The CPU generator of torch reads 32 bits, and the epoch uses some of the bits."""
    seeds = [*range(1, 9), *(1 + 4096 * k for k in range(1, 9)), 2**32 + 1, 2**44 + 1]
    orders = [tuple(cursor(size=50, seed=seed).take(50)) for seed in seeds]
    assert len(set(orders)) == len(seeds)


def test_order_is_stable_across_versions() -> None:
    """Later versions must resume existing runs."""
    assert cursor(size=8, seed=1).take(16) == [6, 1, 3, 2, 4, 5, 0, 7, 3, 5, 6, 7, 4, 2, 0, 1]
    for seed, order in LARGE_SEEDS.items():
        assert cursor(size=8, seed=seed).take(16) == order


@pytest.mark.parametrize("taken", [0, 3, 5, 17])
def test_cursor_resumes_at_its_position(taken: int) -> None:
    before = cursor()
    before.take(taken)
    after = cursor()
    after.load_state_dict(before.state_dict())
    assert after.take(9) == before.take(9)
    assert after.state_dict() == before.state_dict()


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        (
            {**ORDER, "epoch": 0, "position": 0, "fingerprint": "e" * 64},
            "of the source differ from the start of the run: the data, the tokenizer",
        ),
        ({**ORDER, "epoch": 0, "position": 5, "fingerprint": "f" * 64}, "outside of 5 prompts"),
        ({**ORDER, "epoch": 0}, "lacks fingerprint, position"),
        ({**ORDER, "epoch": 0, "position": 0, "fingerprint": "f" * 64, "seed": 2}, "cursor has run.seed 2"),
        ({**ORDER, "epoch": 0, "position": 0, "fingerprint": "f" * 64, "shuffle": False}, "data.shuffle false, but"),
    ],
)
def test_states_of_other_data_are_rejected(state: dict[str, object], sentence: str) -> None:
    walk = cursor()
    with pytest.raises(ValueError, match=sentence):
        walk.load_state_dict(state)
    assert (walk.epoch, walk.position) == (0, 0)


def test_empty_data_is_rejected() -> None:
    with pytest.raises(ValueError, match="dataset_size is 0"):
        cursor(size=0)


SIZES = {"web": 7, "math": 5, "code": 3}


def read(weights: dict[str, float], folder: Path, **more: object) -> MixedPrompts:
    for name in weights:
        lines = [json.dumps({"prompt": f"{name}{'+' * i}", "answer": "1"}) for i in range(SIZES[name])]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    mixture = {n: MixedSourceSettings(source=str(folder / f"{n}.jsonl"), weight=w) for n, w in weights.items()}
    data_settings = DataSettings.model_validate(
        {"mixture": mixture, "max_prompt_tokens": 20, "apply_chat_template": False, **more}
    )
    prompts = read_prompts(data_settings, character_tokenizer())
    assert isinstance(prompts, MixedPrompts)
    return prompts


@cache
def three_prompts() -> PromptDataset:
    source = DataSourceSettings(source="megappo.data.arithmetic:sums", options={"max_operand": 1}, limit=3)
    data_settings = DataSettings(train=source, max_prompt_tokens=20, apply_chat_template=False)
    return PromptDataset(source, data_settings, character_tokenizer())


def mixed(weights: list[float]) -> MixedPrompts:
    return MixedPrompts({f"s{i}": (weight, three_prompts()) for i, weight in enumerate(weights)})


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    weights=st.lists(st.sampled_from([1e-6, 0.01, 0.1, 0.3, 1 / 3, 0.7, 1.0, 2.5, 7.0, 1e6]), min_size=1, max_size=9),
    seed=st.integers(0, 2**63 - 1),
)
def test_source_counts_stay_within_one_of_their_share(weights: list[float], seed: int) -> None:
    cursor = MixedCursor(mixed(weights), seed, shuffle=True)
    shares = [Fraction(str(weight)) for weight in weights]
    for n in range(1, 120):
        cursor.take(1)
        for share, taken in zip(shares, cursor.taken, strict=True):
            assert abs(taken - n * share / sum(shares)) < 1, (n, cursor.taken)


def test_each_source_has_separate_epochs(tmp_path: Path) -> None:
    prompts = read({"web": 2.0, "math": 1.0, "code": 1.0}, tmp_path)
    assert (len(prompts), prompts.names) == (15, ("code", "math", "web"))
    taken = [prompts[i] for i in training_cursor(prompts, data(prompts), 3).take(28)]
    assert Counter(p.source for p in taken) == {"web": 14, "math": 7, "code": 7}
    of_web = [p.index for p in taken if p.source == "web"]
    assert sorted(of_web[:7]) == sorted(of_web[7:]) == list(range(7)) and of_web[:7] != of_web[7:]
    assert all(prompts[prompts.position_of(p)] is p for p in taken)
    assert all(p.text.startswith(p.source) for p in taken)


def data(prompts: MixedPrompts) -> DataSettings:
    """Return data settings for a cursor of these prompts."""
    return DataSettings(mixture={n: MixedSourceSettings(source="a.jsonl") for n in prompts.names}, max_prompt_tokens=20)


def test_order_depends_on_seed_and_names(tmp_path: Path) -> None:
    prompts = read({"web": 1.0, "math": 1.0, "code": 1.0}, tmp_path)
    again = read({"code": 1.0, "web": 1.0, "math": 1.0}, tmp_path)
    orders = [training_cursor(p, data(p), seed).take(30) for p, seed in ((prompts, 1), (again, 1), (prompts, 2))]
    assert orders[0] == orders[1] != orders[2]
    of_web = [[prompts[i].index for i in order if prompts[i].source == "web"] for order in orders]
    assert of_web[0] != of_web[2]
    turns = {tuple(prompts[i].source for i in training_cursor(prompts, data(prompts), s).take(3)) for s in range(20)}
    assert len(turns) > 2  # the seed breaks ties between sources


def test_ranks_share_one_order(tmp_path: Path) -> None:
    prompts = read({"web": 2.0, "math": 1.0}, tmp_path)
    taken = training_cursor(prompts, data(prompts), 3).take(10)
    for ranks in (1, 2, 3, 4):
        world: list[Any] = [SimpleNamespace(rank=rank, world_size=ranks) for rank in range(ranks)]
        parts = [prompts_of_rank(prompts, taken, runtime).prompts for runtime in world]
        assert [p for part in parts for p in part] == [prompts[i] for i in taken]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    weights=st.lists(st.sampled_from([0.1, 1.0, 2.5]), min_size=1, max_size=3),
    before=st.integers(0, 40),
    right=st.lists(st.integers(0, 2), max_size=3),
    most=st.sampled_from([0.0, 0.4, 0.9]),
)
def test_resumed_mixture_continues_the_order(weights: list[float], before: int, right: list[int], most: float) -> None:
    def fresh() -> MixedCursor:
        return MixedCursor(mixed(weights), 5, shuffle=True, most_resting=most)

    whole, other = fresh(), fresh()
    whole.take(before)
    whole.rest(right, 2)
    whole.take(4)
    state = json.loads(json.dumps(whole.state_dict()))
    other.load_state_dict(state)
    assert other.take(50) == whole.take(50)
    assert other.state_dict() == whole.state_dict() and (other.resting, other.taken) == (whole.resting, whole.taken)


def test_changed_weights_are_rejected(tmp_path: Path) -> None:
    prompts, others = read({"web": 2.0, "math": 1.0}, tmp_path), read({"web": 1.0, "math": 1.0}, tmp_path)
    state = training_cursor(prompts, data(prompts), 3).state_dict()
    with pytest.raises(ValueError, match=r"the sources of data.mixture or their weights differ from the start"):
        training_cursor(others, data(others), 3).load_state_dict(state)
    single = Cursor(3, 3, True, fingerprint="f" * 64).state_dict()
    with pytest.raises(ValueError, match=r"the sources of data.mixture or their weights differ from the start"):
        training_cursor(prompts, data(prompts), 3).load_state_dict(single)


def test_changed_files_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The changed file is one source of a mixture or the only source."""
    weights = {"web": 2.0, "math": 1.0}
    before = read(weights, tmp_path)
    state = training_cursor(before, data(before), 3).state_dict()
    monkeypatch.setitem(SIZES, "math", SIZES["math"] + 1)
    changed, now = tmp_path / "math.jsonl", read(weights, tmp_path)
    with pytest.raises(ValueError, match=rf"answers of data.mixture.math, '{changed}', differ from the start"):
        training_cursor(now, data(now), 3).load_state_dict(state)
    alone = DataSettings(train=DataSourceSettings(source=str(changed)), max_prompt_tokens=20, apply_chat_template=False)
    state = training_cursor(read_prompts(alone, character_tokenizer()), alone, 3).state_dict()
    changed.write_text(json.dumps({"prompt": "yet another"}))
    with pytest.raises(ValueError, match=rf"answers of data.train, '{changed}', differ from the start"):
        training_cursor(read_prompts(alone, character_tokenizer()), alone, 3).load_state_dict(state)


def test_single_source_keeps_its_order(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"prompt": "x" * (i + 1)}) for i in range(8)))
    source = DataSourceSettings(source=str(tmp_path / "a.jsonl"))
    data_settings = DataSettings(train=source, max_prompt_tokens=20, apply_chat_template=False)
    prompts = read_prompts(data_settings, character_tokenizer())
    cursor = training_cursor(prompts, data_settings, 1)
    assert cursor.take(16) == [6, 1, 3, 2, 4, 5, 0, 7, 3, 5, 6, 7, 4, 2, 0, 1]
    assert cursor.state_dict().keys() == {"epoch", "position", "fingerprint", "seed", "shuffle"}
    assert prompts[0].source == ""


def resting_cursor(size: int, most: float) -> Cursor:
    return Cursor(size, 1, shuffle=False, fingerprint="f" * 64, most_resting=most)


def test_prompts_rest_in_the_next_epochs() -> None:
    cursor = resting_cursor(6, 0.5)
    cursor.take(4)
    cursor.rest([1, 2], epochs=2)
    assert cursor.take(2) == [4, 5] and cursor.resting == 2  # the current epoch does not change
    assert cursor.take(8) == [0, 3, 4, 5] * 2 and cursor.resting == 0
    assert cursor.take(6) == list(range(6))


def test_resting_prompts_apply_to_the_next_epoch() -> None:
    cursor = resting_cursor(3, 0.5)
    cursor.take(3)
    cursor.rest([1], epochs=1)
    assert cursor.take(5) == [0, 2, 0, 1, 2]


def test_number_of_resting_prompts_is_limited() -> None:
    cursor = resting_cursor(6, 0.5)
    cursor.take(1)
    cursor.rest([0, 1], epochs=1)
    cursor.rest([2, 3, 4, 5], epochs=2)
    cursor.take(5)
    assert cursor.resting == 3 and cursor.take(3) == [0, 1, 5]  # prompts with the shortest rest and the last prompt
    assert cursor.take(3) == [0, 1, 5]
    assert cursor.take(6) == list(range(6))
    alone = resting_cursor(1, 0.99)
    alone.rest([0], epochs=5)
    assert alone.take(3) == [0, 0, 0]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(size=st.integers(1, 12), most=st.floats(0.01, 0.999), epochs=st.integers(1, 4), draws=st.data())
def test_all_resting_prompts_return(size: int, most: float, epochs: int, draws: st.DataObject) -> None:
    """For any correct answers, no epoch is empty, exceeds the limit of resting prompts, or repeats a prompt."""
    cursor = Cursor(size, 3, True, fingerprint="f", most_resting=most)
    last_seen = [0] * size
    for epoch in range(1, 13):
        in_pass = size - cursor.resting
        assert in_pass >= 1 and cursor.resting <= size * most
        before = draws.draw(st.integers(1, in_pass))
        taken = cursor.take(before)
        cursor.rest(draws.draw(st.lists(st.sampled_from(taken))), epochs)
        taken += cursor.take(in_pass - before)
        assert len(set(taken)) == len(taken)
        for i in taken:
            last_seen[i] = epoch
        assert min(last_seen) >= epoch - epochs


@pytest.mark.parametrize(("ahead", "first_without"), [(0, 2), (1, 3)])
def test_prompts_rest_after_their_rewards(ahead: int, first_without: int) -> None:
    """Epochs and steps have two prompts. With `ahead=1`, the next step is drawn before the rewards are available."""
    cursor = resting_cursor(2, 0.5)
    settings_ = CurriculumSettings(right_above=0.5, rest_epochs=100)
    curriculum = Curriculum(settings_, cursor, ahead)
    taken = []
    for step in range(1, 6):
        curriculum.before_drawing(step)
        taken.append(cursor.take(2))
        if step == 1:
            curriculum.note(step, [1])
            state = json.loads(json.dumps(curriculum.state_dict()))
            curriculum = Curriculum(settings_, cursor, ahead)
            curriculum.load_state_dict(state)
    assert taken == [[0, 1]] * (first_without - 1) + [[0, 0]] * (6 - first_without)


@pytest.mark.waits
def test_dry_run_reports_each_source(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    few, many = (
        f"{{source: 'megappo.data.arithmetic:sums', options: {{max_operand: {most}}}, weight: {weight}}}"
        for most, weight in ((1, 1.0), (2, 2.5))
    )
    quickstart = QUICKSTART
    overrides = ["data.train=null", f"data.mixture={{few: {few}, many: {many}}}", f"run.directory={tmp_path / 'run'}"]
    overrides += [f"model.path={quickstart.parent / 'models' / 'tiny_arithmetic'}", "run.steps=10"]
    dry_run(load_config(quickstart, overrides), str(quickstart), [])
    output = " ".join(capsys.readouterr().out.split())
    assert "28.6% few (megappo.data.arithmetic:sums)" in " ".join(output.replace("│", "").split())
    assert "data 4 prompts of megappo" in output and "data 9 prompts of megappo" in output
    assert "epochs 10 steps are 35.7 epochs of few, 28.6% of all prompts" in output
    assert "epochs 10 steps are 39.7 epochs of many, 71.4% of all prompts" in output
    assert "scores the answers of few 1 and empty" in output and "scores the answers of many 1 and empty" in output


def test_changed_sources_need_force() -> None:
    now = load_config(BASE, ["evaluation=null"]).model_dump(mode="json")
    before = {**now, "data": {k: v for k, v in now["data"].items() if k not in NEW}}  # older settings
    assert compare_settings(before, now, (10, 10)) == Changes((), ())
    source = now["data"]["train"]
    mixture = {"a": {**source, "weight": 1.0}, "b": {**source, "weight": 2.0}}
    mixed = {**now, "data": {**now["data"], "train": None, "mixture": mixture}}
    assert any(
        change.startswith("data.mixture.a.source: ") for change in compare_settings(now, mixed, (10, 10)).dangerous
    )
    heavier = {**mixed, "data": {**mixed["data"], "mixture": {**mixture, "b": {**source, "weight": 3.0}}}}
    assert compare_settings(mixed, heavier, (10, 10)) == Changes((), ("data.mixture.b.weight: 2.0 -> 3.0",))
    sets = {**now, "data": {**now["data"], "validation_sets": {"a": {**source, "samples": 2}}}}
    assert compare_settings(now, sets, (10, 10)).dangerous == ()


NEW = ("mixture", "curriculum", "validation_sets")


@settings(max_examples=30, deadline=None, derandomize=True)
@given(ahead=st.sampled_from([0, 1]), stopped_after=st.integers(1, 9), modulus=st.integers(2, 4))
def test_stopped_run_draws_the_same_prompts(ahead: int, stopped_after: int, modulus: int) -> None:
    """The test follows the trainer. With `ahead=1`, the next step is drawn before the rewards of the current step are
    available. The checkpoint has the state of the cursor before this draw."""

    def fresh() -> tuple[Cursor, Curriculum]:
        cursor = Cursor(7, 1, True, fingerprint="f", most_resting=0.6)
        return cursor, Curriculum(CurriculumSettings(right_above=0.5, rest_epochs=2), cursor, ahead)

    def steps(stop: int | None) -> list[list[int]]:
        cursor, curriculum = fresh()
        drawn: dict[int, tuple[dict[str, Any], list[int]]] = {}

        def draw(step: int) -> None:
            curriculum.before_drawing(step)
            drawn[step] = cursor.state_dict(), cursor.take(4)

        for step in range(1, 11):
            if step not in drawn:
                draw(step)
            if ahead:
                draw(step + 1)
            curriculum.note(step, [i for i in drawn[step][1] if i % modulus == 0])
            if step == stop:
                before = drawn[step + 1][0] if ahead else cursor.state_dict()
                saved = json.loads(json.dumps([before, curriculum.state_dict()]))
                cursor, curriculum = fresh()
                cursor.load_state_dict(saved[0])
                curriculum.load_state_dict(saved[1])
                drawn.pop(step + 1, None)
        return [drawn[step][1] for step in range(1, 11)]

    assert steps(None) == steps(stopped_after)
    assert len({i for step in steps(None)[-6:] for i in step}) > 4
