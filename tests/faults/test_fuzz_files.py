"""Every file that turnwise reads, broken in every way: it is read, or refused by name and line, and
no command ends in a traceback."""

import contextlib
import io
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draws import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from run_fixtures import fill_step, make_episode, make_run, make_turn

from turnwise.cli.main import main
from turnwise.config import Config, ConfigError, load_config, show_config
from turnwise.config.schema import DataConfig, EnvConfig
from turnwise.config.yaml_io import parse_yaml
from turnwise.envs.base import EnvError
from turnwise.envs.data_rows import RowSplits, load_rows
from turnwise.envs.games.math_data import load_questions
from turnwise.envs.prompts import read_prompts
from turnwise.evaluate.replay import read_episodes
from turnwise.inspect.export import Chosen, export_run, open_run
from turnwise.log.doctor import diagnose, read_chart
from turnwise.log.events import Evaluated
from turnwise.log.outcome import summary_json
from turnwise.log.records import RunDirectoryError
from turnwise.log.store import RunDirectory, RunReader
from turnwise.train.checkpoint import CheckpointError, read_checkpoint, write_checkpoint
from turnwise.train.sources import read_file, write_messages
from turnwise.types import Message, ToolCall

FUZZ = settings(
    examples(20),  # every example reads a whole run
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.sampled_from([10**400, -1, 1e308, 2**63, "", "NaN", "\x00", "\ud83c", "../.."]),
        st.floats(allow_nan=False),
        st.text(max_size=8),
    ),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@st.composite
