"""What blocks of the documentation name of the reader's: a model, runs, configs, programs, files.
`stage` puts small ones into the folder of a block that is marked small."""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import doc_repositories
from doc_pages import ROOT, blocks_of
from doc_small import GGUF, HUB, RUN, STEPS, smaller

CONFIG = """
extends: bandit
algo: {name: grpo}
"""
MODEL = """
from turnwise.testing.tiny import tiny_model, tiny_tokenizer
tiny_model().save_pretrained("DIR")
tiny_tokenizer().save_pretrained("DIR")
"""
GGUF_MODEL = f"""
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quants
from tokenizers.pre_tokenizers import ByteLevel
from turnwise.testing.tiny import CHATML_TEMPLATE, SPECIAL_TOKENS, tiny_model

letters = [*sorted(ByteLevel.alphabet()), "ab", "cd"]
model = tiny_model("qwen2", vocab_size=261)
file = GGUFWriter("{GGUF}", "qwen2")
file.add_context_length(4096)
file.add_embedding_length(32)
file.add_feed_forward_length(64)
file.add_block_count(2)
file.add_head_count(4)
file.add_head_count_kv(2)
file.add_layer_norm_rms_eps(1e-6)
file.add_tokenizer_model("gpt2")
file.add_token_list([*letters, *SPECIAL_TOKENS])
file.add_token_types([1] * 258 + [3] * 3)
file.add_token_merges(["a b", "c d"])
file.add_pad_token_id(258)
file.add_eos_token_id(260)
file.add_chat_template(CHATML_TEMPLATE)
names = get_tensor_name_map(MODEL_ARCH.QWEN2, 2)
for name, weights in model.state_dict().items():
    kind = GGMLQuantizationType.Q8_0 if weights.ndim == 2 else GGMLQuantizationType.F32
    name = names.get_name(name, try_suffixes=(".weight", ".bias"))
    file.add_tensor(name, quants.quantize(weights.numpy(), kind), raw_dtype=kind)
file.write_header_to_file()
file.write_kv_data_to_file()
file.write_tensors_to_file()
file.close()
"""
REVISION = "0" * 40
LONG = 32768
"""Context of DIR where a demonstration has many characters, each of which is a token of its own."""
GAME = """
from turnwise.envs.base import BaseEnv


class Easy(BaseEnv):
    instruction = "Say something."

    def reset(self, seed=None, **kwargs):
        return f"Task {seed}"

    def step(self, action):
        return "on", 1.0, True, {"success": True}

    def expert_action(self):
        return "a"
"""
"""With an expert, and won by every reply."""
PLAYER = """
def say(situation):
    return "a"
"""
SOLVE = """
def solve(task, client):
    question = {"role": "user", "content": f"Task {task.seed % 10}"}
    answer = client.chat.completions.create(model="policy", messages=[question])
    return float("a" in (answer.choices[0].message.content or ""))
"""
NODE = """
const task = JSON.parse(process.env.TURNWISE_TASK);
const messages = [{role: "user", content: `Task ${task.seed % 10}`}];
fetch(process.env.OPENAI_BASE_URL + "/chat/completions", {
  method: "POST",
  headers: {"Content-Type": "application/json"},
  body: JSON.stringify({model: "policy", messages}),
}).then((answer) => answer.json()).then((data) => {
  const won = (data.choices[0].message.content ?? "").includes("a");
  console.log(JSON.stringify({reward: Number(won), success: won}));
});
"""
TALK = [
    {"role": "user", "content": "How many figs?"},
    {"role": "assistant", "content": "Three."},
]


def stage(folder: Path, code: str) -> None:
    """Puts what the pages name into the folder, once, and what this block names beside it."""
    if not (folder / "DIR").exists():
        shutil.copytree(_made(), folder, dirs_exist_ok=True)
        for name in ("examples", "scripts", "benchmarks"):
            (folder / name).symlink_to(ROOT / name)
    for text, make in NAMED.items():
        if text in code:
            make(folder)


