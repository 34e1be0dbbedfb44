"""Environment in which a model may call tools before it answers: `rollout.environment.name: tools`."""

from __future__ import annotations

from collections.abc import Sequence

from megappo.environments.session import Session
from megappo.environments.tools.tool_calls import WantedCall, call_format
from megappo.errors import either, show
from megappo.files.json_values import JSONValue

_PARAMETERS = {"calculator": "expression", "python": "code"}
_FUNCTIONS = {
    "calculator": "megappo.environments.tools.mathematics:calculate",
    "python": "megappo.environments.tools.mathematics:python",
}
_DESCRIPTIONS = {
    "calculator": ("The value of an arithmetic expression.", "such as (3 + 4) * 2 ** 5 or sqrt(2)"),
    "python": ("Runs a Python program and gives what it prints.", "the program"),
}


class ToolCalling:
    """Runs the calls of each reply and returns their results to the model. A reply without calls ends the episode.

    The environment gives no reward: `reward.function` scores the last reply. The tool `python`, which runs programs
    of the model, must be listed in `tools`.
    """

    role = "tool"

    def __init__(self, *, tools: Sequence[str] = ("calculator",), format: str = "qwen") -> None:
        """Check the arguments. Raises ValueError for an unknown tool or format."""
        self._calls = call_format(format, "rollout.environment.arguments.format").calls
        unknown = [tool for tool in tools if tool not in _FUNCTIONS]
        if unknown or isinstance(tools, str) or not tools:
            raise ValueError(
                f"rollout.environment.arguments.tools is {show(tools)}, must be a list of {either(_FUNCTIONS)}; "
                "change it, or write an environment with custom tools"
            )
        self.tools = {tool: _FUNCTIONS[tool] for tool in tools}
        self.programs = {tool: _PARAMETERS[tool] for tool in tools if tool == "python"}
        self.schemas = [_schema(tool) for tool in tools]

    async def run(self, session: Session) -> None:
        """See `Environment.run`."""
        while calls := self._calls((await session.generate()).text):
            for call in calls:
                session.observe(await self._answer(session, call))

    async def _answer(self, session: Session, call: WantedCall) -> str:
        if call.problem:
            return f"Error: {call.problem}"
        if call.tool not in self.tools:
            return f"Error: there is no tool '{call.tool}'; there are {', '.join(self.tools)}"
        parameter = _PARAMETERS[call.tool]
        if call.arguments.keys() != {parameter} or not isinstance(call.arguments[parameter], str):
            return f"Error: {call.tool} takes one text, {parameter}"
        return await session.use(call.tool, **call.arguments)


def _schema(tool: str) -> dict[str, JSONValue]:
    """Return the schema of a tool in the OpenAI format."""
    what, example = _DESCRIPTIONS[tool]
    name = _PARAMETERS[tool]
    parameters: dict[str, JSONValue] = {
        "type": "object",
        "properties": {name: {"type": "string", "description": example}},
        "required": [name],
    }
    return {"type": "function", "function": {"name": tool, "description": what, "parameters": parameters}}
