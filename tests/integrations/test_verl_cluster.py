"""A cluster that a stranger joins: two Ray nodes with working folders of their own, the driver in a
third, on the node without a GPU, with environments that only it knows."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("verl")

from verl_parts import ROOT, Outcome, run_python, tiny_config

from turnwise.log.store import RunReader

pytestmark = [pytest.mark.verl, pytest.mark.slow, pytest.mark.timeout(900)]

RULES = "def pay(text):\n    return float(len(text))\n"
GAMES = """
from pathlib import Path
from turnwise.envs.base import BaseEnv
from rules import pay

class FileGame(BaseEnv):
    instruction = "Say something."
    def reset(self, seed=None, **kwargs):
        return "go"
    def step(self, action):
        return "on", pay(action), False, {}

class Reader(FileGame):
    def __init__(self):
        Path("maps.txt").read_text()
"""
CONFIG = """
import json, sys
from pathlib import Path
from turnwise.config.schema import Config
config = Config.model_validate(json.loads(Path(sys.argv[1]).read_text()))
"""
DRIVER = """
import json, os, sys
from pathlib import Path
import ray
import turnwise
from turnwise.config.schema import Config
from turnwise.envs.base import BaseEnv

class ScriptGame(BaseEnv):
    instruction = "Say something."
    def reset(self, seed=None, **kwargs):
        return "go"
    def step(self, action):
        return "on", 2.0, False, {}

if __name__ == "__main__":
    os.chdir(sys.argv[1])
    sys.path.insert(0, sys.argv[1])
    turnwise.register("script_game", ScriptGame)
    config = Config.model_validate(json.loads(Path(sys.argv[2]).read_text()))
    ray.init(address=sys.argv[3], log_to_driver=False)  # before turnwise: its job has no plugin
    from turnwise.integrations.verl import AgentTrainer
    trainer = AgentTrainer(config, nodes=1, gpus=1)
    trainer.init_workers()
    trainer.fit()
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folders = [str(tmp_path_factory.mktemp(name)) for name in ("head", "other")]
    nodes = subprocess.Popen(
        [sys.executable, str(ROOT / "tests/integrations/verl_cluster.py"), "0", *folders],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "RAY_worker_niceness": "0"},
        start_new_session=True,
    )
    try:
        assert nodes.stdout is not None
        yield next(line for line in nodes.stdout if line.startswith("ADDRESS ")).split()[1]
    finally:
        os.killpg(nodes.pid, 9)


def _drive(folder: Path, address: str, *overrides: str) -> Outcome:
    mine = folder / "mine"
    mine.mkdir()
    (mine / "games.py").write_text(GAMES)
    (mine / "rules.py").write_text(RULES)
    (mine / "maps.txt").write_text("a map")
    (folder / "given.json").write_text(tiny_config(folder, *overrides).model_dump_json())
    return run_python(DRIVER, str(mine), str(folder / "given.json"), address, seconds=600)


def test_environments_of_the_driver_reach_the_workers(tmp_path: Path, cluster: str) -> None:
    """One is registered in the script, one is a file in the driver's folder that imports another"""
    outcome = _drive(
        tmp_path,
        cluster,
        "envs={script: {name: script_game, max_turn: 2, format: {style: raw}},"
        " file: {name: 'games.py:FileGame', max_turn: 2, format: {style: raw}}}",
        "rollout.train.tags=[script, file]",
        "rollout.train.n_groups=[1, 1]",
        "rollout.isolation=auto",
        "verl={actor_rollout_ref.rollout.agent.num_workers: 2}",
    )
    assert outcome.code == 0, outcome.text[-4000:]
    run = RunReader(tmp_path / "runs" / "run")
    rows = [row for row in run.metrics() if "rollout/reward" in row]
    assert [row["rollout/failures"] for row in rows] == [0, 0]
    assert rows[1]["training/rollout_actor_probs_pearson_corr"] > 0.999
    for episode in run.episodes(1):
        said = [len(turn.text) for turn in episode.turns]
        assert episode.reward == pytest.approx(4.0 if episode.tag == "script" else sum(said))


def test_the_page_joins_a_running_cluster(tmp_path: Path, cluster: str) -> None:
    """The block of docs/scale.md, with one node of one device."""
    mark = "<!-- run by tests/integrations/test_verl_cluster.py -->\n```python\n"
    page = (ROOT / "docs/scale.md").read_text(encoding="utf-8")
    code = page.partition(mark)[2].partition("```")[0]
    assert "nodes=4, gpus=8" in code
    (tmp_path / "given.json").write_text(tiny_config(tmp_path, "train.steps=1").model_dump_json())
    program = CONFIG + code.replace("nodes=4, gpus=8", "nodes=1, gpus=1")
    environment = {"RAY_ADDRESS": cluster}  # what "auto" finds
    given = str(tmp_path / "given.json")
    outcome = run_python(program, given, seconds=600, environment=environment)
    assert outcome.code == 0, outcome.text[-4000:]
    rows = [row for row in RunReader(tmp_path / "runs/run").metrics() if "rollout/reward" in row]
    assert [row["rollout/failures"] for row in rows] == [0]


def test_what_a_node_cannot_make_is_refused_before_the_first_worker(
    tmp_path: Path, cluster: str
) -> None:
    outcome = _drive(tmp_path, cluster, "env.name=games.py:Reader", "env.format.style=raw")
    assert outcome.code != 0
    assert "ClusterError: the run cannot start on this cluster" in outcome.text
    assert "No such file or directory: 'maps.txt'" in outcome.text
    assert "WorkerDict" not in outcome.text


def test_a_file_that_only_the_driver_has_cannot_move_to_processes(
    tmp_path: Path, cluster: str
) -> None:
    outcome = _drive(
        tmp_path,
        cluster,
        "env.name=script_game",
        "env.format.style=raw",
        "rollout.isolation=process",
    )
    assert outcome.code != 0
    assert "only this process knows script_game" in outcome.text
