"""Programs that call the policy through OpenAI's API: real clients, a real server, real tokens."""

import asyncio
import contextlib
import http.client
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from agent_parts import agent_config, play, scripted

from turnwise.data.batch import collate
from turnwise.data.samples import contexts, episode_to_samples
from turnwise.endpoint import wire
from turnwise.rollout.proxy import AgentProxy
from turnwise.testing.tiny import tiny_tokenizer
from turnwise.types import Call, Episode, Message, Observation, Status, StepResult, Task

USER = {"role": "user", "content": "Where to?"}
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
CALL = '<tool_call>{"name": "look", "arguments": {"at": "caf\u00e9", "n": 1}}</tool_call>'


def chat(client: Any, messages: list[Any], **options: Any) -> Any:
    return client.chat.completions.create(model="policy", messages=messages, **options)


def test_turns_cross_to_the_trainer_whole() -> None:
    call = Call(parent=2, role="judge", max_tokens=7, stop=("end",))
    messages = (Message(role="user", content="Where to?"),)
    opening = Observation(messages=messages, tools=(TOOL,), state_key="s", call=call)
    result = StepResult(
        messages=messages,
        reward=0.5,
        truncated=True,
        action="look",
        reward_parts={"env": 1.0, "format": -0.5},
        state_key="t",
        info={"success": False},
        rewritten=Observation(messages=messages, tools=(TOOL,)),
        call=call,
        earlier={0: 0.25, 3: 1.0},
        trained=False,
    )
    sent = json.loads(json.dumps([wire.observation_to_json(opening), wire.result_to_json(result)]))
    assert wire.observation_from_json(sent[0]) == opening
    assert wire.result_from_json(sent[1]) == result
    plain = StepResult(messages=(), reward=1.0, terminated=True)
    assert wire.result_from_json(json.loads(json.dumps(wire.result_to_json(plain)))) == plain


async def three_turns(task: Task, client: Any) -> dict[str, Any]:
    messages: list[Any] = [{"role": "user", "content": f"Task {task.seed % 100}"}]
    for _ in range(3):
        answer = await chat(client, messages)
        messages += [answer.choices[0].message, {"role": "user", "content": "Go on."}]
    return {"reward": 1.5, "success": True, "info": {"calls": 3}}


def test_a_program_is_an_episode_of_one_conversation() -> None:
    episodes, recorder = play(three_turns, groups=2, size=3)
    assert [episode.status for episode in episodes] == [Status.COMPLETED] * 6
    for episode in episodes:
        assert [turn.restart for turn in episode.turns] == [True, False, False]
        assert (episode.reward, episode.success) == (1.5, True)
        assert [turn.reward for turn in episode.turns] == [0.0, 0.0, 1.5]
        assert len(episode_to_samples(episode)) == 1
    opening = {episode.group_id: episode.turns[0].prompt_ids for episode in episodes}
    assert len(set(opening.values())) == 2
    assert len(recorder.calls) == 18


class Waiter:
    """A class is made anew for every episode."""

    def __init__(self) -> None:
        self.asked = 0

    def run(self, task: Task, client: Any) -> float:
        self.asked += 1
        chat(client, [USER])
        return float(self.asked)


def test_a_class_without_async_works() -> None:
    episodes, _ = play(Waiter, groups=3)
    assert [episode.reward for episode in episodes] == [1.0] * 3


def tools_in_many_forms(client: Any) -> float:
    """Sends the reply back as clients do: arguments in another form, no content, parts."""
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, USER]
    for form in range(4):
        answer = chat(client, messages, tools=[TOOL])
        message = answer.choices[0].message
        call = message.tool_calls[0]
        assert answer.choices[0].finish_reason == "tool_calls"
        assert json.loads(call.function.arguments) == {"at": "caf\u00e9", "n": 1}
        arguments = [
            call.function.arguments,
            json.dumps({"n": 1.0, "at": "caf\u00e9"}),
            '{ "at":"caf\u00e9" ,"n":1 }',
            json.dumps(json.loads(call.function.arguments), ensure_ascii=True),
        ][form]
        echo: dict[str, Any] = {
            "role": "assistant",
            "tool_calls": [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": "look", "arguments": arguments},
                }
            ],
        }
        if form:
            echo["content"] = [None, None, "", []][form]
        result: dict[str, Any] = {"role": "tool", "tool_call_id": call.id, "content": "a wall"}
        if form == 2:
            result["content"] = [{"type": "text", "text": "a wall"}]
        messages += [echo, result]
    return 1.0


