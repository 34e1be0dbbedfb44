"""Model card of an exported model: base model, data, settings and results."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import yaml

import megappo
from megappo.config import Config
from megappo.config.role_models import model_paths
from megappo.errors import one_line, reason, redacted, shortened, writing
from megappo.files.json_values import JSONValue
from megappo.files.plain_files import plain_text
from megappo.models.hub import HubName, may_be_hub_name
from megappo.observe.changes import change_notes
from megappo.observe.metrics import read_metrics
from megappo.runtime.packages import installed_version

CARD = "README.md"
_WINDOW_STEPS = 5
_FIGURES = (
    "reward/mean", "reward/std", "response/length", "kl/mean", "actor/entropy", "critic/explained_variance",
    "mismatch/mean",
)  # fmt: skip
"""Training metrics on the card, averaged over the last steps. The card contains all metrics of evaluations."""
_CLASSES = {"actor": "AutoModelForCausalLM", "critic": "AutoModelForTokenClassification"}
_CLASS_OF_ADAPTERS = "AutoPeftModelForCausalLM"
_CRITIC = (
    "The logit of a token is the value of the state after the token. transformers supports this class for most "
    "families. megappo reads the folder as `critic.path` for all families."
)
_SHOWN_CHARACTERS = 200


def write_card(out: Path, config: Config, run_dir: Path, *, role: str, step: int, adapters: bool = False) -> list[str]:
    """Write the card (README.md) to the folder of an exported model and replace an older card. Return messages for the
    user.

    Args:
        config: settings of the run.
        run_dir: directory of the run. metrics.jsonl contains the results; without the file, the card has no results.
        role: `actor` or `critic`.
        step: last training step of the model.
        adapters: whether the folder contains only adapters.
    """
    path, lines, changes, messages = run_dir / "metrics.jsonl", list[dict[str, JSONValue]](), list[str](), list[str]()
    try:
        changes = change_notes(run_dir, before_step=step)
        lines = [line for line in read_metrics(path) if line["step"] <= step] if path.exists() else []
    except (OSError, ValueError) as error:
        messages = [f"the model card has no results: {reason(error)}"]
    card = model_card(config, lines, role=role, step=step, adapters=adapters, changes=changes)
    with writing(out):
        (out / CARD).write_text(card, encoding="utf-8")
    return messages


def exported_step(folder: Path) -> int | None:
    """Return the step of an exported actor, or None if the folder has no model card of an actor."""
    try:
        match = re.search(r"^# .*: actor after step (\d+)$", plain_text(folder / CARD), re.MULTILINE)
    except (OSError, UnicodeDecodeError):
        return None
    return int(match[1]) if match is not None else None


def model_card(
    config: Config,
    lines: Sequence[Mapping[str, JSONValue]],
    *,
    role: str,
    step: int,
    adapters: bool = False,
    changes: Sequence[str] = (),
) -> str:
    """Return the text of a card: YAML front matter for the hub, then Markdown.

    Args:
        config: settings of the last step.
        lines: lines of `metrics.jsonl` until `step`.
        role: see `write_card`.
        step: see `write_card`.
        adapters: see `write_card`.
        changes: a sentence for each change of settings (`changes.jsonl`).
    """
    base = model_paths(config).get(role, config.model.path)
    head: dict[str, str | list[str]] = {
        "library_name": "peft" if adapters else "transformers",
        "tags": ["megappo", "reinforcement-learning", config.algorithm.estimator.rpartition(":")[2], role],
    }
    if may_be_hub_name(base) and config.model.init == "pretrained":
        head["base_model"] = HubName.of(base).repository
    if role == "actor":
        head["pipeline_tag"] = "text-generation"
    front = yaml.safe_dump(head, sort_keys=False, allow_unicode=True)
    title = f"{config.run.name}: {role} after step {step}"
    tables = _tables(config, lines, changes)
    parts = [f"---\n{front}---", f"# {_text(title)}", _origin(config, base, role), *tables]
    library, model_class = head["library_name"], _CLASS_OF_ADAPTERS if adapters else _CLASSES[role]
    load = f"from {library} import {model_class}\n\nmodel = {model_class}.from_pretrained(FOLDER)"
    parts += [f"## Usage\n\n```python\n{load}\n```", *([_CRITIC] if role == "critic" else [])]
    return "\n\n".join(parts) + "\n"


def _origin(config: Config, base: str, role: str) -> str:
    base_weights = "random weights for" if config.model.init == "random" else "the weights of"
    versions = ", ".join(f"{name} {installed_version(name)}" for name in ("torch", "megatron-core", "transformers"))
    return (
        f"The {role} of a run of megappo {megappo.__version__} ({versions}), trained from {base_weights} {_code(base)}."
    )


def _tables(config: Config, lines: Sequence[Mapping[str, JSONValue]], changes: Sequence[str]) -> Iterator[str]:
    rows = [*_settings(config), *(("changed", _text(change)) for change in changes)]
    yield "## Training\n\n" + _table(("setting", "value"), rows)
    if figures := [*_figures(lines)]:
        text = f"Mean of the last {min(_WINDOW_STEPS, len(lines))} steps, and results of the last evaluation."
        yield f"## Results\n\n{text}\n\n" + _table(("metric", "value"), figures)


def _settings(config: Config) -> Iterator[tuple[str, str]]:
    rollout, algorithm = config.rollout, config.algorithm
    yield "data", ", ".join(_code(source.source) for source in config.data.sources.values())
    yield "reward", _text(config.reward.summary)
    yield "algorithm", f"{_code(algorithm.estimator)}, loss {_code(algorithm.policy_loss)}"
    yield "discount", f"gamma {algorithm.gamma:g}, lambda {algorithm.lam.summary}"
    yield "batch", f"{rollout.prompts_per_step} prompts x {rollout.samples_per_prompt} samples a step"
    yield "response", f"at most {rollout.max_response_tokens} tokens, at temperature {rollout.temperature:g}"
    for name, settings in config.trained.items():
        rate, lora = settings.optimizer.learning_rate, settings.lora
        adapters = f", adapters of rank {lora.rank}" if lora is not None else ""
        yield f"{name}'s optimizer", f"learning rate {rate:g}, {settings.optimizer.schedule}{adapters}"
    yield "seed", str(config.run.seed)


def _figures(lines: Sequence[Mapping[str, JSONValue]]) -> Iterator[tuple[str, str]]:
    last = [line for line in lines if "reward/mean" in line][-_WINDOW_STEPS:]
    for name in _FIGURES:
        values = [float(x) for line in last if isinstance(x := line.get(name), int | float)]
        if finite := [value for value in values if math.isfinite(value)]:
            yield _code(name), f"{sum(finite) / len(finite):.4g}"
    evaluated = [line for line in lines if any(name.startswith("eval/") for name in line)]
    for line in evaluated[-1:]:
        for name, value in line.items():
            if name.startswith("eval/") and isinstance(value, int | float) and math.isfinite(value):
                yield f"{_code(name)} at step {line['step']}", f"{float(value):.4g}"


def _table(head: tuple[str, str], rows: Iterator[tuple[str, str]] | Sequence[tuple[str, str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows)]
    return "\n".join(lines)


def _code(text: str) -> str:
    """Return a text in backticks. Backticks in the text are replaced."""
    return f"`{_short(text).replace('`', chr(39)).replace('|', '/')}`"


def _text(text: str) -> str:
    """Return a text with escaped Markdown characters."""
    return "".join(f"\\{c}" if c in "\\`*_{}[]<>()#+!|" else c for c in _short(text))


def _short(text: str) -> str:
    return shortened(redacted(one_line(text)), _SHOWN_CHARACTERS)
