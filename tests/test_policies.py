"""Policies: log-probs and entropy of what the sampler draws from, three kinds of critic, and who trains what."""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpg.estimators import logprobs
from jaxpg.models import Config, Model, heads, lora
from jaxpg.parallel import sharding
from jaxpg.rollout import policies
from jaxpg.sampling import Sampling, filters, sample
from jaxpg.training import train_state
from jaxpg.types import Batch, Rollout

VOCABULARY = 9  # of the tokenizer; the model has three ids more
MODEL = Model(
    Config(
        vocab_size=12, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_size=16, max_length=32
    )
)
ADAPTERS = lora.init(jax.random.key(7), MODEL.config, rank=2)
FILTERS = {
    "none": (),
    "vocabulary": (filters.Vocabulary(VOCABULARY),),
    "top-k": (filters.TopK(4),),
    "top-p": (filters.TopP(0.8),),
    "min-p": (filters.MinP(0.1),),
    "penalty": (filters.RepetitionPenalty(1.5),),
    "all": (
        *(filters.Vocabulary(VOCABULARY), filters.RepetitionPenalty(1.5)),
        *(filters.TopK(6), filters.TopP(0.9), filters.MinP(0.05)),
    ),
}


@pytest.fixture(scope="module")
def params():
    # Larger embeddings than at the start of training, so that the distribution is far from uniform.
    drawn = MODEL.init(jax.random.key(3))
    return drawn | {"embedding": drawn["embedding"] * 12}


def shaken(tree, seed=0):
    """The tree with noise on every leaf, so that no adapter and no head says 0."""
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    noise = [leaf + 0.3 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(structure, noise)


def with_critic(params, kind):
    critic = policies.init_critic(jax.random.key(1), MODEL, params, kind=kind, rank=2)
    return {"actor": params, "critic": shaken(critic)}


def draw(params, sampling, samples=16):
    prompts = jax.random.randint(jax.random.key(4), (3, 5), 2, VOCABULARY)
    mask = jnp.arange(5) >= jnp.arange(3)[:, None]  # left padding of 0, 1, 2 tokens
    options = {"model": MODEL, "max_new_tokens": 8, "samples_per_prompt": samples, **sampling.options}
    return jax.jit(partial(sample, **options))(params, prompts, mask, jax.random.key(0))


def as_batch(rollout: Rollout) -> Batch:
    return Batch(rollout.tokens, rollout.token_mask, rollout.action_mask)


@pytest.fixture(scope="module")
def rollout(params):
    return draw(params, Sampling(stop_tokens=(1,)), samples=4)


def filtered_log_softmax(params, rollout, sampling):
    """Log-probs [B, T, V] at index t of what may be drawn there, from whole logits."""
    logits = MODEL.logits(params, rollout.tokens, rollout.token_mask)[:, :-1] / sampling.temperature
    had = jax.nn.one_hot(rollout.tokens, 12, dtype=bool) & rollout.token_mask[..., None]
    seen = jax.lax.cummax(had.astype(jnp.int32), axis=1)[:, :-1] > 0
    filtered = filters.apply(sampling.filters, logits, seen=seen, keep=rollout.tokens[:, 1:])
    return jnp.pad(jax.nn.log_softmax(filtered), ((0, 0), (1, 0), (0, 0)))


@pytest.mark.parametrize("chosen", FILTERS)
def test_an_actor_has_the_log_probs_and_the_entropy_of_what_the_sampler_drew_from(chosen, params):
    temperature = 0.7
    sampling = Sampling(temperature, FILTERS[chosen], stop_tokens=(1,))
    rollout = draw(params, sampling)
    drawn = rollout.action_mask
    log_probs, entropy = jax.jit(policies.actor(MODEL, sampling))(params, as_batch(rollout))
    np.testing.assert_allclose(log_probs[drawn], rollout.log_probs[drawn], atol=1e-5)
    logits = jax.jit(policies.logits(MODEL, sampling))(params, as_batch(rollout))
    np.testing.assert_allclose(logprobs.token_log_probs(logits, rollout.tokens)[drawn], log_probs[drawn], atol=1e-5)
    exact = filtered_log_softmax(params, rollout, sampling)
    np.testing.assert_allclose(jax.nn.log_softmax(logits)[:, :-1][drawn[:, 1:]], exact[drawn], atol=1e-5)
    possible = jnp.where(exact == -jnp.inf, 0.0, exact)
    np.testing.assert_allclose(entropy[drawn], -(jnp.exp(exact) * possible).sum(-1)[drawn], atol=1e-5)
    if chosen == "none":
        plain = logprobs.token_log_probs(
            MODEL.logits(params, rollout.tokens, rollout.token_mask), rollout.tokens, temperature=temperature
        )
        np.testing.assert_allclose(log_probs, plain, atol=1e-5)
    else:
        assert jnp.abs(rollout.log_probs - rollout.plain_log_probs)[drawn].max() > 0.01
    beyond = (rollout.tokens >= VOCABULARY)[drawn]
    assert beyond.any() == (chosen not in ("vocabulary", "all")), "padded ids are drawn unless ruled out"


def test_gradients_through_filters_are_those_of_whole_logits(params, rollout):
    sampling = Sampling(0.7, FILTERS["all"])
    batch, act = as_batch(rollout), policies.actor(MODEL, sampling)

    def ours(params):
        return jnp.where(batch.action_mask, act(params, batch)[0], 0.0).sum()

    def plainly(params):
        exact = filtered_log_softmax(params, rollout, sampling)
        picked = jnp.take_along_axis(exact, batch.tokens[..., None], axis=-1)[..., 0]
        return jnp.where(batch.action_mask, picked, 0.0).sum()

    found, expected = (jax.jit(jax.grad(f))(params) for f in (ours, plainly))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, expected)