def test_calls_sent_back_in_any_form_continue_the_same_tokens() -> None:
    (episode,), _ = play(tools_in_many_forms, CALL)
    assert episode.status is Status.COMPLETED, episode.error
    assert [turn.restart for turn in episode.turns] == [True, False, False, False]
    assert [turn.info.get("context_cause") for turn in episode.turns] == [
        "first",
        *["continued"] * 3,
    ]


def strips_thoughts(client: Any) -> float:
    messages: list[Any] = [USER]
    for _ in range(3):
        message = chat(client, messages).choices[0].message
        assert (message.content.strip(), message.reasoning_content) == ("north", "which way?")
        messages += [{"role": "assistant", "content": " north\n"}, USER]
    return 1.0


def test_thoughts_that_a_client_strips_stay_in_the_tokens() -> None:
    (episode,), _ = play(strips_thoughts, "<think>which way?</think> north")
    assert len(contexts(episode.turns)) == 1


def goes_back(client: Any) -> float:
    """Two conversations in turns, a branch, an edit, and a summary."""
    plan: list[Any] = [{"role": "system", "content": "Plan."}, USER]
    work: list[Any] = [{"role": "system", "content": "Work."}, USER]
    for messages in (plan, work, plan, work):
        answer = chat(client, messages).choices[0].message.content
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And?"}]
    branch = [*plan[:3], {"role": "user", "content": "Another way?"}]
    chat(client, branch)
    edited = [*plan[:2], {"role": "assistant", "content": "something else"}, USER]
    chat(client, edited)
    chat(client, [{"role": "user", "content": "Summary: nothing."}])
    return 1.0


def test_conversations_of_an_episode_are_contexts_of_one_tree() -> None:
    (episode,), _ = play(goes_back, lambda session, call: f"reply {call}")
    assert episode.status is Status.COMPLETED, episode.error
    turns = episode.turns
    assert [turn.parent for turn in turns] == [None, None, 0, 1, 0, None, None]
    assert [turn.restart for turn in turns] == [True, True, False, False, False, True, True]
    found = contexts(turns)
    assert [context.turns for context in found] == [(0, 2), (1, 3), (4,), (5,), (6,)]
    # The branch begins with the ids that the first turn saw and said; they are trained once.
    prefix = turns[0].prompt_ids + turns[0].completion.ids
    assert found[2].prefix == prefix
    sample = episode_to_samples(episode)[2]
    assert sample.ids[: len(prefix)] == prefix
    assert not any(sample.response_mask[: len(prefix)])
    causes = [turn.info["context_cause"] for turn in turns]
    assert causes == ["first", "new", "branched", "branched", "branched", "edited", "new"]


def test_credit_runs_over_the_calls_in_their_order() -> None:
    """Rows that take turns are one episode for every estimator: GAE looks from each call to the
    next one, whatever conversation that is in."""
    import torch

    from turnwise.algos.turn_gae import turn_gae

    (episode,), _ = play(goes_back, lambda session, call: f"reply {call}")
    batch = collate(episode_to_samples(episode))
    values = torch.where(batch.response_mask, batch.turn_ids.float(), 0.0)
    lay_rewards = torch.where(batch.rewards != 0, batch.rewards, 0.0)
    advantages, _ = turn_gae(
        lay_rewards,
        values,
        batch.response_mask,
        gamma=1.0,
        lam=0.0,
        turn_ids=batch.turn_ids,
        episode_ids=batch.episode_ids,
    )
    by_turn = {
        int(turn): advantages[batch.response_mask & (batch.turn_ids == turn)] for turn in range(7)
    }
    for turn in range(6):  # the next call's value is one more
        assert torch.allclose(by_turn[turn], torch.ones(())), turn
    assert torch.allclose(by_turn[6], torch.tensor(1.0 - 6.0))


def many_at_once(client: Any) -> float:
    async def ask() -> None:
        waiting = openai.AsyncOpenAI(base_url=str(client.base_url), api_key="x")
        await asyncio.gather(
            *(chat(waiting, [{"role": "user", "content": f"part {n}"}]) for n in range(6))
        )
        await waiting.close()

    asyncio.run(ask())
    answer = chat(client, [USER], n=3)
    assert len({choice.message.content for choice in answer.choices}) == 3
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    return 1.0


def test_requests_that_come_together_and_several_choices_are_turns() -> None:
    (episode,), _ = play(many_at_once, lambda session, call: f"reply {call}")
    assert episode.status is Status.COMPLETED, episode.error
    assert len(episode.turns) == 9
    assert len(contexts(episode.turns)) == 9


