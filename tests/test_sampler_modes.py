"""What the sampler can be asked for beyond plain sampling: each mode gives the tokens and log-probs it should."""

import dataclasses
import inspect
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from jaxpg.data.tokenizers import characters
from jaxpg.models import Config, Model
from jaxpg.run import report
from jaxpg.sampling import checks, converse, filters, generate, prepare, sample, score, stop_strings
from jaxpg.types import StopReason

TOKENIZER = characters("0123+=")  # three special tokens in front: a vocabulary of 9
SIZES = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "mlp_size": 24}
MODEL = Model(Config(vocab_size=9, max_length=64, **SIZES))
STOP = 1
ALL_FILTERS = (
    filters.RepetitionPenalty(1.3),
    filters.LogitBias(((4, 0.5), (2, -1.0))),
    filters.Allowed(tuple(range(1, 9))),
    filters.TopK(7),
    filters.TopP(0.95),
    filters.MinP(0.01),
)


@pytest.fixture(scope="module")
def params():
    # Larger embeddings than at the start of training, so that the distribution is far from uniform.
    drawn = MODEL.init(jax.random.key(3))
    return drawn | {"embedding": drawn["embedding"] * 12}


def inputs(rows=4, length=4):
    tokens = jax.random.randint(jax.random.key(4), (rows, length), 3, 9)
    return tokens, jnp.arange(length) >= (jnp.arange(rows) % 3)[:, None]  # left padding of 0, 1, 2 tokens


def options(**changes):
    defaults = {"model": MODEL, "max_new_tokens": 24, "stop_tokens": (STOP,), "samples_per_prompt": 4}
    return defaults | {"filters": ALL_FILTERS} | changes


def run(params, key, how=generate, prompts=None, **changes):
    return how(params, *(prompts or inputs()), key, **options(**changes))


@pytest.fixture(scope="module")
def plain(params):
    """Everything that follows is compared with this: one program, no compaction, a cache of its final size."""
    return jax.jit(partial(sample, **options()))(params, *inputs(), jax.random.key(0))


def assert_same(found, expected):
    for name in ("tokens", "token_mask", "action_mask", "stop_reason"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)
    np.testing.assert_allclose(found.log_probs, expected.log_probs, atol=1e-5)
    np.testing.assert_allclose(found.plain_log_probs, expected.plain_log_probs, atol=1e-5)


@pytest.mark.parametrize("block", [8, 23])  # 23 tokens are fed: a block exactly full at the end
def test_growing_and_compacting_changes_nothing(params, key, plain, block):
    seen = []
    found = run(params, key, block=block, progress=lambda *numbers: seen.append(numbers))
    assert_same(found, plain)
    ended, drawn = zip(*seen, strict=True)
    assert list(ended) == sorted(ended) and ended[-1] == 16 and drawn[-1] == plain.action_mask.sum()


def test_rows_that_have_ended_leave_the_batch(params, key, monkeypatch):
    from jaxpg.sampling import driver

    shapes = []
    original = driver._advance

    def spy(params, state, *args, **kwargs):
        shapes.append((state.cache.prompt_mask.shape[0], state.running.shape[0], state.cache.capacity))
        return original(params, state, *args, **kwargs)

    monkeypatch.setattr(driver, "_advance", spy)
    limits = jnp.full(16, 3).at[5].set(24)  # one straggler
    found = run(params, key, block=2, row_limits=limits, stop_tokens=(), filters=())
    assert (found.action_mask.sum(1) == limits).all()
    assert shapes[0] == (4, 16, 2) and shapes[-1][:2] == (1, 1)
    expected = jax.jit(partial(sample, **options(stop_tokens=(), filters=())))(params, *inputs(), key)
    np.testing.assert_array_equal(found.tokens[5], expected.tokens[5])


def test_nothing_is_compiled_twice(params, key):
    from jaxpg.sampling import driver

    run(params, key, block=8)
    before = driver._advance._cache_size()
    run(params, jax.random.fold_in(key, 0), block=8)
    run(params, key, block=8)
    assert driver._advance._cache_size() <= before + 2, "another key may need a compacted shape or two, no more"
    settled = driver._advance._cache_size()
    run(params, key, block=8)
    assert driver._advance._cache_size() == settled


def test_scanned_layers_give_the_same(params, key, plain):
    assert_same(run(params, key, unroll=False, block=8), plain)