@cache
def _made() -> Path:
    import atexit

    folder = Path(tempfile.mkdtemp(prefix="turnwise-stage-"))
    atexit.register(shutil.rmtree, folder)
    _python(folder, MODEL)
    for name in ("my.yaml", "mine.yaml"):
        (folder / name).write_text(CONFIG)
    for seed, name in enumerate(("a", "b")):
        words = ["train", "mine.yaml", *RUN, f"train.steps={STEPS}", f"log.name={name}"]
        words += ["model.embedded.warmstart_episodes=400", "train.max_idle_steps=99"]
        _turnwise(folder, *words, f"seed={seed}")
    for name in ("NAME", "my-run"):
        shutil.copytree(folder / "runs/a", folder / "runs" / name)
    return folder


def _turnwise(folder: Path, *words: str) -> None:
    import warm

    subprocess.run([*warm.turnwise(), *words], cwd=folder, check=True, capture_output=True)


def _python(folder: Path, program: str) -> None:
    import warm

    command = [*warm.python(), "-c", program]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


def _lamp(folder: Path) -> None:
    """The program of docs/agents.md, without its evaluation."""
    code = blocks_of(ROOT / "docs/agents.md")[0].code
    (folder / "lamp.py").write_text(code.partition("\nfound = ")[0])
    (folder / "agent.js").write_text(NODE)


def _solve(folder: Path) -> None:
    (folder / "solve.py").write_text(SOLVE)


def _shop(folder: Path) -> None:
    if not (folder / "shop.py").exists():
        _turnwise(folder, "init", "tools", "shop")


def _products(folder: Path) -> None:
    """The products that come with turnwise, as a folder of WebShop's."""
    _long(folder)
    (folder / "FOLDER").mkdir()
    sample = ROOT / "turnwise/envs/games/webshop/sample_products.json"
    shutil.copy(sample, folder / "FOLDER/items_shuffle.json")


def _long(folder: Path) -> None:
    file = folder / "DIR/config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "max_position_embeddings": LONG}))


def _hub(folder: Path) -> None:
    """DIR as a model of the hub, in the hub's cache."""
    model = folder / "hub" / f"models--{HUB.partition('=')[2].replace('/', '--')}"
    shutil.copytree(folder / "DIR", model / "snapshots" / REVISION)
    (model / "refs").mkdir()
    (model / "refs/main").write_text(REVISION)


def _gguf(folder: Path) -> None:
    if find_spec("gguf"):
        _python(folder, GGUF_MODEL)


def _thinking(folder: Path) -> None:
    """runs/NAME, of a model that may think."""
    _run_of_model(folder, "mine.yaml", "env.format.think=true")


def _own_game(folder: Path) -> None:
    """A game of the reader's in my.yaml, and runs/NAME, of DIR in that game."""
    (folder / "easy.py").write_text(GAME)
    (folder / "my.yaml").write_text("env: {name: easy.py:Easy, format: {style: raw}}\n")
    _run_of_model(folder, "my.yaml")


def _run_of_model(folder: Path, *words: str) -> None:
    shutil.rmtree(folder / "runs/NAME")
    _turnwise(folder, *smaller(["train", *words, "model.path=DIR", "log.name=NAME"]))


def _demonstrations(folder: Path) -> None:
    """A player's program, episodes, messages."""
    _own_game(folder)
    (folder / "player.py").write_text(PLAYER)
    (folder / "messages.jsonl").write_text(json.dumps({"messages": TALK}) + "\n")
    words = ["my.yaml", "model.path=DIR", "--player", "expert", "--episodes", "4"]
    _turnwise(folder, "rollout", *words)


def _verl_run(folder: Path) -> None:
    """runs/NAME, of verl."""
    shutil.rmtree(folder / "runs/NAME")
    words = ["train", "mine.yaml", "--backend", "verl", "log.name=NAME", "checkpoint.every=1"]
    _turnwise(folder, *smaller(words))


NAMED: dict[str, Callable[[Path], None]] = {
    "agent.js": _lamp,
    "agent:solve.py": _solve,
    "--env.name shop.py": _shop,
    "products=FOLDER": _products,
    "alfworld": _long,
    "--without-thought": _thinking,
    "--backend verl --resume": _verl_run,
    "messages.jsonl": _demonstrations,
    HUB: _hub,
    "model.gguf_file": _gguf,
    **dict.fromkeys(
        ("pip install .", "pip install 'turnwise", "-e .", "make train"),
        doc_repositories.this_repository,
    ),
    "git clone https://github.com/huggingface/trl": doc_repositories.trl,
    "git -C verifiers": doc_repositories.verifiers,
    '"runs/NAME", model="DIR"': _own_game,
}
"""By what a block has in its text."""
