"""Episode -> Sample -> Batch: masks by construction, for any episode."""

import dataclasses

import pytest
import torch
from draws import examples
from hypothesis import given
from hypothesis import strategies as st

from turnwise.data.batch import Batch, collate
from turnwise.data.samples import episode_to_samples
from turnwise.types import Completion, Episode, Message, Sample, Status, Task, Turn

ids = st.lists(st.integers(1, 50), max_size=5).map(tuple)


@st.composite
def turns(draw: st.DrawFn, *, first: bool) -> Turn:
    said = draw(st.lists(st.integers(1, 50), min_size=1, max_size=5).map(tuple))
    return Turn(
        prompt_ids=draw(ids),
        completion=Completion(
            ids=said,
            logprobs=tuple(draw(st.floats(-9, -0.01)) for _ in said),
            finish_reason=draw(st.sampled_from(["stop", "length"])),
        ),
        text=draw(st.text(max_size=5)),
        restart=first or draw(st.booleans()),
        action=draw(st.none() | st.text(max_size=3)),
        messages=(Message(role="user", content=draw(st.text(max_size=5))),),
        reward=draw(st.floats(-2, 2)),
        state_key=draw(st.sampled_from("abc")),
        info={"success": draw(st.booleans())},
    )


@st.composite
def episodes(draw: st.DrawFn) -> Episode:
    number = draw(st.integers(1, 4))
    return Episode(
        id=draw(st.uuids().map(str)),
        task=Task(id="t", seed=draw(st.integers(0, 9)), payload={"row": [1, "x"]}),
        group_id=draw(st.integers(0, 3)),
        index=0,
        tag="env",
        seed=1,
        noise_seed=2,
        prompt=(Message(role="user", content="go"),),
        turns=tuple(draw(turns(first=index == 0)) for index in range(number)),
        status=draw(
            st.sampled_from([Status.COMPLETED, Status.TRUNCATED_TURNS, Status.TRUNCATED_LENGTH])
        ),
        final_ids=draw(ids),
    )


@examples(80)
@given(episodes())
def test_trained_ids_are_sampled_ids(episode: Episode) -> None:
    samples = episode_to_samples(episode)
    trained = [t for s in samples for t, ours in zip(s.ids, s.response_mask, strict=True) if ours]
    assert trained == [token for turn in episode.turns for token in turn.completion.ids]
    logprobs = [
        p for s in samples for p, ours in zip(s.logprobs, s.response_mask, strict=True) if ours
    ]
    assert logprobs == [p for turn in episode.turns for p in turn.completion.logprobs]
    assert len(samples) == sum(turn.restart for turn in episode.turns)
    assert sum(sum(s.rewards) for s in samples) == pytest.approx(episode.reward, abs=1e-9)
    assert [s.truncated for s in samples] == [False] * (len(samples) - 1) + [
        episode.status.truncated
    ]


@examples(80)
@given(episodes())
def test_every_turn_ends_where_its_reward_is(episode: Episode) -> None:
    for sample in episode_to_samples(episode):
        for turn_id in set(sample.turn_ids) - {-1}:
            where = [t for t, turn in enumerate(sample.turn_ids) if turn == turn_id]
            assert where == list(range(where[0], where[-1] + 1))
            assert sample.rewards[where[-1]] == episode.turns[turn_id].reward
            assert all(sample.rewards[t] == 0 for t in where[:-1])


@examples(50)
@given(episodes())
def test_json_round_trip(episode: Episode) -> None:
    assert Episode.from_line(episode.to_line()) == episode
    assert "\n" not in episode.to_line()


@examples(50)
@given(st.lists(episodes(), min_size=1, max_size=5, unique_by=lambda e: e.id))
def test_collate_and_split_keep_every_row(found: list[Episode]) -> None:
    samples = [sample for episode in found for sample in episode_to_samples(episode)]
    batch = collate(samples)
    assert batch.num_tokens == sum(len(sample.ids) for sample in samples)
    for row, sample in enumerate(samples):
        length = len(sample.ids)
        assert tuple(batch.input_ids[row, :length].tolist()) == sample.ids
        assert tuple(batch.response_mask[row, :length].tolist()) == sample.response_mask
        assert not batch.response_mask[row, length:].any()
    assert len(set(batch.episode_ids.tolist())) == len(found)
    parts = batch.split(max_tokens=12)
    assert sum(part.num_rows for part in parts) == batch.num_rows
    assert sum(part.num_tokens for part in parts) == batch.num_tokens
    assert all(part.num_rows == 1 or part.input_ids.numel() <= 12 for part in parts)
    assert all(int(part.lengths.max()) == part.input_ids.shape[1] for part in parts)


