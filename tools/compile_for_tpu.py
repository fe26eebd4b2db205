"""Compiles update, sampler and the way between them for TPUs, without a TPU, and says what a chip would hold and do.

    python tools/compile_for_tpu.py --model qwen3-8b --topology v5p:8x8x8 --mesh fsdp=64,tensor=8 --algorithm grpo
    python tools/compile_for_tpu.py --model llama-3.1-70b --topology v5p:4x4x8 --mesh fsdp=16,tensor=8 --programs update

It needs libtpu (extra `tpu-compile`). Programs are those of a run: `update.make_update` with the algorithm's loss,
AdamW and a donated state, and `sampling.sample`; `reshard` moves the parameters from the mesh of one to that of the
other, once a rollout (`sampling/resharding.py`). Of parameters there are shapes alone; nothing is allocated. Memory and
collectives are the compiled program's; `held` is what else of the train state stays on the chip while it runs. Times
are estimates: nothing has run. What they are made of:

  kernels      the compiler's cycles for each of its kernels, times the trip counts of the loops around it, over the
               clock. XLA's own `optimal_seconds` counts each loop's body once and is of no use for a training step.
  attention    Pallas kernels, of which the compiler knows no time: their FLOPs at half of the chip's peak.
  collectives  bytes received over the bandwidth of the torus axes that their mesh axes run along (Austin et al. 2025,
               "How to Scale Your Model", part 3). Asynchronous ones are taken to be hidden behind the rest, the others
               not: time = max(kernels + attention, hidden collectives) + other collectives.

The model-FLOPs share is (6·N·tokens + 6·layers·heads·head_dim·Σ length²) / (time · peak): N parameters without the
embedding's look-up, causal attention counted by half, recomputation not at all (Chowdhery et al. 2022, appendix B).
"""

import os

# libtpu would look for a TPU's host, warn that there is none, and let one process in at a time.
os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

import dataclasses
import importlib.util
import math
import re
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import hlo
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from rich.console import Console

from jaxpg import algorithms
from jaxpg.estimators import checks, logprobs
from jaxpg.models import Model, num_parameters
from jaxpg.models.presets import PRESETS
from jaxpg.parallel import sharding
from jaxpg.run import cli, report
from jaxpg.run import folder as run_folder
from jaxpg.sampling import sample
from jaxpg.sampling.resharding import make_cast
from jaxpg.training import train_state
from jaxpg.training.update import adamw, make_update
from jaxpg.types import Batch

PALLAS_SHARE = 0.5  # of the peak, that attention kernels are taken to reach
GB = 1e9
OPTIMIZER = adamw(1e-6)


class Chip(NamedTuple):
    """What one device of JAX has: a chip, but of tpu7x one of its two cores. Published by Google Cloud."""

    hbm: float  # GiB
    peak: float  # bfloat16 FLOP/s
    clock: float  # Hz, of the matrix units: what makes their number give the peak
    axis: float  # bytes/s that come in along one torus axis, from both of its ends


