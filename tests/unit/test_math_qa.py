"""Math questions: answers compared, data read, splits apart, backward questions, tries and
rewards."""

import json
import os
import sys
import threading
import types
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from draws import examples
from hypothesis import given
from hypothesis import strategies as st

from turnwise.envs.base import EnvError
from turnwise.envs.games import math_answers
from turnwise.envs.games.math_answers import final_answer, is_right, normal_form
from turnwise.envs.games.math_data import Question, backward_questions, load_questions, questions_of
from turnwise.envs.games.math_qa import MathQAEnv
from turnwise.evaluate.check_env import check_env

DATA = (
    Path(os.environ.get("TURNWISE_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))
    / "math"
)


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("42", "42", True),
        (" 42.00 ", "42", True),
        ("$1,234", "1234", True),
        ("50%", "50", True),
        ("-3/6", "-0.5", True),
        ("#### 7", "7", True),
        ("The answer is: 7.", "7", True),
        ("\\boxed{7}", "7", True),
        ("Blue  whale", "blue whale", True),
        ("43", "42", False),
        ("4 2", "42", True),
        ("1,23", "123", False),
        ("1/0", "0", False),
        ("", "0", False),
        ("9**9**9**9", "42", False),
        ("__import__('os').system('true')", "42", False),
        ("1e9999999999", "42", False),
        ("\x00\x1b[2J", "42", False),
    ],
)
def test_exact_comparison(answer: str, gold: str, right: bool) -> None:
    assert is_right(answer, gold) is right


PAIRS = [
    json.loads(line)
    for line in Path(__file__).with_name("math_pairs.jsonl").read_text().splitlines()
]
"""Answers and gold answers by kind: `right` is what a fair reader says, `exact` what the comparison
of that name says, `math_verify` what math-verify 0.9.0 says alone, with its defaults."""


def test_a_fair_reader_finds_the_table_complete() -> None:
    assert len(PAIRS) >= 150
    assert len({(pair["answer"], pair["gold"]) for pair in PAIRS}) == len(PAIRS)
    assert not [pair for pair in PAIRS if pair["exact"] and not pair["right"]]


def test_the_exact_comparison_accepts_nothing_wrong_and_what_needs_no_mathematics() -> None:
    assert [pair for pair in PAIRS if is_right(pair["answer"], pair["gold"]) != pair["exact"]] == []


def test_the_math_comparison_judges_like_a_fair_reader() -> None:
    """Ten seconds: a hundred verdicts of sympy."""
    pytest.importorskip("math_verify")
    wrong = [
        pair
        for pair in PAIRS
        if is_right(pair["answer"], pair["gold"], compare="math", timeout=120) != pair["right"]
    ]
    assert wrong == []


def test_the_docs_tell_the_agreement_by_kind() -> None:
    page = (Path(__file__).parents[2] / "docs" / "envs" / "math_qa.md").read_text()
    for kind in dict.fromkeys(pair["kind"] for pair in PAIRS):
        rows = [pair for pair in PAIRS if pair["kind"] == kind]
        alone, exact = (
            sum(pair[name] == pair["right"] for pair in rows) for name in ("math_verify", "exact")
        )
        assert f"| {kind} | {len(rows)} | {exact} | {len(rows)} | {alone} |" in page


def test_powers_without_end_take_no_time() -> None:
    """They are not computed: no worker is asked, so the time limit does not matter."""
    for answer in ("9**9**9**9", "9^{9^{9^9}}", "((9^9)^9)^9^9", "2^99999999", "9" * 900 + "^999"):
        assert not is_right(answer, "9", compare="math", timeout=1e-9)


