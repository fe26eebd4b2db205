"""--dry-run: the recipe's own `train` with shapes in place of arrays, to say what a run would do and need."""

import math
from collections.abc import Callable

import jax
import optax
from rich.console import Console

from jaxpg.models import hf, lora, num_parameters
from jaxpg.parallel import sharding
from jaxpg.recipe.recipe import Recipe
from jaxpg.recipe.setup import Setup
from jaxpg.run import report
from jaxpg.run.report import shorten
from jaxpg.training import train_state

GB = 1e9


class DryRecipe(Recipe):
    """A recipe without arrays: what it is asked for is counted, and its loop has no steps."""

    def __init__(self, setup: Setup):
        self.setup, self.config = setup, setup.config
        self.model, self.task, self.tokenizer = setup.model, setup.task, setup.tokenizer
        self.sampling, self.mesh = setup.sampling, setup.mesh
        self.memory: dict[str, float] = {}  # bytes a device, by kind
        self.parameters = self.trained = 0
        self.sample = self.score = self.critic = _never

    def warm_up(self) -> dict:
        c, params = self.config, self.setup.shapes
        if not c.lora_rank:
            return params
        config = self.model.config
        adapters = jax.eval_shape(lambda: lora.init(jax.random.key(0), config, rank=c.lora_rank))
        return {**params, "lora": adapters}

    def first_state(self, params, optimizer: optax.GradientTransformation, *, kl_coef=0.0, trainable=None):
        def init(params):
            return train_state.init(params, optimizer, jax.random.key(0), kl_coef=kl_coef, trainable=trainable)

        state = jax.eval_shape(init, params)
        trained = train_state.split(params, trainable)[0]
        self.parameters, self.trained = num_parameters(params), num_parameters(trained)
        self.memory |= {
            "parameters": self.bytes(params),
            "gradients": self.bytes(trained),
            "optimizer moments": self.bytes(state.opt_state),
        }
        return state

    def with_critic(self, params):
        return jax.eval_shape(self._with_critic, params)

    def reference(self, params) -> Callable:
        kept = params["lora"] if self.config.lora_rank else params
        share = 0.5 if self.config.reference_dtype == "bfloat16" and not self.config.lora_rank else 1.0
        self.memory["reference policy"] = share * self.bytes(kept)
        return _never

    def timed(self, name, function, *, advice="") -> Callable:
        return function

    def compiled(self, update, state) -> Callable:
        return _never

    def steps(self, state):
        self.memory |= self.rollout_memory()
        show(self)
        return iter(())

    def bytes(self, tree) -> float:
        """Bytes of a tree on one device of the mesh."""
        places = sharding.shardings(self.mesh, tree)

        def size(x, place) -> int:
            itemsize = 8 if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x.dtype.itemsize
            return math.prod(place.shard_shape(x.shape)) * itemsize

        return float(sum(jax.tree.leaves(jax.tree.map(size, tree, places))))

    def rollout_memory(self) -> dict[str, float]:
        """Estimates of what comes and goes within a step, bytes a device."""
        c, m = self.config, self.model.config
        length = self.setup.prompt_length + self.setup.max_new_tokens
        rows = c.batch_size / sharding.row_shards(self.mesh)
        cache = 2 * m.num_layers * m.num_kv_heads * m.head_dim * m.dtype.itemsize * length * rows
        part = rows / c.minibatches / c.num_microbatches * length * m.hidden_size * m.dtype.itemsize
        layers = m.num_layers + 16 if m.remat else 16 * m.num_layers  # about as many arrays are kept in a layer
        return {"key-value cache (estimate)": cache, "activations (estimate)": part * layers}


def _never(*_, **__):
    raise AssertionError("a dry run has no steps")


def dry_run(setup: Setup, train: Callable[[Recipe], None]) -> None:
    """Runs a recipe without arrays, and prints what it would do and need."""
    train(DryRecipe(setup))


def show(r: DryRecipe) -> None:
    """Prints the table, and one prompt as the model would read it."""
    c, m, console = r.config, r.model.config, Console()
    tokens = c.batch_size * (r.setup.prompt_length + r.setup.max_new_tokens)
    adapters = f"LoRA, rank {c.lora_rank}" if c.lora_rank else "all"
    rows = [
        ("model", c.model or "small, drawn at random"),
        ("layers × hidden size, vocabulary", f"{m.num_layers} × {m.hidden_size}, {m.vocab_size:,}"),
        ("parameters", f"{r.parameters:,}"),
        ("trained parameters", f"{r.trained:,} ({adapters})"),
        ("task", c.task),
        ("prompt budget, tokens", f"{r.setup.prompt_length}; {r.setup.dropped} longer ones left out"),
        ("completion budget, tokens", r.setup.max_new_tokens),
        ("context, tokens", m.max_length),
        ("stop tokens", ", ".join(map(repr, r.tokenizer.convert_ids_to_tokens(list(r.sampling.stop_tokens))))),
        ("prompts × samples a step", f"{c.batch_size // c.group_size} × {c.group_size}"),
        ("tokens a step, at most", f"{tokens:,}"),
        ("warm-up steps, at most", c.warmup_steps),
        ("steps, updates a step", f"{c.rl_steps}, {c.epochs * c.minibatches}"),
        ("devices, mesh", f"{r.mesh.size}, {c.mesh}"),
    ]
    rows += [(f"memory a device, {kind}", f"{size / GB:.3f} GB") for kind, size in r.memory.items()]
    rows += [("memory a device, together", f"{sum(r.memory.values()) / GB:.3f} GB")]
    console.print(report.table(f"{r.setup.name}, dry run", ("", "value"), rows))
    if r.setup.checkpoint is not None:
        declared = hf.declared(r.setup.checkpoint, m, r.tokenizer)
        rows = [
            (name, "" if one.value is None else shorten(str(one.value), 60), one.use) for name, one in declared.items()
        ]
        console.print(report.table("What the checkpoint declares", ("", "value", "in this run"), rows))
    (prompt,) = r.setup.render(r.setup.problems(0, 0, 1))
    console.print("One prompt, as the model reads it:", prompt, sep="\n", markup=False)