def pays_by_call(client: Any) -> Any:
    first = chat(client, [USER])
    second = chat(client, [USER, first.choices[0].message, USER])
    client.reward(0.25, second)
    client.reward(0.5, first)
    chat(client, [USER])
    client.reward(1.0, first.id)
    client.reward(-0.125)
    return None


def test_rewards_of_single_calls_reach_their_turns() -> None:
    (episode,), _ = play(pays_by_call)
    assert episode.status is Status.COMPLETED, episode.error
    assert [turn.reward for turn in episode.turns] == [1.5, 0.25, -0.125]


def two_roles(task: Task, client: Any) -> Any:
    for _ in range(2):
        chat(client, [USER], **{"extra_headers": {}})
        client.chat.completions.create(model="policy:worker", messages=[USER])
    client.chat.completions.create(model="policy:judge", messages=[USER])
    score = float(task.seed % 2)
    return {"reward": {"": 0.0, "worker": score}}


def test_roles_have_their_own_credit() -> None:
    episodes, _ = play(two_roles, groups=1, size=2, options={"trained_roles": ["", "worker"]})
    for episode in episodes:
        assert episode.status is Status.COMPLETED, episode.error
        assert [turn.role for turn in episode.turns] == ["", "worker", "", "worker", "judge"]
        assert [turn.trained for turn in episode.turns] == [True] * 4 + [False]
        score = float(episode.task.seed % 2)
        assert [turn.reward for turn in episode.turns] == [0.0, 0.0, 0.0, score, 0.0]
    samples = [sample for episode in episodes for sample in episode_to_samples(episode)]
    batch = collate(samples)
    players = list(zip(batch.episode_ids.tolist(), batch.group_ids.tolist(), strict=True))
    roles = [sample.role for sample in samples]
    assert len(set(players)) == 6  # two episodes of three roles
    assert len(set(batch.group_ids.tolist())) == 3  # the same role of both is one group
    for (_, group), role in zip(players, roles, strict=True):
        assert group == players[roles.index(role)][1]
    judge = [row for row, role in enumerate(roles) if role == "judge"]
    assert not batch.loss_mask[judge].any()
    assert batch.response_mask[judge].any()


def streams(client: Any) -> float:
    stream = chat(client, [USER], stream=True, tools=[TOOL], stream_options={"include_usage": True})
    text, name, reasons, usage = "", "", [], None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                name += call.function.name or ""
            reasons.append(choice.finish_reason)
    assert (text, name, reasons[-1]) == ("So:", "look", "tool_calls")
    assert usage is not None
    assert usage.completion_tokens > 10
    with client.responses.stream(model="policy", input="Where to?") as events:
        kinds = [event.type for event in events]
        final = events.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert final.output_text.startswith("So:")
    return 1.0


def test_streams_hold_the_same_as_whole_answers() -> None:
    (episode,), _ = play(streams, "So: " + CALL)
    assert episode.status is Status.COMPLETED, episode.error
    assert len(episode.turns) == 2


def uses_responses(client: Any) -> float:
    items: list[Any] = [{"role": "user", "content": "Where to?"}]
    tool = {"type": "function", **TOOL["function"]}
    for _ in range(2):
        answer = client.responses.create(
            model="policy", input=items, tools=[tool], instructions="Be brief."
        )
        (call,) = [item for item in answer.output if item.type == "function_call"]
        items += [item.model_dump(exclude_none=True) for item in answer.output]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "a wall"})
    return 1.0


def test_the_responses_api_continues_conversations_too() -> None:
    (episode,), _ = play(uses_responses, "<think>hm</think>So: " + CALL)
    assert episode.status is Status.COMPLETED, episode.error
    assert [turn.restart for turn in episode.turns] == [True, False]


def asks_for_numbers(client: Any) -> float:
    answer = chat(client, [USER], logprobs=True, max_tokens=5, stop=["e n"])
    (choice,) = answer.choices
    assert [entry.logprob for entry in choice.logprobs.content] == [-1.0] * 5
    assert "".join(entry.token for entry in choice.logprobs.content).startswith(
        choice.message.content[:2]
    )
    assert (choice.finish_reason, answer.usage.completion_tokens) == ("length", 5)
    return 1.0