def broken(draw: st.DrawFn, whole: bytes) -> bytes:
    """The content of a file after something happened to it."""
    kind = draw(st.sampled_from(["random", "cut", "bytes", "json", "json", "deep", "doubled"]))
    if kind == "random":
        return draw(st.binary(max_size=200)) + b"\n"
    if kind == "cut":
        return whole[: draw(st.integers(0, len(whole)))] + draw(st.sampled_from([b"", b"\n"]))
    if kind == "deep":
        return draw(st.sampled_from([b"[", b'{"a":', b"- "])) * 100_000 + b"\n"
    if kind == "doubled":
        return whole + whole
    if kind == "bytes":
        content = bytearray(whole)
        for _ in range(draw(st.integers(1, 4))):
            at = draw(st.integers(0, len(content)))
            content[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
        return bytes(content)
    lines = whole.decode().splitlines()
    try:
        at = draw(st.sampled_from([at for at, line in enumerate(lines) if line]))
        lines[at] = json.dumps(draw(mutated(json.loads(lines[at]))))
    except ValueError:  # one tree over many lines; JSON is YAML too
        lines = [json.dumps(draw(mutated(parse_yaml(whole.decode()))))]
    return ("\n".join(lines) + "\n").encode()


@st.composite
def mutated(draw: st.DrawFn, data: Any) -> Any:
    """The data with one value, somewhere inside, replaced or left out."""
    if isinstance(data, dict) and data and draw(st.integers(0, 9)):
        key = draw(st.sampled_from(sorted(data)))
        if draw(st.integers(0, 4)) == 0:
            return {name: value for name, value in data.items() if name != key}
        return {**data, key: draw(mutated(data[key]))}
    if isinstance(data, list) and data and draw(st.integers(0, 9)):
        at = draw(st.integers(0, len(data) - 1))
        return [*data[:at], draw(mutated(data[at])), *data[at + 1 :]]
    return draw(VALUES)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with everything in it, failures too, so that the doctor reads episodes."""
    folder = tmp_path_factory.mktemp("runs")
    call = ToolCall(id="c", name="add", arguments='{"a": 1}')
    said = Message(role="assistant", content="x", tool_calls=(call,))
    turns = (make_turn(messages=(said,), info={"a": [1]}), make_turn("down", reward=1.0))
    ended = Evaluated(step=2, label="after", episodes=3, success=(0.1, 0.2, 0.3), reward=(0, 1, 2))
    with make_run(folder) as run:
        for step in (1, 2):
            episodes = [make_episode("e0", turns=turns), make_episode("e1", error="broke")]
            fill_step(run, step, episodes, {"rollout/failures": 1.0, "time/step": 2.0})
        run.write_event("fallback", "something", step=1)
        run.write_pieces(chr)
        run.write_summary(summary_json(ended, ended, baselines=[ended.to_json()]))
    return run.path


def read_whole_run(path: Path) -> None:
    """All that reads a run directory without playing or training."""
    export_run(open_run(path), Chosen())
    reader = RunReader(path)
    diagnose(read_chart(reader))
    reader.curve("rollout/failures")
    reader.curve("time/step")
    for step in reader.steps():
        reader.episodes(step)
        reader.credit(step)
    read_episodes(path / "episodes" / "step_000001.jsonl")


def refused_or_read(
    read: Callable[[], object], named: str, *errors: type[Exception], lines: bool = False
) -> None:
    """Runs the reader. What it raises is one of these errors, and names the file and its line."""
    said = None
    try:
        read()
    except errors as error:
        said = str(error)
    assert said is None or named in said, said
    if said is not None and lines:
        assert re.search(r"line \d+|tells of other turns|no prompt|no episode", said), said


RUN_FILES = (
    *("metrics.jsonl", "timings.jsonl", "ledger.jsonl", "events.jsonl", "summary.json"),
    *("pieces.json", "episodes/step_000001.jsonl", "credit/step_000001.jsonl"),
    *("timings/step_000001.jsonl", "config.yaml"),
)


@pytest.mark.parametrize("name", RUN_FILES)
@FUZZ
@given(data=st.data())
def test_files_of_a_run(name: str, whole_run: Path, tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "run"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(whole_run, path)
    (path / name).write_bytes(data.draw(broken((whole_run / name).read_bytes())))
    # A problem of a setting is named by its key.
    named = str(path) if name == "config.yaml" else Path(name).name
    refused_or_read(
        lambda: read_whole_run(path), named, RunDirectoryError, lines=name.endswith(".jsonl")
    )

    def go_on() -> None:
        with RunDirectory.open(path) as run:
            run.truncate_to(1)

    refused_or_read(go_on, str(path), RunDirectoryError)


CONFIG = show_config(Config()).encode()


@FUZZ
@given(content=broken(CONFIG))
def test_configs(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    refused_or_read(lambda: load_config(path), "the config has", ConfigError)


YAML_BOMBS = {
    "aliases": "a: &a [1,1,1,1,1,1,1,1,1]\n"
    + "".join(
        f"{c}: &{c} [{', '.join(['*' + p] * 9)}]\n"
        for p, c in zip("abcdefgh", "bcdefghi", strict=True)
    ),
    "itself": "env: &e {options: *e}\n",
    "deep": "[" * 5_000,
    "deep keys": "a:\n" + "".join(" " * n + "a:\n" for n in range(1, 500)),
    "digits": "seed: " + "9" * 5_000,
    "tag": "seed: !!bool maybe\n",
    "number": "seed: !!int x\n",
    "date": "seed: !!timestamp 2001-99-99\n",
    "object": "seed: !!python/object/apply:os.system [ls]\n",
    "set": "env: !!set {a, b}\n",
    "binary": "env: {name: !!binary aGk=}\n",
    "keys": "{1: 2, null: 3, [1]: 4}\n",
    "numbers as keys": "{1: 2, 2.5: 3, true: 4}\n",
    "latin": b"seed: 1\nenv: {name: \xe4}\n",
    "nothing": "",
    "documents": "a: 1\n---\nb: 2\n",
}


@pytest.mark.parametrize("name", YAML_BOMBS)
def test_hostile_yaml(name: str, tmp_path: Path) -> None:
    text = YAML_BOMBS[name]
    path = tmp_path / "mine.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    if name == "nothing":
        assert load_config(path) == Config()
        return
    with pytest.raises(ConfigError) as refused:
        load_config(path)
    said = str(refused.value)
    assert len(said) < 20_000
    if name in ("tag", "number", "date", "digits"):
        assert "line 1" in said
    if name == "latin":
        assert "mine.yaml, line 2 is not UTF-8" in said


ROWS = b'{"prompt": "1+1?", "answer": "2"}\n{"prompt": "2+2?", "answer": "4"}\n\n{"prompt": "3?"}\n'


@FUZZ
@given(content=broken(ROWS))
def test_prompts_and_data_sets(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    prompts = DataConfig(prompts=str(path))
    refused_or_read(lambda: read_prompts(prompts, seed=0), path.name, ValueError, lines=True)

    def draw() -> None:
        rows = load_rows(path, name="rows.jsonl")
        RowSplits(rows, val_fraction=0.5, name="rows.jsonl").all("train")

    refused_or_read(draw, path.name, EnvError)
    refused_or_read(lambda: load_questions(str(path)), path.name, EnvError)


CALLS = [{"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}]
MESSAGES = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "", "tool_calls": CALLS},
    {"role": "tool", "content": "2", "tool_call_id": "c", "name": "add"},
    {"role": "assistant", "content": "2", "weight": 1},
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
DEMONSTRATIONS = json.dumps(
    {"messages": MESSAGES, "tools": TOOLS, "reward": 1.0, "success": True, "task": "t"}
)


@FUZZ
@given(content=broken(f"{DEMONSTRATIONS}\n{DEMONSTRATIONS}\n".encode()))
def test_demonstrations(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "said.jsonl"
    path.write_bytes(content)

    def learn() -> None:
        write_messages(tmp_path / "again.jsonl", read_file(path))

    refused_or_read(learn, path.name, ValueError, lines=True)


@pytest.mark.parametrize("tools", ["add", [5], [None]])
def test_tools_of_demonstrations_are_objects(tools: Any, tmp_path: Path) -> None:
    path = tmp_path / "said.jsonl"
    path.write_text(json.dumps({"messages": MESSAGES, "tools": tools}) + "\n")
    with pytest.raises(ValueError, match=r"said\.jsonl, line 1 .*tools"):
        read_file(path)


@FUZZ
@given(data=st.data(), name=st.sampled_from(["manifest.json", "state.json", "trainer.safetensors"]))
def test_checkpoints(tmp_path: Path, data: st.DataObject, name: str) -> None:
    folder = tmp_path / "checkpoints"
    shutil.rmtree(folder, ignore_errors=True)
    path = write_checkpoint(
        folder,
        step=3,
        tensors={"a": torch.zeros(2)},
        state={"positions": {"step": 3}},
        save_model=lambda place: (place / "config.json").write_text("{}") and None,
        keep=1,
    )
    whole = (path / name).read_bytes()
    hurt = data.draw(st.binary(max_size=50) if name == "trainer.safetensors" else broken(whole))
    (path / name).write_bytes(hurt)

    def read() -> None:
        found = read_checkpoint(path)
        assert found.step == 3
        assert torch.equal(found.tensors()["a"], torch.zeros(2))

    refused_or_read(read, path.name, CheckpointError)


def test_tensors_that_only_their_checksum_fits(tmp_path: Path) -> None:
    """A stranger's checkpoint is whole by its own manifest."""

    def save(place: Path) -> None:
        (place / "config.json").write_text("{}")

    path = write_checkpoint(
        tmp_path, step=1, tensors={"a": torch.zeros(2)}, state={}, save_model=save, keep=1
    )
    from turnwise.train import checkpoint

    (path / "trainer.safetensors").write_bytes(b"nothing")
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["sha256"]["trainer.safetensors"] = checkpoint._sha256(path / "trainer.safetensors")  # pyright: ignore[reportPrivateUsage]
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"trainer.safetensors cannot be read"):
        read_checkpoint(path).tensors()


