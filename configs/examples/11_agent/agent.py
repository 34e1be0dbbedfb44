"""An agent that uses OpenAI's client, and one episode of the agent."""

from __future__ import annotations

from typing import Any

from megappo.environments.gateway.server import AgentEndpoint
from megappo.types import Prompt


async def converse(client: Any, question: str) -> list[str]:
    """Ask the question, then ask for one more. Return both answers."""
    messages: list[Any] = [{"role": "user", "content": question}]
    while len(messages) < 4:
        answer = await client.chat.completions.create(model="any", messages=messages)
        messages += [answer.choices[0].message, {"role": "user", "content": "+1="}]
    return [messages[1].content, messages[3].content]


async def play(endpoint: AgentEndpoint, prompt: Prompt) -> float:
    """Play one episode. The reward is the share of answers that begin with the right number."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        first, second = await converse(client, prompt.text)
    number = int(prompt.answer or 0)
    return (first.startswith(str(number)) + second.startswith(str(number + 1))) / 2
