"""Rules for settings that name a metric."""

from __future__ import annotations

from collections.abc import Iterator

from megappo.config.schema import Config
from megappo.errors import nearest_word
from megappo.observe.metric_docs import METRICS


def keep_best_rules(config: Config) -> Iterator[str]:
    """The best checkpoint is chosen by a metric that there is."""
    wanted = config.checkpoint.keep_best if config.checkpoint is not None else None
    if wanted is None:
        return
    name, known = wanted.removeprefix("-"), _metrics_of(config)
    if name not in known:
        yield (
            f"checkpoint.keep_best is '{wanted}', must be a metric of the run (a `-` in front: lowest is best); "
            f"the nearest is '{nearest_word(name, known)}'"
        )


def _metrics_of(config: Config) -> list[str]:
    """Every metric, for each of the sources and validation sets that it is of."""
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
