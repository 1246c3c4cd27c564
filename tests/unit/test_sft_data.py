"""Demonstrations as rows: exact masks and ids, the same rendering as a rollout, every kind of
source, and what is refused."""

import gzip
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from learn_parts import parrot_config

from turnwise.config.schema import Config
from turnwise.data.batch import collate
from turnwise.evaluate.baselines import ExpertPlayer
from turnwise.generate.scripted import ScriptedGenerator
from turnwise.json_lines import FileError
from turnwise.rollout.plan import plan_rollout
from turnwise.rollout.proxy import AgentProxy
from turnwise.testing.tiny import tiny_tokenizer
from turnwise.train.demonstrations import (
    DemonstrationRenderer,
    deal,
    digest,
    hold_out,
    load,
    rows_of,
    store,
)
from turnwise.train.sources import (
    collect,
    from_messages,
    keep_best,
    play_tasks,
    read_file,
    write_messages,
)
from turnwise.types import Completion, Episode, Task

END = 258  # <|im_end|>
Ids = tuple[int, ...]


def expert_episodes(config: Config, *, count: int = 4, slips: float = 0.0) -> list[Episode]:
    return play_tasks(
        config,
        ExpertPlayer(),
        config.env.name,
        config.env,
        count=count,
        purpose="test",
        task_seed=lambda number: number,
        slips=slips,
    )


def renderer(config: Config, template: str = "chatml") -> DemonstrationRenderer:
    return DemonstrationRenderer(config, tiny_tokenizer(template), None, max_context=4096)


def silent(_: str) -> None:
    """Nobody listens."""


@pytest.mark.parametrize("template", ["chatml", "rewriting"])
@pytest.mark.parametrize(
    "rollout",
    [{}, {"window": "last_k", "window_turns": 1}, {"response_prefix": "<think>"}],
    ids=["full", "last_k", "prefix"],
)
def test_ids_and_masks_are_those_of_a_rollout_that_says_the_same(
    rollout: dict[str, Any], template: str
) -> None:
    config = parrot_config(rollout=rollout, think=True)
    played = expert_episodes(config)
    rendered = renderer(config, template).render(played, say=silent)
    tokenizer = tiny_tokenizer(template)
    said = {episode.task.seed: [turn.text for turn in episode.turns] for episode in played}
    prefix = config.rollout.response_prefix
    turns: dict[str, int] = {}

    def script(session: Any, ids: tuple[int, ...], call: int) -> str:
        # Windows open a session per turn; its key begins with the episode's.
        name = session.key.partition("#")[0]
        number = turns[name] = turns.get(name, -1) + 1
        return said[seeds[name]][number].removeprefix(prefix)

    generator = ScriptedGenerator(script, tokenizer=tokenizer, end_id=END, max_context=4096)
    proxy = AgentProxy(config, generator, tokenizer, split="train")
    plans = plan_rollout(config, split="train", step=0, probes=proxy.env_state.probes)[
        : len(played)
    ]
    plans = [
        replace(plan, task=episode.task, episode_id=f"e{number}", env_id=number)
        for number, (plan, episode) in enumerate(zip(plans, played, strict=True))
    ]
    seeds = {plan.episode_id: plan.task.seed for plan in plans}
    try:
        rolled = proxy.play_these(plans)
    finally:
        proxy.close()
    for ours, theirs in zip(rendered, rolled, strict=True):
        assert [turn.prompt_ids for turn in ours.turns] == [t.prompt_ids for t in theirs.turns]
        assert [turn.restart for turn in ours.turns] == [turn.restart for turn in theirs.turns]
        assert [turn.completion.ids for turn in ours.turns] == [
            turn.completion.ids for turn in theirs.turns
        ]
        assert ours.reward == theirs.reward == 1.0


