"""Tasks by name: every one asks, scores and holds out, in terse form and in words; mistakes are one line."""

import json
import string
import subprocess
import sys

import numpy as np
import pytest

from jaxpg import tasks
from jaxpg.data import characters, encode_demonstrations, encode_prompts
from jaxpg.tasks import arithmetic, draws, steps, taste
from jaxpg.tasks.find import NAMES, Options, find

SMALL = ("arithmetic", "wordy", "steps", "taste", "countdown", "calculator")
CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def completion(task, problem):
    """What the policy says in a demonstration."""
    shown = task.demonstrate(problem)
    return shown if isinstance(shown, str) else "".join(text for text, is_action in shown if is_action)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("spoken", [False, True])
@pytest.mark.parametrize("name", SMALL)
def test_every_task_is_a_function_of_seed_and_index_and_holds_problems_out(name, spoken):
    task = find(Options(task=name), spoken=spoken)
    problems, held_out = task.problems(0, 0, 200), task.held_out(50)
    assert task.name == name and task.size is None and len(problems) == 200 and len(held_out) == 50
    assert list(problems[10:20]) == list(task.problems(0, 10, 10)) != list(task.problems(1, 10, 10))
    if name != "taste":  # whose hundred sums every step asks
        assert not {task.ask(p) for p in problems} & {task.ask(p) for p in held_out}
        assert len({task.ask(p) for p in held_out}) == 50


@pytest.mark.parametrize("spoken", [False, True])
@pytest.mark.parametrize("name", SMALL)
def test_right_demonstrations_are_right_and_nonsense_is_not(name, spoken):
    task = find(Options(task=name), spoken=spoken)
    problems = task.problems(0, 0, 200)
    right = np.array([task.is_right(p, completion(task, p)) for p in problems])
    assert set(right) == ({0.0, 1.0} if name in ("wordy", "taste") else {1.0}), "the writers of these two err"
    assert all(task.is_right(p, "I do not know") == 0.0 for p in problems)
    [(score, weight)] = task.scorers.values()
    assert weight == 1.0 and all(
        score(p, completion(task, p)) >= 1.0 for p, r in zip(problems, right, strict=True) if r
    )
    for measure in task.measures.values():
        assert isinstance(measure(problems[0], completion(task, problems[0])), float)


@pytest.mark.parametrize("name", SMALL)
def test_the_terse_form_fits_its_budgets_and_its_alphabet(name):
    task = find(Options(task=name, spare=2), spoken=False)
    problems = [*task.problems(0, 0, 500), *task.held_out(50)]
    tokenizer, length = characters(task.alphabet), task.prompt_length + task.max_new_tokens
    encode_prompts(tokenizer, [task.ask(p) for p in problems], length=task.prompt_length)
    shown = [task.demonstrate(p) for p in problems]
    batch = encode_demonstrations(tokenizer, [task.ask(p) for p in problems], shown, length=length)
    bare = find(Options(task=name), spoken=False)
    assert task.max_new_tokens == bare.max_new_tokens + 2
    assert (
        not task.chat and bare.max_new_tokens >= (batch.token_mask.sum(1) - [len(task.ask(p)) for p in problems]).max()
    )


@pytest.mark.parametrize("name", SMALL)
def test_in_words_the_checkpoint_decides_about_tokens(name):
    task = find(Options(task=name), spoken=True)
    assert task.prompt_length is None and task.alphabet is None and task.chat == (name != "taste")


def test_several_levels_take_turns():
    for spoken in (False, True):
        task = find(Options(levels=(2, 3)), spoken=spoken)
        assert [p.level for p in task.problems(0, 0, 4)] == [2, 3, 2, 3]
        held_out = task.held_out(7)
        assert len(held_out) == 7 and [p.level for p in held_out[:2]] == [2, 3]
    task = find(Options(levels=(2, 3), spare=2), spoken=False)
    assert task.max_new_tokens == len("198") + 1 + 2
    assert find(Options(level=3), spoken=False).problems(5, 3, 4) == arithmetic.problems(5, 3, 4, level=3)
    assert find(Options(level=5, task="countdown"), spoken=False).held_out(4)[0].level == 5


def test_sums_in_words_take_any_wording_and_vote_by_value():
    task = find(Options(), spoken=True)
    [problem] = task.problems(0, 0, 1)
    assert task.ask(problem) == f"What is {problem.prompt[:-1]}? Answer with just the number."
    assert task.is_right(problem, f"{problem.prompt[:-1]} = {problem.answer}.") == 1.0
    assert task.vote("That is 1,000.") == task.vote("1000") and task.vote("none") is None


