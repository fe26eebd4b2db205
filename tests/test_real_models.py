"""Tasks by name, and the experiment and the tool that take a checkpoint: here a small one of random weights."""

import json
import string

import jax
import numpy as np
import pytest
from launching import ROOT, load

from jaxpg.data import characters
from jaxpg.models import Config, Model, hf
from jaxpg.rollout import evaluate
from jaxpg.run.metrics import read_jsonl
from jaxpg.tasks import catalog


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A model of a few thousand parameters, one character a token, with a chat template."""
    tokenizer = characters(string.ascii_letters + string.digits + " ?!.,+-*/=()<>#\n'[]|:")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    config = Config(
        vocab_size=len(tokenizer), hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=8, mlp_size=16,
        max_length=256,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("model") / "tiny"
    hf.save(folder, config, Model(config).init(jax.random.key(0)), tokenizer)
    return folder


@pytest.mark.parametrize("rank", [0, 2])
def test_grpo_trains_a_checkpoint_and_saves_it(rank, checkpoint, tmp_path):
    module = load(ROOT / "experiments" / "grpo_real.py")
    c = module.Config(model=str(checkpoint), smoke=True, lora_rank=rank, run_dir=tmp_path / "run")
    prepared = module.prepare(c)
    # A random model gets no sum right: reward what it can do, so that there is a signal.
    task = prepared[0].task._replace(score=lambda problem, text: float(len(text) % 2))
    module.train((prepared[0]._replace(task=task), prepared[1]))
    rl = [row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if row["phase"] == "rl"]
    assert len(rl) == 2 and all(row["log_prob_gap"] < 1e-4 and row["grad_norm"] > 0 for row in rl)
    before, after = hf.load(checkpoint).params, hf.load(tmp_path / "run" / "model").params
    changed = jax.tree.map(lambda a, b: not np.array_equal(a, b), before, after)
    assert changed["layers"]["attention"]["query"]
    assert changed["embedding"] == (rank == 0), "with adapters the base is frozen"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "chess"}, "task='chess': choose among arithmetic"),
        ({"lora_rank": -1}, "--lora-rank=-1"),
        ({"prompt_length": 10}, "prompt_length=10"),
        ({"level": 9}, "level=9"),
    ],
)
def test_mistakes_are_named_and_nothing_is_written(change, message, checkpoint, tmp_path):
    module = load(ROOT / "experiments" / "grpo_real.py")
    with pytest.raises(ValueError, match=message):
        module.prepare(module.Config(model=str(checkpoint), smoke=True, run_dir=tmp_path / "run", **change))
    assert not (tmp_path / "run").exists()


def test_the_evaluation_of_a_checkpoint(checkpoint, tmp_path, capsys):
    module = load(ROOT / "tools" / "evaluate_model.py")
    out = tmp_path / "numbers.json"
    c = module.Config(model=str(checkpoint), count=5, batch=4, samples=3, k=(1, 3), json=out)
    module.run(module.prepare(c))
    assert set(json.loads(out.read_text())["all"]) == {"greedy", "pass@1", "pass@3", "majority@3"}
    assert "pass@3" in capsys.readouterr().out
    with pytest.raises(ValueError, match="--k=4: must lie between 1 and --samples=3"):
        module.prepare(module.Config(model=str(checkpoint), samples=3, k=(4,)))


def test_tasks_by_name_ask_score_and_split():
    for name in ("arithmetic", "countdown"):
        task = catalog.by_name(name, level=2)
        problems, held_out = task.problems(0, 0, 50), task.held_out(20)
        assert problems[10:20] == task.problems(0, 10, 10)
        assert not {p.prompt for p in problems} & {p.prompt for p in held_out}
        assert all(task.score(p, p.answer) == 1.0 for p in problems)
        assert all(task.score(p, "I do not know") == 0.0 for p in problems)
    sums = catalog.by_name("arithmetic", level=2)
    problem = sums.problems(0, 0, 1)[0]
    assert sums.ask(problem) == f"What is {problem.prompt[:-1]}? Answer with just the number."
    assert sums.score(problem, f"{problem.prompt[:-1]} = {problem.answer}.") == 1.0
    assert sums.vote("That is 1,000.") == sums.vote("1000") and sums.vote("none") is None


def test_gsm8k_by_name_is_split_by_file(tmp_path):
    for name, count in (("train", 3), ("test", 2)):
        rows = [{"question": f"{name} {i}?", "answer": f"so\n#### {i}"} for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = catalog.by_name("gsm8k", source=tmp_path)
    assert {p.prompt for p in task.problems(0, 0, 40)} == {"train 0?", "train 1?", "train 2?"}
    assert [p.prompt for p in task.held_out(2)] == ["test 0?", "test 1?"]
    assert task.score(task.held_out(2)[1], "#### 1") == 1.0
    with pytest.raises(ValueError, match="count=3: the test set has 2 problems"):
        task.held_out(3)


def test_majority_votes_by_hand():
    answers = [["7", "7", "8"], ["1", "2", None], [None, None, None], ["3", "4", "4"]]
    correct = [[True, True, False], [True, False, False], [False] * 3, [True, False, False]]
    np.testing.assert_array_equal(evaluate.majority_at_k(answers, correct), [1.0, 0.5, 0.0, 0.0])
    assert evaluate.by_group([1, 0, 1, 1], [2, 2, 3, 3]) == {2: 0.5, 3: 1.0}
