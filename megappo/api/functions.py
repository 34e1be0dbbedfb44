"""A run from Python; the command line calls the same functions."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megappo.config import Config, ConfigError, describe, describe_evaluation, print_rows
from megappo.errors import expanded
from megappo.observe.streams import adapt_streams
from megappo.runtime.launchers import adopt_launcher, is_main

if TYPE_CHECKING:
    from megappo.plan.planner import Plan


def plan(
    config: Config,
    *,
    machine: str | os.PathLike[str] | None = None,
    gpus: int | None = None,
    beside: str | os.PathLike[str] | None = None,
) -> Plan:
    """What a configuration will need, before it is started, by one process without GPUs: bytes of each rank, seconds of
    each stage.

    Args:
        machine: name of a machine (`h100`, `cpu`), or path of a YAML file; None: by `runtime.device`.
        gpus: devices, one for each rank; None: the fewest that the layouts need.
        beside: folder with a NAME/config.json for models, by the last part of their path, that are not on this machine.

    Raises ConfigError for settings that cannot run on so many devices, and for an unknown machine or model.
    """
    from megappo.plan.planner import planning

    return planning(config, machine, gpus, beside).plan


def train(config: Config) -> Path:
    """Train as the configuration says, or go on from its newest checkpoint; returns the directory of the run.

    A collective of the world: every rank calls it, one process alone or those that torchrun, srun or mpirun started. It
    writes nothing but what stands in that directory, and to stdout and stderr of rank 0.

    Raises ConfigError if settings, models, data and number of processes do not match. Raises Interrupted after the
    checkpoint if the run receives SIGTERM, SIGINT, SIGUSR1 or SIGHUP. Raises RunError if the run cannot continue.
    """
    from megappo.preflight.resolved import resolve_run

    adapt_streams()
    adopt_launcher(os.environ)
    run = resolve_run("train", config)
    if is_main(os.environ) and config.logging.console != "quiet":
        print_rows([*describe(run.config, run.derived), *run.rows])
    from megappo.ppo.run import train as train_run

    train_run(run)
    return config.run.path


def evaluate(config: Config, *, weights: str | os.PathLike[str] | None = None) -> dict[str, float]:
    """Score the model on `data.validation` and `data.validation_sets`; the metrics by name, the same on every rank.

    A collective of the world, as `train`. `weights` names a Hugging Face folder to score in place of `model.path`, with
    the tokenizer of that. Raises as `train` does, and ConfigError without prompts to score.
    """
    from megappo.preflight.resolved import resolve_run

    if not config.data.evaluated:
        raise ConfigError("eval needs prompts; add data.validation or data.validation_sets")
    adapt_streams()
    adopt_launcher(os.environ)
    run = resolve_run("eval", config if weights is None else _with_weights(config, expanded(weights, "weights")))
    if is_main(os.environ) and config.logging.console != "quiet":
        print_rows(describe_evaluation(run.config, run.derived))
    from megappo.ppo.run import evaluate as evaluate_run

    return evaluate_run(run)


def _with_weights(config: Config, weights: str) -> Config:
    """The settings with `weights` in the model's place; the tokenizer stays the model's."""
    tokenizer = config.model.tokenizer or config.model.path
    model = config.model.model_copy(update={"path": weights, "init": "pretrained", "tokenizer": tokenizer})
    actor = config.actor.model_copy(update={"start_from": None})
    return config.model_copy(update={"model": model, "actor": actor})


def export(
    run_directory: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    role: Literal["actor", "critic"] = "actor",
    step: int | str = "latest",
    form: Literal["huggingface", "torch_dist", "peft"] = "huggingface",
    without_mtp: bool = False,
    push_to_hub: str | None = None,
    public: bool = False,
    family: str | None = None,
    trust_remote_code: bool = False,
) -> list[str]:
    """Write a checkpoint of a run to a new folder, in one process without GPUs; returns sentences for the user.

    Args:
        step: number of the checkpoint's step, `best` or `latest`.
        form: `torch_dist` is Megatron-LM's; `peft` has adapters alone, which are merged otherwise.
        without_mtp: leave out layers that predict further tokens.
        push_to_hub: `OWNER/NAME` of a model on the Hugging Face hub to which `out` is uploaded; not as `torch_dist`.
        public: a model that is created there is for everybody to see.
        family: import path of the run's `model.family`, whose code is imported.
        trust_remote_code: run code in the folders of the run's model and tokenizer.

    Raises ValueError where there is no such checkpoint or role, or `out` holds something, and ConfigError where nothing
    can be uploaded, before anything is written.
    """
    from megappo.checkpoint.export import export_run
    from megappo.checkpoint.identity import OwnCode
    from megappo.checkpoint.publishing import check_hub, upload_model

    if push_to_hub is not None:
        if form == "torch_dist":
            raise ConfigError(
                "push_to_hub is for models of the hub, and torch_dist is no format of theirs; leave it out"
            )
        check_hub(push_to_hub)
    elif public:
        raise ConfigError("public requires push_to_hub; set push_to_hub, or leave out public")
    own = OwnCode(family, trust_remote_code)
    source, target = expanded(run_directory), expanded(out)
    sentences = export_run(source, target, role, str(step), form, without_mtp=without_mtp, own=own)
    return sentences if push_to_hub is None else [*sentences, upload_model(Path(target), push_to_hub, public=public)]
