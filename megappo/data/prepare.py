"""Writes the data sets of the shipped configurations as parquet files in verl's schema (`megappo data`).

The sources are the Hugging Face hub or downloaded files. Countdown is generated from a seed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from megappo.data.countdown import puzzles
from megappo.data.tables import json_lines, shown, table_rows
from megappo.errors import either, first_of, nearest_word, reason, writing
from megappo.files.json_values import JSONValue
from megappo.files.parquet_files import read_parquet

Rows = Iterator[dict[str, JSONValue]]
Located = Iterable[tuple[str, dict[str, JSONValue]]]
"""Rows with their places for errors."""

TEST_PUZZLES = 512
_GSM8K_ASKS = 'Let\'s think step by step and output the final answer after "####".'
_MATH_ASKS = "Let's think step by step and output the final answer within \\boxed{}."
_GSM8K_ANSWER = re.compile(r"####\s*(-?[\d.,]+)")
_BOXES = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
_SCHEMA = ("data_source", "prompt", "ability", "reward_model", "extra_info")
_OTHER_FORM = "socratic"
"""Folder of the other configuration of GSM8K in the same repository."""
_MOST_SHOWN = 4


@dataclass(frozen=True)
class Split:
    """A written file and its source."""

    name: str
    """Name of the written file and of the source file, which may have several parts: `train` or
    `train-00000-of-00002`."""
    repository: str
    """Repository on the hub."""
    folder: str
    """Folder in the repository."""
    converted: Callable[[Located, Split], Rows]

    @property
    def is_one(self) -> re.Pattern[str]:
        """Pattern for names of files of the split."""
        return re.compile(rf"{re.escape(self.name)}(?:-\d+-of-(\d+))?\.(?:parquet|jsonl)")


def _row(split: Split, question: str, asks: str, answer: str, extra: Mapping[str, JSONValue]) -> dict[str, JSONValue]:
    return {
        "data_source": split.repository,
        "prompt": [{"role": "user", "content": f"{question} {asks}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split.name, **extra},
    }


def _gsm8k(rows: Located, split: Split) -> Rows:
    """Convert rows with the fields `question` and `answer`. An answer ends with a number, such as `#### 12`."""
    for index, (where, row) in enumerate(rows):
        question, solution = _text(row, "question", where), _text(row, "answer", where)
        numbers = _GSM8K_ANSWER.findall(solution)
        if not numbers:
            raise ValueError(f"{where} has no number after #### in the answer, unlike GSM8K; fetch the file again")
        extra: dict[str, JSONValue] = {"index": index, "question": question, "answer": solution}
        yield _row(split, question, _GSM8K_ASKS, numbers[-1].replace(",", "").rstrip("."), extra)


def _math(rows: Located, split: Split) -> Rows:
    r"""Convert rows with the fields `problem`, `level`, `type` and `solution`. The last `\boxed{}` is the answer."""
    for index, (where, row) in enumerate(rows):
        answer = boxed(_text(row, "solution", where))
        if answer is None:
            raise ValueError(f"{where} has no \\boxed{{}} in the solution, unlike MATH; fetch the file again")
        extra: dict[str, JSONValue] = {"index": index, **{key: str(row.get(key, "")) for key in ("level", "type")}}
        yield _row(split, _text(row, "problem", where), _MATH_ASKS, answer, extra)


def boxed(solution: str) -> str | None:
    r"""Return the content of the last `\boxed{}` of a text, including inner braces, or None without a box."""
    boxes = list(_BOXES.finditer(solution))
    if not boxes:
        return None
    start, depth = boxes[-1].end(), 0
    for place in range(start, len(solution)):
        if solution[place] in "{}" and solution[place - 1] != "\\":
            depth += 1 if solution[place] == "{" else -1
            if depth == 0:
                return solution[start + 1 : place].strip()
    return None


def _each_once(rows: Located, split: Split) -> Rows:
    """Yield rows in verl's schema without duplicate prompts. The files of DAPO contain each prompt many times."""
    seen = set[str]()
    for where, row in rows:
        if missing := [name for name in ("data_source", "prompt", "reward_model") if row.get(name) is None]:
            raise ValueError(f"{where} lacks {', '.join(missing)}, unlike the files of {split.repository}")
        if (key := json.dumps(row["prompt"], sort_keys=True)) not in seen:
            seen.add(key)
            yield {name: row[name] for name in _SCHEMA if name in row}


def _text(row: dict[str, JSONValue], name: str, where: str) -> str:
    text = row.get(name)
    if not isinstance(text, str):
        raise ValueError(f"{where} has {shown(text)} as its {name}, must be a text; use a file of this set")
    return text.strip()


