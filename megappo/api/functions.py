"""Functions for a run from Python. The command line calls the same functions."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megappo.config import Config, ConfigError, describe, describe_evaluation, print_rows
from megappo.config.role_models import load_architecture
from megappo.errors import expanded
from megappo.observe.terminal.streams import adapt_streams
from megappo.runtime.launchers import adopt_launcher, is_main

if TYPE_CHECKING:
    from megappo.plan.planner import Plan


def plan(
    config: Config,
    *,
    machine: str | os.PathLike[str] | None = None,
    gpus: int | None = None,
    models_folder: str | os.PathLike[str] | None = None,
) -> Plan:
    """Compute the requirements of a configuration: bytes of each rank and seconds of each stage. Runs in one process
    without GPUs, before the run starts.

    Args:
        machine: Name of a machine (`h100`, `cpu`), or path of a YAML file. Default: according to `runtime.device`.
        gpus: Number of devices, one for each rank. Default: the minimum for the layouts.
        models_folder: Folder with a NAME/config.json for each model that is missing on this machine. NAME is the last
            part of the path of the model.

    Raises ConfigError if the settings cannot run on this number of devices, or if the machine or a model is unknown.
    """
    from megappo.plan.planner import planning

    return planning(config, machine, gpus, models_folder).plan


def train(config: Config) -> Path:
    """Train with a configuration, or resume from its newest checkpoint. Returns the directory of the run.

    This is a collective of the world: a single process, or all ranks that torchrun, srun or mpirun started. The
    function writes only to the directory of the run, and to stdout and stderr of rank 0.

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
    """Evaluate the model on `data.validation` and `data.validation_sets`. Returns the metrics by name, the same on
    every rank.

    This is a collective of the world, as `train`. `weights` is a Hugging Face folder to evaluate instead of
    `model.path`, with the tokenizer of `model.path`. Raises the exceptions of `train`, and ConfigError without
    prompts.
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
    """Return the settings with `weights` as the model. The tokenizer of the model is kept.

    Raises ConfigError if `weights` is not a supported model.
    """
    load_architecture(weights, config.model, key="--weights")
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
    """Write a checkpoint of a run to a new folder, in one process without GPUs. Returns messages for the user.

    Args:
        step: Step number of the checkpoint, `best` or `latest`.
        form: `torch_dist` is the format of Megatron-LM. `peft` contains only the adapters. Other forms merge
            adapters.
        without_mtp: Omit multi-token prediction layers.
        push_to_hub: `OWNER/NAME` of a model on the Hugging Face hub. `out` is uploaded. Not available with
            `torch_dist`.
        public: A new model on the hub is public.
        family: Import path of `model.family` of the run, whose code is imported.
        trust_remote_code: Run code in the folders of the model and tokenizer of the run.

    Raises ValueError if the checkpoint or role does not exist, or if `out` is not empty. Raises ConfigError if an
    upload is impossible, before any file is written.
    """
    from megappo.checkpoint.exports.export import export_run
    from megappo.checkpoint.exports.publishing import check_hub, upload_model
    from megappo.checkpoint.identity import OwnCode

    if push_to_hub is not None:
        if form == "torch_dist":
            raise ConfigError(
                "push_to_hub requires a format of the hub, and torch_dist is not such a format; omit push_to_hub"
            )
        check_hub(push_to_hub)
    elif public:
        raise ConfigError("public requires push_to_hub; set push_to_hub, or omit public")
    own = OwnCode(family, trust_remote_code)
    source, target = expanded(run_directory), expanded(out)
    sentences = export_run(source, target, role, str(step), form, without_mtp=without_mtp, own=own)
    return sentences if push_to_hub is None else [*sentences, upload_model(Path(target), push_to_hub, public=public)]