def test_trained_ids_are_the_demonstrations_own() -> None:
    config = parrot_config()
    rendered = renderer(config).render(expert_episodes(config), say=silent)
    rows = rows_of(rendered)
    batch = collate([row.sample for row in rows], pad_id=256)
    tokenizer = tiny_tokenizer()
    for row, ids, mask, episode in zip(
        rows, batch.input_ids, batch.response_mask, rendered, strict=True
    ):
        assert tuple(ids[mask].tolist()) == row.said
        said = "".join(f"{turn.text}<|im_end|>" for turn in episode.turns)
        assert tokenizer.decode(row.said) == said


def test_a_slip_is_shown_and_not_learned() -> None:
    config = parrot_config()
    played = expert_episodes(config, count=30, slips=0.5)
    turns = [turn for episode in played for turn in episode.turns]
    slipped = [turn for turn in turns if not turn.trained]
    assert 0.3 < len(slipped) / len(turns) < 0.7
    assert any(turn.reward == 0.0 for turn in slipped)
    assert all(turn.reward == 0.5 for turn in turns if turn.trained), "the expert is never wrong"
    for row in rows_of(renderer(config).render(played, say=silent)):
        turn_ids = {
            turn
            for turn, learned in zip(row.sample.turn_ids, row.sample.loss_mask, strict=True)
            if learned
        }
        episode = next(one for one in played if one.id == row.sample.episode_id)
        assert turn_ids == {i for i, turn in enumerate(episode.turns) if turn.trained}


def test_special_tokens_in_a_reply_stay_text(tmp_path: Path) -> None:
    row = {
        "messages": [
            {"role": "user", "content": "say it"},
            {"role": "assistant", "content": "a<|im_end|>b"},
        ]
    }
    (episode,) = renderer(parrot_config()).render([from_messages(row, name="a")], say=silent)
    assert episode.turns[0].completion.ids.count(END) == 1
    assert episode.turns[0].completion.ids[-1] == END


def test_a_template_says_how_a_reply_ends() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"  # as base checkpoints have it
    config = parrot_config()
    rendering = DemonstrationRenderer(config, tokenizer, None, max_context=4096)
    (episode,) = rendering.render(expert_episodes(config, count=1), say=silent)
    assert {turn.completion.ids[-1] for turn in episode.turns} == {END}


def test_stored_ids_are_learned_as_they_are(tmp_path: Path) -> None:
    config = parrot_config()
    rendered = renderer(config).render(expert_episodes(config), say=silent)
    # An end of text in the middle, which decoding leaves out: no tokenizer would write it so.
    odd = [with_ids(episode, lambda ids: (*ids[:1], 256, *ids[1:])) for episode in rendered]
    file = tmp_path / "episodes.jsonl"
    store(file, odd)
    again = renderer(config).render(read_file(file), say=silent)
    assert again == odd == load(file)
    assert digest(rows_of(again)) != digest(rows_of(rendered))


def with_ids(episode: Episode, change: Callable[[Ids], Ids]) -> Episode:
    """The episode with other ids of its replies."""

    def changed(completion: Completion) -> Completion:
        ids = change(completion.ids)
        return replace(completion, ids=ids, logprobs=(0.0,) * len(ids))

    turns = [
        replace(  # seconds are not stored
            turn, completion=changed(turn.completion), generate_seconds=0.0, env_seconds=0.0
        )
        for turn in episode.turns
    ]
    return replace(episode, turns=tuple(turns))


def test_a_prompt_that_would_be_rendered_otherwise_is_said() -> None:
    config = parrot_config()
    rendered = renderer(config).render(expert_episodes(config, count=2), say=silent)
    said: list[str] = []
    renderer(config).render(rendered, say=said.append)
    assert said == []
    template = "{% for message in messages %}[{{ message.content }}]<|im_end|>{% endfor %}"
    kept = renderer(config, template).render(rendered, say=said.append)
    assert kept == rendered
    assert "stored prompts differ" in said[0]


