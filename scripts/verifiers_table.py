"""Plays every environment of a checkout of verifiers, trains on it for a step, and prints a table.

python scripts/verifiers_table.py 0.4=CHECKOUT 0.2=OLDER_CHECKOUT --old SITE --write

Each environment gets a process of its own, without a network, and a time limit. Packages of the old
kind (`load_environment`) are played with the verifiers in the folder SITE (0.3.1: `pip install
--target SITE verifiers==0.3.1`), all others with the installed one. Data sets, judges and word
lists that would be downloaded have stand-ins here. Of a checkout that has packages of the old kind,
only those are tried: its others are an earlier state of later ones. `--write` puts the table into
docs/verifiers.md; `--only NAME` tries one environment.
"""

import argparse
import importlib
import itertools
import json
import logging
import multiprocessing
import os
import re
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "verifiers.md"
BEGIN, END = "<!-- table: scripts/verifiers_table.py -->", "<!-- end of the table -->"
SECONDS = 600.0
NUM_ROWS = 1000
MAX_TURNS = 12
CALL = '<tool_call>{"name": "%s", "arguments": %s}</tool_call>'
TEXT = (
    "The mill stood by the river for a long time and the people of the village came to it. "
    "It had one wheel and two stones and a roof of straw that let in the rain in spring. "
    "The miller rose with the sun and went to bed with it and was seldom seen in between. "
    "On market days the road was full of carts and of children who ran beside them all day. "
    "Later the river changed its course and the wheel stood still for the first time in years. "
    "Nobody knows today where the stones went or who took the beams of the roof away at last. "
)
ROWS: dict[str, dict[str, Any]] = {
    "kalomaze/alphabetic-arxiv-authors-it1": {
        "names": [f"{first}{last}" for first in ("Ada", "Bo", "Cy", "Di") for last in
                  ("Ash", "Beech", "Cedar", "Elm", "Fir")],
    },
    "PrimeIntellect/Reverse-Text-RL": {"prompt": "a stand-in sentence"},
    "openai/gsm8k": {"question": "What is 2 + 2?", "answer": "Two and two.\n#### 4"},
    "chiayewken/competition_math": {"problem": "What is 2 + 2?", "solution": "It is \\boxed{4}."},
    "PrimeIntellect/Hendrycks-Math": {"question": "What is 2 + 2?", "answer": "4"},
    "agentlans/wikipedia-paragraphs": {"text": TEXT},
    "google/civil_comments": {"text": "Nice mill.", "toxicity": 0.1},
    "willcb/wiki-trivia-questions-v4": {"question": "How many stones?", "answer": "two"},
    "willcb/rare-wiki-pages": {"id": "mill", "title": "Mill", "content": TEXT},
    "MMMU/MMMU": {
        "question": "What is shown?", "options": "['a', 'b', 'c', 'd']", "answer": "A",
        "image_1": None,
    },
}  # fmt: skip
"""One row of each data set, by name; it is repeated."""
REPLIES: dict[str, tuple[tuple[str, str], ...]] = {
    "kuhn_poker": (("[check] or [bet]", "[bet]"), ("[fold] or [call]", "[call]")),
    "proposer_solver": (("JSON object", '{"problem": "1 + 1?", "answer": 2}'), ("", "2")),
    "glossary": (("facts_lookup", CALL % ("facts_lookup", '{"name": "Ada Lovelace"}')),),
    "scratchpad": (("roundtrip", CALL % ("scratchpad_roundtrip", '{"word": "alpha"}')),),
    "bash_interception": (("bash once", CALL % ("bash", '{"command": "true"}')),),
    "code_golf": (("sum of", "```python\nprint(5050)\n```"),),
    "tool_test": (("tool_A", CALL % ("tool_A", '{"x": 1}')),),
    "wordle": (("", "[mills] <guess>[mills]</guess>"),),
    "wiki_search": (
        ("wiki_search_pages", CALL % ("wiki_search_pages", '{"query": "mill"}')),
        ("How many stones?", CALL % ("search_pages", '{"query": "mill"}')),
    ),
}
"""By environment: what to say where the last message holds a text; "ok" otherwise."""
SCRIPTED = ("proposer_solver",)
"""Environments whose episode fails on the noise of a random model: trained on the replies above."""
HARNESS = {"bash_interception": "bash"}
SERVERS = ("wiki_search",)
"""Packages of 0.4 whose tool servers, processes of their own, need the stand-ins too."""
AT_START = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("verifiers_table", {__file__!r})
table = importlib.util.module_from_spec(spec)
spec.loader.exec_module(table)
offline = table.Offline()
offline.stand_in_rows()
offline.stand_in_embeddings()
"""
"""What Python runs when such a server starts."""
ARGUMENTS: dict[str, Callable[[str], dict[str, Any]]] = {
    "self_reward": lambda judge: {"base_url": judge},
    "toxicity_explanation": lambda judge: {"judge_base_url": judge},
    "continuation_quality": lambda judge: {"judge_base_url": judge},
    "wiki_search": lambda judge: {"judge_base_url": judge, "embed_base_url": judge},
}
"""What `load_environment` is given to reach the stand-in for its judge."""


MARK = "result: "
Found = tuple[str, str, Path]
"""A name, its kind (new, old, example), and the folder that it is in."""


OUTSIDE = {
    "failed to prepare uv script": "uv cannot fetch what its program imports",
    "CreateSandboxRequest": "a sandbox in Prime's cloud",
    "prime login": "a sandbox in Prime's cloud",
}
"""Signs in an error of something outside that a package asks for by itself."""


class NetworkError(OSError):
    """Something outside this machine was asked for."""


class Offline:
    """This process without a network, with stand-ins for what is usually downloaded."""

    def __init__(self) -> None:
        self.wanted: list[str] = []
        self.used: set[str] = set()
        self.swallowed: list[str] = []
        self.uv = False
        self._lookup = socket.getaddrinfo
        socket.getaddrinfo = self._getaddrinfo  # type: ignore[assignment]
        os.environ |= {"HF_HUB_OFFLINE": "1", "NO_PROXY": "localhost,127.0.0.1"}
        logging.getLogger().addHandler(_Swallowed(self.swallowed))

    def _getaddrinfo(self, host: Any, *args: Any, **kwargs: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else str(host)
        if name not in ("localhost", "127.0.0.1", "::1", "0.0.0.0", "None"):
            self.want(name)
        return self._lookup(host, *args, **kwargs)

    def want(self, what: str) -> None:
        if what not in self.wanted:
            self.wanted.append(what)
        raise NetworkError(f"no network here: {what}")

    def stand_in_rows(self) -> None:
        """Puts made-up rows in the place of data sets from the hub."""
        import datasets

        def load_dataset(name: str, *args: Any, split: str | None = None, **_: Any) -> Any:
            if name not in ROWS:
                self.want(f"the data set {name}")
            self.used.add("rows")
            row = dict(ROWS[name])
            if "image_1" in row:
                from PIL import Image

                row["image_1"] = Image.new("RGB", (8, 8))
            rows = datasets.Dataset.from_list([row] * NUM_ROWS)
            return rows if split is not None else {"train": rows, "test": rows}

        datasets.load_dataset = load_dataset

    def watch_uv(self) -> None:
        """Notes where a package has uv install something. uv runs outside this process."""
        from verifiers.v1.runtimes.base import Runtime

        prepare = Runtime.prepare_uv_script

        async def prepare_uv_script(*args: Any, **kwargs: Any) -> Any:
            self.uv = True
            return await prepare(*args, **kwargs)

        Runtime.prepare_uv_script = prepare_uv_script

    def stand_in_embeddings(self) -> None:
        """Puts the letters of a text in the place of chromadb's embedding of it."""
        from chromadb.api.types import DefaultEmbeddingFunction

        def embed(self: Any, input: list[str]) -> list[Any]:
            import numpy as np

            return [np.asarray(letters(text), dtype=np.float32) for text in input]

        DefaultEmbeddingFunction.__call__ = embed

    def stand_in_words(self) -> None:
        """Puts a short word list in the place of nltk's, where nltk is installed."""
        try:
            import nltk
            from nltk.corpus import words
        except ImportError:
            return

        def some_words(*_: Any) -> list[str]:
            self.used.add("word list")
            return ["mills", "stone", "river", "wheel", "roofs", "carts", "beams", "straw"]

        nltk.download = lambda *_, **__: True
        nltk.pos_tag = lambda tokens, **__: [(token, "NN") for token in tokens]
        words._LazyCorpusLoader__load = lambda: None
        words.words = some_words
        nltk.corpus.words = words

    def stand_in_judge(self) -> str:
        """The address of a judge that grades everything alike, and embeds texts."""
        used = self.used

        class Judge(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path.endswith("/embeddings"):
                    used.add("embeddings")
                    rows = [
                        {"object": "embedding", "index": index, "embedding": letters(text)}
                        for index, text in enumerate(asked["input"])
                    ]
                    return self.answer({"object": "list", "data": rows})
                used.add("judge")
                said = {"role": "assistant", "content": "<grade>B</grade> 0.5 yes"}
                choice = {"index": 0, "message": said, "finish_reason": "stop"}
                answer: dict[str, Any] = {"id": "1", "object": "chat.completion", "created": 0}
                return self.answer({**answer, "choices": [choice]})

            def answer(self, found: dict[str, Any]) -> None:
                body = json.dumps({**found, "model": "judge"}).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        os.environ |= {"PRIME_INFERENCE_URL": url, "OPENAI_API_KEY": "none"}
        return url


def letters(text: str) -> list[float]:
    """How often each letter stands in a text: a stand-in for an embedding."""
    return [float(text.lower().count(chr(97 + letter))) for letter in range(26)]


class _Swallowed(logging.Handler):
    """Keeps what verifiers only logs: a reward function that raised counts as 0 there."""

    def __init__(self, found: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._found = found

    def emit(self, record: logging.LogRecord) -> None:
        if "reward function" in record.getMessage():
            self._found.append(record.getMessage())


# In the process of one environment.


def load_old(name: str, judge: str) -> Any:
    """An environment of the old kind."""
    module = importlib.import_module(name)
    return module.load_environment(**ARGUMENTS.get(name, lambda _: {})(judge))


def load_new(name: str) -> Any:
    """A taskset with what plays it; a package that is only a harness plays another one's."""
    import verifiers.v1 as vf
    from verifiers.v1.utils.loaders import taskset_class, taskset_config_type

    from turnwise.integrations.verifiers.environments import TasksetEnv

    module = importlib.import_module(name)
    exported = [getattr(module, one) for one in module.__all__]
    if not any(isinstance(one, type) and issubclass(one, vf.Taskset) for one in exported):
        agent = vf.AgentConfig(harness={"id": name})
        taskset = vf.TasksetConfig(id="reverse_text")
        return vf.SingleAgentEnv(vf.SingleAgentEnvConfig(taskset=taskset, agent=agent))
    taskset = taskset_class(name)(taskset_config_type(name)(id=name))
    kind = name.removesuffix("_v1")
    return TasksetEnv(taskset, harness=HARNESS.get(kind))


def reply_to(name: str, text: str) -> str:
    pairs = REPLIES.get(name.removesuffix("_v1"), ())
    return next((reply for part, reply in pairs if part in text), "ok")


def play(name: str, source: Any) -> str:
    """How an episode went."""
    from turnwise.types import Message

    env = source.factory()
    messages = env.reset(source.task("train", 0)).messages
    agents: set[int] = set()
    for turn in itertools.count(1):
        said = reply_to(name, messages[-1].content if messages else "")
        result = env.step(Message(role="assistant", content=said))
        agents.add(result.info.get("trace", 0))
        if not result.done and turn < MAX_TURNS:
            messages = result.messages
            continue
        if not result.done:
            env.finish()
        env.close()
        several = f", {len(agents)} agents" if len(agents) > 1 else ""
        return f"{turn} turn{'s' * (turn > 1)}{several}"
    raise AssertionError


def train(name: str, env: Any) -> None:
    """One step on a tiny model."""
    from turnwise.integrations.trl import VerifiersGRPOConfig, VerifiersGRPOTrainer, setup
    from turnwise.testing.tiny import tiny_model, tiny_tokenizer

    tokenizer = tiny_tokenizer()
    if name.removesuffix("_v1") in SCRIPTED:
        setup.HFGenerator = scripted_generator(name, tokenizer)  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as folder:
        args = VerifiersGRPOConfig(
            folder,
            per_device_train_batch_size=4,
            num_generations=2,
            max_steps=1,
            max_completion_length=512,
            max_tokens_per_turn=None if name in SCRIPTED else 4,
            max_context=8192,
            env_timeout=SECONDS,
            learning_rate=1e-3,
            logging_steps=1,
            report_to="none",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            disable_tqdm=True,
        )
        model = tiny_model(max_position_embeddings=16384)
        trainer = VerifiersGRPOTrainer(model, env, args, processing_class=tokenizer)
        trainer.train()
        trainer.close()
        logs = [row for row in trainer.state.log_history if "loss" in row]
        failures = [row.get("rollout/failures", 0.0) for row in logs]
        if trainer.state.global_step != 1 or any(failures):
            raise RuntimeError(f"the step failed: {failures} of its episodes")


def scripted_generator(name: str, tokenizer: Any) -> Callable[..., Any]:
    from turnwise.generate.scripted import ScriptedGenerator

    def script(session: Any, ids: tuple[int, ...], call: int) -> str:
        last = tokenizer.decode(list(ids)).rpartition("<|im_start|>user")[2]
        return reply_to(name, last)

    def make(model: Any, tokenizer: Any, *, max_context: int, **_: Any) -> Any:
        end = tokenizer.eos_token_id
        return ScriptedGenerator(script, tokenizer=tokenizer, end_id=end, max_context=max_context)

    return make


def run_one(name: str, kind: str) -> dict[str, str]:
    """(result, how or why) of one environment or example."""
    offline = Offline()
    try:
        judge = offline.stand_in_judge()
        if kind == "example":
            runpy.run_path(name, run_name="__main__")
            return {"result": "runs", "note": ""}
        offline.stand_in_rows()
        offline.stand_in_words()
        from turnwise.envs.base import EnvError
        from turnwise.integrations.trl.rewards import lacks_reward
        from turnwise.integrations.trl.sources import make_source

        if kind == "new":
            offline.watch_uv()
            offline.used |= {"embeddings"} if name in SERVERS else set()
        env = load_old(name, judge) if kind == "old" else load_new(name)
        try:
            source = make_source(env)
        except EnvError as error:
            return _failed(offline, "refused", error)
        note = play(name, source)
        if source.close is not None:
            source.close()
        train(name, env)
        if offline.swallowed:
            raise RuntimeError(offline.swallowed[0])
    except ImportError as error:
        return _failed(offline, "needs a package", error)
    except (Exception, SystemExit) as error:
        return _failed(offline, "fails", error)
    used = f"; stand-in {' and '.join(sorted(offline.used))}" if offline.used else ""
    uv = "; uv installs what its script imports" if offline.uv else ""
    reason = lacks_reward(env)
    zero = "" if reason is None else f"; every reward is 0: {reason}"
    return {"result": "runs", "note": note + used + uv + zero}


def _failed(offline: Offline, result: str, error: BaseException) -> dict[str, str]:
    whole = " ".join(str(error).split())
    missing = re.search(r"No module named '([\w.]+)'", whole)
    if missing is not None:
        return {"result": "needs a package", "note": missing[1]}
    text = whole[:300]
    if offline.wanted:
        return {"result": "needs network", "note": ", ".join(offline.wanted)}
    for sign, what in OUTSIDE.items():
        if sign in whole:
            return {"result": "needs network", "note": what}
    if "needs a container" in text:
        return {"result": "needs a container", "note": text.partition(",")[0]}
    return {
        "result": result,
        "note": text if result == "refused" else f"{type(error).__name__}: {text}",
    }


# In the process that asks.


def environments(checkout: Path) -> Iterator[Found]:
    """(name, kind, folder that is imported from) of everything in a checkout."""
    found: list[Found] = []
    for project in sorted((checkout / "environments").glob("*/pyproject.toml")):
        folder = project.parent
        code = "".join(path.read_text() for path in folder.rglob("*.py"))
        kind = "old" if "def load_environment" in code else "new"
        found.append((folder.name, kind, folder))
    old = [one for one in found if one[1] == "old"]
    yield from old or found
    for example in sorted((checkout / "examples").glob("*.py")):
        yield f"examples/{example.name}", "example", checkout


def ask(found: Sequence[Found], old: Path | None) -> Iterator[dict[str, str]]:
    """What processes of their own find. Those of one kind are forks of one that has imported what
    all of them need."""
    for kind, group in itertools.groupby(found, key=lambda one: one[1]):
        if kind == "old" and old is None:
            why = "of the old kind; --old SITE is missing"
            yield from ({"name": one[0], "result": "not tried", "note": why} for one in group)
            continue
        before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        site = [str(old)] if kind == "old" else []
        path = os.pathsep.join([*site, str(ROOT), *filter(None, before)])
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        asked = json.dumps([(name, kind, str(folder)) for name, kind, folder in group])
        command = [sys.executable, __file__, "--these", asked]
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(MARK):
                    yield json.loads(line.removeprefix(MARK))


def run_these(asked: Sequence[Sequence[str]]) -> None:
    """Prints what each of these comes to."""
    import turnwise.integrations.trl.trainer  # noqa: F401  (what every fork needs)

    forks = multiprocessing.get_context("fork")
    for name, kind, folder in asked:
        receiver, sender = forks.Pipe(duplex=False)
        process = forks.Process(target=_fork, args=(sender, name, kind, Path(folder)))
        process.start()
        sender.close()
        try:
            late = {"result": "fails", "note": f"not over after {SECONDS:g} s"}
            found = receiver.recv() if receiver.poll(SECONDS) else late
        except EOFError:
            found = {"result": "fails", "note": "its process died"}
        process.kill()
        process.join()
        print(MARK + json.dumps({"name": name, **found}), flush=True)


def _fork(sender: Any, name: str, kind: str, folder: Path) -> None:
    beside = [folder.parent / "reverse_text", folder.parent / "reverse_text_v1"]
    paths = [str(path) for path in (folder, *beside)]
    sys.path[:0] = paths
    with tempfile.TemporaryDirectory() as start:
        if kind == "new" and name in SERVERS:
            (Path(start) / "sitecustomize.py").write_text(AT_START, encoding="utf-8")
            os.environ["WIKI_SEARCH_CACHE"] = start
        path = [start, *paths, os.environ["PYTHONPATH"]]
        os.environ["PYTHONPATH"] = os.pathsep.join(path)
        os.chdir(start)  # some write beside themselves
        sender.send(run_one(str(folder / name) if kind == "example" else name, kind))


def table(rows: list[dict[str, str]]) -> str:
    lines = ["| release | environment | result | how, or why not |", "|---|---|---|---|"]
    for row in rows:
        note = row["note"].replace("|", "\\|")
        lines.append(f"| {row['release']} | `{row['name']}` | {row['result']} | {note} |")
    outside = [row for row in rows if row["result"].startswith("needs")]
    here = len(rows) - len(outside)
    runs = sum(row["result"] == "runs" for row in rows)
    summary = (
        f"{runs} of the {here} that can run here run ({runs / max(here, 1):.0%}). {len(outside)} "
        "others need a network, a package or a container."
    )
    return "\n".join([*lines, "", summary])


def write(rows: list[dict[str, str]]) -> None:
    """Puts the rows into the page, in the place of those with the same names."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    old, _, after = rest.partition(END)
    cells = [line.strip("| ").split(" | ", 3) for line in old.splitlines() if "| `" in line]
    known = {
        (release, name.strip("`")): {"result": result, "note": note[0] if note else ""}
        for release, name, result, *note in cells
    }
    known |= {(row["release"], row["name"]): row for row in rows}
    merged = [{**row, "release": key[0], "name": key[1]} for key, row in known.items()]
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(merged)}\n\n{END}{after}", encoding="utf-8")


def main() -> None:
    if sys.argv[1:2] == ["--these"]:
        return run_these(json.loads(sys.argv[2]))
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkouts", nargs="+", help="RELEASE=FOLDER")
    parser.add_argument("--old", type=Path, help="a folder with verifiers 0.3.1")
    parser.add_argument("--only", action="append", help="an environment; may be repeated")
    parser.add_argument("--write", action="store_true", help=f"into {PAGE.relative_to(ROOT)}")
    options = parser.parse_args()
    rows: list[dict[str, str]] = []
    for given in options.checkouts:
        release, _, folder = given.partition("=")
        there = environments(Path(folder).resolve())
        chosen = [one for one in there if options.only is None or one[0] in options.only]
        for found in ask(chosen, options.old and options.old.resolve()):
            print(json.dumps(found), file=sys.stderr, flush=True)
            rows.append({"release": release, **found})
    print(table(rows))
    if options.write:
        write(rows)


if __name__ == "__main__":
    main()
