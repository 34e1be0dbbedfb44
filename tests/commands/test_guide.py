"""`megappo guide` prints guides and their sections."""

from __future__ import annotations

import pytest

from megappo.cli import main
from megappo.commands.guide import GUIDES, TOPICS, section_of, text_of


def test_every_guide_is_a_topic() -> None:
    assert {path.stem for path in GUIDES.glob("*.md")} == set(TOPICS)


def test_list_of_topics(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["guide"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines] == list(TOPICS)


@pytest.mark.parametrize("topic", TOPICS)
def test_print_a_guide(topic: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["guide", topic]) == 0
    assert capsys.readouterr().out == text_of(topic)


def test_print_a_section_with_its_subsections(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["guide", "ppo", "ratio and"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("## Ratio and clipping\n") and "### Dual clip" in printed
    assert "## Estimators of KL" not in printed


def test_comments_in_code_are_no_headings(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "# Title\n\n## Use\n\n```bash\n# a comment about ends\nls\n```\n\nmore\n\n## End\n\nlast\n"
    monkeypatch.setattr("megappo.commands.guide.text_of", lambda topic: text)
    assert section_of("ppo", "use").endswith("```\n\nmore")
    assert section_of("ppo", "end") == "## End\n\nlast"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["troubleshot"], "there is no guide 'troubleshot'; the nearest topic is troubleshoot"),
        (["xyzzy"], "there is no guide 'xyzzy'; the topics are"),
        (["ppo", "no such words"], "the guide ppo has no section 'no such words'; its sections are"),
    ],
)
def test_unknown_topics_and_sections(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["guide", *arguments]) == 2
    assert message in capsys.readouterr().err
