"""`megappo inspect`: saved samples of a step, and the tokens of one sample with the inputs and results of GAE."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from megappo.commands import path_option, whole_option
from megappo.config.load import load_config
from megappo.config.rules.experience import folder_of_run
from megappo.config.schema import Config
from megappo.config.sections.algorithm import AlgorithmSettings
from megappo.errors import ConfigError, first_of, nearest_numbers, one_line, reason, shortened
from megappo.observe.changes import read_changes
from megappo.observe.saved_samples import (
    SampleLine,
    SampleTokens,
    SavedStep,
    StepSums,
    TokenSpread,
    read_lines,
    read_sample,
    read_sums,
    saved_steps,
)

_MOST_ROWS = 1_000_000
_LARGEST_STEP = 10**9
_TEXT_CHARACTERS, _TOKEN_CHARACTERS, _WHOLE_CHARACTERS = 32, 20, 600
_SORTS = ("id", "reward", "length")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megappo inspect`."""
    parser.add_argument(
        "run_dir", metavar="RUN_DIR", type=path_option, help="directory of a run with logging.save_experience"
    )
    parser.add_argument("--step", metavar="N", help="a saved step (default: the last)")
    parser.add_argument("--sample", metavar="K", help="show the tokens of this sample instead of a list of samples")
    parser.add_argument("--text", metavar="WORDS", help="list samples with this text in the prompt or the response")
    parser.add_argument(
        "--reward", metavar="LOW:HIGH", help="list samples with a reward in this range; --reward=-1:0, --reward=:0"
    )
    parser.add_argument("--length", metavar="LOW:HIGH", help="list samples with a response length in this range")
    parser.add_argument("--sort", choices=_SORTS, default="id", help="order of the list (default: %(default)s)")
    parser.add_argument("--rows", metavar="N", default="40", help="maximum length of the list (default: %(default)s)")


def run(arguments: argparse.Namespace) -> None:
    """Print the samples of a step, or one sample."""
    saved = SavedRun(Path(arguments.run_dir))
    step = saved.step(arguments.step)
    if arguments.sample is not None:
        print("\n".join(saved.describe_sample(step, arguments.sample)))
        return
    search = SampleSearch(
        arguments.text,
        _bounds("--reward", arguments.reward),
        _bounds("--length", arguments.length),
        arguments.sort,
        whole_option("--rows", arguments.rows, 1, _MOST_ROWS),
    )
    print("\n".join(saved.describe_step(step, search)))


def _bounds(option: str, text: str | None) -> tuple[float, float]:
    """Parse LOW:HIGH. Either bound may be omitted."""
    if text is None:
        return -math.inf, math.inf
    low, colon, high = text.partition(":")
    try:
        bounds = float(low or "-inf"), float(high or "inf")
    except ValueError:
        bounds = math.nan, math.nan
    if not colon or not bounds[0] <= bounds[1]:
        raise ConfigError(f"{option} is '{shortened(one_line(text))}', must be LOW:HIGH, such as 0.5:1, 0.5: or :1")
    return bounds


@dataclass(frozen=True)
class SampleSearch:
    """Criteria and order of the listed samples."""

    text: str | None
    reward: tuple[float, float]
    length: tuple[float, float]
    sort: str
    rows: int

    @property
    def chooses(self) -> bool:
        """Whether the criteria may exclude samples."""
        return self.text is not None or {self.reward, self.length} != {(-math.inf, math.inf)}

    def among(self, lines: Sequence[SampleLine]) -> list[SampleLine]:
        """Return the matching lines in order. The largest rewards and lengths are first."""
        matches = [line for line in lines if self._wants(line)]
        keys = {"id": lambda x: x.sample_id, "reward": lambda x: -x.reward, "length": lambda x: -x.length}
        return sorted(matches, key=keys[self.sort])

    def _wants(self, line: SampleLine) -> bool:
        has_text = self.text is None or any(self.text in text for text in (line.prompt, line.raw_response))
        bounds = ((line.reward, self.reward), (line.length, self.length))
        return has_text and all(low <= number <= high for number, (low, high) in bounds)