def test_log_probs_limits_and_counts_are_those_of_the_engine() -> None:
    (episode,), _ = play(asks_for_numbers, "one two three four five six")
    assert episode.status is Status.COMPLETED, episode.error
    assert len(episode.turns[0].completion.ids) == 5


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"top_p": 0.5}, "top_p = 0.5 changes what is sampled"),
    ({"frequency_penalty": 1.0}, "frequency_penalty"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"logit_bias": {"3": 4}}, "logit_bias"),
    ({"extra_body": {"wibble": 1}}, "unknown field 'wibble'"),
    ({"messages": []}, "at least one message"),
    ({"messages": [{"role": "assistant", "content": "I"}]}, "begins its replies itself"),
    ({"messages": [{"role": "system", "content": "I"}]}, "nothing that a user said"),
    ({"messages": [{"role": "wizard", "content": "I"}]}, "a role is system"),
    ({"messages": [USER, {"role": "tool", "content": "5", "tool_call_id": "x"}]}, "earlier"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "reads text"),
    ({"messages": [{"role": "user", "content": 7}]}, "is a text or a list"),
    ({"n": 99}, "n is between"),
    ({"max_tokens": 0}, "a limit of tokens"),
    ({"tools": [{"type": "retrieval"}]}, "a tool is a function"),
]


def makes_mistakes(client: Any) -> float:
    for options, words in REFUSED:
        with pytest.raises(openai.BadRequestError) as caught:
            chat(client, **{"messages": [USER], **options})
        assert words in str(caught.value), (options, str(caught.value))
    base = str(client.base_url)
    for body in (b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"messages": 3}'):
        request = urllib.request.Request(f"{base}chat/completions", body)
        with pytest.raises(urllib.error.HTTPError) as told:
            urllib.request.urlopen(request)
        assert told.value.code == 400
        assert json.loads(told.value.read())["error"]["message"]
    where = urlsplit(base)
    for method, page, size, status in (
        ("POST", "chat/completions", 50_000_000, 413),
        ("GET", "chat/completions", 0, 405),
        ("POST", "embeddings", 0, 404),
    ):
        connection = http.client.HTTPConnection(str(where.hostname), where.port, timeout=600)
        connection.request(method, where.path + page, headers={"Content-Length": str(size)})
        refused = connection.getresponse()
        assert refused.status == status
        assert json.loads(refused.read())["error"]["message"]
        connection.close()
    stranger = openai.OpenAI(base_url=base.replace("/e/", "/e/no"), api_key="x")
    with pytest.raises(openai.AuthenticationError, match="no episode has this token"):
        chat(stranger, [USER])
    keyed = openai.OpenAI(
        base_url=base.partition("/e/")[0] + "/v1", api_key=base.partition("/e/")[2].split("/")[0]
    )
    assert chat(keyed, [USER], temperature=0.3).choices[0].message.content == "fine"
    assert [model.id for model in keyed.models.list()] == ["policy"]
    return 1.0


def test_mistakes_are_errors_of_the_request_and_the_episode_goes_on() -> None:
    (episode,), _ = play(makes_mistakes)
    assert episode.status is Status.COMPLETED, episode.error
    assert len(episode.turns) == 1


def test_settings_may_be_ignored_by_name() -> None:
    def sloppy(client: Any) -> float:
        chat(client, [USER], top_p=0.5, extra_body={"wibble": 1})
        return 1.0

    (episode,), _ = play(sloppy, options={"ignore": ["top_p", "wibble"]})
    assert episode.status is Status.COMPLETED, episode.error


def never_asks(client: Any) -> float:
    return 1.0


def returns_nothing(client: Any) -> None:
    chat(client, [USER])


def returns_nonsense(client: Any) -> Any:
    chat(client, [USER])
    return "good"


def returns_nan(client: Any) -> float:
    chat(client, [USER])
    return float("nan")


def raises(client: Any) -> float:
    chat(client, [USER])
    raise RuntimeError("half a sign: \ud83c")


def exits(client: Any) -> float:
    chat(client, [USER])
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (never_asks, "ended without calling the model"),
        (returns_nothing, "returned no reward"),
        (returns_nonsense, "must be a finite number"),
        (returns_nan, "returned no reward"),
        (raises, "RuntimeError: half a sign"),
        (exits, "SystemExit: 3"),
    ],
)
def test_programs_that_fail_are_a_status(program: Any, words: str) -> None:
    (episode,), _ = play(program)
    assert episode.status is Status.ENV_ERROR
    assert words in (episode.error or "")


def asks_forever(client: Any) -> float:
    try:
        while True:
            chat(client, [USER])
    except openai.APIStatusError as error:
        return 0.5 if (error.status_code, error.code) == (410, "turn_limit") else -1.0


def test_a_program_that_asks_forever_is_cut_and_may_still_return() -> None:
    (episode,), recorder = play(asks_forever)
    assert episode.status is Status.TRUNCATED_TURNS
    assert (len(episode.turns), episode.reward, len(recorder.calls)) == (12, 0.5, 12)


ENOUGH = threading.Event()
"""Set when programs that would never end have served their purpose."""