CHIPS = {
    "v5e": Chip(16, 197e12, 1.5e9, 90e9),
    "v5p": Chip(95, 459e12, 1.75e9, 180e9),
    "v6e": Chip(32, 918e12, 1.75e9, 180e9),
    "tpu7x": Chip(96, 1153e12, 2.2e9, 100e9),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Options of a compilation."""

    model: str = "qwen3-8b"  # a name in jaxpg.models.presets
    topology: str = "v5p:8x8x8"  # v5e:16x16, v5p:4x4x8, v6e:16x16, tpu7x:2x2x1: chips along each torus axis
    mesh: str = "fsdp=-1"  # of the update, e.g. fsdp=64,tensor=8
    sampler_mesh: str | None = None  # default that of the update with fsdp folded into data
    algorithm: Literal["reinforce", "ppo_critic_free", "rloo", "grpo", "dr_grpo", "gspo", "cispo"] = "grpo"
    programs: tuple[Literal["update", "reshard", "sampler"], ...] = ("update", "reshard", "sampler")
    sequences: int = 512  # completions an update
    group_size: int = 8  # completions a prompt
    length: int = 4096  # prompt and completion, in tokens
    prompt_length: int = 1024
    num_microbatches: int = 8
    chunk: int | None = None  # positions a row whose logits are held at a time, as in logprobs.from_hidden
    layers: int | None = None  # in place of the model's own, to compile a shorter one
    dtype: str = "bfloat16"  # of activations and matrix products; parameters and moments are float32
    attention: Literal["xla", "splash"] = "splash"
    remat: bool = True
    remat_policy: str = "nothing_saveable"
    json: Path | None = None  # where the numbers are written to
    hlo: Path | None = None  # folder for the compiled programs' text


class Prepared(NamedTuple):
    """What is compiled."""

    config: Config
    model: Model
    chip: Chip
    meshes: dict[str, jax.sharding.Mesh]  # by program


def prepare(c: Config) -> Prepared:
    """Checks the options before anything is compiled."""
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError("libtpu is not installed: pip install -c constraints.txt -e '.[tpu-compile]'")
    if c.model not in PRESETS:
        raise ValueError(f"--model={c.model!r}: there is no such preset, choose among {', '.join(PRESETS)}")
    mesh = sharding.make_mesh(c.mesh, devices=devices(c.topology))
    sampled = sharding.sampler_mesh(mesh, c.sampler_mesh)
    if "reshard" in c.programs and list(mesh.devices.flat) != list(sampled.devices.flat):
        raise ValueError(
            f"--sampler-mesh={c.sampler_mesh} has the devices in another order than --mesh={c.mesh}: leave reshard out "
            "of --programs, it cannot be compiled as one program"
        )
    if set(c.programs) == {"reshard"} and mesh == sampled:
        raise ValueError(f"--programs=reshard: on --mesh={c.mesh} update and sampler have one mesh, nothing is moved")
    if not c.programs:
        raise ValueError("--programs is empty: name at least one of update, reshard, sampler")
    meshes = {"update": mesh, "reshard": mesh, "sampler": sampled}
    _check_sizes(c, {name: meshes[name] for name in c.programs if name != "reshard"})
    model = build(c)
    for place in (mesh, sampled):
        sharding.shardings(place, jax.eval_shape(lambda: model.init(jax.random.key(0))))
    if c.json is not None:
        run_folder.make_folder("--json", c.json.parent)
    if c.hlo is not None:
        run_folder.make_folder("--hlo", c.hlo)
    return Prepared(c, model, CHIPS[c.topology.split(":")[0]], meshes)


def devices(topology: str):
    """The devices of a topology that is nowhere near.

    Raises:
      ValueError: if there is no such one.
    """
    kind = topology.split(":")[0]
    if kind not in CHIPS or not re.fullmatch(r"\w+:\d+(x\d+){1,2}", topology):
        raise ValueError(f"--topology={topology!r}: must be <chip>:<sizes>, of {', '.join(CHIPS)}, e.g. v5p:4x4x8")
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except (jax.errors.JaxRuntimeError, RuntimeError, ValueError) as error:
        raise ValueError(f"--topology={topology!r}: {str(error).splitlines()[0]}") from error


def _check_sizes(c: Config, meshes) -> None:
    checks.options_at_least(c, 1, "sequences", "group_size", "num_microbatches", "prompt_length", "chunk")
    if c.length <= c.prompt_length:
        raise ValueError(
            f"--length={c.length} leaves no room for a completion behind --prompt-length={c.prompt_length}"
        )
    prompts, rows = c.sequences / c.group_size, c.sequences / c.num_microbatches
    for program, mesh in meshes.items():
        shards, what = sharding.row_shards(mesh), "prompts" if program == "sampler" else "rows of a micro-batch"
        if (size := prompts if program == "sampler" else rows) % shards:
            raise ValueError(
                f"{size:g} {what} cannot be spread over data*fsdp={shards} of the {program}'s mesh: change "
                "--sequences, --group-size, --num-microbatches or the mesh"
            )


def build(c: Config) -> Model:
    """The preset as it is trained."""
    config = PRESETS[c.model]
    layers = config.num_layers if c.layers is None else c.layers
    return Model(
        dataclasses.replace(
            config,
            num_layers=layers,
            local_layers=config.local_layers[:layers],
            max_length=max(config.max_length, c.length),
            compute_dtype=c.dtype,
            attention=c.attention,
            remat=c.remat,
            remat_policy=c.remat_policy,
        )
    )


def lower_update(p: Prepared):
    """The update of `Recipe.start`, for shapes."""
    c, mesh = p.config, p.meshes["update"]
    options = {"max_new_tokens": c.length - c.prompt_length} if c.algorithm == "dr_grpo" else {}
    algorithm = getattr(algorithms, c.algorithm)(**options)

    def policy(params, batch):  # `policies.actor`, with a --chunk of one's own
        hidden = p.model.hidden(params, batch.tokens, batch.token_mask)
        return logprobs.from_hidden(partial(p.model.unembed, params), hidden, batch.tokens, chunk=c.chunk)

    step = make_update(algorithms.make_loss_fn(algorithm, policy), OPTIMIZER, num_microbatches=c.num_microbatches)
    state = train_state_of(p)
    places = sharding.shardings(mesh, state)
    rows = partial(jax.ShapeDtypeStruct, (c.sequences, c.length), sharding=sharding.rows(mesh))
    batch = Batch(rows(jnp.int32), rows(bool), rows(bool), log_probs=rows(jnp.float32), advantages=rows(jnp.float32))
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(places, sharding.replicated(mesh)))
    return jitted.lower(placed(state, places), batch)


def train_state_of(p: Prepared):
    """Shapes of parameters and moments."""
    return jax.eval_shape(lambda: train_state.init(p.model.init(jax.random.key(0)), OPTIMIZER, jax.random.key(1)))


def held_meanwhile(p: Prepared, name: str) -> float:
    """Bytes of the train state on a device that are not among a program's arguments, and stay there while it runs."""
    state = train_state_of(p)
    given = (state.opt_state,) if one_mesh(p) else (state.params, state.opt_state)
    trees = {"update": (), "reshard": (state.opt_state,), "sampler": given}[name]
    places = sharding.shardings(p.meshes["update"], trees)
    sizes = jax.tree.map(lambda x, place: math.prod(place.shard_shape(x.shape)) * x.dtype.itemsize, trees, places)
    return float(sum(jax.tree.leaves(sizes)))


def one_mesh(p: Prepared) -> bool:
    """Is the sampler's mesh the update's? Then a run gives it the parameters themselves (`resharding.on_mesh`)."""
    return p.meshes["update"] == p.meshes["sampler"]


def lower_sampler(p: Prepared):
    """The sampler as a run calls it."""
    c, mesh = p.config, p.meshes["sampler"]
    draw = partial(
        sample,
        model=p.model,
        max_new_tokens=c.length - c.prompt_length,
        samples_per_prompt=c.group_size,
        stop_tokens=(0,),
    )
    cast = (lambda params: params) if one_mesh(p) else make_cast(p.model, mesh)
    params = jax.eval_shape(lambda: cast(p.model.init(jax.random.key(0))))
    rows = partial(jax.ShapeDtypeStruct, (c.sequences // c.group_size, c.prompt_length), sharding=sharding.rows(mesh))
    key = jax.eval_shape(lambda: jax.random.key(0))
    key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=sharding.replicated(mesh))
    jitted = jax.jit(draw, out_shardings=sharding.rows(mesh))
    return jitted.lower(placed(params, sharding.shardings(mesh, params)), rows(jnp.int32), rows(bool), key)


def lower_reshard(p: Prepared):
    """The parameters' way from the update to the sampler, as `resharding.on_mesh` takes it."""
    here, there = p.meshes["reshard"], p.meshes["sampler"]
    params = jax.eval_shape(lambda: p.model.init(jax.random.key(0)))
    jitted = jax.jit(make_cast(p.model, here), out_shardings=sharding.shardings(there, params))
    return jitted.lower(placed(params, sharding.shardings(here, params)))


def placed(shapes, places):
    """Shapes with their shardings."""
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, places)


def measure(p: Prepared, name: str) -> dict[str, Any]:
    """Compiles one program and reads off what it says about a device."""
    mesh, started = p.meshes[name], time.perf_counter()
    with jax.set_mesh(mesh):
        lowered = {"update": lower_update, "reshard": lower_reshard, "sampler": lower_sampler}[name](p)
    found = {"mesh": dict(mesh.shape), "devices": mesh.size, "capacity_bytes": p.chip.hbm * 2**30}
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error) and "memory" not in str(error):
            raise
        return found | {"fits": False, "error": str(error).splitlines()[0]}
    text = compiled.as_text()
    if p.config.hlo:
        (p.config.hlo / f"{name}.txt").write_text(text)
    assumed = p.config.length - p.config.prompt_length - 1 if name == "sampler" else 1  # the longest completion's steps
    found["memory_bytes"] = memory(compiled.memory_analysis(), held=held_meanwhile(p, name))
    found["fits"] = found["memory_bytes"]["total"] <= found["capacity_bytes"]
    found |= work(p, name, compiled, hlo.Program(text, assumed=assumed))
    return found | {"compile_seconds": time.perf_counter() - started}


