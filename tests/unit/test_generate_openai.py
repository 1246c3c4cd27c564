"""ChatClient against a real local HTTP server."""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from turnwise.generate.base import ContextOverflowError, GeneratorError, Sampling
from turnwise.generate.openai import ChatClient, SaidToken
from turnwise.types import Message

HELLO = [Message(role="system", content="Be brief."), Message(role="user", content="hello")]
SAMPLING = Sampling(max_tokens=5, temperature=0.3, stop=("END",))


class Server:
    """Answers with what is queued: (status, headers, body or delay in seconds)."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, dict[str, str], Any]] = []
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append((self.path, dict(self.headers), body))
                status, headers, answer = outer.answers.pop(0)
                if isinstance(answer, float):
                    time.sleep(answer)
                    answer = {}
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                with contextlib.suppress(ConnectionError):  # the client may have given up
                    self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(
            target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()

    def client(self, **options: Any) -> ChatClient:
        return ChatClient(self.url, model="m", **{"backoff": 0.01, "timeout": 10.0, **options})


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.http.shutdown()
    server.http.server_close()


def said(content: str | None, **more: Any) -> dict[str, Any]:
    return {
        "choices": [
            {"message": {"role": "assistant", "content": content, **more}, "finish_reason": "stop"}
        ]
    }


def ask(client: ChatClient, **options: Any) -> Message:
    return asyncio.run(client.chat(HELLO, SAMPLING, **options))


def test_a_reply_becomes_a_message(server: Server):
    server.answers = [(200, {}, said("hi"))]
    assert ask(server.client(api_key="secret")) == Message(role="assistant", content="hi")
    path, headers, body = server.requests[0]
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer secret"
    assert body == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "hello"},
        ],
        "max_tokens": 5,
        "temperature": 0.3,
        "top_p": 1.0,
        "stop": ["END"],
    }


def test_tools_go_out_and_calls_come_back(server: Server):
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    call = {"id": "c0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    server.answers = [(200, {}, said(None, tool_calls=[call]))]
    reply = ask(server.client(), tools=[tool])
    assert server.requests[0][2]["tools"] == [tool]
    assert (reply.content, reply.tool_calls[0].name, reply.tool_calls[0].arguments) == (
        "",
        "add",
        '{"a": 1}',
    )


def test_busy_and_broken_servers_are_asked_again(server: Server):
    server.answers = [(429, {"Retry-After": "0"}, {}), (503, {}, {}), (200, {}, said("late"))]
    assert ask(server.client()).content == "late"
    assert len(server.requests) == 3


def test_it_gives_up_with_the_last_problem(server: Server):
    server.answers = [(500, {}, {"error": "boom"})] * 3
    with pytest.raises(GeneratorError, match=r"3 attempts.*500.*boom"):
        ask(server.client(retries=2))


def test_a_refusal_is_not_repeated(server: Server):
    server.answers = [(401, {}, {"error": "no key"})]
    with pytest.raises(GeneratorError, match="401"):
        ask(server.client())
    assert len(server.requests) == 1
    server.answers = [(400, {}, {"error": {"code": "context_length_exceeded"}})]
    with pytest.raises(ContextOverflowError):
        ask(server.client())


def test_a_silent_server_times_out(server: Server):
    server.answers = [(200, {}, 1.0)]
    with pytest.raises(GeneratorError, match=r"1 attempts.*imed"):
        ask(server.client(timeout=0.1, retries=0))


CALLS = [{"id": "c0", "function": {"name": "add", "arguments": {"a": 1}}}]


@pytest.mark.parametrize(
    "answer",
    [
        b"not json",
        {"choices": []},
        {"choices": [{}]},
        b"null",
        b"[" * 50_000,
        {"choices": [{"message": {"content": 7}}]},
        {"choices": [{"message": {"content": ["hi"]}}]},
        {"choices": [{"message": {"content": "", "tool_calls": CALLS}}]},
    ],
)
def test_an_answer_of_another_shape_is_an_error(server: Server, answer: Any):
    server.answers = [(200, {}, answer)]
    with pytest.raises(GeneratorError, match="no chat completion"):
        ask(server.client())


def test_an_endless_answer_is_given_up(server: Server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("turnwise.generate.openai.MAX_ANSWER", 1000)
    server.answers = [(200, {}, said("hi" * 1000))]
    with pytest.raises(GeneratorError, match="answered with more than 1000 bytes"):
        ask(server.client())


def test_an_answer_that_breaks_off_is_asked_for_again(server: Server):
    server.answers = [(200, {"Content-Length": "1000"}, b'{"choices"'), (200, {}, said("hi"))]
    assert ask(server.client()).content == "hi"
    assert len(server.requests) == 2


def told(content: Any) -> dict[str, Any]:
    answer = said("hi")
    answer["choices"][0]["logprobs"] = {"content": content}
    return answer


def ask_tokens(client: ChatClient) -> tuple[SaidToken, ...]:
    message, tokens = asyncio.run(client.chat_tokens(HELLO, SAMPLING, most=2))
    assert message.content == "hi"
    return tokens


def test_tokens_and_what_could_have_been_said(server: Server):
    others = [{"token": "hi", "logprob": -0.1}, {"token": "ho", "logprob": -3}]
    server.answers = [(200, {}, told([{**others[0], "top_logprobs": others}]))]
    found = ask_tokens(server.client())
    assert found == (SaidToken("hi", -0.1, (("hi", -0.1), ("ho", -3.0))),)
    asked = server.requests[0][2]
    assert (asked["logprobs"], asked["top_logprobs"]) == (True, 2)


def test_what_a_server_does_not_tell_is_not_asked_for_again(server: Server):
    client, refused = server.client(), (400, {}, {"error": "no top_logprobs"})
    plain = (200, {}, told([{"token": "hi", "logprob": -0.1}]))
    server.answers = [refused, plain, plain]
    assert ask_tokens(client) == ask_tokens(client) == (SaidToken("hi", -0.1),)
    server.answers = [(403, {}, {"error": "not allowed"}), (200, {}, said("hi"))]
    assert ask_tokens(client) == ()
    asked = [sorted({"logprobs", "top_logprobs"} & body.keys()) for *_, body in server.requests]
    assert asked == [["logprobs", "top_logprobs"], ["logprobs"], ["logprobs"], ["logprobs"], []]
    server.answers = [(400, {}, {"error": "no such model"})]
    with pytest.raises(GeneratorError, match="no such model"):
        ask_tokens(client)


@pytest.mark.parametrize(
    "content", [None, 3, [3], [{"token": "a"}], [{"token": "a", "logprob": 10**400}]]
)
def test_tokens_of_another_shape_are_left_out(server: Server, content: Any):
    server.answers = [(200, {}, told(content))]
    assert ask_tokens(server.client()) == ()


def test_nobody_there_is_an_error():
    with pytest.raises(GeneratorError, match="nothing listens at"):
        ask(ChatClient("http://127.0.0.1:9/v1", model="m", retries=1, backoff=0.01))


def test_settings_without_a_field_are_refused_and_so_are_bad_addresses():
    client = ChatClient("http://localhost/v1", model="m")
    with pytest.raises(GeneratorError, match="top_k=5"):
        client.body(HELLO, Sampling(max_tokens=1, top_k=5))
    with pytest.raises(ValueError, match="http or https"):
        ChatClient("localhost:8000", model="m")