@pytest.mark.parametrize("chunk", [3])
def test_scoring_gives_both_log_probs_of_the_sampler(params, plain, chunk):
    filtered, tempered = score(params, plain.tokens, plain.token_mask, model=MODEL, filters=ALL_FILTERS, chunk=chunk)
    drawn = plain.action_mask
    np.testing.assert_allclose(filtered[drawn], plain.log_probs[drawn], atol=1e-5)
    np.testing.assert_allclose(tempered[drawn], plain.plain_log_probs[drawn], atol=1e-5)
    assert jnp.abs(plain.log_probs - plain.plain_log_probs).max() > 0.01


def test_scoring_does_not_depend_on_padding_between_prompt_and_completion(params, plain):
    def insert(x):
        return jnp.concatenate([x[:, :4], jnp.zeros((x.shape[0], 3), x.dtype), x[:, 4:]], axis=1)

    expected, _ = score(params, plain.tokens, plain.token_mask, model=MODEL, filters=ALL_FILTERS)
    found, _ = score(params, insert(plain.tokens), insert(plain.token_mask), model=MODEL, filters=ALL_FILTERS)
    np.testing.assert_allclose(found[:, 7:][plain.action_mask[:, 4:]], expected[plain.action_mask], atol=1e-5)


@pytest.mark.parametrize("cut", [1, 9])
def test_a_partial_rollout_goes_on_as_if_it_had_not_stopped(params, key, plain, cut):
    partly = run(params, key, max_new_tokens=cut, block=8)
    assert (partly.stop_reason == StopReason.BUDGET).any()
    assert_same(run(params, key, continued=partly, block=8), plain)


def test_greedy_beside_samples_changes_no_sample(params, key, plain):
    sampled, greedy = run(params, key, greedy=True, block=8)
    assert_same(sampled, plain)
    alone = run(params, key, temperature=0.0, samples_per_prompt=1, block=8)
    assert_same(greedy, alone)
    assert (greedy.log_probs == 0).all()


@pytest.mark.parametrize(
    "one",
    [ALL_FILTERS[:3], *((single,) for single in ALL_FILTERS[3:])],
    ids=["penalty, bias, allowed", "k", "p", "min-p"],
)
def test_frequencies_of_all_sequences_match_the_exact_probabilities(params, key, one):
    """Chi-square over all completions of two tokens, for each filter: 99.9 % of seeds pass, and this one is fixed."""
    prompt, count = (jnp.array([[5, 3]]), jnp.ones((1, 2), bool)), 20_000
    asked = {"filters": one, "temperature": 1.5, "max_new_tokens": 2, "samples_per_prompt": count}
    rollout = jax.jit(partial(sample, **options(**asked, stop_tokens=(), unroll=False)))(params, *prompt, key)
    drawn = [tuple(row) for row in np.asarray(rollout.tokens)[:, 2:]]
    every = list(itertools.product(range(9), repeat=2))
    rows = jnp.array([[5, 3, *pair] for pair in every])
    logits = MODEL.logits(params, rows, jnp.ones_like(rows, bool))[:, 1:3] / 1.5
    had = jax.nn.one_hot(rows, 9, dtype=bool)
    seen = jnp.stack([had[:, :2].any(1), had[:, :3].any(1)], axis=1)
    log_probs = jax.nn.log_softmax(filters.apply(one, logits, seen=seen), axis=-1)
    exact = np.exp(np.take_along_axis(np.asarray(log_probs), np.asarray(rows)[:, 2:, None], -1)[..., 0].sum(1))
    assert abs(exact.sum() - 1) < 1e-5
    assert set(drawn) <= {pair for pair, p in zip(every, exact, strict=True) if p > 0}
    likely = [(drawn.count(pair), p * count) for pair, p in zip(every, exact, strict=True) if p * count >= 5]
    statistic = sum((found - expected) ** 2 / expected for found, expected in likely)
    assert len(likely) > 5
    assert statistic < len(likely) - 1 + 3.3 * np.sqrt(2 * (len(likely) - 1)) + 5