def test_what_a_task_offers_besides_is_there():
    stepwise, talking = (find(Options(task=name), spoken=False) for name in ("steps", "calculator"))
    rewards, _ = stepwise.step_rewards(characters(stepwise.alphabet))(
        [steps.Problem("2+3+4=", "5;9", 1, ("5", "9"))], np.array([[8, 15, 12, 1]]), np.ones((1, 4), bool)
    )
    assert rewards.tolist() == [[0.0, 0.5, 0.0, 0.5]]
    assert talking.turn_ends == ("]",) and talking.max_turns == 2 and talking.environment is not None
    assert find(Options(), spoken=False).environment is None and find(Options(), spoken=False).step_rewards is None
    tasteful = find(Options(task="taste"), spoken=True)
    shown = [tasteful.demonstrate(p) for p in tasteful.problems(2, 5, 3)]
    assert shown == [taste.demonstration(p, 2, 5 + i) for i, p in enumerate(taste.problems(2, 5, 3))]


def test_scorers_of_ones_own_are_rewards_beside_the_task_s_accuracy():
    task = find(Options(scorers=("task@1.0", "regex:^[0-9]+$@0.1")), spoken=True)
    [problem] = task.problems(0, 0, 1)
    text = f"It is {problem.answer}"
    assert {name: (score(problem, text), weight) for name, (score, weight) in task.scorers.items()} == {
        **{"task": (1.0, 1.0), "regex:^[0-9]+$": (0.0, 0.1)}
    }
    assert find(Options(scorers=("exact",)), spoken=True).is_right(problem, text) == 1.0


def test_prompts_are_rendered_by_the_chat_template_where_the_task_speaks():
    tokenizer = characters(string.printable)
    tokenizer.chat_template = CHAT
    for name, text in (("arithmetic", "user: What is {}? Answer with just the number.\n"), ("taste", "{}=")):
        task = find(Options(task=name), spoken=True)
        [problem] = task.problems(0, 0, 1)
        assert tasks.render(task, tokenizer, [problem]) == [text.format(problem.prompt[:-1])]
    task = find(Options(), spoken=True)
    assert tasks.render(task, tokenizer, task.problems(0, 0, 1), system="Hi")[0].startswith("system: Hi\nuser: ")


def test_gsm8k_is_split_by_file_and_shows_its_solutions(tmp_path):
    for name, count in (("train", 3), ("test", 2)):
        write(
            tmp_path / f"{name}.jsonl", [{"question": f"{name} {i}?", "answer": f"so\n#### {i}"} for i in range(count)]
        )
    task = find(Options(task="gsm8k", gsm8k=tmp_path), spoken=True)
    assert {p.prompt for p in task.problems(0, 0, task.size)} == {"train 0?", "train 1?", "train 2?"}
    assert [p.prompt for p in task.held_out(2)] == ["test 0?", "test 1?"]
    assert (
        task.demonstrate(task.held_out(2)[1]) == "so\n#### 1"
        and task.is_right(task.held_out(2)[1], "so\n#### 1") == 1.0
    )
    with pytest.raises(ValueError, match="count=3: the test set has 2 problems"):
        task.held_out(3)
    with pytest.raises(ValueError, match=r"--task=gsm8k: .*train\.jsonl'; name a folder"):
        find(Options(task="gsm8k", gsm8k=tmp_path / "none"), spoken=True)


# ---- Data of the user's own ------------------------------------------------------------------------------------------


def data(tmp_path, count=200, **options):
    rows = [{"q": f"What is {i}+1?", "a": str(i + 1), "hint": i} for i in range(count)]
    path = write(tmp_path / "data.jsonl", rows)
    return find(Options(task=f"data:{path}", prompt_column="q", answer_column="a", **options), spoken=True)


def test_a_tenth_of_the_rows_is_held_out_by_their_prompts(tmp_path):
    task = data(tmp_path, scorers=("number@1.0", "regex:<b>.*</b>@0.1"))
    trained = {row.prompt for row in task.problems(0, 0, task.size)}
    kept = 200 - task.size
    held_out = {row.prompt for row in task.held_out(kept)}
    assert len(trained) == task.size and len(held_out) == kept and 8 <= kept <= 35 and not trained & held_out
    assert held_out == {f"What is {i}+1?" for i in range(200) if draws.is_held_out(f"What is {i}+1?")}
    [row] = task.held_out(1)
    assert task.demonstrate(row) == row.answer and task.chat and row.fields["hint"] + 1 == int(row.answer)
    scores = {name: (score(row, f"<b>{row.answer}</b>"), weight) for name, (score, weight) in task.scorers.items()}
    assert scores == {"number": (1.0, 1.0), "regex:<b>.*</b>": (1.0, 0.1)}
    assert task.vote("1,000") == task.vote("#### 1000")
    with pytest.raises(
        ValueError, match=rf"--held-out=150: a tenth of data:.* has {kept} held-out rows, ask for fewer"
    ):
        task.held_out(150)


