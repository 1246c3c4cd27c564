"""Which turns, roles and branches the rewards of a program reach, and what credit they get."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from agent_parts import play

from turnwise.algos.gigpo import gigpo
from turnwise.algos.groups import group_inputs
from turnwise.algos.grpo import grpo
from turnwise.data.batch import Batch, collate
from turnwise.data.samples import episode_to_samples, require_one_role
from turnwise.endpoint.client import RewardError
from turnwise.integrations.trl.credit import train_row
from turnwise.log.metrics import rollout_metrics
from turnwise.types import Episode, Status, Task

USER = {"role": "user", "content": "Where to?"}


def ask(client: Any, role: str = "", messages: Sequence[Any] = (USER,), **options: Any) -> Any:
    model = f"policy:{role}" if role else "policy"
    return client.chat.completions.create(model=model, messages=list(messages), **options)


def rewards_of(episode: Episode) -> list[tuple[str, float]]:
    assert episode.status is Status.COMPLETED, episode.error
    return [(turn.role, turn.reward) for turn in episode.turns]


def judge_last(client: Any) -> float:
    ask(client)
    ask(client, "judge")
    return 1.0


def test_a_plain_reward_goes_to_the_trained_role_whoever_speaks_last() -> None:
    (episode,), _ = play(judge_last, options={"trained_roles": [""]})
    assert rewards_of(episode) == [("", 1.0), ("judge", 0.0)]
    assert episode.reward == 1.0


def a_team(client: Any) -> float:
    ask(client, "planner")
    ask(client, "worker")
    ask(client, "planner")
    ask(client, "judge")
    return 0.75


def test_a_plain_reward_pays_every_trained_role_and_counts_once() -> None:
    episodes, _ = play(a_team, size=2, options={"trained_roles": ["planner", "worker"]})
    for episode in episodes:
        assert rewards_of(episode) == [
            ("planner", 0.0),
            ("worker", 0.75),
            ("planner", 0.75),
            ("judge", 0.0),
        ]
        assert episode.reward == 0.75
        assert sum(episode.reward_parts.values()) == 0.75
        assert Episode.from_line(episode.to_line()) == episode
    assert rollout_metrics(episodes)["rollout/reward"] == 0.75


def cut_team(client: Any) -> float:
    ask(client, "planner")
    while True:
        ask(client, "worker")


def test_the_reward_of_the_unfinished_goes_to_every_trained_role() -> None:
    (episode,), _ = play(cut_team, options={"unfinished_reward": -2.0})
    assert episode.status is Status.TRUNCATED_TURNS
    assert episode.reward == -2.0
    paid = {index: turn.reward for index, turn in enumerate(episode.turns) if turn.reward}
    assert paid == {0: -2.0, 11: -2.0}


def pays(rewards: Any) -> Any:
    def program(client: Any) -> Any:
        ask(client)
        ask(client, "planner")
        return {"reward": rewards}

    return program


def test_the_empty_name_is_the_role_without_a_name() -> None:
    (episode,), _ = play(pays({"": 0.5, "planner": 2.0}))
    assert rewards_of(episode) == [("", 0.5), ("planner", 2.0)]
    assert episode.reward == 2.5


def test_a_reward_for_a_role_that_never_spoke_is_an_error_by_name() -> None:
    (episode,), _ = play(pays({"planner": 1, "wroker": 7}))
    assert episode.status is Status.ENV_ERROR
    assert episode.error == (
        "the program returned a reward for the role 'wroker', which never spoke; those that did: "
        "'', 'planner'"
    )
    (episode,), _ = play(pays({"planner": 1, "worker": 0.0}))  # nothing is lost
    assert rewards_of(episode) == [("", 0.0), ("planner", 1.0)]


def pays_early(client: Any) -> None:
    ask(client)
    client.reward(0.5)
    ask(client)


def test_a_reward_of_an_early_reply_alone_is_enough() -> None:
    (episode,), _ = play(pays_early)
    assert rewards_of(episode) == [("", 0.5), ("", 0.0)]


def by_turn(batch: Batch, values: torch.Tensor) -> dict[tuple[int, int], float]:
    """The value on each turn's tokens, by (player, turn)."""
    found: dict[tuple[int, int], float] = {}
    for row in range(batch.num_rows):
        for turn in batch.turn_ids[row][batch.response_mask[row]].unique().tolist():
            (value,) = values[row][batch.turn_ids[row] == turn].unique().tolist()
            found[int(batch.episode_ids[row]), turn] = value
    return found


def test_grpo_compares_each_role_with_the_same_role() -> None:
    """Planners get 0 and 2, workers 1 and 4; the judge is not paid."""
    scores = iter(((0.0, 1.0), (2.0, 4.0)))

    def team(client: Any) -> Any:
        ask(client, "planner")
        ask(client, "worker")
        ask(client, "judge")
        planner, worker = next(scores)
        return {"reward": {"planner": planner, "worker": worker}}

    options = {"trained_roles": ["planner", "worker"], "slots": 1}
    episodes, _ = play(team, size=2, options=options)
    episodes.sort(key=lambda episode: episode.reward)
    batch = collate([sample for episode in episodes for sample in episode_to_samples(episode)])
    advantages, _ = grpo(
        batch.rewards, batch.response_mask, normalize_std=False, **group_inputs(batch)
    )
    assert by_turn(batch, advantages) == {
        (0, 0): -1.0,
        (1, 1): -1.5,
        (2, 2): 0.0,
        (3, 0): 1.0,
        (4, 1): 1.5,
        (5, 2): 0.0,
    }
    assert not batch.loss_mask[batch.turn_ids == 2].any()


