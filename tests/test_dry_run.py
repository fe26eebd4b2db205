"""--dry-run says what a run would do and need, without an array, a compilation or a file."""

import re
import sys

import jax
import pytest
import tiny
from launching import EXPERIMENTS, load

from jaxpg import recipe
from jaxpg.models import hf, num_parameters

pytestmark = pytest.mark.usefixtures("quick_compilation")
LADDER = sorted((EXPERIMENTS / "ladder").glob("*.py"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def no_arrays(monkeypatch, checkpoint):
    """Parameters are neither read nor drawn."""

    def never(*args, **options):
        raise AssertionError("a dry run made parameters")

    monkeypatch.setattr(hf, "load", never)
    monkeypatch.setattr(recipe.Setup, "params", never)


def told(path, capsys, **options) -> str:
    """What the dry run of a recipe prints, its spaces and lines as one space each."""
    module = load(path)
    recipe.execute(recipe.prepare(module.Config(dry_run=True, **options), name=path.stem), train=module.train)
    return re.sub(r"[\s│]+", " ", capsys.readouterr().out)


def counts(text: str) -> tuple[int, int]:
    """Parameters, and those that are trained."""
    found = re.search(r"parameters ([\d,]+) trained parameters ([\d,]+)", text)
    return tuple(int(number.replace(",", "")) for number in found.groups())


@pytest.mark.usefixtures("no_arrays")
@pytest.mark.parametrize("path", LADDER, ids=lambda path: path.stem)
def test_every_recipe_has_one(path, tmp_path, capsys):
    found = told(path, capsys, smoke=True, run_dir=tmp_path / "run")
    assert f"{path.stem}, dry run" in found and "steps, updates a step 2, " in found
    assert re.search(r"One prompt, as the model reads it: \d+\+\d+=", found)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("no_arrays")
def test_what_it_says_is_what_the_options_ask_for(tmp_path, capsys):
    options = {"batch_size": 64, "group_size": 4, "levels": (2, 4), "spare": 2, "rl_steps": 7, "epochs": 3}
    found = told(EXPERIMENTS / "ladder" / "grpo.py", capsys, run_dir=tmp_path / "run", **options)
    prompt, completion = len("99+99+99="), len("208") + 1 + 2
    for line in (
        f"prompt budget, tokens {prompt}; 0 longer ones left out",
        f"completion budget, tokens {completion}",
        "prompts × samples a step 16 × 4",
        f"tokens a step, at most {64 * (prompt + completion)}",
        "steps, updates a step 7, 6",
        "stop tokens '<eos>'",
    ):
        assert line in found, found


def kinds_of_memory(text: str) -> dict[str, float]:
    """Gigabytes by kind."""
    return {
        kind: float(size)
        for kind, size in re.findall(r"memory a device, ([a-z\- ]+?(?: \(estimate\))?) ([\d.]+) GB", text)
    }


@pytest.mark.usefixtures("no_arrays")
@pytest.mark.parametrize("rank", [0, 4])
def test_a_checkpoint_is_described_without_its_weights(rank, checkpoint, tmp_path, capsys):
    path = EXPERIMENTS / "ladder" / "grpo.py"
    options = {"model": str(checkpoint), "lora_rank": rank, "kl_coef": 0.1, "run_dir": tmp_path / "run"}
    found = told(path, capsys, **options)
    parameters, trained = counts(found)
    whole = num_parameters(jax.eval_shape(tiny.MODEL.init, jax.random.key(0)))
    assert trained == parameters == whole if rank == 0 else parameters == whole + trained and 0 < trained < whole
    assert "reference policy" in kinds_of_memory(found)
    assert re.search(r"as the model reads it: What is \d+\+\d+\?", found)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("no_arrays")
def test_each_critic_counts_what_it_adds(checkpoint, tmp_path, capsys):
    path, options = EXPERIMENTS / "ladder" / "ppo.py", {"model": str(checkpoint), "run_dir": tmp_path / "run"}
    added = {}
    whole, _ = counts(told(EXPERIMENTS / "ladder" / "grpo.py", capsys, **options))
    for kind in ("head", "copy", "lora"):
        parameters, trained = counts(told(path, capsys, critic=kind, critic_rank=2, **options))
        assert parameters == trained
        added[kind] = parameters - whole
    head = 16 + 1  # of a hidden size of 16
    assert added["head"] == head and added["copy"] == whole + head and head < added["lora"] < whole
    for kind, of_critic in added.items():
        parameters, trained = counts(told(path, capsys, critic=kind, critic_rank=2, lora_rank=4, **options))
        assert trained - of_critic == parameters - whole - of_critic, "adapters and critic, not the base"


@pytest.mark.usefixtures("no_arrays")
def test_memory_falls_with_shards_of_the_parameters(tmp_path, capsys):
    path = EXPERIMENTS / "ladder" / "grpo.py"
    alone, shared = (
        kinds_of_memory(told(path, capsys, run_dir=tmp_path / "run", mesh=mesh)) for mesh in ("data=8", "fsdp=8")
    )
    assert alone.keys() == shared.keys() and {"parameters", "gradients", "optimizer moments"} <= alone.keys()
    assert shared["optimizer moments"] < alone["optimizer moments"]
    assert alone["together"] == pytest.approx(sum(alone.values()) - alone["together"], abs=2e-3 * len(alone))


def test_the_command_line_ends_with_it(tmp_path, capsys, monkeypatch):
    module = load(EXPERIMENTS / "ladder" / "grpo.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["grpo.py", "--dry-run", "--smoke"])
    recipe.main(module.Config, module.train, name="grpo", description="")
    assert "grpo, dry run" in capsys.readouterr().out and not list(tmp_path.iterdir())
