"""Why the context of a turn is the one that it is, in the turn, the metrics and the ledger."""

from dataclasses import asdict
from typing import Any

from agent_parts import play

from turnwise.log.metrics import context_causes, rollout_metrics
from turnwise.log.records import LedgerEntry, checked, ledger_entry
from turnwise.types import Status

USER: Any = {"role": "user", "content": "Where to?"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def ask(client: Any, messages: list[Any], role: str = "", **options: Any) -> Any:
    model = f"policy:{role}" if role else "policy"
    return client.chat.completions.create(model=model, messages=messages, **options)


def does_everything(client: Any) -> float:
    said = ask(client, [USER]).choices[0].message
    other = {"role": "user", "content": "A part of it?"}
    ask(client, [USER, said, USER])  # continued
    ask(client, [other])  # a sub-agent
    ask(client, [USER, said, other])  # branched
    ask(client, [USER], "worker")  # another role
    ask(client, [other], "worker")  # a sub-agent of that role
    ask(client, [USER], n=2)  # the first request once more, twice
    ask(client, [USER, said, USER], tools=[TOOL])  # other tools
    ask(client, [USER, {"role": "assistant", "content": "elsewhere"}, USER])  # edited
    return 1.0


CAUSES = [
    *("first", "continued", "new", "branched", "role", "new"),
    *("again", "again", "tools", "edited"),
]


def test_every_turn_says_why_its_context_is_what_it_is() -> None:
    (episode,), _ = play(does_everything, lambda session, call: f"reply {call}")
    assert episode.status is Status.COMPLETED, episode.error
    assert [turn.info["context_cause"] for turn in episode.turns] == CAUSES
    counts = {cause: CAUSES.count(cause) for cause in CAUSES}
    assert context_causes([episode]) == counts
    metrics = rollout_metrics([episode])
    assert {name: metrics[f"rollout/context/{name}"] for name in counts} == counts


def test_a_template_that_rewrites_is_told_as_such() -> None:
    def talks(client: Any) -> float:
        messages: list[Any] = [USER]
        for _ in range(3):
            messages += [ask(client, messages).choices[0].message, USER]
        return 1.0

    (episode,), _ = play(talks, "<think>which way?</think>north", template="rewriting")
    assert [turn.restart for turn in episode.turns] == [True] * 3
    assert context_causes([episode]) == {"first": 1, "template": 2}


def test_the_ledger_counts_the_causes() -> None:
    entry = ledger_entry(0, [((1,), (1,))], contexts={"first": 2, "edited": 1})
    stored = asdict(entry)
    assert checked(LedgerEntry(**stored)).contexts == {"first": 2, "edited": 1}
    del stored["contexts"]  # an older run
    assert checked(LedgerEntry(**stored)).contexts == {}
