"""Environment in which a model may call tools before it answers: `rollout.environment.name: tools`."""

from __future__ import annotations

from collections.abc import Sequence

from megappo.environments.session import Session
from megappo.environments.tool_calls import WantedCall, call_format
from megappo.errors import either, show
from megappo.observe.json_values import JSONValue

_PARAMETERS = {"calculator": "expression", "python": "code"}
_FUNCTIONS = {
    "calculator": "megappo.environments.mathematics:calculate",
    "python": "megappo.environments.mathematics:python",
}
_WORDS = {
    "calculator": ("The value of an arithmetic expression.", "such as (3 + 4) * 2 ** 5 or sqrt(2)"),
    "python": ("Runs a Python program and gives what it prints.", "the program"),
}


class ToolCalling:
    """Runs the calls of each reply and shows the model their results; a reply without calls ends the episode. It
    gives no reward itself: `reward.function` scores the last reply. `python`, which runs what the model wrote, must
    be named."""

    role = "tool"

    def __init__(self, *, tools: Sequence[str] = ("calculator",), format: str = "qwen") -> None:
        """Check the arguments. Raises ValueError for an unknown tool or format."""
        self._calls = call_format(format, "rollout.environment.arguments.format").calls
        unknown = [tool for tool in tools if tool not in _FUNCTIONS]
        if unknown or isinstance(tools, str) or not tools:
            raise ValueError(
                f"rollout.environment.arguments.tools is {show(tools)}, must be a list of {either(_FUNCTIONS)}; "
                "change it, or write an environment with tools of your own"
            )
        self.tools = {tool: _FUNCTIONS[tool] for tool in tools}
        self.programs = {tool: _PARAMETERS[tool] for tool in tools if tool == "python"}
        self.schemas = [_schema(tool) for tool in tools]

    async def run(self, session: Session) -> None:
        """See `Environment.run`."""
        while calls := self._calls((await session.generate()).text):
            for wanted in calls:
                session.observe(await self._answer(session, wanted))

    async def _answer(self, session: Session, wanted: WantedCall) -> str:
        if wanted.problem:
            return f"Error: {wanted.problem}"
        if wanted.tool not in self.tools:
            return f"Error: there is no tool '{wanted.tool}'; there are {', '.join(self.tools)}"
        parameter = _PARAMETERS[wanted.tool]
        if wanted.arguments.keys() != {parameter} or not isinstance(wanted.arguments[parameter], str):
            return f"Error: {wanted.tool} takes one text, {parameter}"
        return await session.use(wanted.tool, **wanted.arguments)


def _schema(tool: str) -> dict[str, JSONValue]:
    """Schema of a tool in OpenAI's form."""
    what, example = _WORDS[tool]
    name = _PARAMETERS[tool]
    parameters: dict[str, JSONValue] = {
        "type": "object",
        "properties": {name: {"type": "string", "description": example}},
        "required": [name],
    }
    return {"type": "function", "function": {"name": tool, "description": what, "parameters": parameters}}
