"""Which engine generates where nothing is said: decided once by the device, and told with what the other would take."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from megappo.cli import main
from megappo.commands import dry_run
from megappo.config import ConfigError, load_config, resolve, save_config
from megappo.config.derive import derive_run, describe
from megappo.doctor import software
from megappo.plan.deadlines import WATCHED_COLLECTIVE_SECONDS, planned_deadlines
from megappo.plan.engines import other_engine
from megappo.plan.here import machine_like, plan_start
from megappo.plan.machine_file import find_machine
from megappo.plan.machines import ASSUMED, MACHINES, Machine
from megappo.plan.planner import make_plan, read_models
from megappo.runtime import accelerations, device
from megappo.runtime.accelerations import Accelerations, Library
from tests.support.places import QUICKSTART, ROOT
from tests.support.plan import machine

SMALL = ROOT / "configs" / "qwen3_0.6b_1gpu_gsm8k.yaml"
MIDDLE = ROOT / "tests/support/qwen3_8b_8gpu.yaml"
EXPERTS = ROOT / "tests/support/qwen3_30b_a3b_4node.yaml"
UNSAID = ("rollout.engine=null", "rollout.sglang=null")


@pytest.fixture(autouse=True)
def in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize(("machine", "engine"), [("h100", "sglang"), ("cpu", "transformers")])
def test_the_plan_follows_the_machine_that_it_is_for(machine: str, engine: str) -> None:
    models = read_models(load_config(SMALL), ROOT / "configs" / "models").models
    unsaid, said = (
        make_plan(load_config(SMALL, [*UNSAID[:1], f"rollout.engine={word}", "rollout.sglang=null"]), models, m, 1)
        for m in [find_machine(machine)]
        for word in ("null", engine)
    )
    assert unsaid == said


@pytest.mark.parametrize(("on_cuda", "engine"), [(True, "sglang"), (False, "transformers")])
def test_the_default_is_resolved_once_and_is_seen(on_cuda: bool, engine: str, tmp_path: Path) -> None:
    config = resolve(load_config(QUICKSTART, UNSAID), on_cuda=on_cuda)
    assert dict(describe(config, derive_run(config, 2)))["rollout"].startswith(engine)
    save_config(config, tmp_path / "config.yaml")
    saved = load_config(tmp_path / "config.yaml")
    assert saved.rollout.engine == engine
    assert resolve(saved, on_cuda=not on_cuda).rollout.engine == engine  # what was chosen stays
    for given in ("sglang", "transformers"):
        chosen = resolve(load_config(QUICKSTART, [f"rollout.engine={given}"]), on_cuda=on_cuda)
        assert chosen.rollout.engine == given


def test_settings_of_servers_need_servers(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("rollout.engine=null", "rollout.sglang={tensor_parallel: 1}")
    assert main(["plan", str(QUICKSTART), "--machine", "cpu", *words]) == 2
    said = "rollout.sglang is given but rollout.engine is 'transformers', which is the default without CUDA"
    assert said in capsys.readouterr().err
    assert main(["plan", str(QUICKSTART), "--machine", "h100", *words, "model.dtype=bfloat16"]) == 0


def test_servers_on_gpus_have_no_float32(capsys: pytest.CaptureFixture[str]) -> None:
    """Their kernels end the server after a minute; where the other engine generates, the plan says why not SGLang."""
    assert main(["plan", str(QUICKSTART), "--machine", "h100", "rollout.engine=null"]) == 2
    said = "model.dtype is float32, which its GPU kernels do not support"
    remedy = "set model.dtype to bfloat16, or rollout.engine to transformers"
    assert f"rollout.engine is sglang, but {said}; {remedy}" in capsys.readouterr().err
    assert main(["plan", str(QUICKSTART), "--machine", "h100"]) == 0
    assert f"SGLang is not possible: {said}" in capsys.readouterr().out
    assert main(["plan", str(QUICKSTART), "--machine", "cpu", "rollout.engine=sglang"]) == 0


def test_the_default_engine_keeps_its_rules(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["rollout.engine=null", "rollout.when_stopped=keep", "rollout.sglang={deterministic: false}"]
    assert main(["plan", str(QUICKSTART), "--machine", "h100", *words]) == 2
    assert "rollout.when_stopped is keep and rollout.sglang.deterministic is false" in capsys.readouterr().err


@pytest.mark.waits
def test_a_dry_run_checks_the_engine_that_the_run_would_have_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What nobody named is planned for and run on this machine, which has neither GPUs nor SGLang."""
    installed = software.installed_version
    monkeypatch.setattr(software, "installed_version", lambda name: None if name == "sglang" else installed(name))
    monkeypatch.setattr(device, "runs_on_cuda", lambda settings: False)
    words = ["train", str(QUICKSTART), "--dry-run", *UNSAID, "runtime.device=auto", f"run.directory={tmp_path / 'run'}"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "transformers on every rank" in said and "SGLang is not installed" in said
    assert "plan             2 ranks on this machine's " in said and "with SGLang, the rollout would take" in said
    assert "H100" not in said
    assert main([*words, "--machine", "h100"]) == 2  # that is where it is to run
    assert "rollout.engine is sglang, which is not installed" in capsys.readouterr().err


@pytest.mark.waits
def test_a_dry_run_plans_for_other_machines_where_this_one_is_too_small(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", str(QUICKSTART), "--dry-run", f"run.directory={tmp_path / 'run'}"]
    small = dataclasses.replace(MACHINES["cpu"], memory_bytes=2.12e9, summary="a small machine")
    monkeypatch.setattr(dry_run, "this_machine", lambda: small)
    assert main(words) == 0
    plans = [line.split(None, 2)[2] for line in capsys.readouterr().out.splitlines() if " plan  " in line]
    assert plans[0].startswith("2 ranks on a small machine: does not fit: rank 1 needs ")
    assert plans[1].startswith("2 x H100 SXM, 80 GB instead: fits: ")
    assert plans[-1] == "--machine selects another machine"
    assert main([*words, "runtime.device=cuda"]) == 0
    assert "\nfine    plan             2 x H100 SXM, 80 GB: fits: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("path", "machine", "gpus", "given"),
    [
        (SMALL, "h100", 1, ()),
        (SMALL, "h100", 1, ("rollout.engine=transformers", "rollout.sglang=null")),
        (MIDDLE, "h100", 8, ("rollout.engine=transformers", "rollout.sglang=null", "rollout.dtype=float32")),
        (QUICKSTART, "cpu", 2, ()),
        (ROOT / "configs/sglang_disaggregated.yaml", "cpu", 2, ("rollout.ahead=2", "rollout.max_lag=2")),
    ],
)
def test_the_other_engine_is_what_its_overrides_make(
    path: Path, machine: str, gpus: int, given: tuple[str, ...]
) -> None:
    config, its_machine = load_config(path, given), MACHINES[machine]
    models = read_models(config, ROOT / "configs" / "models").models
    other = other_engine(config, models, its_machine, gpus)
    changed = load_config(path, [*given, *other.overrides])
    assert changed.rollout.engine == other.engine != config.rollout.engine
    found = make_plan(changed, models, its_machine, gpus)
    assert found.fits
    assert found.stages[0].seconds == other.rollout_seconds
    assert all(word in other.sentence for word in other.overrides)


def rollouts(path: Path, machine: Machine, gpus: int, tried: Iterable[list[str]]) -> list[float]:
    """Seconds of the rollouts that fit, by plans of all that is tried."""
    config = load_config(path)
    models = read_models(config, ROOT / "configs" / "models").models
    found = []
    for words in tried:
        try:
            plan = make_plan(load_config(path, words), models, machine, gpus)
        except ConfigError:  # no room for the longest sequence
            continue
        if plan.fits and plan.gpus + plan.server_gpus <= gpus:
            found.append(plan.stages[0].seconds)
    return found


def test_the_other_engine_has_the_best_settings_that_fit() -> None:
    """The embedded one with batches up to 512, servers of one, two, four or eight ranks with tenths of the memory; what
    is told is how the two compare."""
    machine, gpus = MACHINES["h100"], 8
    batches = [["rollout.engine=transformers", "rollout.sglang=null", f"rollout.generate_batch_sequences={2**n}"]
               for n in range(10)]  # fmt: skip
    servers = [["rollout.engine=sglang", f"rollout.sglang={{tensor_parallel: {tp}, memory_fraction: {tenths / 10}}}"]
               for tp in (1, 2, 4, 8) for tenths in range(1, 9)]  # fmt: skip
    models = read_models(load_config(SMALL), ROOT / "configs" / "models").models
    for given, others in ((servers[0], batches), (batches[0], servers)):
        config = load_config(SMALL, given)
        found, fitting = other_engine(config, models, machine, gpus), rollouts(SMALL, machine, gpus, others)
        best = min(fitting)
        assert found.rollout_seconds == best and len(fitting) < len(others)
        now = make_plan(config, models, machine, gpus).stages[0].seconds
        said = f"the rollout would take {best:.3g} seconds, "
        said += f"{best / now:.2g} times as long: " if best > now else f"{now / best:.2g} times faster: "
        assert said in found.sentence


def test_what_servers_are_tried() -> None:
    """A few samples of a large model are generated fastest by two ranks together, though a third has no server then;
    many long ones with the eight tenths of the memory that fit beside what stays of the roles."""
    roomy, large = (dataclasses.replace(MACHINES["b200"], memory_bytes=n) for n in (2e12, 3e11))
    embedded = ["rollout.engine=transformers", "rollout.sglang=null"]
    cases = (
        (MIDDLE, roomy, 3, ["rollout.prompts_per_step=3"], "rollout.sglang.tensor_parallel=2"),
        (MIDDLE, roomy, 4, ["rollout.prompts_per_step=4"], "rollout.sglang.tensor_parallel=4"),
        (SMALL, large, 1, ["rollout.max_response_tokens=8192"], "rollout.sglang.memory_fraction=0.8"),
    )
    for model, its_machine, gpus, changes, override in cases:
        models = read_models(load_config(model), ROOT / "configs" / "models").models
        config = load_config(SMALL, [*embedded, *changes])
        assert override in other_engine(config, models, its_machine, gpus).overrides


def test_engines_that_take_as_long_are_told_so() -> None:
    """Where starting kernels is all that takes time: one batch of a rank's 200 samples makes as many steps as a server
    that runs all 400 of them, two batches make twice as many."""
    instant = machine(is_cuda=False, shared_by_ranks=True, memory_bytes=1e15)
    for batch, words in ((200, "the same time as now: "), (100, "2 times faster: ")):
        config = load_config(QUICKSTART, ["rollout.engine=transformers", f"rollout.generate_batch_sequences={batch}"])
        models = read_models(config, None).models
        assert words in other_engine(config, models, instant, 2).sentence


def test_an_engine_that_does_not_fit_is_told() -> None:
    config = load_config(EXPERTS)
    models = read_models(config, ROOT / "configs" / "models").models
    other = other_engine(config, models, MACHINES["h100"], 32)
    assert (other.rollout_seconds, other.overrides) == (None, ())
    whole = "the embedded engine does not fit: the engine keeps a whole model on every rank"
    assert (
        other.sentence
        == f"{whole}, also during training; with `offload` of a role, the engine leaves the device during training"
    )
    config = load_config(EXPERTS, ["actor.offload=true"])
    assert other_engine(config, models, MACHINES["h100"], 32).sentence == whole


def test_sglang_is_faster_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(SMALL), "--machine", "h100", "--gpus", "1", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    rollout = content["plan"]["stages"][0]["seconds"]
    assert content["other_engine"]["engine"] == "transformers"
    assert content["other_engine"]["rollout_seconds"] > 2 * rollout
    assert main(["plan", str(SMALL), "--machine", "h100", "--gpus", "1"]) == 0
    assert "\nwith the embedded engine, the rollout would take " in capsys.readouterr().out


def test_a_run_is_told_its_plan_and_gets_its_deadlines() -> None:
    config = resolve(load_config(QUICKSTART, ["rollout.engine=sglang"]), on_cuda=False)
    layout = {"tensor_parallel": 1, "pipeline_parallel": 2, "pipeline_layers": (3, 1)}
    actor = config.actor.model_copy(update={"layout": config.actor.layout.model_copy(update=layout)})
    found = plan_start(config.model_copy(update={"actor": actor}), 2, MACHINES["cpu"])
    rows = dict(found.rows)
    assert rows["actor pipeline"] == "chunks of 3, 1 layers" and "critic pipeline" not in rows
    assert rows["layers"].startswith("torch's layers, because Transformer Engine "), "what it is without, and why"
    assert "and its rollout" in rows["plan"] and rows["other engine"].startswith("with the embedded engine, ")
    assert found.deadlines.request_seconds == 1800.0


def test_windows_of_shared_out_samples_need_torchs_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ring of Transformer Engine has none; without it, or without a window, nothing is refused."""
    folder = tmp_path / "model"
    folder.mkdir()
    found = json.loads((ROOT / "configs/models/tiny_arithmetic/config.json").read_text())
    window = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}
    (folder / "config.json").write_text(json.dumps({**found, "model_type": "qwen3", **window}))
    settings = [
        f"model.path={folder}",
        "actor.layout={context_parallel: 2}",
        "critic.layout={}",
        "model.dtype=bfloat16",
    ]
    config = resolve(load_config(QUICKSTART, settings), on_cuda=False)
    plan_start(config, 2, MACHINES["cpu"])
    engine = Accelerations(engine=Library("Transformer Engine", "2.10.0"))
    monkeypatch.setattr(accelerations, "find_accelerations", lambda _: engine)
    with pytest.raises(ConfigError) as caught:
        plan_start(config, 2, MACHINES["cpu"])
    assert str(caught.value) == (
        "actor.layout.context_parallel is 2 and the actor model has a sliding window, for which "
        "Transformer Engine 2.10.0 has no ring attention; set model.accelerations to torch, or "
        "actor.layout.context_parallel to 1"
    )
    plan_start(load_config(QUICKSTART, [*settings[1:], "rollout.engine=transformers"]), 2, MACHINES["cpu"])


def test_deadlines_follow_the_plan_where_none_are_given() -> None:
    config = resolve(load_config(SMALL), on_cuda=True)
    slow = planned_deadlines(config, {"rollout": 1000.0, "evaluate": 1000.0})
    assert slow.request_seconds == 4000.0
    assert slow.of_phases == {"rollout": 4000.0, "evaluate": 4000.0}
    assert slow.phase_seconds == config.runtime.phase_timeout_seconds
    for seconds in (2e5, 1e9):  # no limit is above a million seconds
        assert planned_deadlines(config, {"rollout": seconds}).request_seconds == min(4 * seconds, 1e6)
    fast = planned_deadlines(config, {"rollout": 10.0})
    assert fast.request_seconds == 1800.0 and fast.of_phases == {}
    long = planned_deadlines(config, {"rollout": 10.0, "update_actor": 1000.0, "forward": 10.0})
    assert long.of_phases == {"update_actor": 4000.0}


def test_settings_that_a_run_has_written_give_the_same_deadlines(tmp_path: Path) -> None:
    """The defaults of limits that follow from the plan are not written, as they would count as given then."""
    planned = {"rollout": 9000.0}
    for given in ([], ["runtime.collective_timeout_seconds=90000"], ["runtime.phase_timeout_seconds=null"]):
        config = resolve(load_config(SMALL, given), on_cuda=True)
        save_config(config, tmp_path / "config.yaml")
        assert load_config(tmp_path / "config.yaml") == config
        assert planned_deadlines(load_config(tmp_path / "config.yaml"), planned) == planned_deadlines(config, planned)


def test_a_start_may_last_as_long_as_its_reading_and_its_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose own limit is to end a server that does not answer, with what it said, and not the watchdog."""
    slow = resolve(load_config(SMALL, ["rollout.sglang.start_timeout_seconds=3000"]), on_cuda=True)
    assert planned_deadlines(slow, {"rollout": 1.0, "start": 100.0}).of_phases == {"start": 3700.0}
    config = resolve(load_config(QUICKSTART), on_cuda=False)
    disk = dataclasses.replace(ASSUMED, checkpoint_bytes_per_second=1e3)
    for room in ("here", "stopping"):
        monkeypatch.setattr(f"megappo.plan.{room}.ASSUMED", disk)
    limits = plan_start(config, 2, MACHINES["cpu"]).deadlines.of_phases
    assert limits["start"] > limits["export"] > 1500  # the models, too


def test_no_collective_fails_in_a_phase_that_may_go_on() -> None:
    """Whoever waits in one for a rank that still generates is ended by the watchdog, which knows of the tokens."""
    planned = {"rollout": 1000.0}
    watched = planned_deadlines(load_config(SMALL), planned)
    assert watched.collective_seconds == WATCHED_COLLECTIVE_SECONDS > 1e5
    alone = planned_deadlines(load_config(SMALL, ["runtime.phase_timeout_seconds=null"]), planned)
    assert alone.collective_seconds == 1800
    given = load_config(SMALL, ["runtime.collective_timeout_seconds=3999"])
    with pytest.raises(ConfigError, match=r"seconds is 3999, but a phase \(rollout\) may last 4000 seconds"):
        planned_deadlines(given, planned)
    given = load_config(SMALL, ["runtime.collective_timeout_seconds=4001"])
    assert planned_deadlines(given, planned).collective_seconds == 4001


@pytest.mark.parametrize(
    ("given", "phases", "request_seconds"),
    [
        ("runtime.phase_timeouts_seconds={rollout: 60}", {"rollout": 60.0, "evaluate": 4000.0}, 4000.0),
        ("runtime.phase_timeout_seconds=70", {}, 4000.0),
        ("runtime.phase_timeout_seconds=null", {}, 4000.0),
        ("rollout.sglang.request_timeout_seconds=80", {"rollout": 4000.0, "evaluate": 4000.0}, 80.0),
    ],
)
def test_deadlines_that_are_given_stay(given: str, phases: dict[str, float], request_seconds: float) -> None:
    found = planned_deadlines(load_config(SMALL, [given]), {"rollout": 1000.0, "evaluate": 1000.0})
    assert found.of_phases == phases
    assert found.request_seconds == request_seconds


def test_a_longer_response_has_later_deadlines() -> None:
    limits = []
    for tokens in (1024, 32768):
        words = [f"rollout.max_response_tokens={tokens}", "actor.microbatch_budget_tokens=65536"]
        words += ["critic.microbatch_budget_tokens=65536", f"model.path={ROOT / 'configs/models/Qwen3-0.6B'}"]
        config = resolve(load_config(SMALL, words), on_cuda=True)
        limits.append(plan_start(config, 1, MACHINES["h100"]).deadlines.request_seconds)
    assert limits[0] == 1800.0 and limits[1] > 5000.0


@pytest.mark.parametrize(
    ("device", "gigabytes", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", 42.3, "a100-40"),
        ("NVIDIA A100-SXM4-80GB", 85.0, "a100-80"),
        ("NVIDIA H100 80GB HBM3", 85.0, "h100"),
        ("NVIDIA H200", 150.0, "h200"),
        ("NVIDIA H20", 102.0, "h20"),
        ("NVIDIA L40S", 47.7, "l40s"),
        ("Some GPU", 12.0, "h100"),
    ],
)
def test_a_device_is_found_in_the_table(device: str, gigabytes: float, name: str) -> None:
    found = machine_like(device, gigabytes * 1e9)
    assert (found.name, found.memory_bytes) == (name, gigabytes * 1e9)
