"""The default of `rollout.engine`, which depends on the device, and the comparison with the other engine."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from megappo.cli import main
from megappo.commands import dry_run
from megappo.config import ConfigError, load_config, resolve, save_config
from megappo.config.derive import derive_run, describe
from megappo.doctor import software
from megappo.plan.deadlines import WATCHED_COLLECTIVE_SECONDS, planned_deadlines
from megappo.plan.engines import other_engine
from megappo.plan.hardware.machine_file import find_machine
from megappo.plan.hardware.machines import ASSUMED, MACHINES, Machine
from megappo.plan.here import machine_like, plan_start
from megappo.plan.planner import make_plan, read_models
from megappo.runtime import accelerations, device
from megappo.runtime.accelerations import Accelerations, Library
from tests.support.places import QUICKSTART, ROOT
from tests.support.plan import machine

SMALL = ROOT / "configs" / "qwen3_0.6b_1gpu_gsm8k.yaml"
MIDDLE = ROOT / "tests/support/qwen3_8b_8gpu.yaml"
EXPERTS = ROOT / "tests/support/qwen3_30b_a3b_4node.yaml"
UNSET = ("rollout.engine=null", "rollout.servers=null")


@pytest.mark.parametrize(
    ("machine", "engine"), [("h100", "rollout.servers={}"), ("cpu", "rollout.engine=transformers")]
)
def test_plan_follows_its_machine(machine: str, engine: str) -> None:
    models = read_models(load_config(SMALL), ROOT / "configs" / "models").models
    default, explicit = (
        make_plan(load_config(SMALL, overrides), models, m, 1)
        for m in [find_machine(machine)]
        for overrides in (UNSET, [engine])
    )
    assert default == explicit


@pytest.mark.parametrize(("on_cuda", "engine"), [(True, "sglang"), (False, "transformers")])
def test_default_engine_is_resolved_once(on_cuda: bool, engine: str, tmp_path: Path) -> None:
    config = resolve(load_config(QUICKSTART, UNSET), on_cuda=on_cuda)
    assert dict(describe(config, derive_run(config, 2)))["rollout"].startswith(engine)
    save_config(config, tmp_path / "config.yaml")
    saved = load_config(tmp_path / "config.yaml")
    assert saved.rollout.engine_name == engine
    assert resolve(saved, on_cuda=not on_cuda).rollout.engine_name == engine  # the saved choice does not change
    for setting, name in (("rollout.servers.kind", "sglang"), ("rollout.engine", "transformers")):
        chosen = resolve(load_config(QUICKSTART, [f"{setting}={name}"]), on_cuda=on_cuda)
        assert chosen.rollout.engine_name == name


@pytest.mark.parametrize("machine", ["cpu", "h100"])
def test_settings_of_servers_select_servers(machine: str, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ("rollout.servers={tensor_parallel: 1}", "model.dtype=bfloat16")
    assert main(["plan", str(QUICKSTART), "--machine", machine, *overrides]) == 0
    assert "with the embedded engine, the rollout would take" in capsys.readouterr().out
    assert main(["plan", str(QUICKSTART), "--machine", machine, *overrides, "rollout.engine=transformers"]) == 2
    message = "rollout: engine 'transformers' and servers are both given; remove servers, or remove engine"
    assert message in capsys.readouterr().err


def test_servers_on_gpus_reject_float32(capsys: pytest.CaptureFixture[str]) -> None:
    """The kernels of SGLang end the server after a minute. If the other engine generates, the plan explains why SGLang
    is not possible."""
    assert main(["plan", str(QUICKSTART), "--machine", "h100", "rollout.engine=null"]) == 2
    reason = "model.dtype is float32, which its GPU kernels do not support"
    remedy = "set model.dtype to bfloat16, or rollout.engine to transformers"
    assert f"rollout.servers.kind is sglang, but {reason}; {remedy}" in capsys.readouterr().err
    assert main(["plan", str(QUICKSTART), "--machine", "h100"]) == 0
    assert f"SGLang is not possible: {reason}" in capsys.readouterr().out
    assert main(["plan", str(QUICKSTART), "--machine", "cpu", "rollout.servers.kind=sglang"]) == 0


def test_default_engine_obeys_its_rules(errors_of: Callable[..., str]) -> None:
    overrides = ["rollout.engine=null", "rollout.when_stopped=keep", "rollout.servers={deterministic: false}"]
    printed = errors_of("plan", QUICKSTART, "--machine", "h100", *overrides)
    assert "rollout.when_stopped is keep and rollout.servers.deterministic is false" in printed


@pytest.mark.waits
def test_dry_run_checks_the_default_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The default engine is planned and checked for this machine, which has neither GPUs nor SGLang."""
    installed = software.installed_version
    monkeypatch.setattr(software, "installed_version", lambda name: None if name == "sglang" else installed(name))
    monkeypatch.setattr(device, "runs_on_cuda", lambda settings: False)
    arguments = [
        "train", str(QUICKSTART), "--dry-run", *UNSET, "runtime.device=auto", f"run.directory={tmp_path / 'run'}",
    ]  # fmt: skip
    assert main(arguments) == 0
    output = capsys.readouterr().out
    assert "transformers on every rank" in output and "SGLang is not installed" in output
    assert "plan             2 ranks on this machine's " in output and "with SGLang, the rollout would take" in output
    assert "H100" not in output
    assert main([*arguments, "--machine", "h100"]) == 2  # the machine of the run
    assert "rollout.servers.kind is sglang, which is not installed" in capsys.readouterr().err


