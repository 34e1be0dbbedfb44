"""Rules for settings that name a metric."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megappo.config.schema import Config
from megappo.errors import nearest_word
from megappo.observe.metric_docs import METRICS


def keep_best_rules(config: Config, steps: int | None) -> Iterator[str]:
    """Rules on `checkpoint.keep_best`: the metric exists in steps that write a checkpoint; `steps` of the run, None
    where not known."""
    checkpoint, evaluation = config.checkpoint, config.evaluation
    if checkpoint is None or (wanted := checkpoint.keep_best) is None:
        return
    name, known = wanted.removeprefix("-"), _metrics_of(config)
    if name not in known:
        yield (
            f"checkpoint.keep_best is '{wanted}', must be a metric of the run (a `-` in front: lowest is best); "
            f"the nearest is '{nearest_word(name, known)}'"
        )
        return
    if name.startswith("critic/") and config.critic is None:
        yield f"checkpoint.keep_best is '{wanted}', and there is no critic; name another metric"
    if not name.startswith("eval/"):
        return
    if evaluation is None:
        yield f"checkpoint.keep_best is '{wanted}', and nothing is evaluated; add evaluation, or name another metric"
    elif steps is not None:  # a checkpoint holds the metrics of its own step only
        periods = [every for every in (checkpoint.every_steps, checkpoint.keep_every_steps) if every is not None]
        if all(math.lcm(every, evaluation.every_steps) >= steps for every in periods):
            yield (
                f"checkpoint.keep_best is '{wanted}', and no step before the last has both an evaluation "
                f"(evaluation.every_steps {evaluation.every_steps}) and a checkpoint (checkpoint.every_steps "
                f"{checkpoint.every_steps}); set checkpoint.every_steps to {evaluation.every_steps}"
            )


def _metrics_of(config: Config) -> list[str]:
    """Names of all metrics of the run, with the names of its sources and validation sets filled in."""
    sources = config.data.mixture or {}
    sets = config.data.validation_sets or {}
    found = list[str]()
    for name in METRICS:
        if name.startswith("source/NAME/"):
            found += [name.replace("NAME", source) for source in sources]
        elif name == "eval/NAME/pass@K":
            found += [f"eval/{of}/pass@{k}" for of, settings in sets.items() for k in settings.pass_at]
        elif name.startswith("eval/NAME/"):
            found += [name.replace("NAME", of) for of in sets]
        else:
            found.append(name)
    return found