def sample_of(**changes: object) -> Sample:
    base = Sample(
        ids=(1, 2, 7, 8, 3, 9),
        response_mask=(False, False, True, True, False, True),
        loss_mask=(False, False, True, True, False, True),
        logprobs=(0, 0, -1, -2, 0, -3),
        turn_ids=(-1, -1, 0, 0, -1, 1),
        rewards=(0, 0, 0, 0.5, 0, 1.0),
        state_keys={0: "a", 1: "b"},
        episode_id="e",
        group_id=0,
        truncated=False,
    )
    return dataclasses.replace(base, **changes)


def test_states_are_equal_within_a_group_only() -> None:
    batch = collate([sample_of(), sample_of(episode_id="f"), sample_of(episode_id="g", group_id=1)])
    assert batch.state_ids[0].tolist() == batch.state_ids[1].tolist()
    assert not set(batch.state_ids[0].tolist()) & set(batch.state_ids[2].tolist()) - {-1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"loss_mask": (True, False, True, True, False, True)},
            "loss_mask must lie within response_mask",
        ),
        ({"turn_ids": (0, -1, 0, 0, -1, 1)}, "turn_ids must be"),
        ({"rewards": (1.0, 0, 0, 0, 0, 0)}, "rewards must lie within"),
        ({"rewards": (0, 0, 0, float("nan"), 0, 0)}, "rewards must be finite"),
        ({"logprobs": (0, -1, -1, -2, 0, -3)}, "logprobs must be 0 outside"),
        ({"logprobs": (0, 0, -1, float("-inf"), 0, -3)}, "logprobs must be finite"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        collate([sample_of(**changes)])


def test_sequences_of_different_lengths_are_refused_even_where_rows_make_up_for_each_other() -> (
    None
):
    row = sample_of()
    for name in ("response_mask", "loss_mask", "logprobs", "turn_ids", "rewards"):
        values = getattr(row, name)
        longer, shorter = (
            sample_of(**{name: given}) for given in ((*values, values[0]), values[:-1])
        )
        with pytest.raises(ValueError, match=rf"6 ids and 7 {name}"):
            collate([longer, shorter])
        with pytest.raises(ValueError, match=rf"6 ids and 5 {name}"):
            collate([row, shorter])


def test_a_turn_without_a_state_is_refused_and_never_given_the_next_rows() -> None:
    others = [sample_of(episode_id="f"), sample_of(episode_id="g")]
    for keys, last in (({}, 1), ({0: "s"}, 1), ({1: "s"}, 1), ({0: "s"}, 2), ({0: "s"}, 3)):
        with pytest.raises(ValueError, match="state_ids"):
            collate([sample_of(state_keys=keys, turn_ids=(-1, -1, 0, 0, -1, last)), *others])


def test_attention_mask_depends_on_neither_mask() -> None:
    nobody = (False,) * 6
    silent = sample_of(
        response_mask=nobody,
        loss_mask=nobody,
        turn_ids=(-1,) * 6,
        rewards=(0,) * 6,
        logprobs=(0,) * 6,
    )
    assert torch.equal(collate([sample_of()]).attention_mask, collate([silent]).attention_mask)
    assert collate([sample_of(loss_mask=nobody)]).attention_mask.sum() == 6


def test_shapes_and_dtypes_are_checked() -> None:
    batch = collate([sample_of()])
    with pytest.raises(ValueError, match=r"Batch.values must have shape \(1, 6\)"):
        batch.replace(values=torch.zeros(1, 5))
    with pytest.raises(ValueError, match=r"Batch.loss_mask must be torch.bool"):
        batch.replace(loss_mask=torch.zeros(1, 6))
    with pytest.raises(ValueError, match="at least one sample"):
        collate([])
    with pytest.raises(ValueError, match="ones, then zeros"):
        batch.replace(attention_mask=torch.tensor([[1, 0, 1, 1, 1, 1]])).validate()


def test_failed_and_empty_episodes_are_refused() -> None:
    episode = Episode(
        id="e",
        task=Task(id="t", seed=0),
        group_id=0,
        index=0,
        tag="x",
        seed=0,
        noise_seed=0,
        prompt=(),
        turns=(),
        status=Status.COMPLETED,
    )
    with pytest.raises(ValueError, match="no turns"):
        episode_to_samples(episode)
    with pytest.raises(ValueError, match="never trained on"):
        episode_to_samples(dataclasses.replace(episode, status=Status.ENV_TIMEOUT))
    assert isinstance(collate([sample_of()]), Batch)
