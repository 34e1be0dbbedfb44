"""The command line: `megappo train | plan | doctor | serve | eval | export | report`.

Settings, models and layout are checked on every rank before anything else starts; what a user can mend is one line
per problem on stderr (rank 0 only) and exit code 2.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence

from megappo import __version__
from megappo.config import Config, ConfigError, check_run, derive_run, load_config, print_table
from megappo.config.errors import one_line, raised_by_megappo
from megappo.errors import RUN_ERROR, STOPPED_BY_USER, USER_ERROR, Interrupted, RunError
from megappo.launchers import adopt_launcher, read_world_size, tell_torchrun

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE)
_ON_RANKS = ("train", "eval", "doctor")
_COMMANDS = "{train,plan,doctor,serve,eval,export,report}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, or one of `megappo.errors`."""
    arguments = _parse(argv)
    try:
        if arguments.command in _ON_RANKS:
            adopt_launcher(os.environ)
        if arguments.command == "doctor":
            return 0 if _examine(arguments) else RUN_ERROR
        if arguments.command == "plan":
            return 0 if _plan(arguments) else RUN_ERROR
        _run(arguments)
    except Interrupted as interrupted:
        return interrupted.exit_code
    except KeyboardInterrupt:
        return STOPPED_BY_USER
    except RunError as error:
        _report(error)
        return RUN_ERROR
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        where = f"{error.filename}: " if error.filename else ""
        _report(
            RunError(
                f"writing failed, {where}{error.strerror}; make room or mend the disk and start again, a run continues "
                "from its newest checkpoint"
            )
        )
        return RUN_ERROR
    except ValueError as error:
        if not isinstance(error, ConfigError) and not raised_by_megappo(error):
            raise
        _report(error)
        return USER_ERROR
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="megappo", description="PPO for large language models.")
    parser.add_argument("--version", action="version", version=f"megappo {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar=_COMMANDS)
    train = commands.add_parser("train", help="run PPO as a YAML file describes it")
    plan = commands.add_parser("plan", help="say what a run will need and how fast it will be, before it is started")
    doctor = commands.add_parser("doctor", help="say what of this machine, or of all ranks, is fine, slow or broken")
    doctor.add_argument("config", metavar="CONFIG", nargs="?", help="YAML file of the run that is to work")
    doctor.add_argument("overrides", nargs="*", metavar="key=value", help="override such as run.steps=10")
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")
    export = commands.add_parser("export", help="write a checkpoint of a run as a Hugging Face folder")
    evaluate = commands.add_parser("eval", help="score a model on data.validation")
    _add_serve(commands.add_parser("serve", help="run one SGLang server for trainers elsewhere, and keep it running"))
    train.add_argument("--dry-run", action="store_true", help="do everything but train, in one process without a GPU")
    for command in (train, plan):
        command.add_argument(
            "--machine", metavar="NAME", help="h100, cpu, ... or a YAML file (default: by runtime.device)"
        )
        command.add_argument("--gpus", metavar="N", help="devices, one per rank (default: the fewest the layouts need)")
    for command in (train, plan, evaluate):
        needed = None if command is not train else "?"
        command.add_argument("config", metavar="CONFIG", nargs=needed, help="YAML file")
        command.add_argument("overrides", nargs="*", metavar="key=value", help="override such as run.steps=10")
    train.add_argument("--replay", metavar="FOLDER", help="repeat an update that was refused as not finite, instead")
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")
    plan.add_argument("--search", action="store_true", help="propose the fastest layouts for these devices instead")
    evaluate.add_argument("--weights", metavar="DIR", help="Hugging Face folder to score instead of model.path")
    export.add_argument("run_dir", metavar="RUN_DIR", help="directory of the run")
    export.add_argument("out", metavar="OUT", help="folder to write")
    export.add_argument("--role", choices=("actor", "critic"), default="actor", help="(default: %(default)s)")
    export.add_argument(
        "--step", metavar="N", default="latest", help="step of the checkpoint, best or latest (default: %(default)s)"
    )
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
    if arguments.command == "train":
        given = [arguments.config is not None, bool(arguments.overrides or extra)]
        if any(given) if arguments.replay is not None else not given[0]:
            parser.error("train needs CONFIG, or --replay FOLDER alone, which holds its settings")
    if extra:
        arguments.overrides = [*arguments.overrides, *extra]
    return arguments


def _add_serve(serve: argparse.ArgumentParser) -> None:
    serve.add_argument("config", metavar="CONFIG", help="YAML file of the trainers' run")
    serve.add_argument("overrides", nargs="*", metavar="key=value", help="override such as rollout.sglang.threads=4")
    serve.add_argument("--host", help="interface to listen on (default: rollout.sglang.host)")
    serve.add_argument("--port", type=int, default=30000, help="port, 0: a free one (default: %(default)s)")
    serve.add_argument("--index", type=int, default=0, help="number that names its log (default: %(default)s)")
    serve.add_argument(
        "--linger", type=float, default=0.0, metavar="SECONDS", help="go on so long after SIGTERM (default: 0)"
    )
    serve.add_argument("--ranks", action="store_true", help="print how many devices a server takes, instead")


def _run(arguments: argparse.Namespace) -> None:
    """Check everything, then import the heavy modules and start."""
    if arguments.command == "export":
        from megappo.export import export_run

        for sentence in export_run(arguments.run_dir, arguments.out, arguments.role, arguments.step):
            print(sentence)
        return
    if arguments.command == "report":
        from megappo.report import report

        print(report(arguments.run_dir, arguments.metric))
        return
    if arguments.command == "train" and arguments.replay is not None:
        from megappo.replay import replay

        replay(arguments.replay, read_world_size(os.environ))
        return
    config = load_config(arguments.config, arguments.overrides)
    if arguments.command == "serve":
        if arguments.ranks:
            print(config.rollout.servers.tensor_parallel)
            return
        from megappo.plan.here import resolve_here
        from megappo.serve import serve

        place = {"host": arguments.host, "port": arguments.port, "index": arguments.index}
        serve(resolve_here(config), **place, linger_seconds=arguments.linger)
        return
    if arguments.command == "train" and arguments.dry_run:
        from megappo.dry_run import dry_run

        if _is_main():
            _refuse_lost_run(config)
            gpus, machine = arguments.gpus, arguments.machine
            dry_run(config, arguments.config, arguments.overrides, gpus_text=gpus, machine_name=machine)
        return
    if arguments.command == "eval":
        config = _for_evaluation(config, arguments.weights)
    _start(arguments.command, config)


def _start(command: str, config: Config) -> None:
    """Fill in what follows from this machine, check against the ranks, show the run and begin it."""
    from megappo.plan.here import outlook, resolve_here, this_machine

    world_size, prompts = read_world_size(os.environ), None
    check_run(config, world_size)  # refuses most mistakes before torch is imported
    config = resolve_here(config)
    check_run(config, world_size)  # and the rest before the data are tokenised
    if config.run.epochs is not None:
        from megappo.assembly import training_prompts

        prompts = training_prompts(config)
    derived = derive_run(config, world_size, None if prompts is None else len(prompts))
    found = outlook(config, world_size, this_machine())
    config = found.config
    if _is_main() and config.logging.console != "quiet":
        # An evaluation has no steps and writes no checkpoints.
        print_table(config, derived, more=found.rows if command == "train" else ())
    if command == "train":
        from megappo.run import train

        train(config, derived, prompts)
    else:
        from megappo.run import evaluate

        evaluate(config, derived, prompts)


def _examine(arguments: argparse.Namespace) -> bool:
    """`megappo doctor`; returns whether nothing is broken."""
    config = load_config(arguments.config, arguments.overrides) if arguments.config is not None else None
    from megappo.doctor import doctor_command

    return doctor_command(config, arguments.config, as_json_text=arguments.json)


def _plan(arguments: argparse.Namespace) -> bool:
    """Print the plan; whether the run fits."""
    config = load_config(arguments.config, arguments.overrides)
    from megappo.plan import plan_command

    return plan_command(
        config,
        arguments.config,
        machine_name=arguments.machine,
        gpus_text=arguments.gpus,
        as_json=arguments.json,
        search=arguments.search,
    )


def _for_evaluation(config: Config, weights: str | None) -> Config:
    """The settings with `weights` in the model's place; the tokenizer stays the model's."""
    if config.data.validation is None:
        raise ConfigError("eval needs prompts; add data.validation")
    if weights is None:
        return config
    tokenizer = config.model.tokenizer or config.model.path
    model = config.model.model_copy(update={"path": weights, "init": "pretrained", "tokenizer": tokenizer})
    actor = config.actor.model_copy(update={"start_from": None})
    return config.model_copy(update={"model": model, "actor": actor})


def _refuse_lost_run(config: Config) -> None:
    from megappo.resume import checkpoints_directory, lost_steps

    if not any(checkpoints_directory(config).glob("*/checkpoint.json")):
        problem, _ = lost_steps(config)
        if problem is not None:
            raise ConfigError(problem)


def _is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _report(error: ValueError | RunError) -> None:
    problems = error.problems if isinstance(error, ConfigError) else (one_line(str(error)),)
    sentences = [f"megappo: error: {problem}" for problem in problems]
    tell_torchrun(os.environ, sentences)
    if not _is_main() and not isinstance(error, RunError):
        return  # every rank finds what is wrong with the settings; one says it
    print("\n".join(sentences), file=sys.stderr)
