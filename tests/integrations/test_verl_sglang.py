"""verl's own SGLang engine with our agent loop, without a GPU. Skipped where SGLang is not
installed.

SGLang 0.5.12, which verl 0.9.1 expects, runs on the CPU with layers in plain torch, and computes
every token here. Two packages that it imports come as wheels for CUDA alone: the folder sglang_cpu
holds stand-ins for sgl_kernel and torchvision, which can be imported and fail where they are
called. It needs no other stand-in. Installed with `pip install --no-deps`, beside torch 2.13 and
transformers 5.10.4, it further imports triton, soundfile, IPython and some pure Python packages.
"""

import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("verl")
if find_spec("sglang") is None:  # imported in processes of their own alone, with the stand-ins
    pytest.skip("sglang is not installed", allow_module_level=True)

from verl_parts import ROOT, check_two_steps, run_python, tiny_config, trained

from turnwise.integrations.verl.rollout.generator import stop_pattern
from turnwise.testing.tiny import tiny_tokenizer

HERE = ROOT / "tests" / "integrations"
ON_CPU = {"PYTHONPATH": os.pathsep.join(map(str, [ROOT, HERE, HERE / "sglang_cpu"]))}
SGLANG = "verl={actor_rollout_ref.rollout.name: sglang}"
LETTERS = "abcdefghijklm"  # a random model says one of them soon
pytestmark = [pytest.mark.verl, pytest.mark.slow, pytest.mark.timeout(900)]


def test_two_steps_with_sglang(tmp_path: Path) -> None:
    """What SGLang sampled is what is trained on, and at step 2 it samples with the weights of step
    1's update"""
    config = tiny_config(
        tmp_path,
        SGLANG,
        f"rollout.stop=[{', '.join(LETTERS)}]",
        "rollout.temperature=0.8",
    )
    run, outcome = trained(tmp_path, config, seconds=600, environment=ON_CPU)
    check_two_steps(run, config, seconds=outcome.seconds, tokenizer=tiny_tokenizer(), gap=1e-3)


def test_two_servers_and_validation(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, SGLANG, "eval.before=true", "eval.after=true")
    run, outcome = trained(tmp_path, config, seconds=600, environment=ON_CPU, gpus=2)
    print(f"{outcome.seconds:.0f} s")
    trained_on = [row for row in run.metrics() if "rollout/reward" in row]
    assert [row["training/rollout_actor_probs_pearson_corr"] > 0.999 for row in trained_on] == [
        True,
        True,
    ]
    assert [row["rollout/failures"] for row in trained_on] == [0, 0]
    assert sum(row.get("eval/episodes") == 4 for row in run.metrics()) == 2


def test_lora(tmp_path: Path) -> None:
    """verl adds the adapter to the weights and sends them in bfloat16, so log-probs differ more
    than otherwise"""
    config = tiny_config(
        tmp_path, SGLANG, "model.lora.rank=4", "model.lora.alpha=8", "train.lr=1e-2"
    )
    run, outcome = trained(tmp_path, config, seconds=600, environment=ON_CPU)
    rows = [row for row in run.metrics() if "rollout/reward" in row]
    print(f"{outcome.seconds:.0f} s; largest gaps {[row['train/gap_max'] for row in rows]}")
    assert [row["training/rollout_actor_probs_pearson_corr"] > 0.999 for row in rows] == [
        True,
        True,
    ]
    assert [row["actor/grad_norm"] > 1e-3 for row in rows] == [True, True]
    assert [row["rollout/failures"] for row in rows] == [0, 0]


def test_a_dead_scheduler_is_an_error_within_a_minute(tmp_path: Path) -> None:
    """The process that computes dies; the server that talks to it goes on living for a while"""
    path = tmp_path / "given.json"
    path.write_text(
        tiny_config(tmp_path, SGLANG, "train.steps=500", "log.episodes_every=0").model_dump_json()
    )
    code = "import sys; from verl_killer import run; run(sys.argv[1], 'scheduler')"
    outcome = run_python(code, str(path), environment=ON_CPU)
    assert outcome.code == 0, outcome.text[-4000:]
    report = json.loads(outcome.text.split("KILLED ")[1].splitlines()[0])
    assert (report["error"], report["seconds"] < 60) == ("WorkerDiedError", True), report
    assert "rollout server 0 died in step" in report["message"]


STOPS = """
import json, os, sys
os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams
from turnwise.testing.tiny import tiny_tokenizer

def ended_after(said, **options):
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode(said)  # a token per byte
    tokenizer.add_tokens(["</answer>"])  # from here on one token spells it
    params = SamplingParams(max_new_tokens=100, **options)
    params.normalize(tokenizer)
    request = Req("r", "", [1], params)
    request.tokenizer = tokenizer
    for token in ids:
        request.output_ids.append(token)
        if request._check_str_based_finish():
            return tokenizer.decode(request.output_ids)

asked = json.loads(sys.argv[1])
print("ENDED", json.dumps([ended_after(said, **options) for said, options in asked]))
"""


def test_a_stop_string_in_another_spelling() -> None:
    """SGLang's own check, fed byte by byte a stop string that its tokenizer has a token for"""
    cases = [
        (
            "up</answer> and on",
            {"stop": ["</answer>"]},
            None,
        ),  # missed: why strings are not sent as they are
        ("up</answer> and on", {"stop_regex": [stop_pattern("</answer>")]}, "up</answer>"),
        ("10 \u20ac\u20ac more", {"stop_regex": [stop_pattern("\u20ac\u20ac")]}, "10 \u20ac\u20ac"),
    ]
    outcome = run_python(STOPS, json.dumps([case[:2] for case in cases]), environment=ON_CPU)
    assert outcome.code == 0, outcome.text[-2000:]
    assert json.loads(outcome.text.split("ENDED ")[1]) == [case[2] for case in cases]