class SavedRun:
    """Saved experience of a run. Raises ValueError if the run saved none, or if the directory does not belong to a
    run."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        folder = directory if next(directory.glob("step-*/step.json"), None) else self._folder()
        self._steps = saved_steps(folder)
        if not self._steps:
            raise ValueError(
                f"{directory} has no saved experience (in {folder}); run it with 'logging.save_experience={{}}', or "
                "select steps and samples with 'logging.save_experience={steps: [1, 10], samples: 64}'"
            )

    def _folder(self) -> Path:
        """Folder with the saved experience, according to the run's configuration."""
        if not self._directory.is_dir():
            raise ValueError(f"{self._directory} is no directory; name the directory of a run")
        return folder_of_run(self._directory, self._config[0])

    @cached_property
    def _config(self) -> tuple[Config | None, str]:
        """Configuration of the run, or None and the reason."""
        folder = self._directory
        path = next((p for p in (folder / "config.yaml", folder.parent / "config.yaml") if p.exists()), None)
        try:
            return (load_config(path), "") if path is not None else (None, "no config.yaml next to it")
        except ConfigError as error:
            return None, f"{path}: {reason(error)}"

    def step(self, number_text: str | None) -> SavedStep:
        """Return the saved step with a number, or the last saved step."""
        if number_text is None:
            return self._steps[max(self._steps)]
        number = whole_option("--step", number_text, 0, _LARGEST_STEP)
        if number not in self._steps:
            near = nearest_numbers(number, self._steps)
            raise ConfigError(f"step {number} is not saved; saved are {first_of(sorted(self._steps), 8)}; take {near}")
        return self._steps[number]

    def describe_step(self, step: SavedStep, search: SampleSearch) -> Iterator[str]:
        """Yield the text for a step: one line per matching sample, and sums over all saved samples."""
        lines = [line for path in step.files for line in read_lines(path)]
        matches = search.among(lines)
        shown = matches[: search.rows]
        of_all = step.prompts_per_step * step.samples_per_prompt
        yield f"step {step.step} of {self._directory}: {len(lines)} of its {of_all} samples are saved"
        yield from self._settings(step.step)
        if search.chooses:
            yield f"{len(matches)} match the criteria"
        yield ""
        yield from _listed(shown)
        if len(matches) > len(shown):
            yield f"and {len(matches) - len(shown)} more; --rows {len(matches)} shows all"
        if lines:
            yield from ("", "all saved samples together:", *_sum_rows(read_sums(step.files)))
        yield from ("", "--sample K shows one sample token by token; `megappo guide gae` explains the numbers")

    def describe_sample(self, step: SavedStep, number_text: str) -> Iterator[str]:
        """Yield the text for one sample, token by token."""
        sample_id, known = whole_option("--sample", number_text, 0, _LARGEST_STEP), list[int]()
        for path in step.files:
            ids = [line.sample_id for line in read_lines(path)]
            if sample_id in ids:
                line, tokens, sums = read_sample(path, ids.index(sample_id))
                yield f"sample {sample_id} of step {step.step} of {self._directory}"
                yield from self._settings(step.step)
                yield from (*_sample_rows(line), "", *_token_rows(tokens), "", *_sum_rows(sums))
                return
            known += ids
        near = f"saved are {first_of(sorted(known), 8)}" if known else "none is saved"
        raise ConfigError(f"step {step.step} has no sample {sample_id}; {near}")

    def _settings(self, step: int) -> Iterator[str]:
        """Yield the settings of the last step of the run, and the changes after the selected step."""
        config, problem = self._config
        yield f"settings: {_format_algorithm(config.algorithm) if config else f'not known ({one_line(problem)})'}"
        for after, changes in read_changes(self._directory):
            if after >= step:
                yield one_line(f"changed after step {after}: {'; '.join(changes)}")


def _format_algorithm(algorithm: AlgorithmSettings) -> str:
    parts = [f"estimator {algorithm.estimator}", f"gamma {algorithm.gamma:g}", f"lambda {algorithm.lam.summary}"]
    kl = algorithm.kl_in_reward
    parts += [f"per {algorithm.discount_at}"] if algorithm.discount_at != "token" else []
    parts += [f"KL in the reward times {kl.coef:g} ({kl.controller})"] if kl is not None else []
    parts += ["advantages whitened"] if algorithm.whiten_advantages else []
    parts += ["truncated samples are left out of the losses"] if algorithm.mask_truncated else []
    return one_line(", ".join(parts))


