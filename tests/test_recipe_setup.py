"""What a recipe refuses, before anything is loaded, compiled or written; and prompts that do not fit."""

import json

import pytest
import tiny
from launching import EXPERIMENTS, load

from jaxpg import recipe
from jaxpg.models import hf

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(tiny.save(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="module")
def mute(tmp_path_factory):
    """A checkpoint without a chat template."""
    return str(tiny.save(tmp_path_factory.mktemp("model") / "mute", chat_template=None))


@pytest.fixture(autouse=True)
def no_weights(monkeypatch, checkpoint, mute):
    """Weights are neither read nor drawn."""

    def never(*args, **options):
        raise AssertionError("parameters were made")

    monkeypatch.setattr(hf, "load", never)
    monkeypatch.setattr(recipe.Setup, "params", never)


def sums(path, lengths):
    """A data set of sums whose prompts have so many characters each."""
    rows = [{"prompt": f"{i}+1=".rjust(length, "0"), "answer": str(i + 1)} for i, length in enumerate(lengths)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"data:{path}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"spare": -1}, "--spare=-1: must be at least 0"),
        ({"levels": (2, 9)}, "level=9: choose among 1, 2, 3, 4, 5"),
        ({"levels": (2,), "task": "wordy"}, "level=2: wordy problems have level 1 only"),
        ({"evaluate_every": 0}, "--evaluate-every=0: must be at least 1"),
        ({"top_p": 1.5}, "--top-p=1.5: must be between 0 and 1"),
        ({"mesh": "data=3"}, "asks for 3 devices"),
        ({"task": "gsm8k"}, "--task=gsm8k asks in words.*name a checkpoint with --model"),
        ({"system": "Be brief."}, "--system='Be brief.': .* the small model has no chat template"),
        ({"scorers": ("number",), "task": "data:sums.jsonl"}, "name a checkpoint with --model"),
        ({"warm_start": "nowhere", "rl_steps": -1}, "--rl-steps=-1"),
    ],
)
def test_bad_options_are_named_and_nothing_is_written(change, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        recipe.prepare(recipe.Config(run_dir=tmp_path / "run", **change), name="refused")
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_without_a_chat_template_is_told(mute, tmp_path):
    config = recipe.Config(model=mute, run_dir=tmp_path / "run")
    with pytest.raises(ValueError, match="has no chat template: choose an instruction-tuned checkpoint"):
        recipe.prepare(config, name="refused")


def test_a_scorer_without_its_column_is_told(checkpoint, tmp_path):
    task = sums(tmp_path / "sums.jsonl", [6] * 20)
    for column, message in ((None, "number"), ("solution", "solution")):
        config = recipe.Config(
            model=checkpoint, task=task, scorers=("number",), answer_column=column, run_dir=tmp_path / "run"
        )
        with pytest.raises(ValueError, match=message) as told:
            recipe.prepare(config, name="refused")
        assert "\n" not in str(told.value) and "column" in str(told.value)


def test_a_task_without_demonstrations_has_no_warm_up(checkpoint, tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}?"}) + "\n" for i in range(20)))
    data = {"task": f"data:{path}", "scorers": ("regex:.",), "answer_column": None}
    config = recipe.Config(model=checkpoint, warmup_steps=3, run_dir=tmp_path / "run", **data)
    with pytest.raises(ValueError, match="has no demonstrations to warm up on: pass --warmup-steps 0"):
        recipe.prepare(config, name="refused")


def test_a_recipe_that_learns_from_steps_refuses_a_task_without_them(tmp_path):
    module = load(EXPERIMENTS / "studies" / "step_level.py")
    with pytest.raises(ValueError, match="--task=arithmetic has no step rewards, which this recipe learns from"):
        module.prepare(module.Config(task="arithmetic", level=2, run_dir=tmp_path / "run"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--critic", "copy"], "--critic"),
        (["--levels", "2", "9"], "level=9"),
        (["--scorers", "nubmer"], "--scorers=nubmer: choose among"),
        (["--scorers", "own_scorers:missing"], "--scorers=own_scorers:missing"),
    ],
)
def test_mistakes_on_the_command_line_are_one_line(arguments, words, capsys, tmp_path):
    module = load(EXPERIMENTS / "ladder" / "grpo.py")
    with pytest.raises(SystemExit) as stopped:
        recipe.main(
            module.Config,
            module.train,
            name="grpo",
            description="",
            args=[*arguments, "--run-dir", str(tmp_path / "run")],
        )
    told = capsys.readouterr().err
    assert stopped.value.code == 2 and words in told and len(told.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_prompts_that_do_not_fit_are_left_out_and_counted_or_end_the_run_before_it_began(checkpoint, tmp_path):
    lengths = [6, 9, 6, 7, 12, 6] * 10
    options = {"task": sums(tmp_path / "train.jsonl", lengths), "run_dir": tmp_path / "run"}
    options |= {"held_out_data": str(tmp_path / "test.jsonl"), "model": checkpoint, "smoke": True, "max_new_tokens": 8}
    sums(tmp_path / "test.jsonl", [5] * 8)
    setup = recipe.prepare(recipe.Config(prompt_length=8, **options), name="drop")
    for k in range(10):
        problems = setup.problems(1, 16 * k, 16)
        assert len(problems) == 16 and all(len(text) <= 8 for text in setup.render(problems))
    assert setup.dropped == sum(length > 8 for length in lengths)
    with pytest.raises(ValueError, match=r"--long-prompts=stop: .* the longest has 12 tokens"):
        recipe.prepare(recipe.Config(prompt_length=8, long_prompts="stop", **options), name="stop")
    whole = recipe.prepare(recipe.Config(long_prompts="stop", **options), name="stop")
    assert whole.prompt_length == 12 and whole.dropped == 0


def test_a_family_of_problems_brings_its_own_alphabet_lengths_and_measures(tmp_path):
    config = recipe.Config(smoke=True, run_dir=tmp_path / "run", task="steps", level=1)
    setup = recipe.prepare(config, name="steps")
    assert setup.prompt_length == len("9+9+9=") and setup.max_new_tokens == len("18;27") + 1
    assert setup.model.config.max_length == setup.prompt_length + setup.max_new_tokens
    assert set(setup.task.measures) == {"right_steps"}
    held_out = {problem.prompt for problem in setup.held_out}
    assert len(held_out) == 16 and not held_out & {p.prompt for p in setup.problems(0, 0, 500)}
