"""An agent written with OpenAI's SDK, which knows nothing of training, and an episode of it (see agent.yaml)."""

from __future__ import annotations

from typing import Any

from megappo.environments.gateway.server import AgentEndpoint
from megappo.types import Prompt


async def ask_twice(client: Any, question: str) -> list[str]:
    """The agent: it asks, and asks again with what it was told."""
    messages: list[Any] = [{"role": "user", "content": question}]
    while len(messages) < 4:
        answer = await client.chat.completions.create(model="any", messages=messages)
        messages += [answer.choices[0].message, {"role": "user", "content": "+1="}]
    return [messages[1].content, messages[3].content]


async def play(endpoint: AgentEndpoint, prompt: Prompt) -> float:
    """One episode: its reward is how many of the two answers begin with the number that was asked for, and one more."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        first, second = await ask_twice(client, prompt.text)
    number = int(prompt.answer or 0)
    return (first.startswith(str(number)) + second.startswith(str(number + 1))) / 2


def write_chat(source: str, folder: str) -> None:
    """The tokenizer of a folder with a chat template in which a turn is its text and the end of a sequence."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    )
    tokenizer.save_pretrained(folder)