def command(*words: str) -> tuple[int, str]:
    """(exit status, output) of a command, which ends as the command `turnwise` does and never in a
    traceback."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            main(words)
        except SystemExit as ended:
            return int(ended.code or 0), out.getvalue()
    return 0, out.getvalue()


BROKEN: dict[str, bytes] = {
    "not text": b"\xff\xfe\x00\x01\n",
    "not JSON": b"{nothing\n",
    "another shape": b"[1, 2]\n",
    "another type": b'{"step": "x", "id": 5, "kind": 1, "before": 5}\n',
    "deep": b"[" * 100_000 + b"\n",
}


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("name", ["metrics.jsonl", "config.yaml", "summary.json", "ledger.jsonl"])
def test_the_doctor_refuses_a_broken_run(
    name: str, kind: str, whole_run: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    shutil.copytree(whole_run, path)
    (path / name).write_bytes(BROKEN[kind])
    status, said = command("doctor", str(path))
    assert (status, name in said) == (2, True), said


@pytest.mark.parametrize("kind", BROKEN)
def test_commands_refuse_broken_files(kind: str, whole_run: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(whole_run, path)
    episodes = path / "episodes" / "step_000001.jsonl"
    episodes.write_bytes(BROKEN[kind])
    status, said = command("replay", str(episodes))
    assert (status, "step_000001.jsonl, line 1" in said) == (2, True), said
    status, said = command("sft", str(path), "--write", str(tmp_path / "x.jsonl"))
    assert (status, "step_000001.jsonl, line 1" in said) == (2, True), said
    checkpoint = path / "checkpoints" / "step_000001"
    checkpoint.mkdir()
    (checkpoint / "manifest.json").write_bytes(BROKEN[kind])
    for words in (("eval", str(path)), ("rollout", str(path), "--out", str(tmp_path / "x.jsonl"))):
        status, said = command(*words)
        assert (status, "step_000001" in said) == (1, True), said
    (path / "config.yaml").write_bytes(BROKEN[kind])
    for words in (
        ("eval", str(path)),
        ("rollout", str(path)),
        ("train", "--resume", str(path)),
        ("train", str(path / "config.yaml")),
        ("config", str(path / "config.yaml")),
        ("replay", str(episodes), "--config", str(path / "config.yaml")),
    ):
        status, said = command(*words)
        assert status == 2, (words, said)
        assert "config" in said


@pytest.mark.parametrize(
    "name",
    [
        "lock",
        "metrics.jsonl",
        "episodes/step_000002.jsonl",
        "checkpoints/step_000001/manifest.json",
    ],
)
def test_a_pipe_among_the_files_holds_nobody_up(name: str, whole_run: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(whole_run, path)
    (path / name).parent.mkdir(exist_ok=True)
    (path / name).unlink(missing_ok=True)
    os.mkfifo(path / name)
    for words in (("watch", "--once"), ("doctor",), ("push", str(tmp_path / "model"))):
        status, said = command(words[0], str(path), *words[1:])
        assert status in (0, 1, 2), said


@pytest.mark.parametrize("kind", ["not text", "not JSON", "another shape", "deep"])
def test_a_sweep_refuses_a_broken_summary(kind: str, whole_run: Path, tmp_path: Path) -> None:
    shutil.copytree(whole_run, tmp_path / "run-s0")
    (tmp_path / "run-s0" / "summary.json").write_bytes(BROKEN[kind])
    status, said = command("sweep", "bandit", "--seeds", "1", "--dir", str(tmp_path))
    assert (status, "summary.json" in said) == (2, True), said


def test_an_environment_says_which_line_of_its_data_is_broken(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_bytes(ROWS + b"{broken\n")
    settings_ = EnvConfig(name="math_qa", options={"data": str(path)})
    status, said = command(
        "rollout", "--player", "random", "--env", settings_.name, f"env.options.data={path}",
        "--out", str(tmp_path / "out.jsonl"),
    )  # fmt: skip
    assert (status, "questions.jsonl, line 5" in said) == (2, True), said