@pytest.fixture(autouse=True, scope="module")
def nothing_goes_on() -> Iterator[None]:
    yield
    ENOUGH.set()


def stubborn(client: Any) -> float:
    while not ENOUGH.wait(0.1):
        with contextlib.suppress(openai.APIStatusError):
            chat(client, [USER])
    return 0.0


def test_one_that_does_not_end_gets_the_reward_of_the_unfinished() -> None:
    options = {"patience": 0.1, "unfinished_reward": -2.0}
    (episode,), _ = play(stubborn, options=options)
    assert episode.status is Status.TRUNCATED_TURNS
    assert episode.reward == -2.0


def grows(client: Any) -> float:
    messages: list[Any] = [USER]
    try:
        while True:
            answer = chat(client, messages).choices[0].message.content
            messages += [{"role": "assistant", "content": answer}, USER]
    except openai.BadRequestError as error:
        return 0.25 if error.code == "context_length_exceeded" else -1.0


def test_a_conversation_that_does_not_fit_is_told_in_openais_words() -> None:
    (episode,), _ = play(grows, max_context=120)
    assert episode.status is Status.TRUNCATED_LENGTH, episode.error
    assert episode.reward == 0.25


def test_an_agent_that_hangs_ends_by_the_step_timeout() -> None:
    def hangs(client: Any) -> float:
        chat(client, [USER])
        ENOUGH.wait()
        return 1.0

    (episode,), _ = play(hangs, step_timeout=0.3)
    assert episode.status is Status.ENV_TIMEOUT


def test_a_client_that_hangs_up_is_not_trained_on() -> None:
    async def impatient(client: Any) -> float:
        with pytest.raises(openai.APITimeoutError):
            await chat(client.with_options(timeout=0.2, max_retries=0), [USER])
        await chat(client, [{"role": "user", "content": "Again."}])
        return 1.0

    def latency(session: Any, call: int) -> float:
        return 1.0 if session.key.endswith("#0") else 0.0

    (episode,), _ = play(impatient, generator={"latency": latency})
    assert episode.status is Status.COMPLETED, episode.error
    assert [turn.trained for turn in episode.turns] == [False, True]
    first, second = episode_to_samples(episode)
    assert not any(first.loss_mask)
    assert any(second.loss_mask)


def test_a_request_sent_again_gets_the_answer_of_the_first() -> None:
    async def flaky(client: Any) -> float:
        answer = await chat(client.with_options(timeout=0.5, max_retries=5), [USER])
        assert answer.choices[0].message.content == "fine"
        return 1.0

    (episode,), recorder = play(flaky, generator={"latency": 1.2})
    assert episode.status is Status.COMPLETED, episode.error
    assert (len(episode.turns), episode.turns[0].trained) == (1, True)
    assert len(recorder.calls) == 1


def test_a_thousand_requests_at_once_are_bounded() -> None:
    seen: list[int] = []

    async def floods(base_url: str) -> float:
        where = urlsplit(base_url)

        async def ask(number: int) -> None:
            body = json.dumps({"messages": [{"role": "user", "content": str(number)}]})
            reader, writer = await asyncio.open_connection(where.hostname, where.port)
            writer.write(
                f"POST {where.path}/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
                f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
            )
            seen.append(int((await reader.readline()).split()[1]))
            writer.close()

        await asyncio.gather(*map(ask, range(1000)))
        return 1.0

    (episode,), _ = play(floods, options={"patience": 600.0}, step_timeout=600.0)
    assert episode.status is Status.TRUNCATED_TURNS, episode.error
    assert (len(seen), seen.count(200)) == (1000, 12)
    assert set(seen) <= {200, 429, 410}


def test_late_requests_are_told_that_the_episode_is_over() -> None:
    told: list[int] = []
    over = threading.Event()

    def lingers(client: Any) -> float:
        where = str(client.base_url)
        chat(client, [USER])

        def later() -> None:
            try:
                chat(openai.OpenAI(base_url=where, api_key="x", max_retries=0), [USER])
            except openai.APIStatusError as error:
                told.append(error.status_code)
            over.set()

        threading.Timer(0.5, later).start()
        return 1.0

    play(lingers)
    assert over.wait(60)
    assert told == [410]


def test_episodes_are_stored_and_read_back() -> None:
    (episode,), _ = play(goes_back, lambda session, call: f"reply {call}")
    assert Episode.from_line(episode.to_line()) == episode


def test_windows_are_refused_by_name() -> None:
    config = agent_config(three_turns, window="single_turn")
    with pytest.raises(ValueError, match=r"rollout\.window.*agent"):
        AgentProxy(config, scripted("fine"), tiny_tokenizer())