def test_each_filter_keeps_what_its_paper_says():
    logits = jnp.log(jnp.array([0.5, 0.25, 0.15, 0.06, 0.04]))

    def kept(one):
        return np.flatnonzero(one(logits) > -jnp.inf).tolist()

    assert kept(filters.TopK(2)) == [0, 1] and kept(filters.TopK(9)) == [0, 1, 2, 3, 4]
    assert (
        kept(filters.TopP(0.5)) == [0] and kept(filters.TopP(0.6)) == [0, 1] and kept(filters.TopP(1.0)) == [*range(5)]
    )
    assert (
        kept(filters.MinP(0.2)) == [0, 1, 2]
        and kept(filters.MinP(1.0)) == [0]
        and kept(filters.MinP(0.0)) == [*range(5)]
    )
    assert kept(filters.Allowed((3, 1))) == [1, 3]
    assert kept(filters.Vocabulary(3)) == [0, 1, 2] and kept(filters.Vocabulary(9)) == [0, 1, 2, 3, 4]
    penalised = filters.RepetitionPenalty(2.0)(jnp.array([1.0, -1.0, 3.0]), jnp.array([True, True, False]))
    np.testing.assert_array_equal(penalised, [0.5, -2.0, 3.0])
    assert kept(lambda x: filters.TopK(2)(jnp.zeros_like(x))) == [0, 1], "ties are broken, not kept"


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: filters.TopK(0), "k=0"),
        (lambda: filters.TopP(0.0), "p=0.0"),
        (lambda: filters.MinP(2.0), "p=2.0"),
        (lambda: filters.RepetitionPenalty(0.0), "penalty=0.0"),
        (lambda: filters.Allowed(()), "allow at least one"),
        (lambda: filters.Vocabulary(0), "size=0"),
        (lambda: filters.Allowed((9,))(jnp.zeros(9)), "not in a vocabulary of 9"),
        (lambda: filters.LogitBias(((-1, 1.0),))(jnp.zeros(9)), "not in a vocabulary of 9"),
    ],
)
def test_impossible_filters_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_minimum_and_maximum_of_each_row(params, key):
    least, most = jnp.arange(16) % 5, jnp.arange(16) % 7 + 5
    found = run(params, key, min_new_tokens=least, row_limits=most, block=8)
    lengths = np.asarray(found.action_mask.sum(1))
    assert (lengths >= least).all() and (lengths <= most).all()
    short = np.asarray(found.tokens)[:, 4:]
    assert all(STOP not in short[row, : int(least[row]) - 1] for row in range(16) if least[row] > 1)
    assert (found.stop_reason == StopReason.BUDGET)[lengths < np.asarray(most)].sum() == 0


def test_stop_strings_end_rows_across_tokens(params, key):
    automaton = stop_strings.build(["+1", "==", "33"], TOKENIZER, vocab_size=9)
    found = run(params, key, stop_strings=automaton, block=8)
    free = run(params, key, stop_tokens=(STOP,), block=8)
    reasons = np.asarray(found.stop_reason)
    assert (reasons == StopReason.STOP_STRING).any()
    for row in range(16):
        ids = np.asarray(free.tokens)[row][np.asarray(free.action_mask)[row]].tolist()
        ends = [
            n
            for n in range(1, len(ids) + 1)
            if any(s in TOKENIZER.decode(ids[:n], skip_special_tokens=True) for s in ("+1", "==", "33"))
        ]
        length = min([len(ids), *ends])
        assert found.action_mask[row].sum() == length
        assert (reasons[row] == StopReason.STOP_STRING) == (bool(ends) and ids[length - 1] != STOP)


def test_same_on_eight_devices_with_compaction(params, key, plain):
    from jaxpg.parallel import sharding

    mesh = sharding.make_mesh("data=2,fsdp=2,tensor=1", devices=jax.devices()[:4])
    placed = jax.device_put(params, sharding.shardings(mesh, params))
    with jax.set_mesh(mesh):
        assert_same(run(placed, key, prompts=sharding.put_rows(mesh, inputs()), block=8), plain)


def test_same_on_eight_devices_with_heads_over_tensor(key):
    from jaxpg.parallel import sharding

    model = Model(dataclasses.replace(MODEL.config, vocab_size=10, num_heads=4, num_kv_heads=2))
    params = model.init(jax.random.key(3))
    params |= {"embedding": params["embedding"] * 12}
    expected = run(params, key, model=model, block=8, filters=ALL_FILTERS[2:])
    mesh = sharding.make_mesh("data=2,fsdp=2,tensor=2")
    placed = jax.device_put(params, sharding.shardings(mesh, params))
    with jax.set_mesh(mesh):
        prompts = sharding.put_rows(mesh, inputs())
        assert_same(run(placed, key, prompts=prompts, model=model, block=8, filters=ALL_FILTERS[2:]), expected)


def test_prepared_parameters_draw_the_same(params, key, plain):
    prepared = prepare(params)
    assert_same(run(prepared, key), plain)
    talk = partial(converse, environment=add_up, states=[()] * 16, max_turns=2)
    found, expected = (run(p, key, how=talk, filters=()).rollout for p in (prepared, params))
    assert_same(found, expected)


def test_progress_is_shown(params, key):
    console = Console(record=True, force_terminal=True, width=120)
    with report.watch_sampling(16, console=console) as watch:
        rollout = run(params, key, progress=watch)
    shown = console.export_text()
    assert "16/16" in shown and f"{int(rollout.action_mask.sum())} tokens" in shown


