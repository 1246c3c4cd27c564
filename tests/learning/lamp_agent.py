"""Press the button that has the colour of the lamp, twice: as a program that calls the model, and
as an environment."""

import json
from random import Random
from typing import Any

from turnwise import MultiTurnEnv, Rubric, Task
from turnwise.envs.tools.calls import parse_tool_calls

COLORS = ("red", "green", "blue")
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "press",
        "description": "",
        "parameters": {
            "type": "object",
            "properties": {"color": {"type": "string"}},
            "required": ["color"],
        },
    },
}


def lamps(split: str, seed: int) -> list[str]:
    rng = Random(f"{split}/{seed}")
    return [rng.choice(COLORS) for _ in range(2)]


def pressed(arguments: str) -> object:
    try:
        return json.loads(arguments).get("color")
    except (ValueError, AttributeError):
        return None


def lamp(task: Task, client: Any) -> dict[str, Any]:
    messages: list[Any] = []
    for color in lamps(task.split, task.seed):
        messages.append({"role": "user", "content": f"light {color}"})
        answer = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        message = answer.choices[0].message
        calls = message.tool_calls or ()
        if not calls or pressed(calls[0].function.arguments) != color:
            return {"reward": 0.0, "success": False}
        client.reward(0.5)
        messages += [message, {"role": "tool", "tool_call_id": calls[0].id, "content": "ok"}]
    return {"reward": 0.0, "success": True}


class Lamp(MultiTurnEnv):
    """The same as an environment."""

    def __init__(self) -> None:
        super().__init__(rubric=Rubric([]), max_turns=3)
        self.oai_tools = [TOOL]

    def make_row(self, seed: int, split: str) -> dict[str, Any]:
        shown = lamps(split, seed)
        return {"prompt": f"light {shown[0]}", "info": {"shown": shown}}

    def setup_state(self, state: Any) -> Any:
        return {**state, "right": 0}

    def is_completed(self, messages: Any, state: Any) -> bool:
        return False

    def env_response(self, messages: Any, state: Any) -> Any:
        shown = state["info"]["shown"]
        calls = parse_tool_calls(messages[-1]["content"])
        right = bool(calls) and pressed(calls[0].arguments) == shown[state["right"]]
        state["right"] += right
        state["turn_reward"] = 0.5 * right
        if not right or state["right"] == len(shown):
            state["done"], state["success"] = True, right
            return [{"role": "user", "content": "end"}], state
        told = {"role": "tool", "tool_call_id": calls[0].id, "content": "ok"}
        return [told, {"role": "user", "content": f"light {shown[1]}"}], state