@pytest.mark.waits
def test_dry_run_plans_for_another_machine_if_too_small(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, output_of: Callable[..., str]
) -> None:
    arguments = ["train", str(QUICKSTART), "--dry-run", f"run.directory={tmp_path / 'run'}"]
    small = dataclasses.replace(MACHINES["cpu"], memory_bytes=2.12e9, summary="a small machine")
    monkeypatch.setattr(dry_run, "this_machine", lambda: small)
    plans = [line.split(None, 2)[2] for line in output_of(*arguments).splitlines() if " plan  " in line]
    assert plans[0].startswith("2 ranks on a small machine: does not fit: rank 1 needs ")
    assert plans[1].startswith("2 x H100 SXM, 80 GB instead: fits: ")
    assert plans[-1] == "--machine selects another machine"
    assert "\nfine    plan             2 x H100 SXM, 80 GB: fits: " in output_of(*arguments, "runtime.device=cuda")


@pytest.mark.parametrize(
    ("path", "machine", "gpus", "overrides"),
    [(SMALL, "h100", 1, ()), (SMALL, "h100", 1, ("rollout.engine=transformers", "rollout.servers=null")),
     (MIDDLE, "h100", 8, ("rollout.engine=transformers", "rollout.servers=null", "rollout.dtype=float32")),
     (QUICKSTART, "cpu", 2, ()),
     (ROOT / "configs/sglang_disaggregated.yaml", "cpu", 2, ("rollout.ahead=2", "rollout.max_lag=2"))],
)  # fmt: skip
def test_other_engine_matches_its_overrides(path: Path, machine: str, gpus: int, overrides: tuple[str, ...]) -> None:
    config, its_machine = load_config(path, overrides), MACHINES[machine]
    models = read_models(config, ROOT / "configs" / "models").models
    other = other_engine(config, models, its_machine, gpus)
    changed = load_config(path, [*overrides, *other.overrides])
    assert changed.rollout.engine_name == other.engine != config.rollout.engine_name
    expected = make_plan(changed, models, its_machine, gpus)
    assert expected.fits
    assert expected.stages[0].seconds == other.rollout_seconds
    assert all(word in other.sentence for word in other.overrides)


def rollouts(path: Path, machine: Machine, gpus: int, candidates: Iterable[list[str]]) -> list[float]:
    """Return the seconds of the rollouts of all candidates that fit."""
    config = load_config(path)
    models = read_models(config, ROOT / "configs" / "models").models
    durations = []
    for overrides in candidates:
        try:
            plan = make_plan(load_config(path, overrides), models, machine, gpus)
        except ConfigError:  # no room for the longest sequence
            continue
        if plan.fits and plan.gpus + plan.server_gpus <= gpus:
            durations.append(plan.stages[0].seconds)
    return durations


def test_other_engine_has_the_best_settings() -> None:
    """The embedded engine has batches of up to 512 samples. Servers have one, two, four or eight ranks with tenths of
    the memory. The message reports the ratio of the two times."""
    machine, gpus = MACHINES["h100"], 8
    batches = [["rollout.engine=transformers", f"rollout.generate_batch_sequences={2**n}"]
               for n in range(10)]  # fmt: skip
    servers = [[f"rollout.servers={{tensor_parallel: {tp}, memory_fraction: {tenths / 10}}}"]
               for tp in (1, 2, 4, 8) for tenths in range(1, 9)]  # fmt: skip
    models = read_models(load_config(SMALL), ROOT / "configs" / "models").models
    for overrides, others in ((servers[0], batches), (batches[0], servers)):
        config = load_config(SMALL, overrides)
        other, fitting = other_engine(config, models, machine, gpus), rollouts(SMALL, machine, gpus, others)
        best = min(fitting)
        assert other.rollout_seconds == best and len(fitting) < len(others)
        now = make_plan(config, models, machine, gpus).stages[0].seconds
        message = f"the rollout would take {best:.3g} seconds, "
        message += f"{best / now:.2g} times as long: " if best > now else f"{now / best:.2g} times faster: "
        assert message in other.sentence