def test_gigpo_compares_branches_that_go_on_from_the_same_state() -> None:
    """Both episodes try two ways from the first reply. The state of those two turns is the same,
    in one episode as between episodes; each has its own reward."""
    scores = iter(((1.0, 2.0), (3.0, 6.0)))

    def explores(task: Task, client: Any) -> None:
        first = ask(client).choices[0].message
        for score in next(scores):
            ask(client, messages=[USER, first, {"role": "user", "content": "And?"}])
            client.reward(score)

    episodes, _ = play(explores, size=2, options={"slots": 1})
    episodes.sort(key=lambda episode: episode.reward)
    for episode in episodes:
        assert [turn.parent for turn in episode.turns] == [None, None, 0]
        states = [turn.state_key for turn in episode.turns]
        assert states[1] == states[2] != states[0]
    batch = collate([sample for episode in episodes for sample in episode_to_samples(episode)])
    advantages, _, peers = gigpo(
        batch.rewards,
        batch.response_mask,
        state_ids=batch.state_ids,
        turn_ids=batch.turn_ids,
        gamma=0.5,
        normalize_std=False,
        **group_inputs(batch),
    )
    # Episodes: 3 and 9, so -3 and 3. From the second state on, G is 1 + 2 / 2, 2, 3 + 6 / 2 and 6;
    # their mean is 4. From the first it is half of the second's: 1 and 3.
    assert by_turn(batch, advantages) == {
        (0, 0): -3.0 - 1.0,
        (0, 1): -3.0 - 2.0,
        (0, 2): -3.0 - 2.0,
        (1, 0): 3.0 + 1.0,
        (1, 1): 3.0 + 2.0,
        (1, 2): 3.0 + 2.0,
    }
    assert math.isclose(peers, 1.0)


def test_plain_rewards_of_a_team_have_the_credit_of_one_speaker() -> None:
    """What a plain number pays does not depend on how many roles spoke."""
    scores = iter((0.0, 1.0, 0.0, 1.0))

    def alone(client: Any) -> float:
        ask(client, "worker")
        return next(scores)

    def both(client: Any) -> float:
        ask(client, "planner")
        ask(client, "worker")
        return next(scores)

    found: list[set[float]] = []
    for program in (alone, both):
        episodes, _ = play(program, size=2, options={"slots": 1})
        batch = collate([one for episode in episodes for one in episode_to_samples(episode)])
        advantages, _ = grpo(
            batch.rewards, batch.response_mask, normalize_std=False, **group_inputs(batch)
        )
        found.append(set(by_turn(batch, advantages).values()))
    assert found == [{-0.5, 0.5}] * 2


def test_states_are_short_names_of_whole_conversations() -> None:
    def talks(client: Any) -> float:
        messages: list[Any] = [USER]
        for _ in range(5):
            said = ask(client, messages=messages).choices[0].message
            messages += [said, {"role": "user", "content": "y" * 1000}]
        ask(client)  # as at the beginning
        ask(client, messages=[{"role": "system", "content": "Be brief."}, USER])
        return 1.0

    (episode,), _ = play(talks)
    states = [turn.state_key for turn in episode.turns]
    assert max(map(len, states)) < 40
    assert len(set(states)) == 6
    assert states[5] == states[0] != states[6]


def test_states_differ_by_the_calls_in_them() -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    calls = [f'<tool_call>{{"name": "look", "arguments": {{"at": {n}}}}}</tool_call>' for n in "12"]

    def looks(client: Any) -> float:
        for _ in range(2):
            said = ask(client, tools=[tool]).choices[0].message
            result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "a wall"}
            ask(client, messages=[USER, said, result], tools=[tool])
        return 1.0

    (episode,), _ = play(looks, lambda session, call: calls[call // 2])
    first, after_one, again, after_two = (turn.state_key for turn in episode.turns)
    assert first == again
    assert len({first, after_one, after_two}) == 3


async def pays_and_waits(client: Any) -> None:
    """A program may await a reward, and needs not."""
    await ask(client)
    await client.reward(0.5)
    client.reward(0.25)


def pays_badly(client: Any) -> float:
    for value, reply, words in (
        (1.0, None, "there is none yet"),
        (float("nan"), None, "must be a finite number"),
        (1.0, "chatcmpl-of-another", "no reply of this episode has the id 'chatcmpl-of-another'"),
    ):
        with pytest.raises(RewardError, match=words):
            client.reward(value, reply)
        if reply is None and value == 1.0:
            ask(client)
    return 1.0


def test_rewards_are_given_and_refused_in_plain_words() -> None:
    (episode,), _ = play(pays_and_waits)
    assert rewards_of(episode) == [("", 0.75)]
    (episode,), _ = play(pays_badly)
    assert rewards_of(episode) == [("", 1.0)]


def test_backends_that_compare_episodes_refuse_several_trained_roles() -> None:
    (one,), _ = play(judge_last, options={"trained_roles": [""]})
    (two,), _ = play(judge_last)
    for backend, convert in {
        "trl": lambda episode: train_row(episode, eos_id=0),
        "verl": lambda episode: require_one_role(episode, backend="verl"),
    }.items():
        convert(one)
        with pytest.raises(ValueError, match=f"roles '', 'judge', and backend {backend} credits"):
            convert(two)