def _listed(lines: Sequence[SampleLine]) -> Iterator[str]:
    has_answer = any(line.answer is not None for line in lines)
    columns = {
        "sample": [str(line.sample_id) for line in lines],
        "reward": [_number(line.reward) for line in lines],
        "tokens": [str(line.length) for line in lines],
        "end": [str(line.end) for line in lines],
        "prompt": [_start(line.prompt) for line in lines],
        "response": [_start(line.raw_response) for line in lines],
        **({"right answer": [_start(line.answer or "") for line in lines]} if has_answer else {}),
    }
    yield from _table(columns, left=("end", "prompt", "response", "right answer"))


def _sample_rows(line: SampleLine) -> Iterator[str]:
    of = f" of {one_line(line.data_source)}" if line.data_source else ""
    failed = " (its episode failed)" if line.group_id < 0 else ""
    yield f"prompt {line.group_id}{of}{failed}: {_whole(line.prompt)}"
    yield f"response, {line.length} tokens, {line.end.description}: {_whole(line.raw_response)}"
    if line.answer is not None:
        yield f"right answer: {_whole(line.answer)}"
    scored = "" if line.score == line.reward else f", from the score {_number(line.score)}"
    yield f"reward: {_number(line.reward)}{scored}"
    if line.reward_failure:
        yield f"the reward failed: {_whole(line.reward_failure)}"
    if line.episode_failure:
        yield f"the episode failed: {_whole(line.episode_failure)}"


def _token_rows(tokens: SampleTokens) -> Iterator[str]:
    """Yield a row for each token. Tokens that GAE skips have no value, return or advantage, but their reward is
    shown."""
    own = [bool(x) for x in tokens.columns["mask"]]
    columns = {"position": [str(i) for i in range(len(own))], "id": [str(token) for token in tokens.ids]}
    columns["token"] = [repr(shortened(text, _TOKEN_CHARACTERS)) for text in tokens.texts]
    for name, numbers in tokens.columns.items():
        is_plain = name in ("mask", "loss", "version", "reward")
        shown = [_number(x) if is_plain or is_own else "-" for x, is_own in zip(numbers, own, strict=True)]
        columns["old/engine" if name == "ratio" else name] = shown
    yield from _table(columns, left=("token",))


def _sum_rows(sums: StepSums) -> Iterator[str]:
    yield f"tokens: {sums.tokens}, the model's own {sums.own}, in the losses {sums.counted}"
    yield (
        f"rewards: sum {_number(sums.reward)}, on the last own token {_share(sums.reward_at_end)} of their size, "
        f"on tokens that are not the model's {_share(sums.reward_elsewhere)}"
    )
    yield (
        f"return of the first own token: {_number(sums.first_return)}, "
        f"off the sum of rewards by {_number(sums.return_gap)} (with gamma 1 and lambda 1 by no more than rounding)"
    )
    yield f"returns: {_spread(sums.returns)}"
    if sums.values is not None:
        yield (
            f"values: {_spread(sums.values)}; explained variance {sums.explained_variance:z.3f}, "
            f"correlation with returns {sums.correlation:z.3f}"
        )
    yield f"advantages: {_spread(sums.advantages)}"


def _table(columns: Mapping[str, Sequence[str]], left: Sequence[str]) -> Iterator[str]:
    """Yield the rows of a table. The cells must not contain control characters for terminals."""
    widths = {name: max(len(name), *map(len, cells), 0) for name, cells in columns.items()}
    for row in ([*columns], *(list(cells) for cells in zip(*columns.values(), strict=True))):
        placed = (
            cell.ljust(widths[name]) if name in left else cell.rjust(widths[name])
            for name, cell in zip(columns, row, strict=True)
        )
        yield "  ".join(placed).rstrip()


def _number(value: float) -> str:
    return f"{float(value):.4g}"


def _share(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1%}"


def _spread(spread: TokenSpread) -> str:
    return f"mean {_number(spread.mean)}, standard deviation {_number(spread.std)}"


def _start(text: str) -> str:
    return shortened(one_line(text), _TEXT_CHARACTERS)


def _whole(text: str) -> str:
    return shortened(one_line(text), _WHOLE_CHARACTERS)