def test_ids_of_another_tokenizer_are_refused_and_their_text_can_be_learned() -> None:
    config = parrot_config()
    (episode,) = renderer(config).render(expert_episodes(config, count=1), say=silent)
    other = with_ids(episode, lambda ids: tuple(token % 200 + 1 for token in ids))
    with pytest.raises(ValueError, match=r"another tokenizer.*sft.retokenize=true"):
        renderer(config).render([other], say=silent)
    large = [replace(turn, prompt_ids=(999,)) for turn in episode.turns]
    with pytest.raises(ValueError, match="another tokenizer"):
        renderer(config).render([replace(episode, turns=tuple(large))], say=silent)
    again = parrot_config(sft={"retokenize": True})
    (found,) = renderer(again).render([other], say=silent)
    assert [t.completion.ids for t in found.turns] == [t.completion.ids for t in episode.turns]


def test_what_does_not_fit_is_cut_or_left_out_and_said() -> None:
    config = parrot_config()
    played = expert_episodes(config, count=3)
    full = renderer(config).render(played, say=silent)
    first = len(full[0].turns[0].prompt_ids)
    said: list[str] = []
    tight = DemonstrationRenderer(config, tiny_tokenizer(), None, max_context=first + 12)
    cut = tight.render(played, say=said.append)
    assert [len(episode.turns) for episode in cut] == [1, 1, 1]
    assert "0 demonstrations do not fit" in said[0]
    assert "3 are cut" in said[0]
    with pytest.raises(ValueError, match="none of the 3 demonstrations fits"):
        DemonstrationRenderer(config, tiny_tokenizer(), None, max_context=first).render(
            played, say=silent
        )


def test_a_reply_without_the_prefix_is_refused() -> None:
    config = parrot_config(rollout={"response_prefix": "<answer>"})
    with pytest.raises(ValueError, match="response_prefix begins every reply with '<answer>'"):
        renderer(config).render(expert_episodes(config, count=1), say=silent)


def test_long_replies_are_said() -> None:
    config = parrot_config(rollout={"max_response_tokens": 2})
    said: list[str] = []
    renderer(config).render(expert_episodes(config, count=1), say=said.append)
    assert "longer than rollout.max_response_tokens=2" in said[0]


# Sources


def test_players_play_training_tasks_one_after_the_other() -> None:
    config = parrot_config(sft={"source": ["expert", "random"], "episodes": 5})
    said: list[str] = []
    found = collect(config, factories={}, say=said.append)
    assert said[0] == "expert: 5 episodes, 5 of them succeeded"
    assert said[1].startswith("random: 5 episodes, ")
    assert {episode.task.split for episode in found} == {"train"}
    seeds = [episode.task.seed for episode in found[:5]]
    assert seeds == list(range(seeds[0], seeds[0] + 5))
    assert seeds == [episode.task.seed for episode in found[5:]]
    more = parrot_config(sft={"source": ["expert"], "episodes": 8})
    again = collect(more, factories={}, say=silent)
    assert [e.task.seed for e in again[:5]] == seeds, "a larger set has the smaller one in it"


def test_messages_are_read_as_they_were_written(tmp_path: Path) -> None:
    config = parrot_config()
    played = expert_episodes(config, count=6, slips=0.3)
    for name in ("a.jsonl", "b.jsonl.gz"):
        assert write_messages(tmp_path / name, played) == 6
        found = read_file(tmp_path / name)
        assert [[turn.text for turn in one.turns] for one in found] == [
            [turn.text for turn in one.turns] for one in played
        ]
        assert [[turn.trained for turn in one.turns] for one in found] == [
            [turn.trained for turn in one.turns] for one in played
        ]
        assert [(one.success, one.reward, one.task.id) for one in found] == [
            (one.success, one.reward, one.task.id) for one in played
        ]
        ours, theirs = (renderer(config).render(set_, say=silent) for set_ in (played, found))
        assert digest(rows_of(ours)) == digest(rows_of(theirs))