def test_packed_documents_do_not_see_each_other(params):
    tokens = jax.random.randint(jax.random.key(6), (2, 6), 2, VOCABULARY)
    apart = Batch(tokens, jnp.ones((2, 6), bool), jnp.ones((2, 6), bool))
    together = Batch(
        *(x.reshape(1, 12) for x in (apart.tokens, apart.token_mask, apart.action_mask)),
        documents=jnp.arange(12)[None] // 6,
    )
    act = jax.jit(policies.actor(MODEL, Sampling()))
    expected = act(params, apart)[0]
    np.testing.assert_allclose(act(params, together)[0].reshape(2, 6)[:, 1:], expected[:, 1:], atol=1e-5)
    told = dataclasses.replace(together, documents=None)
    assert jnp.abs(act(params, told)[0].reshape(2, 6)[1, 1:] - expected[1, 1:]).max() > 0.01
    with pytest.raises(ValueError, match="packed rows hold several documents; pass Sampling"):
        policies.actor(MODEL, Sampling(filters=FILTERS["penalty"]))(params, together)


def sizes(jaxpr):
    """Each operation of a program, of its loops and calls too, and how many entries it computes."""
    for equation in jaxpr.eqns:
        yield from ((equation.primitive.name, math.prod(out.aval.shape)) for out in equation.outvars)
        for inner in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from sizes(inner)


@pytest.mark.parametrize("length", [1024, 8])
def test_the_logits_of_long_sequences_never_exist_and_those_of_short_ones_are_kept(length):
    model = Model(dataclasses.replace(MODEL.config, vocab_size=150_000, max_length=1024))
    rows = (8, length)
    batch = Batch(jax.ShapeDtypeStruct(rows, jnp.int32), *[jax.ShapeDtypeStruct(rows, jnp.bool_)] * 2)
    act = policies.actor(model, Sampling(filters=(filters.Vocabulary(149_000),)))
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    program = jax.make_jaxpr(jax.grad(lambda *args: sum(x.mean() for x in act(*args))))(shapes, batch)
    logits = 8 * (length - 1) * 150_000
    computed = list(sizes(program.jaxpr))
    if length == 1024:
        assert max(size for _, size in computed) < logits / 5
    else:
        assert computed.count(("dot_general", logits)) == 1, "not computed again in the backward pass"


def test_logits_that_are_kept_and_logits_computed_again_have_the_same_gradient(params, rollout, monkeypatch):
    batch, act = as_batch(rollout), policies.actor(MODEL, Sampling(0.7, FILTERS["all"]))

    def both():
        def loss(params):
            log_probs, entropy = act(params, batch)
            return jnp.where(batch.action_mask, log_probs + entropy, 0.0).sum()

        return jax.jit(jax.value_and_grad(loss))(params)

    kept = both()
    monkeypatch.setattr(logprobs, "LOGITS_THAT_ARE_KEPT", 0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), kept, both())


@pytest.mark.parametrize("kind", policies.CRITICS)
def test_values_are_those_of_the_head_on_the_trunk_of_its_kind(kind, params, rollout):
    params = with_critic(lora.attach(params, shaken(ADAPTERS)), kind)
    actor, critic = params["actor"], params["critic"]
    trunk = {
        "head": actor,
        "copy": critic.get("trunk"),
        "lora": lora.base(actor) | {"lora": critic.get("lora")},
    }[kind]
    expected = heads.values(critic["head"], MODEL.hidden(trunk, rollout.tokens, rollout.token_mask))
    found = jax.jit(policies.values(MODEL))(params, rollout)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    sampling = Sampling(0.7, FILTERS["top-k"])
    log_probs, entropy, values = jax.jit(policies.actor_critic(MODEL, sampling))(params, as_batch(rollout))
    np.testing.assert_allclose(values, expected, atol=1e-5)
    alone = jax.jit(policies.actor(MODEL, sampling))(policies.acting(params), as_batch(rollout))
    np.testing.assert_allclose((log_probs, entropy), alone, atol=1e-5)