@pytest.mark.parametrize("chosen", [(), ALL_FILTERS])
def test_bfloat16_sampler_and_trainer_stay_near(params, key, chosen):
    """Rounding differs between a cached step and a whole pass: less than 5e-3 in the mean."""
    model = Model(dataclasses.replace(MODEL.config, compute_dtype="bfloat16"))
    rollout = run(params, key, model=model, filters=chosen)
    found, _ = jax.jit(partial(score, model=model, filters=chosen))(params, rollout.tokens, rollout.token_mask)
    gap = jnp.abs(found - rollout.log_probs)[rollout.action_mask]
    assert jnp.isfinite(gap).all() and gap.mean() < 5e-3


def add_up(state, tokens):
    """An environment of two answers: the number of tokens it was told, in unary, then the end."""
    return [*state, list(tokens)], [4] * (1 + len(tokens) % 3), float(len(tokens)), len(state) >= 2


@pytest.mark.parametrize("unroll", [True, False])
def test_a_conversation_is_what_one_sequence_would_be(unroll, params, key):
    """What the environment says is fed several tokens at once, through layers unrolled or scanned."""
    options = {"environment": add_up, "states": [[] for _ in range(16)], "max_turns": 3, "block": 8, "unroll": unroll}
    talk = run(params, key, how=converse, **options)
    rollout, actions = talk.rollout, np.asarray(talk.rollout.action_mask)
    assert talk.turns.max() == 3 and talk.turns.min() >= 1
    filtered, tempered = score(params, rollout.tokens, rollout.token_mask, model=MODEL, filters=ALL_FILTERS)
    np.testing.assert_allclose(filtered[actions], rollout.log_probs[actions], atol=1e-5)
    np.testing.assert_allclose(tempered[actions], rollout.plain_log_probs[actions], atol=1e-5)
    observed = np.asarray(rollout.token_mask) & ~actions
    assert (np.asarray(rollout.tokens)[:, 4:][observed[:, 4:]] == 4).all() and observed[:, 4:].any()
    for row in range(16):
        told = [token for turn in talk.states[row] for token in turn]
        assert told == np.asarray(rollout.tokens)[row][actions[row]].tolist(), "tokens in are tokens out"
        assert len(talk.states[row]) == talk.turns[row]
        ends = np.flatnonzero(talk.token_rewards[row])
        assert [talk.token_rewards[row, end] for end in ends] == [len(turn) for turn in talk.states[row]]
        assert actions[row, ends].all()


def test_the_first_turn_is_what_sampling_draws(params, key, plain):
    talk = run(
        params, key, how=converse, environment=lambda s, t: (s, [], 1.0, True), states=[0] * 16, max_turns=5, block=8
    )
    assert_same(talk.rollout, plain)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"states": [0]}, "states has 1 entries: pass one a row, 16"),
        ({"environment": lambda s, t: (s, [], 0.0, False)}, "answered row 0 with no tokens"),
        ({"environment": lambda s, t: (s, [99], 0.0, False)}, r"answered row 0 with \[99\]"),
        ({"max_turns": 0}, "max_turns=0"),
    ],
)
def test_impossible_conversations_are_named(params, key, change, message):
    asked = {"environment": add_up, "states": [[] for _ in range(16)], "max_turns": 3, "stop_tokens": tuple(range(9))}
    with pytest.raises(ValueError, match=message):
        run(params, key, how=converse, **(asked | change))


def test_the_three_ways_to_sample_take_the_options_of_a_request_with_its_defaults():
    fields = inspect.signature(checks.Request).parameters
    for function, lacks in ((sample, set()), (generate, set()), (converse, {"greedy", "continued"})):
        options = inspect.signature(function).parameters
        assert not [p for p in options.values() if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        assert fields.keys() - options.keys() == lacks
        assert all(options[name].default == fields[name].default for name in fields.keys() - lacks)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"block": 0}, "block=0"),
        ({"row_limits": jnp.ones(3, int)}, r"row_limits has shape \(3,\): pass one number a row"),
        ({"min_new_tokens": 25}, "min_new_tokens=25: must be between 0 and max_new_tokens=24"),
        ({"max_new_tokens": 61}, "needs 65 positions"),
        ({"stop_strings": stop_strings.build(["1"], TOKENIZER, vocab_size=12)}, "built for 12 tokens, the model has 9"),
    ],
)
def test_bad_arguments_are_named(params, key, change, message):
    with pytest.raises(ValueError, match=message):
        run(params, key, **change)
