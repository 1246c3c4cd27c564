"""Replies of the policy as the JSON and the event streams of the chat completions API and the
responses API."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from turnwise.endpoint.asks import Ask
from turnwise.endpoint.history import without_thoughts
from turnwise.envs.tools.calls import CLOSE, OPEN, parse_tool_calls
from turnwise.types import FinishReason, Json, Message, ToolCall


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """One reply, with what programs want to know of its tokens."""

    id: str
    content: str
    thoughts: str
    calls: tuple[ToolCall, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    logprobs: tuple[tuple[str, float], ...] = ()
    """(text, log-prob) of every token, where they were asked for."""
    likeliest: tuple[tuple[tuple[str, float], ...], ...] = ()
    """In the place of every token, (text, log-prob) of the likeliest, where they were asked for."""

    @property
    def message(self) -> Message:
        """The reply as a program sends it back."""
        return Message(role="assistant", content=self.content, tool_calls=self.calls)


def read_reply(text: str, ask: Ask, *, turn: int | str) -> tuple[str, str, tuple[ToolCall, ...]]:
    """(thoughts, content, calls of tools) of what the policy said. Calls are read where tools were
    offered; a malformed call stays a part of the content, so that the program sees it.

    Example:
        >>> ask = Ask(api="chat", messages=(), tools=({"type": "function"},))
        >>> text = 'So: <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
        >>> read_reply(text, ask, turn=3)
        ('', 'So:', (ToolCall(id='call_3_0', name='add', arguments='{"a": 1}'),))
    """
    for stop in ask.stop:
        text = text.partition(stop)[0]
    thoughts, content = without_thoughts(text)
    if not ask.tools:
        return thoughts, content, ()
    calls: list[ToolCall] = []
    rest: list[str] = []
    head, *pieces = content.split(OPEN)
    rest.append(head)
    for piece in pieces:
        body, mark, after = piece.partition(CLOSE)
        found = parse_tool_calls(OPEN + body + CLOSE) if mark else ()
        if found and found[0].name:
            number = f"call_{turn}_{len(calls)}"
            calls.append(ToolCall(id=number, name=found[0].name, arguments=found[0].arguments))
            rest.append(after)
        else:
            rest.append(OPEN + piece)
    return thoughts, "".join(rest).strip() if calls else content, tuple(calls)


def chat_json(ask: Ask, replies: Sequence[Reply]) -> dict[str, Json]:
    """The answer of POST /v1/chat/completions."""
    return {
        "id": replies[0].id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": ask.model,
        "choices": [
            {
                "index": place,
                "message": {
                    "role": "assistant",
                    "content": reply.content if reply.content or not reply.calls else None,
                    **({"reasoning_content": reply.thoughts} if reply.thoughts else {}),
                    **({"tool_calls": _calls(reply)} if reply.calls else {}),
                },
                "logprobs": _logprobs(ask, reply),
                "finish_reason": _finish(reply),
            }
            for place, reply in enumerate(replies)
        ],
        "usage": _usage(replies),
    }


def chat_events(ask: Ask, replies: Sequence[Reply]) -> Iterator[Json]:
    """The chunks of a stream of chat completions, after the first (see `first_chunk`)."""

    def chunk(choices: list[Json], **more: Json) -> Json:
        return {**_chunk(ask, replies[0].id), "choices": choices, **more}

    for place, reply in enumerate(replies):
        deltas: list[dict[str, Json]] = []
        if place:
            deltas.append({"role": "assistant", "content": ""})
        if reply.thoughts:
            deltas.append({"reasoning_content": reply.thoughts})
        if reply.content:
            deltas.append({"content": reply.content})
        if reply.calls:
            calls = [{"index": number, **call} for number, call in enumerate(_calls(reply))]
            deltas.append({"tool_calls": calls})
        # All tokens of a reply come with its first words, or with its end where it has none.
        logprobs = _logprobs(ask, reply)
        for delta in deltas:
            says = bool(delta.get("content") or delta.get("tool_calls"))
            yield chunk(
                [
                    {
                        "index": place,
                        "delta": delta,
                        "logprobs": logprobs if says else None,
                        "finish_reason": None,
                    }
                ]
            )
            logprobs = None if says else logprobs
        yield chunk(
            [{"index": place, "delta": {}, "logprobs": logprobs, "finish_reason": _finish(reply)}]
        )
    if ask.usage:
        yield chunk([], usage=_usage(replies))


def first_chunk(ask: Ask, name: str) -> Json:
    """The chunk that opens a stream."""
    return delta_chunk(ask, name, {"role": "assistant", "content": ""})


def waiting_chunk(ask: Ask, name: str) -> Json:
    """A chunk that says nothing, for a stream whose policy is not ready. Clients put the texts of
    all chunks together, so the role must not come twice."""
    return delta_chunk(ask, name, {"content": ""})


def delta_chunk(
    ask: Ask, name: str, delta: Json, logprobs: Sequence[tuple[str, float]] = ()
) -> Json:
    """A chunk with a piece of a reply, and (text, log-prob) of its tokens."""
    told = _token_logprobs(logprobs) if ask.logprobs and logprobs else None
    return {
        **_chunk(ask, name),
        "choices": [{"index": 0, "delta": delta, "logprobs": told, "finish_reason": None}],
    }


def responses_json(ask: Ask, reply: Reply, *, status: str = "completed") -> dict[str, Json]:
    """The answer of POST /v1/responses."""
    done = status == "completed"
    cut = done and reply.finish_reason == "length"
    return {
        "id": reply.id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if cut else status,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "model": ask.model,
        "output": _items(reply) if done else [],
        "temperature": None,
        "top_p": None,
        "max_output_tokens": ask.max_tokens,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "truncation": "disabled",
        "text": {"format": {"type": "text"}},
        "usage": {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": reply.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        }
        if done
        else None,
        **ask.echo,
    }


def responses_events(ask: Ask, reply: Reply) -> Iterator[Json]:
    """The events of a stream of the responses API."""
    started = responses_json(ask, reply, status="in_progress")
    yield {"type": "response.created", "response": started}
    yield {"type": "response.in_progress", "response": started}
    for place, item in enumerate(_items(reply)):
        at: dict[str, Json] = {"item_id": item["id"], "output_index": place}
        empty = {**item, "status": "in_progress"}
        if item["type"] == "message":
            part = item["content"][0]
            blank = {**part, "text": ""}
            inside = {**at, "content_index": 0}
            yield {
                "type": "response.output_item.added",
                "output_index": place,
                "item": {**empty, "content": []},
            }
            yield {"type": "response.content_part.added", **inside, "part": blank}
            yield {
                "type": "response.output_text.delta",
                **inside,
                "delta": part["text"],
                "logprobs": [],
            }
            yield {
                "type": "response.output_text.done",
                **inside,
                "text": part["text"],
                "logprobs": [],
            }
            yield {"type": "response.content_part.done", **inside, "part": part}
        elif item["type"] == "function_call":
            yield {
                "type": "response.output_item.added",
                "output_index": place,
                "item": {**empty, "arguments": ""},
            }
            yield {
                "type": "response.function_call_arguments.delta",
                **at,
                "delta": item["arguments"],
            }
            yield {
                "type": "response.function_call_arguments.done",
                **at,
                "name": item["name"],
                "arguments": item["arguments"],
            }
        else:
            yield {"type": "response.output_item.added", "output_index": place, "item": item}
        yield {"type": "response.output_item.done", "output_index": place, "item": item}
    whole = responses_json(ask, reply)
    yield {"type": f"response.{whole['status']}", "response": whole}


def as_event(data: Json, *, named: bool = False) -> bytes:
    """One server-sent event. Those of the responses API have a name."""
    name = f"event: {data['type']}\n" if named else ""
    return f"{name}data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


def _items(reply: Reply) -> list[dict[str, Json]]:
    items: list[dict[str, Json]] = []
    if reply.thoughts:
        items.append(
            {
                "type": "reasoning",
                "id": f"rs_{reply.id}",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": reply.thoughts}],
                "status": "completed",
            }
        )
    if reply.content or not reply.calls:
        items.append(
            {
                "type": "message",
                "id": f"msg_{reply.id}",
                "role": "assistant",
                "status": "completed",
                "content": [
                    {
                        "type": "output_text",
                        "text": reply.content,
                        "annotations": [],
                        "logprobs": [],
                    }
                ],
            }
        )
    for call in reply.calls:
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{call.id}",
                "call_id": call.id,
                "name": call.name,
                "arguments": call.arguments,
                "status": "completed",
            }
        )
    return items


def _chunk(ask: Ask, name: str) -> dict[str, Json]:
    return {
        "id": name,
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": ask.model,
    }


def _calls(reply: Reply) -> list[dict[str, Json]]:
    return [call.to_json() for call in reply.calls]


def _finish(reply: Reply) -> str:
    return "tool_calls" if reply.calls and reply.finish_reason == "stop" else reply.finish_reason


def _usage(replies: Sequence[Reply]) -> dict[str, Json]:
    prompt = replies[0].prompt_tokens
    said = sum(reply.completion_tokens for reply in replies)
    return {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}


def _logprobs(ask: Ask, reply: Reply) -> Json:
    return _token_logprobs(reply.logprobs, reply.likeliest) if ask.logprobs else None


def _token_logprobs(
    logprobs: Sequence[tuple[str, float]],
    likeliest: Sequence[Sequence[tuple[str, float]]] = (),
) -> Json:
    rows = likeliest or [()] * len(logprobs)
    return {
        "content": [
            {**_token(*said), "top_logprobs": [_token(*one) for one in row]}
            for said, row in zip(logprobs, rows, strict=True)
        ],
        "refusal": None,
    }


def _token(text: str, logprob: float) -> dict[str, Json]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