def test_held_out_data_is_never_trained_on(tmp_path):
    rows = [{"q": f"What is {i}+1?", "a": str(i + 1)} for i in (3, 4, 1000)]
    task = data(tmp_path, held_out_data=str(write(tmp_path / "test.jsonl", rows)))
    assert {row.prompt for row in task.held_out(3)} == {row["q"] for row in rows} and task.size == 198
    assert not {row.prompt for row in task.problems(0, 0, 400)} & {row["q"] for row in rows}
    assert task.is_right(task.held_out(1)[0], task.held_out(1)[0].answer) == 1.0, "exact by default"
    with pytest.raises(ValueError, match=r"has 3 held-out rows, ask for fewer$"):
        task.held_out(4)


def test_conversations_are_prompts_and_an_answer_is_not_needed(tmp_path):
    said = [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"Say {i}."}] for i in range(60)]
    path = write(tmp_path / "chat.jsonl", [{"prompt": messages} for messages in said])
    task = find(Options(task=f"data:{path}", answer_column=None, scorers=("regex:^.{3}$",)), spoken=True)
    assert task.demonstrate is None and task.ask(task.problems(0, 0, 1)[0]) in said
    tokenizer = characters(string.printable)
    tokenizer.chat_template = CHAT
    assert tasks.render(task, tokenizer, task.problems(0, 0, 1))[0].startswith("system: Be brief.\nuser: Say ")
    assert task.is_right(task.problems(0, 0, 1)[0], "abc") == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"scorers": ("number",), "answer_column": None},
            "--scorers=number compares with an answer: name the column by",
        ),
        ({"answer_column": None}, "has no answer column and no scorer"),
        ({"scorers": ("nubmer",)}, "--scorers=nubmer: choose among exact"),
        ({}, r"--task: .*none\.jsonl"),
    ],
)
def test_a_wrong_scorer_is_told_before_any_data_is_read(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        find(Options(task=f"data:{tmp_path}/none.jsonl", **options), spoken=True)


def test_answers_that_a_scorer_cannot_read_are_told(tmp_path):
    with pytest.raises(ValueError, match=r"--scorers=choice can read no answer of the data, .*data\.jsonl:\d+ has '"):
        data(tmp_path, scorers=("choice",))
    with pytest.raises(ValueError, match=r"--task: .*data\.jsonl:1: column 'b' is missing"):
        find(Options(task=f"data:{tmp_path}/data.jsonl", prompt_column="b"), spoken=True)


@pytest.mark.parametrize(
    ("options", "spoken", "message"),
    [
        ({"task": "chess"}, True, "--task=chess: choose among arithmetic, wordy, steps, taste, countdown, calculator"),
        ({"task": "arithmetic:2"}, True, "--task=arithmetic:2: choose among"),
        ({"task": "arithmetic:"}, False, "--task=arithmetic:: choose among"),
        ({"task": "gsm8k:"}, True, "--task=gsm8k:: choose among"),
        ({"task": "data:"}, True, "--task=data:: choose among"),
        ({"task": "reasoning_gym"}, True, "--task=reasoning_gym: choose among"),
        ({"task": "gsm8k"}, False, "--task=gsm8k asks in words.*name a checkpoint with --model"),
        ({"task": "data:a.jsonl"}, False, "name a checkpoint with --model"),
        ({"task": "reasoning_gym:chain_sum"}, False, "name a checkpoint with --model"),
        ({"level": 9}, False, "level=9: choose among 1, 2, 3, 4, 5"),
        ({"level": 9, "task": "countdown"}, True, "level=9: choose among"),
        ({"levels": (2,), "task": "wordy"}, False, "level=2: wordy problems have level 1 only"),
        ({"spare": -1}, False, "--spare=-1"),
        ({"system": "Hi"}, False, "--system='Hi': --task=arithmetic needs a checkpoint"),
        ({"system": "Hi", "task": "taste"}, True, "--system='Hi': --task=taste asks in plain text"),
        ({"scorers": ("nubmer",)}, False, "--scorers=nubmer: choose among task, exact"),
    ],
)
def test_mistakes_are_named(options, spoken, message):
    with pytest.raises(ValueError, match=message):
        find(Options(**options), spoken=spoken)
    assert set(SMALL) < set(NAMES)


def test_a_puzzle_is_scored_or_its_package_is_named():
    options = Options(task="reasoning_gym:chain_sum")
    try:
        import reasoning_gym  # noqa: F401
    except ImportError:
        with pytest.raises(ValueError, match=r"chain_sum: .*pip install 'jaxpg\[reasoning\]'"):
            find(options, spoken=True)
    else:
        task = find(options, spoken=True)
        [problem] = task.problems(0, 3, 1)
        assert task.is_right(problem, task.demonstrate(problem)) == 1.0
        assert len({p.prompt for p in task.held_out(20)}) == 20


def test_a_task_needs_a_scorer():
    with pytest.raises(ValueError, match=r"scorers=\{\} of task 'a': name at least one"):
        tasks.Task(name="a", problems=None, held_out=None, ask=None, scorers={}, max_new_tokens=1)


def test_tasks_are_described_without_jax_so_that_workers_start_quickly():
    code = "import sys; from jaxpg import tasks; assert not {'jax', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