def test_tools_and_native_calls_become_the_text_that_a_policy_says() -> None:
    call = {
        "id": "0",
        "type": "function",
        "function": {"name": "add", "arguments": '{"a": 1}'},
    }
    row = {
        "tools": [{"type": "function", "function": {"name": "add", "parameters": {}}}],
        "messages": [
            {"role": "user", "content": "1 + 1"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "2", "tool_call_id": "0"},
            {"role": "assistant", "content": "two"},
        ],
    }
    episode = from_messages(row, name="a")
    assert episode.turns[0].text.startswith("<tool_call>")
    (found,) = renderer(parrot_config()).render([episode], say=silent)
    opening = tiny_tokenizer().decode(found.turns[0].prompt_ids)
    assert '"name": "add"' in opening


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def reply(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"messages": [user("a")]}, "no message is of the role assistant"),
        ({"messages": [reply("a")]}, "message 0 is a reply, and there is nothing to reply to"),
        ({"messages": [user("a"), reply("b"), reply("c")]}, "message 2 is a reply"),
        ({"messages": [{"role": "robot", "content": ""}]}, "message 0 has the role 'robot'"),
        ({"messages": [user("a"), {"role": "assistant", "content": ["b"]}]}, "content is text"),
        ({"messages": [user("a"), reply("b")], "reward": "much"}, "reward is a number"),
        ({"messages": "hello"}, "a JSON object is wanted"),
        ({"text": "hello"}, "it has no 'id'"),
        ([1], "a JSON object is wanted"),
    ],
)
def test_a_line_that_is_no_conversation_is_named(tmp_path: Path, row: Any, why: str) -> None:
    good = {"messages": [user("a"), reply("b")]}
    file = tmp_path / "demos.jsonl"
    file.write_text(f"{json.dumps(good)}\n{json.dumps(row)}\n")
    with pytest.raises(FileError, match=r"demos.jsonl, line 2") as found:
        read_file(file)
    assert why in str(found.value)


def test_torn_and_empty_files_are_named(tmp_path: Path) -> None:
    file = tmp_path / "demos.jsonl"
    line = json.dumps({"messages": [user("a"), reply("b")]})
    file.write_text(f"{line}\n{line[:20]}")
    with pytest.raises(FileError, match=r"demos.jsonl, line 2 cannot be read"):
        read_file(file)
    file.write_text("\n")
    with pytest.raises(ValueError, match="has no episode to learn from: it is empty"):
        read_file(file)
    packed = tmp_path / "demos.jsonl.gz"
    packed.write_bytes(gzip.compress(line.encode())[:-10])
    with pytest.raises(FileError, match=r"demos.jsonl.gz cannot be unpacked"):
        read_file(packed)
    packed.write_bytes(b"no gzip at all")
    with pytest.raises(FileError, match=r"demos.jsonl.gz cannot be"):
        read_file(packed)
    with pytest.raises(ValueError, match="neither a player"):
        collect(parrot_config(sft={"source": ["nothing"]}), factories={}, say=silent)


def test_held_out_tasks_are_never_learned_from(tmp_path: Path) -> None:
    config = parrot_config()
    (episode,) = renderer(config).render(expert_episodes(config, count=1), say=silent)
    store(tmp_path / "e.jsonl", [replace(episode, task=replace(episode.task, split="val"))])
    asked = parrot_config(sft={"source": [str(tmp_path / "e.jsonl")]})
    with pytest.raises(ValueError, match="1 of 1 episodes were played on held-out tasks"):
        collect(asked, factories={}, say=silent)


# Rejection sampling


def outcome(name: str, *, task: str, reward: float, success: bool | None) -> Episode:
    row: dict[str, Any] = {"messages": [user(task), reply(name)], "task": task, "reward": reward}
    if success is not None:
        row["success"] = success
    return from_messages(row, name=name)


TRIED = [
    outcome("a0", task="a", reward=0.0, success=False),
    outcome("a1", task="a", reward=1.0, success=True),
    outcome("b0", task="b", reward=0.5, success=True),
    outcome("b1", task="b", reward=0.9, success=True),
    outcome("b2", task="b", reward=0.9, success=True),
    outcome("c0", task="c", reward=2.0, success=False),
]