def reached(function, params) -> set[str]:
    """The parts of the parameters that a loss has a gradient in."""
    gradient = jax.jit(jax.grad(function))(params)
    parts = {
        "base": lora.base(gradient["actor"]),
        "adapters": gradient["actor"].get("lora", {}),
        **gradient["critic"],
    }
    return {name for name, part in parts.items() if any(jnp.abs(leaf).max() > 0 for leaf in jax.tree.leaves(part))}


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "adapters"])
@pytest.mark.parametrize(
    ("kind", "own"),
    [("head", {"head"}), ("copy", {"head", "trunk"}), ("lora", {"head", "lora"})],
)
def test_each_loss_reaches_what_it_trains(kind, own, adapted, params, rollout):
    actor = lora.attach(params, shaken(ADAPTERS)) if adapted else params
    params, batch = with_critic(actor, kind), as_batch(rollout)
    of_actor = {"base", "adapters"} if adapted else {"base"}
    policy = policies.actor_critic(MODEL, Sampling())
    assert reached(lambda p: policy(p, batch)[0].sum(), params) == of_actor
    assert reached(lambda p: policy(p, batch)[2].sum(), params) == own | (of_actor if kind == "head" else set())


@pytest.mark.parametrize("kind", policies.CRITICS)
def test_a_new_critic_says_zero_and_shares_no_array(kind, params, rollout):
    actor = lora.attach(params, ADAPTERS)
    critic = policies.init_critic(jax.random.key(1), MODEL, actor, kind=kind, rank=3)
    assert not policies.values(MODEL)({"actor": actor, "critic": critic}, rollout).any()
    owned = {id(leaf) for leaf in jax.tree.leaves(actor)}
    assert not owned & {id(leaf) for leaf in jax.tree.leaves(critic)}, "the arrays of a donated state are not shared"
    if kind == "copy":
        jax.tree.map(np.testing.assert_array_equal, critic["trunk"], params)
    if kind == "lora":
        assert critic["lora"]["layers"]["mlp"]["up"]["a"].shape[-1] == 3


def test_a_reference_is_the_base_where_adapters_are_trained(params, rollout):
    sampling = Sampling(0.7, FILTERS["all"])
    adapted = {"actor": lora.attach(params, shaken(ADAPTERS)), "critic": {}}
    reference = jax.jit(policies.reference(MODEL, sampling))
    found = reference(lora.base(policies.acting(adapted)), rollout)
    act = jax.jit(policies.actor(MODEL, sampling))
    (before, _), (now, _) = (act(p, as_batch(rollout)) for p in (params, adapted["actor"]))
    np.testing.assert_allclose(found, before, atol=1e-5)
    assert jnp.abs(now - before)[rollout.action_mask].max() > 0.01


@pytest.mark.parametrize(
    ("adapters", "kind", "frozen"),
    [
        (False, None, None),
        (False, "lora", None),
        (True, None, {"actor/base"}),
        (True, "head", {"actor/base"}),
        (True, "copy", {"actor/base"}),
        (True, "lora", {"actor/base"}),
    ],
)
def test_adapters_and_critics_are_trained_and_the_base_under_adapters_is_not(adapters, kind, frozen, params):
    actor = lora.attach(params, ADAPTERS) if adapters else params
    tree = {"actor": actor} if kind is None else with_critic(actor, kind)
    trainable = policies.trainable_paths(adapters, kind)
    assert (trainable is None) == (frozen is None)
    trained, kept = train_state.split(tree, trainable)
    assert len(jax.tree.leaves(kept)) == (len(jax.tree.leaves(params)) if frozen else 0)
    assert jax.tree.leaves(trained.get("critic", {})) == jax.tree.leaves(tree.get("critic", {}))
    if frozen:
        jax.tree.map(np.testing.assert_array_equal, lora.base(kept["actor"]), params)


def test_the_actor_is_what_acts(params):
    assert policies.acting(params) is params
    assert policies.acting(with_critic(params, "head")) is params


def test_same_on_eight_devices(params, rollout):
    sampling = Sampling(0.7, FILTERS["all"])
    policy = jax.jit(policies.actor_critic(MODEL, sampling))
    whole = with_critic(params, "lora")
    batch = jax.tree.map(lambda x: x[:8], as_batch(rollout))
    mesh = sharding.make_mesh("data=2,fsdp=2,tensor=2")
    placed = jax.device_put(whole, sharding.shardings(mesh, whole))
    with jax.set_mesh(mesh):
        found = policy(placed, sharding.put_rows(mesh, batch))
    for ours, expected in zip(found, policy(whole, batch), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: policies.actor(MODEL, Sampling(0.0)), "temperature=0.0: must be greater than 0"),
        (lambda: policies.actor_critic(MODEL, Sampling().greedy()), "temperature=0.0"),
        (lambda: policies.reference(MODEL, Sampling(0.0)), "temperature=0.0"),
        (lambda: policies.logits(MODEL, Sampling(0.0)), "temperature=0.0"),
        (
            lambda: policies.init_critic(jax.random.key(0), MODEL, {}, kind="own"),
            "kind='own': a critic is one of head, copy, lora",
        ),
        (lambda: policies.init_critic(jax.random.key(0), MODEL, {}, kind="lora", rank=0), "rank=0"),
        (lambda: policies.trainable_paths(True, "own"), "kind='own'"),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