def test_candidate_settings_of_servers() -> None:
    """Two ranks together generate a few samples of a large model fastest, although a third rank then has no server.
    Many long samples are generated fastest with eight tenths of the memory, which fit in addition to the resident state
    of the roles."""
    roomy, large = (dataclasses.replace(MACHINES["b200"], memory_bytes=n) for n in (2e12, 3e11))
    embedded = ["rollout.engine=transformers"]
    cases = (
        (MIDDLE, roomy, 3, ["rollout.prompts_per_step=3"], "rollout.servers.tensor_parallel=2"),
        (MIDDLE, roomy, 4, ["rollout.prompts_per_step=4"], "rollout.servers.tensor_parallel=4"),
        (SMALL, large, 1, ["rollout.max_response_tokens=8192"], "rollout.servers.memory_fraction=0.8"),
    )
    for model, its_machine, gpus, changes, override in cases:
        models = read_models(load_config(model), ROOT / "configs" / "models").models
        config = load_config(SMALL, [*embedded, *changes])
        assert override in other_engine(config, models, its_machine, gpus).overrides


def test_engines_with_equal_time_are_reported() -> None:
    """Only kernel launches take time. One batch of the 200 samples of a rank takes the same number of steps as a server
    that runs all 400 samples. Two batches take twice the number of steps."""
    instant = machine(is_cuda=False, shared_by_ranks=True, memory_bytes=1e15)
    for batch, message in ((200, "the same time as now: "), (100, "2 times faster: ")):
        config = load_config(QUICKSTART, ["rollout.engine=transformers", f"rollout.generate_batch_sequences={batch}"])
        models = read_models(config, None).models
        assert message in other_engine(config, models, instant, 2).sentence


def test_missing_memory_for_an_engine_is_reported() -> None:
    config = load_config(EXPERTS)
    models = read_models(config, ROOT / "configs" / "models").models
    other = other_engine(config, models, MACHINES["h100"], 32)
    assert (other.rollout_seconds, other.overrides) == (None, ())
    whole = "the embedded engine does not fit: the engine keeps a whole model on every rank"
    message = f"{whole}, also during training; with `offload` of a role, the engine leaves the device during training"
    assert other.sentence == message
    config = load_config(EXPERTS, ["actor.offload=true"])
    assert other_engine(config, models, MACHINES["h100"], 32).sentence == whole


def test_sglang_is_faster_on_a_gpu(output_of: Callable[..., str]) -> None:
    content = json.loads(output_of("plan", SMALL, "--machine", "h100", "--gpus", "1", "--json"))
    rollout = content["plan"]["stages"][0]["seconds"]
    assert content["other_engine"]["engine"] == "transformers"
    assert content["other_engine"]["rollout_seconds"] > 2 * rollout
    printed = output_of("plan", SMALL, "--machine", "h100", "--gpus", "1")
    assert "\nwith the embedded engine, the rollout would take " in printed


def test_run_gets_its_plan_and_deadlines() -> None:
    config = resolve(load_config(QUICKSTART, ["rollout.servers.kind=sglang"]), on_cuda=False)
    layout = {"tensor_parallel": 1, "pipeline_parallel": 2, "pipeline_layers": (3, 1)}
    actor = config.actor.model_copy(update={"layout": config.actor.layout.model_copy(update=layout)})
    start = plan_start(config.model_copy(update={"actor": actor}), 2, MACHINES["cpu"])
    rows = dict(start.rows)
    assert rows["actor pipeline"] == "chunks of 3, 1 layers" and "critic pipeline" not in rows
    assert rows["layers"].startswith("torch's layers, because Transformer Engine "), (
        "the missing library and the reason"
    )
    assert "and its rollout" in rows["plan"] and rows["other engine"].startswith("with the embedded engine, ")
    assert start.deadlines.request_seconds == 1800.0