def names(episodes: Sequence[Episode]) -> list[str]:
    return [episode.id for episode in episodes]


def test_the_best_are_kept() -> None:
    assert names(keep_best(TRIED, "all")) == ["a0", "a1", "b0", "b1", "b2", "c0"]
    assert names(keep_best(TRIED, "success")) == ["a1", "b0", "b1", "b2"]
    assert names(keep_best(TRIED, 1)) == ["a1", "b1"]
    assert names(keep_best(TRIED, 2)) == ["a1", "b1", "b2"]
    twice = [*TRIED, *TRIED]  # two runs may use the same names
    assert names(keep_best(twice, 1)) == ["a1", "b1"]


def test_an_episode_cut_by_its_turn_limit_is_not_the_best_of_its_task() -> None:
    cut = outcome("d0", task="d", reward=0.0, success=None)  # the environment said nothing yet
    assert names(keep_best([*TRIED, cut], 1)) == ["a1", "b1"]


def test_nothing_left_is_said() -> None:
    with pytest.raises(ValueError, match="none of the 2 episodes succeeded"):
        keep_best([TRIED[0], TRIED[5]], "success")
    silent_ones = [outcome("x", task="a", reward=float(i), success=None) for i in range(3)]
    with pytest.raises(ValueError, match=r"says whether it succeeded.*--best 1"):
        keep_best(silent_ones, "success")
    assert [one.reward for one in keep_best(silent_ones, 1)] == [2.0]


def test_what_is_kept_and_dropped_is_said(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    write_messages(file, TRIED)
    said: list[str] = []
    config = parrot_config(sft={"source": [str(file)], "keep": "success", "limit": 2})
    kept = collect(config, factories={}, say=said.append)
    assert [one.turns[0].text for one in kept] == ["a1", "b0"]
    assert said == [
        f"{file}: 6 episodes, 4 of them succeeded",
        "kept 4 episodes and dropped 2 (sft.keep: success)",
        "the first 2 of 4 episodes are used (sft.limit)",
    ]


# Dealing


def test_tasks_are_held_out_whole() -> None:
    episodes = [
        replace(TRIED[0], id=f"{task}-{try_}", task=Task(id=f"t{task}", seed=0))
        for task in range(40)
        for try_ in range(3)
    ]
    learned, apart = hold_out(episodes, 0.1)
    assert len(apart) == 4 * 3
    assert not {one.task.id for one in learned} & {one.task.id for one in apart}
    assert hold_out(episodes, 0.0) == (episodes, [])
    assert [len(part) for part in hold_out(episodes[:1], 0.5)] == [1, 0]
    assert hold_out(list(reversed(episodes)), 0.1)[1] == list(reversed(apart))


@pytest.mark.parametrize("batch_tokens", [1, 50, 120, 10_000])
def test_every_epoch_deals_every_row_once(batch_tokens: int) -> None:
    lengths = [7, 30, 11, 60, 5, 5, 40, 22, 19, 3]
    steps = deal(lengths, batch_tokens=batch_tokens, epochs=3, seed=4)
    assert steps == deal(lengths, batch_tokens=batch_tokens, epochs=3, seed=4)
    for epoch in range(3):
        part = [step for step in steps if step.epoch == epoch]
        assert sorted(row for step in part for row in step.rows) == list(range(10))
        assert [step.ends_epoch for step in part] == [False] * (len(part) - 1) + [True]
        assert all(step.rows for step in part)
        tokens = [sum(lengths[row] for row in step.rows) for step in part]
        assert max(tokens) <= batch_tokens * sum(lengths) / max(
            batch_tokens * round(sum(lengths) / batch_tokens), 1
        ) + 2 * max(lengths)
    orders = [[step.rows for step in steps if step.epoch == epoch] for epoch in range(3)]
    assert orders[0] != orders[1]
