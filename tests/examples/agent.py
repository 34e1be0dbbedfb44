"""An agent with the OpenAI SDK, which is independent of training, and an episode of this agent (see agent.yaml)."""

from __future__ import annotations

from typing import Any

from megappo.environments.gateway.server import AgentEndpoint
from megappo.types import Prompt


async def send_two_questions(client: Any, question: str) -> list[str]:
    """Send a question and a follow-up question with the first answer, and return both answers."""
    messages: list[Any] = [{"role": "user", "content": question}]
    while len(messages) < 4:
        answer = await client.chat.completions.create(model="any", messages=messages)
        messages += [answer.choices[0].message, {"role": "user", "content": "+1="}]
    return [messages[1].content, messages[3].content]


async def play(endpoint: AgentEndpoint, prompt: Prompt) -> float:
    """Run an episode. The reward is the share of answers that begin with the right number, which is one higher in the
    second answer."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        first, second = await send_two_questions(client, prompt.text)
    number = int(prompt.answer or 0)
    return (first.startswith(str(number)) + second.startswith(str(number + 1))) / 2


def write_chat(source: str, folder: str) -> None:
    """Write the tokenizer of a folder with a chat template. A turn is its text, and turns of the model end with the
    end token."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    )
    tokenizer.save_pretrained(folder)