def test_context_parallel_windows_need_attention_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ring attention of Transformer Engine has no window. Without Transformer Engine or without a window, no
    configuration is refused."""
    folder = tmp_path / "model"
    folder.mkdir()
    content = json.loads((ROOT / "configs/models/tiny_arithmetic/config.json").read_text())
    window = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}
    (folder / "config.json").write_text(json.dumps({**content, "model_type": "qwen3", **window}))
    settings = [
        f"model.path={folder}", "actor.layout={context_parallel: 2}", "critic.layout={}", "model.dtype=bfloat16",
    ]  # fmt: skip
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


def test_deadlines_follow_the_plan_by_default() -> None:
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


def test_saved_settings_give_the_same_deadlines(tmp_path: Path) -> None:
    """Defaults of limits that follow from the plan are not saved. Otherwise they would count as explicit settings."""
    planned = {"rollout": 9000.0}
    for overrides in ([], ["runtime.collective_timeout_seconds=90000"], ["runtime.phase_timeout_seconds=null"]):
        config = resolve(load_config(SMALL, overrides), on_cuda=True)
        save_config(config, tmp_path / "config.yaml")
        assert load_config(tmp_path / "config.yaml") == config
        assert planned_deadlines(load_config(tmp_path / "config.yaml"), planned) == planned_deadlines(config, planned)


def test_start_deadline_includes_loading_and_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start timeout of the servers must end a server that does not answer, with the output of the server, before
    the watchdog does."""
    slow = resolve(load_config(SMALL, ["rollout.servers.start_timeout_seconds=3000"]), on_cuda=True)
    assert planned_deadlines(slow, {"rollout": 1.0, "start": 100.0}).of_phases == {"start": 3700.0}
    config = resolve(load_config(QUICKSTART), on_cuda=False)
    disk = dataclasses.replace(ASSUMED, checkpoint_bytes_per_second=1e3)
    for module in ("here", "stopping"):
        monkeypatch.setattr(f"megappo.plan.{module}.ASSUMED", disk)
    limits = plan_start(config, 2, MACHINES["cpu"]).deadlines.of_phases
    assert limits["start"] > limits["export"] > 1500  # including the models


def test_collectives_outlast_continuing_phases() -> None:
    """Ranks that wait in a collective for a rank that still generates are ended by the watchdog, which observes the
    tokens."""
    planned = {"rollout": 1000.0}
    watched = planned_deadlines(load_config(SMALL), planned)
    assert watched.collective_seconds == WATCHED_COLLECTIVE_SECONDS > 1e5
    alone = planned_deadlines(load_config(SMALL, ["runtime.phase_timeout_seconds=null"]), planned)
    assert alone.collective_seconds == 1800
    config = load_config(SMALL, ["runtime.collective_timeout_seconds=3999"])
    with pytest.raises(ConfigError, match=r"seconds is 3999, but a phase \(rollout\) may last 4000 seconds"):
        planned_deadlines(config, planned)
    config = load_config(SMALL, ["runtime.collective_timeout_seconds=4001"])
    assert planned_deadlines(config, planned).collective_seconds == 4001


@pytest.mark.parametrize(
    ("override", "phases", "request_seconds"),
    [("runtime.phase_timeouts_seconds={rollout: 60}", {"rollout": 60.0, "evaluate": 4000.0}, 4000.0),
     ("runtime.phase_timeout_seconds=70", {}, 4000.0), ("runtime.phase_timeout_seconds=null", {}, 4000.0),
     ("rollout.servers.request_timeout_seconds=80", {"rollout": 4000.0, "evaluate": 4000.0}, 80.0)],
)  # fmt: skip
def test_explicit_deadlines_are_unchanged(override: str, phases: dict[str, float], request_seconds: float) -> None:
    deadlines = planned_deadlines(load_config(SMALL, [override]), {"rollout": 1000.0, "evaluate": 1000.0})
    assert deadlines.of_phases == phases
    assert deadlines.request_seconds == request_seconds


def test_longer_responses_have_later_deadlines() -> None:
    limits = []
    for tokens in (1024, 32768):
        overrides = [f"rollout.max_response_tokens={tokens}", "actor.microbatch_budget_tokens=65536"]
        overrides += ["critic.microbatch_budget_tokens=65536", f"model.path={ROOT / 'configs/models/Qwen3-0.6B'}"]
        config = resolve(load_config(SMALL, overrides), on_cuda=True)
        limits.append(plan_start(config, 1, MACHINES["h100"]).deadlines.request_seconds)
    assert limits[0] == 1800.0 and limits[1] > 5000.0


@pytest.mark.parametrize(
    ("device", "gigabytes", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", 42.3, "a100-40"), ("NVIDIA A100-SXM4-80GB", 85.0, "a100-80"),
        ("NVIDIA H100 80GB HBM3", 85.0, "h100"), ("NVIDIA H200", 150.0, "h200"), ("NVIDIA H20", 102.0, "h20"),
        ("NVIDIA L40S", 47.7, "l40s"), ("Some GPU", 12.0, "h100"),
    ],
)  # fmt: skip
def test_device_matches_the_table(device: str, gigabytes: float, name: str) -> None:
    machine = machine_like(device, gigabytes * 1e9)
    assert (machine.name, machine.memory_bytes) == (name, gigabytes * 1e9)
