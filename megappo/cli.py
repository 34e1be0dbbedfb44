"""The command line: `megappo train | plan | doctor | eval | export | report`.

Settings, models and layout are checked on every rank before anything else starts; what a user can mend is one line
per problem on stderr (rank 0 only) and exit code 2.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from megappo import __version__
from megappo.config import Config, ConfigError, derive_run, load_config, print_table
from megappo.config.errors import raised_by_megappo
from megappo.errors import RunError
from megappo.launchers import adopt_launcher

_RUN_ERROR = 1
_USER_ERROR = 2
_ON_RANKS = ("train", "eval", "doctor")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, 1 for a run or machine that is broken, 2 for what the user can mend."""
    arguments = _parse(argv)
    try:
        if arguments.command in _ON_RANKS:
            adopt_launcher(os.environ)
        if arguments.command == "doctor":
            from megappo.doctor import doctor_command

            healthy = doctor_command(arguments.config, arguments.overrides, as_json_text=arguments.json)
            return 0 if healthy else _RUN_ERROR
        _run(arguments)
    except RunError as error:
        _report(error)
        return _RUN_ERROR
    except ValueError as error:
        if not isinstance(error, ConfigError) and not raised_by_megappo(error):
            raise
        _report(error)
        return _USER_ERROR
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="megappo", description="PPO for large language models.")
    parser.add_argument("--version", action="version", version=f"megappo {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{train,plan,doctor,eval,export,report}")
    train = commands.add_parser("train", help="run PPO as a YAML file describes it")
    plan = commands.add_parser("plan", help="say what a run will need and how fast it will be, before it is started")
    doctor = commands.add_parser("doctor", help="say what of this machine, or of all ranks, is fine, slow or broken")
    doctor.add_argument("config", metavar="CONFIG", nargs="?", help="YAML file of the run that is to work")
    doctor.add_argument("overrides", nargs="*", metavar="key=value", help="override such as run.steps=10")
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")
    export = commands.add_parser("export", help="write a run's newest checkpoint as a Hugging Face folder")
    evaluate = commands.add_parser("eval", help="score a model on data.validation")
    train.add_argument("--dry-run", action="store_true", help="do everything but train, in one process without a GPU")
    for command in (train, plan):
        command.add_argument("--machine", metavar="NAME", help="h100, h200, b200 or cpu (default: by runtime.device)")
        command.add_argument("--gpus", metavar="N", help="devices, one per rank (default: the fewest the layouts need)")
    for command in (train, plan, evaluate):
        command.add_argument("config", metavar="CONFIG", help="YAML file")
        command.add_argument("overrides", nargs="*", metavar="key=value", help="override such as run.steps=10")
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")
    plan.add_argument("--search", action="store_true", help="propose the fastest layouts for these devices instead")
    evaluate.add_argument("--weights", metavar="DIR", help="Hugging Face folder to score instead of model.path")
    export.add_argument("run_dir", metavar="RUN_DIR", help="directory of the run")
    export.add_argument("out", metavar="OUT", help="folder to write")
    report = commands.add_parser("report", help="show how a metric of a run went")
    report.add_argument("run_dir", metavar="RUN_DIR", help="directory of the run")
    report.add_argument("--metric", default="reward/mean", help="name in metrics.jsonl (default: %(default)s)")
    # argparse gives positional arguments away before it sees an option, so overrides after `--weights DIR` are left
    # over in `extra`.
    arguments, extra = parser.parse_known_args(argv)
    strange = [word for word in extra if word.startswith("-") or not hasattr(arguments, "overrides")]
    if strange:
        parser.error(f"unrecognized arguments: {' '.join(strange)}")
    if arguments.command == "train" and not arguments.dry_run and (arguments.machine or arguments.gpus):
        parser.error("--machine and --gpus are for plan and for train --dry-run; torchrun sets the processes of a run")
    if extra:
        arguments.overrides = [*arguments.overrides, *extra]
    return arguments


def _run(arguments: argparse.Namespace) -> None:
    """Check everything, then import the heavy modules and start."""
    if arguments.command == "export":
        from megappo.export import export_run

        export_run(arguments.run_dir, arguments.out)
        return
    if arguments.command == "report":
        from megappo.report import report

        print(report(arguments.run_dir, arguments.metric))
        return
    if arguments.command == "plan":
        from megappo.plan import plan_command

        plan_command(
            arguments.config,
            arguments.overrides,
            machine_name=arguments.machine,
            gpus_text=arguments.gpus,
            as_json=arguments.json,
            search=arguments.search,
        )
        return
    config = load_config(arguments.config, arguments.overrides)
    if arguments.command == "train" and arguments.dry_run:
        from megappo.dry_run import dry_run

        if _is_main():
            _refuse_used_directory(config)
            gpus, machine = arguments.gpus, arguments.machine
            dry_run(config, arguments.config, arguments.overrides, gpus_text=gpus, machine_name=machine)
        return
    if arguments.command == "train" and _is_main():
        _refuse_used_directory(config)
    if arguments.command == "eval":
        config = _for_evaluation(config, arguments.weights)
    derived = derive_run(config, _environment_number("WORLD_SIZE", 1))
    if _is_main() and config.logging.console != "quiet":
        print_table(config, derived)
    if arguments.command == "train":
        from megappo.run import train

        train(config, derived)
    else:
        from megappo.run import evaluate

        evaluate(config, derived)


def _refuse_used_directory(config: Config) -> None:
    """A run never writes over another one's files."""
    metrics = config.run.path / "metrics.jsonl"
    if metrics.exists() and metrics.stat().st_size:  # a run that failed before its first step left it empty
        raise ConfigError(
            f"run.directory '{config.run.path}' holds a run already; choose another run.directory or run.name, "
            "or remove the folder"
        )


def _for_evaluation(config: Config, weights: str | None) -> Config:
    """The settings with `weights` in the model's place; the tokenizer stays the model's."""
    if config.data.validation is None:
        raise ConfigError("eval needs prompts; add data.validation (and evaluation.every_steps)")
    if weights is None:
        return config
    tokenizer = config.model.tokenizer or config.model.path
    model = config.model.model_copy(update={"path": weights, "init": "pretrained", "tokenizer": tokenizer})
    return config.model_copy(update={"model": model})


def _environment_number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdigit():
        raise ConfigError(f"the environment variable {name} is '{text}', must be a whole number; start with torchrun")
    return int(text)


def _is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _report(error: ValueError | RunError) -> None:
    if not _is_main() and not isinstance(error, RunError):
        return  # every rank finds what is wrong with the settings; one says it
    problems = error.problems if isinstance(error, ConfigError) else (" ".join(str(error).split()),)
    for problem in problems:
        print(f"megappo: error: {problem}", file=sys.stderr)