_MATH_HOME = "DigitalLearningGmbH/MATH-lighteval"
SETS: dict[str, tuple[Split, ...]] = {
    "gsm8k": tuple(Split(name, "openai/gsm8k", "main", _gsm8k) for name in ("train", "test")),
    "math": tuple(Split(name, _MATH_HOME, "", _math) for name in ("train", "test")),
    "dapo": (
        Split("dapo-math-17k", "BytedTsinghua-SIA/DAPO-Math-17k", "data", _each_once),
        Split("aime-2024", "BytedTsinghua-SIA/AIME-2024", "data", _each_once),
    ),
}
"""Splits to read from the hub, by the names in `megappo data prepare`."""
COUNTDOWN = "countdown"


def prepare(name: str, out: Path, *, source: Path | None = None, seed: int = 0, count: int = 10_000) -> Iterator[str]:
    """Write the files of a data set to the folder `out`. Yield a sentence for each file.

    Args:
        name: one of `SETS`, or `COUNTDOWN`.
        out: output folder, created if missing. Files with the same names are replaced.
        source: downloaded file or folder, used instead of the hub.
        seed: seed of countdown.
        count: number of countdown puzzles for training. `TEST_PUZZLES` more puzzles are for tests.

    Raises ValueError if the name is unknown, if files cannot be fetched, or if rows do not fit the data set.
    """
    if name == COUNTDOWN:
        if source is not None:
            raise ValueError(f"countdown is generated from a seed and reads no file; remove --from {source}")
        rows = puzzles(count + TEST_PUZZLES, seed)
        yield _write(out / "train.parquet", islice(rows, count))
        yield _write(out / "test.parquet", rows)
        return
    if name not in SETS:
        known = [*SETS, COUNTDOWN]
        near = nearest_word(name, known)
        raise ValueError(f"there is no data set {shown(name)}; the nearest of {either(known)} is {near}")
    for split, files in list(_located(name, source)):
        yield _write(out / f"{split.name}.parquet", split.converted(_rows(files), split))


def _located(name: str, source: Path | None) -> Iterator[tuple[Split, list[Path]]]:
    """Yield the existing splits with their files."""
    splits = SETS[name]
    if source is not None and source.is_file():
        match = next((split for split in splits if split.is_one.fullmatch(source.name)), None)
        if match is None:
            names = either(f"{split.name}.parquet" for split in splits)
            raise ValueError(
                f"--from {source}: the name does not identify a split of {name}; rename the file to {names}"
            )
        yield match, [source]
        return
    if source is not None and not source.is_dir():
        raise ValueError(f"--from {source}: there is no such file or folder (from {Path.cwd()}); check the path")
    for split in splits:
        yield split, _files(source if source is not None else _fetched(split), split)


def _files(folder: Path, split: Split) -> list[Path]:
    """Return all parts of a split below a folder, in order."""
    paths = [path for path in sorted(folder.rglob("*")) if _OTHER_FORM not in path.relative_to(folder).parts]
    matches = {path: split.is_one.fullmatch(path.name) for path in paths}
    parts_of_files = {path: match[1] for path, match in matches.items() if match}
    if not parts_of_files:
        raise ValueError(
            f"{folder} contains no {split.name}.parquet or {split.name}.jsonl, and no parts; fetch the folder again, "
            "or use a single file"
        )
    parts = {int(count or 1) for count in parts_of_files.values()}
    if parts != {len(parts_of_files)} or len({path.parent for path in parts_of_files}) > 1:
        shown_files = first_of([path.relative_to(folder) for path in parts_of_files], _MOST_SHOWN)
        raise ValueError(
            f"{folder} contains {shown_files}, which are not the parts of one {split.name}; use one file or folder"
        )
    return list(parts_of_files)


def _fetched(split: Split) -> Path:
    from huggingface_hub import constants, snapshot_download

    from megappo.models.hub import PATIENCE_SECONDS, http_package, silence

    is_set = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else None
    offline = is_set or silence(constants.ENDPOINT, PATIENCE_SECONDS)
    patterns = [f"{split.folder}/*" if split.folder else "*"]
    try:
        where = snapshot_download(
            split.repository, repo_type="dataset", allow_patterns=patterns, local_files_only=offline is not None
        )
    except (OSError, ValueError, http_package().HTTPError) as error:
        raise ValueError(
            f"the data set '{split.repository}' could not be fetched from the hub ({offline or reason(error)}); on a "
            f"machine with a network, run `hf download --repo-type dataset {split.repository} --local-dir FOLDER`, and "
            "use --from FOLDER"
        ) from error
    return Path(where)


def _rows(files: Iterable[Path]) -> Located:
    for path in files:
        yield from json_lines(path) if path.suffix == ".jsonl" else table_rows(read_parquet(path), path)


def _write(path: Path, rows: Iterable[dict[str, JSONValue]]) -> str:
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.Table.from_pylist(list(rows))
    partial = path.with_name(f"{path.name}.partial")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(table, partial)
        partial.replace(path)
    return f"{path}: {table.num_rows} prompt{'s' if table.num_rows != 1 else ''}"