def memory(stats, *, held: float) -> dict[str, float]:
    """Bytes by kind; outputs that take the place of donated arguments are counted once."""
    kinds = {"arguments": "argument", "outputs": "output", "temporaries": "temp", "code": "generated_code"}
    found = {kind: float(getattr(stats, f"{field}_size_in_bytes")) for kind, field in kinds.items()}
    found["held"], aliased = held, float(stats.alias_size_in_bytes)
    return found | {"aliased": aliased, "total": sum(found.values()) - aliased}


def work(p: Prepared, name: str, compiled, program: hlo.Program) -> dict[str, Any]:
    """FLOPs, collectives and estimated times of a program on one device."""
    mesh, chip = p.meshes[name], p.chip
    collectives = program.collectives(mesh.shape)
    by_kind, by_axis, waits = Counter(), Counter(), Counter()
    for one in collectives:
        total = one.times * one.bytes
        by_kind[one.kind] += total
        by_axis["+".join(one.axes)] += total
        waits[one.hidden] += total / (chip.axis * torus_axes(mesh, one.axes))
    pallas = attention_flops(p, name) / mesh.size
    seconds = {
        "kernels": program.cycles() / chip.clock,
        "attention": pallas / (PALLAS_SHARE * chip.peak),
        "hidden_collectives": waits[True],
        "other_collectives": waits[False],
    }
    total = max(seconds["kernels"] + seconds["attention"], waits[True]) + waits[False]
    found = {
        "flops": program.flops() + pallas,
        "bytes_accessed_loops_once": compiled.cost_analysis().get("bytes accessed"),
        "collective_bytes": sum(by_kind.values()),
        "collective_bytes_by_kind": dict(by_kind.most_common()),
        "collective_bytes_by_axis": dict(by_axis.most_common()),
        "largest_collectives": [
            one._asdict() for one in sorted(collectives, key=lambda one: -one.times * one.bytes)[:12]
        ],
        "loops_of_unknown_length": program.unknown_loops,
        "seconds": seconds | {"total": total},
    }
    if name == "update":
        found["model_flops_share"] = model_flops(p) / (total * chip.peak * mesh.size)
    return found