@pytest.mark.parametrize("text", ["1", "\\boxed{", "#", "the answer is ", " ", "x"])
def test_a_ten_megabyte_answer_is_wrong(text: str) -> None:
    """Its length alone says so: it ends with the right answer, and is not looked at."""
    assert is_right(" \n#### 1", "1")
    assert not is_right(text * (10_000_000 // len(text)) + " \n#### 1", "1")


@examples(50)
@given(value=st.integers(-(10**12), 10**12))
def test_numbers_equal_themselves_in_every_spelling(value: int) -> None:
    assert (
        normal_form(f"{value:,}") == normal_form(str(value)) == normal_form(f"${value}.0") == value
    )
    assert not is_right(str(value + 1), str(value))


def test_math_comparison_accepts_equal_expressions() -> None:
    pytest.importorskip("math_verify")
    assert is_right("\\frac{1}{3}", "1/3", compare="math", timeout=60)
    assert is_right("2(x+1)", "2x+2", compare="math", timeout=60)
    assert not is_right("2(x+2)", "2x+2", compare="math", timeout=60)
    assert not is_right("\\frac{1}{3}", "1/3", compare="exact")


def test_math_comparison_is_killed_when_it_hangs_and_works_in_threads() -> None:
    pytest.importorskip("math_verify")
    results: list[bool] = []

    def work() -> None:
        results.append(is_right("\\sqrt{8}", "2\\sqrt{2}", compare="math", timeout=60))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 3
    assert not is_right("9^{9^{9^{9}}}", "42", compare="math", timeout=1.0)
    assert is_right("\\frac{2}{4}", "\\frac{1}{2}", compare="math", timeout=60)


def test_an_answer_that_computes_for_too_long_is_wrong() -> None:
    pytest.importorskip("math_verify")
    assert not is_right("\\binom{1000000}{500000}", "42", compare="math", timeout=0.5)
    assert is_right("2(x+1)", "2x+2", compare="math", timeout=60)


def verifying_process() -> psutil.Process:
    """The process that compares, once it has imported what it needs; it is below its guard."""
    assert is_right("2(x+1)", "2x+2", compare="math", timeout=60)
    worker = math_answers._worker
    assert worker is not None
    assert worker._process is not None
    (process,) = psutil.Process(worker._process.pid).children()
    return process


def test_a_right_answer_is_right_on_a_machine_that_does_not_get_to_it() -> None:
    """Seconds of computing count, not those in which the process waits for its turn."""
    pytest.importorskip("math_verify")
    process = verifying_process()
    process.suspend()
    later = threading.Timer(2.5, process.resume)
    later.start()
    assert is_right("3(x+1)", "3x+3", compare="math", timeout=2)
    later.join()


def test_a_comparison_that_stands_still_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not a wrong answer: the episode fails."""
    pytest.importorskip("math_verify")
    verifying_process().suspend()
    monkeypatch.setattr(math_answers, "STALLED_SECONDS", 0.1)
    with pytest.raises(TimeoutError):
        is_right("3(x+1)", "3x+3", compare="math", timeout=0.1)


def test_the_last_mark_counts() -> None:
    assert final_answer("it is 5\n#### 5\nThe answer is: 5") == "5"
    assert final_answer("the answer is therefore 3.\n#### 3") == "3"
    assert final_answer("so \\boxed{\\frac{1}{2}} holds") == "\\frac{1}{2}"


def test_rewards_halve_with_every_try() -> None:
    env = MathQAEnv(data=[{"question": "6 * 7?", "answer": "42"}], max_tries=4)
    for wrong in range(4):
        env.reset(seed=0)
        for _ in range(wrong):
            text, reward, done, info = env.step("0")
            assert (text, reward, done, info["success"]) == (
                "Incorrect. Think again. 6 * 7?",
                0.0,
                False,
                False,
            )
        _, reward, done, info = env.step("42")
        assert (reward, done, info["tries"]) == (0.5**wrong, True, wrong + 1)
    env.reset(seed=0)
    results = [env.step("0")[1:3] for _ in range(4)]
    assert results == [(0.0, False)] * 3 + [(0.0, True)]
    with pytest.raises(EnvError, match="reset"):
        env.step("42")


def test_files_of_every_known_shape(tmp_path: Path) -> None:
    meta = tmp_path / "MetaMathQA.json"
    rows: list[dict[str, Any]] = [
        {
            "query": "2+2?",
            "response": "#### 4\nThe answer is: 4",
            "type": "GSM_AnsAug",
            "original_question": "2+2?",
        },
        {
            "query": "two plus two?",
            "response": "The answer is: 4",
            "type": "GSM_Rephrased",
            "original_question": "2+2?",
        },
    ]
    meta.write_text(json.dumps(rows))
    questions = load_questions(meta)
    assert [q.answer for q in questions] == ["4", "4"]
    assert questions[0].key == questions[1].key
    assert questions[1].kind == "GSM_Rephrased"
    lines = tmp_path / "own.jsonl"
    lines.write_text('{"frage": "1+1?", "loesung": 2.0}\n\n{"frage": "1+2?", "loesung": "3"}\n')
    assert [
        q.answer for q in load_questions(lines, question_column="frage", answer_column="loesung")
    ] == ["2", "3"]
    with pytest.raises(EnvError, match="set question_column and answer_column"):
        load_questions(lines)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"question": "1+1?"}], "no column pair"),
        (
            [{"question": "1+1?", "answer": "2"}, {"question": "x"}],
            "row 2: column 'answer' is missing",
        ),
        ([{"question": "", "answer": "2"}], "row 1: the question is text"),
        ([{"question": "1+1?", "answer": None}], "row 1: the answer"),
        ([{"question": "1+1?", "answer": "9" * 2000}], "row 1: the answer"),
        (["text"], "a row is an object"),
        ([], "at least one question"),
    ],
)
def test_bad_rows_are_refused(rows: list[Any], message: str) -> None:
    with pytest.raises(EnvError, match=message):
        questions_of(rows)


def test_bad_files_and_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no question file"):
        MathQAEnv(data=tmp_path / "absent.json")
    file = tmp_path / "bad.json"
    file.write_text("{")
    with pytest.raises(EnvError, match="JSON"):
        MathQAEnv(data=file)
    with pytest.raises(ValueError, match="compare"):
        MathQAEnv(compare="eval")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="max_tries"):
        MathQAEnv(max_tries=0)
    with pytest.raises(ValueError, match="val_fraction"):
        MathQAEnv(val_fraction=0.0)


def test_the_environment_keeps_its_contract() -> None:
    report = check_env("metamathqa", seeds=5)
    assert not report.findings, str(report)


@pytest.mark.skipif(find_spec("datasets") is not None, reason="the library datasets is installed")
def test_hub_data_names_what_is_missing() -> None:
    with pytest.raises(ImportError, match="pip install datasets"):
        MathQAEnv(data="hf:openai/gsm8k")


def test_hub_data_is_read_by_name_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None, str]] = []

    def load_dataset(name: str, subset: str | None, *, split: str) -> list[dict[str, str]]:
        asked.append((name, subset, split))
        return [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(30)]

    library = types.ModuleType("datasets")
    library.load_dataset = load_dataset  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "datasets", library)
    env = MathQAEnv(data="hf:someone/sums:test")
    MathQAEnv(data="hf:someone/sums/main")
    assert asked == [("someone/sums", None, "test"), ("someone/sums", "main", "train")]
    assert sum(map(len, env.questions.values())) == 30


def test_the_sample_is_right_and_splits_share_nothing() -> None:
    env = MathQAEnv(backward=3)
    keys = {split: {question.key for question in side} for split, side in env.questions.items()}
    assert keys["train"]
    assert keys["val"]
    assert not keys["train"] & keys["val"]
    kinds = {question.kind for side in env.questions.values() for question in side}
    assert kinds == {"given", "backward"}
    assert env.reset(seed=3, split="val") == env.reset(seed=3, split="val")
    texts = {question.text for question in env.questions["train"]}
    assert all(env.reset(seed=seed) in texts for seed in range(50))


def test_given_validation_questions_leave_the_training_side() -> None:
    rows = [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(20)]
    env = MathQAEnv(data=rows, val_data=[{"question": "3 + 1 ?", "answer": "4"}])
    assert len(env.questions["train"]) == 19
    assert [q.text for q in env.questions["val"]] == ["3 + 1 ?"]


def back(text: str, answer: str = "5", limit: int = 9) -> list[tuple[str, str]]:
    question = Question(text=text, answer=answer, source=text)
    return [(q.text.split("\n")[0], q.answer) for q in backward_questions(question, limit=limit)]


def test_backward_questions_mask_whole_numbers_only() -> None:
    assert back("Pay $1,200.50 for 20% off.") == [
        ("Pay $x for 20% off.", "1200.50"),
        ("Pay $1,200.50 for x% off.", "20"),
    ]
    assert back("At 7:30 the 3rd of 1/2 a 5-day trip in A4.") == []
    assert back("Twice three, then twenty-five and 8.") == [
        ("Twice x, then twenty-five and 8.", "3"),
        ("Twice three, then twenty-five and x.", "8"),
    ]
    assert back("Let x be 4.") == [("Let x be y.", "4")]
    assert back("4 and 5", answer="x + 1") == []
    assert len(back("1 2 3 4 5", limit=2)) == 2


@examples(50)
@given(numbers=st.lists(st.integers(0, 10**6), min_size=1, max_size=5))
def test_putting_the_answer_back_gives_the_question(numbers: list[int]) -> None:
    text = "There are " + " and ".join(map(str, numbers)) + " things."
    question = Question(text=text, answer="7", source=text)
    found = backward_questions(question, limit=99)
    assert [int(q.answer) for q in found] == numbers
    for q in found:
        assert q.text.split("\n")[0].replace("x", q.answer) == text
        assert q.key == question.key


@pytest.mark.skipif(not DATA.exists(), reason="GSM8K is not at hand (TURNWISE_SHARED_DATA)")
def test_gsm8k_loads_and_grows() -> None:
    train = load_questions(DATA / "gsm8k" / "train.jsonl")
    test = load_questions(DATA / "gsm8k" / "test.jsonl")
    assert (len(train), len(test)) == (7473, 1319)
    assert all(not isinstance(normal_form(question.answer), str) for question in train)
    assert sum(len(backward_questions(question, limit=99)) for question in train[:500]) > 1000
    env = MathQAEnv(
        data=DATA / "gsm8k" / "train.jsonl", val_data=DATA / "gsm8k" / "test.jsonl", backward=1
    )
    assert not {q.key for q in env.questions["train"]} & {q.key for q in env.questions["val"]}


@pytest.mark.skipif(
    not DATA.exists(), reason="MetaMath's questions are not at hand (TURNWISE_SHARED_DATA)"
)
def test_backward_questions_agree_with_metamath() -> None:
    rows = [
        json.loads(line)
        for line in (DATA / "metamath" / "GSM8K_Backward.jsonl").read_text().splitlines()
    ]
    rows = [row for row in rows if "original_answer" in row]
    hits = 0
    for row in rows:
        wanted = row["question"].rsplit("\n", 1)[0]
        hits += any(
            text == wanted and is_right(answer, str(row["answer"]))
            for text, answer in back(
                row["original_question"], str(row["original_answer"]), limit=99
            )
        )
    assert len(rows) > 500
    # Theirs also masks "one" and "half", and was edited by hand in places.
    assert hits / len(rows) > 0.6
