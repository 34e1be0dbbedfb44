"""Mutated configurations are accepted or refused with sentences, within a time limit."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest

from megappo.cli import main
from megappo.config import Config, load_config, save_config
from megappo.config.fields import all_keys, dotted, find_field, section_of
from megappo.config.reading.yaml_core import dump_yaml, parse_yaml
from tests.support.places import ROOT

SEED, MUTATIONS = 20261122, 520
LIMIT_SECONDS = 2.0
MAX_OUTPUT_CHARACTERS = 20_000

NUMBERS = [
    *(".inf", "-.inf", ".nan", "1e999", "-1e999", "0", "-0.0", "-1", "1", "2", "3", "7", "0.5", "1e-400", "4.9e-324"),
    *("1.7e308", "2147483647", "2147483648", "4294967296", "9223372036854775807", "9223372036854775808", "1e11"),
    *("100000000000", "1000000000000", "18446744073709551616", "1e12", "16384", "65536", "1048576", "16777216", "+5"),
    *("0x7fffffffffffffff", "0o777", "1_000", "1.0", "1e3", "010", "9" * 30, "9" * 4300, "0x" + "f" * 5000),
]
TEXTS = [
    *("true", "null", "no", "''", "'10'", "[]", "{}", "[1, 2]", "[-1]", "[[[]]]", "{a: 1}", "{1: 2}", "{null: 3}"),
    *("../../x", "/", ".", "~", "a/../../b", "x" * 300, "x" * 5000, "'x\n\ny'", '"\\e[2J"', '"\\0"', '"\\ud800"'),
    *("!!bool maybe", '!!float ""', "!!int x", "!!null 1", "!!str 1", "!!seq 1", "!!map []", "!!set {a}", "!x y"),
    *('"\\UFFFFFFFF"', '"\\xff"', "*a", "&a 1", "&a [*a]", "<<", "1e" + "9" * 400, "ü" * 200),
    *("[" * 60 + "]" * 60, "[" * 2000, "{a: " * 60 + "1" + "}" * 60, "- " * 500, "[" + "1," * 4000 + "]"),
    *("reasoning_gym:x", "os:system", "a.jsonl", "gpt:nonsense", "http://x", "Qwen/", "float32", "sglang"),
]  # fmt: skip
BOMB = "x: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"y{i}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(9)
)
LEAVES = [key for key in all_keys() if (field := find_field(key)) is not None and section_of(field) is None]
SECTIONS = sorted(set(all_keys()) - set(LEAVES))
Mutant = tuple[str, list[str]]
"""Text of the file and overrides."""


class Base(NamedTuple):
    """A valid configuration."""

    text: str
    data: dict[str, Any]
    config: Config


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> list[Base]:
    """Write valid configurations of a model with a long context."""
    model = tmp_path_factory.mktemp("model")
    shape = json.loads((ROOT / "configs/models/tiny_arithmetic/config.json").read_text())
    (model / "config.json").write_text(json.dumps(shape | {"max_position_embeddings": 2**31}))
    names = ("configs/quickstart.yaml", "configs/sglang_disaggregated.yaml", "tests/support/config_base.yaml")
    configurations = []
    for name in names:
        data = parse_yaml((ROOT / name).read_text(), name)
        data["model"]["path"] = str(model)
        if data["rollout"].get("engine") != "transformers":
            data["model"]["dtype"] = "bfloat16"  # the plan is for GPUs, where servers reject float32
        path = model / "base.yaml"
        path.write_text(dump_yaml(data))
        configurations.append(Base(path.read_text(), data, load_config(path)))
        with contextlib.redirect_stdout(io.StringIO()):  # the command imports all modules
            assert main(["plan", str(path), "--gpus", "2"]) == 0
    return configurations


def new_value(rng: random.Random, old: Any) -> str:
    """Return the YAML text of a new value: a similar value, a number at a limit, or text that is no valid value."""
    if isinstance(old, bool) or (old is None and rng.random() < 0.3):
        return rng.choice(("true", "false", "null", "1", "0.5"))
    if isinstance(old, (int, float)) and rng.random() < 0.6:
        factor = rng.choice((-1, 0.1, 0.5, 2, 2, 4, 10, 1000, 1e6, 1e9))
        return str(type(old)(old * factor))
    return rng.choice(NUMBERS if rng.random() < 0.5 else TEXTS)


def value_at(config: Config, key: tuple[str, ...]) -> Any:
    value: Any = config
    for name in key:
        value = getattr(value, name, None)
    return value


def mutate_values(rng: random.Random, base: Base) -> Mutant:
    """Change the values of some settings with overrides."""
    keys = rng.sample(LEAVES, rng.choice((1, 1, 1, 2, 3)))
    return base.text, [f"{dotted(key)}={new_value(rng, value_at(base.config, key))}" for key in keys]


def mutate_structure(rng: random.Random, base: Base) -> Mutant:
    """Remove, move, duplicate or replace sections, or add unknown settings."""
    data = copy.deepcopy(base.data)
    place = data
    while (inner := [v for v in place.values() if isinstance(v, dict)]) and rng.random() < 0.6:
        place = rng.choice(inner)
    name = rng.choice(list(place)) if place else "x"
    other = rng.choice(list(data))
    kind = rng.randrange(9)
    if kind == 0:
        place.pop(name, None)
    elif kind == 1:
        data[rng.choice(SECTIONS)[-1]] = place.pop(name, None)
    elif kind == 2:
        place[name] = [place.get(name)] * rng.choice((1, 2, 100))
    elif kind == 3:
        place[name] = {name: place.get(name)}
    elif kind == 4:
        place[name] = copy.deepcopy(data[other])
    elif kind == 5:
        place |= {f"{rng.choice(LEAVES)[-1]}{rng.choice('sx_1')}": i for i in range(rng.choice((1, 5, 40, 3000)))}
        place |= {f"k{i}": i for i in range(rng.choice((1, 1, 3000)))}
    elif kind == 6:
        odd: Any = rng.choice((None, True, 1, 2.5, float("inf"), "", "a.b", "x" * 4000, "\x1b[2J", "ü"))
        place[odd] = 1
    elif kind == 7:
        data.update(copy.deepcopy(place))
    else:
        deep: Any = 1
        for _ in range(rng.choice((10, 48, 49, 60, 400))):
            deep = {name: deep} if rng.random() < 0.5 else [deep]
        place[name] = deep
        return json.dumps(data), []
    return dump_yaml(data), []


def mutate_text(rng: random.Random, base: Base) -> Mutant:
    """Remove, duplicate, move or replace characters and lines, or add very long text."""
    text = base.text
    lines = text.splitlines(keepends=True)
    kind = rng.randrange(8)
    if kind == 0:
        start = rng.randrange(len(text))
        return text[:start] + text[start + rng.choice((1, 1, 3, 20, 500)) :], []
    if kind == 1:
        for _ in range(rng.choice((1, 2, 5))):
            at = rng.randrange(len(text))
            text = text[:at] + rng.choice("{}[]:,&*!|>'\"%@`#?-\t\n\r\0\x07\x85\ufeff\u2028ü=<~ 9") + text[at:]
        return text, []
    if kind == 2:
        rng.shuffle(lines)
    elif kind == 3:
        lines.insert(rng.randrange(len(lines)), rng.choice(lines))
    elif kind == 4:
        at = rng.randrange(len(lines))
        lines[at] = rng.choice((" ", "   ", "\t", "- ", "? ", "! ", "&a ", "...\n", "---\n", "%YAML 9.9\n")) + lines[at]
    elif kind == 5:
        lines.insert(rng.randrange(len(lines) + 1), rng.choice((BOMB, "#" * 99_000, "\n" * 50_000, "a: " * 2000)))
    elif kind == 6:
        at = rng.randrange(len(lines))
        lines[at] = f"{lines[at].split(':')[0]}: {rng.choice(TEXTS)}\n"
    else:
        lines *= rng.choice((2, 60, 1000))
    return "".join(lines), []


def mutate_overrides(rng: random.Random, base: Base) -> Mutant:
    """Add overrides with invalid keys."""
    key = dotted(rng.choice(all_keys()))
    at = rng.randrange(len(key))
    options = "reward.options" + ".a" * rng.choice((3, 47, 60, 5000))
    strange = key[: at + 1] + rng.choice("abc._- ü\udc80\x1b") + key[at:]
    keys = (key[:at] + key[at + 1 :], strange, f"{key}.{key}", f".{key}", key.upper(), key.split(".")[-1], options)
    name, equals = rng.choice((*keys, "", "=", "x" * 9000)), rng.choice(("=", "=", "=", "", "==", ": "))
    first = f"{name}{equals}{rng.choice(NUMBERS + TEXTS)}"
    return base.text, [first, *([f"{key}={rng.choice(TEXTS)}"] if rng.random() < 0.3 else [])]


MUTATORS: tuple[Callable[[random.Random, Base], Mutant], ...] = (
    mutate_values, mutate_values, mutate_structure, mutate_text, mutate_overrides,
)  # fmt: skip


@contextlib.contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError if the block uses more CPU time than the limit. Time of other processes does not count."""

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"more than {seconds:g} seconds")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def run_mutant(path: Path, overrides: list[str]) -> tuple[int, str]:
    """Plan a mutated configuration on two devices. Return the exit code and the text on stderr."""
    output = io.StringIO()
    with contextlib.redirect_stderr(output), contextlib.redirect_stdout(io.StringIO()), cpu_limit(LIMIT_SECONDS):
        try:
            code = main(["plan", str(path), *overrides, "--gpus", "2"])
        except SystemExit as refusal:  # argparse exits for an override that begins like an option
            assert (refusal.code, output.getvalue()[:6]) == (2, "usage:")
            return 2, "megappo: error: usage"
    return code, output.getvalue()


def check_mutant(number: int, bases: list[Base], path: Path) -> int:
    """Mutate a configuration, run the command, and check its output. Return the exit code."""
    rng = random.Random(f"{SEED}/{number}")
    text, overrides = MUTATORS[number % len(MUTATORS)](rng, rng.choice(bases))
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    code, output = run_mutant(path, overrides)
    assert len(output) < MAX_OUTPUT_CHARACTERS, number
    if code == 2:
        assert output, number
        for line in output.splitlines():
            assert line.startswith("megappo: error: "), (number, line)
            assert len(line) < 5000, (number, line)
            assert line.isprintable(), (number, line)
    else:
        assert output == "", (number, output)
        config = load_config(path, overrides)
        save_config(config, path)
        assert load_config(path) == config, number
    return code


@pytest.mark.slow
def test_mutated_configurations_are_accepted_or_refused(bases: list[Base], tmp_path: Path) -> None:
    codes = [check_mutant(number, bases, tmp_path / "mutant.yaml") for number in range(MUTATIONS)]
    assert set(codes) <= {0, 1, 2}
    assert codes.count(2) > MUTATIONS // 3
    assert len(codes) - codes.count(2) > MUTATIONS // 12, "some mutations leave a configuration valid"