def torus_axes(mesh: jax.sharding.Mesh, axes: tuple[str, ...]) -> int:
    """Along how many axes of the chips' torus the devices of a group lie, at least one."""
    along = tuple(slice(None) if axis in axes else 0 for axis in mesh.axis_names)
    places = np.array([device.coords for device in np.ravel(mesh.devices[along])])
    return max(int((places != places[0]).any(0).sum()), 1)


def model_flops(p: Prepared) -> float:
    """6·N·tokens and causal attention, of one update on all devices."""
    c, config = p.config, p.model.config
    parameters = num_parameters(jax.eval_shape(lambda: p.model.init(jax.random.key(0))))
    if not config.tie_embeddings:
        parameters -= config.vocab_size * config.hidden_size  # the look-up multiplies nothing
    attention = 6 * config.num_layers * config.num_heads * config.head_dim * c.length**2
    return float(c.sequences * (6 * parameters * c.length + attention))


def attention_flops(p: Prepared, name: str) -> float:
    """What the Pallas kernels do on all devices, causal halves: 2 products forwards, 7 backwards; whole windows."""
    c, config = p.config, p.model.config
    if c.attention != "splash" or name == "reshard":
        return 0.0
    update = name == "update"
    rows, length = (c.sequences, c.length) if update else (c.sequences // c.group_size, c.prompt_length)
    products = (2 * (1 + c.remat) + 7) if update else 2
    return float(products * config.num_layers * config.num_heads * config.head_dim * rows * length**2)


def show(p: Prepared, results: dict[str, dict[str, Any]]) -> None:
    """Prints tables: memory, work, collectives by kind and axis."""
    console, c = Console(), p.config
    title = f"{c.model} on {c.topology}, {c.algorithm}, {c.sequences} x {c.length} tokens; per device"
    rows = [(name, *_summary(found)) for name, found in results.items()]
    names = ("program", "GB", "of GB", "fits", "TFLOP", "GB received", "seconds", "MFU")
    console.print(report.table(title, names, rows))
    for name, found in results.items():
        if "error" in found:
            console.print(f"{name}: {found['error']}")
            continue
        parts = [(f"memory, {k}", f"{v / GB:.2f} GB") for k, v in found["memory_bytes"].items()]
        parts += [(f"time, {k.replace('_', ' ')}", f"{v:.3f} s") for k, v in found["seconds"].items()]
        parts += [(k, f"{v / GB:.2f} GB") for k, v in found["collective_bytes_by_kind"].items()]
        parts += [(f"over {k}", f"{v / GB:.2f} GB") for k, v in found["collective_bytes_by_axis"].items()]
        parts += [("bytes accessed, loops once", f"{(found['bytes_accessed_loops_once'] or 0) / GB:.2f} GB")]
        console.print(
            report.table(f"{name}: compiled in {found['compile_seconds']:.0f} s", ("what", "per device"), parts)
        )
    console.print("Compiled, not run: memory and bytes are the program's, times are estimates (see --help).")


def _summary(found: dict[str, Any]) -> tuple[str, ...]:
    capacity, fits = f"{found['capacity_bytes'] / GB:.0f}", "yes" if found["fits"] else "NO"
    if "error" in found:
        return ("too much", capacity, fits, "", "", "", "")
    share = f"{found['model_flops_share']:.0%}" if "model_flops_share" in found else ""
    numbers = (f"{found[key] / scale:.1f}" for key, scale in (("flops", 1e12), ("collective_bytes", GB)))
    total = f"{found['memory_bytes']['total'] / GB:.1f}"
    return (total, capacity, fits, *numbers, f"{found['seconds']['total']:.2f}", share)


def run(p: Prepared) -> None:
    results = {name: measure(p, name) for name in p.config.programs if not (name == "reshard" and one_mesh(p))}
    show(p, results)
    if p.config.json:
        options = {k: v if isinstance(v, int | tuple) else v and str(v) for k, v in vars(p.config).items()}
        run_folder.write_json(p.config.json, {"config": options, "programs": results})


if __name__ == "__main__":
    cli.main(Config, prepare, run, description=__doc__)
