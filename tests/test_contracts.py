"""What every function of the math modules promises its caller: its signature, and errors that say what to do.

Over the table of `test_laws`. A ValueError names the argument, what it was and what it must be, while tracing.
"""

import inspect
import numbers

import jax
import numpy as np
import pytest
from test_laws import CASES, MASK, MODULES, arguments, names_of

# Free shapes: scalars that broadcast.
CONTROLLERS = ("kl.double_or_halve", "kl.proportional")
SEVERAL = [
    (name, argument)
    for name, case in CASES.items()
    for argument in names_of(case)
    if len(names_of(case)) > 1 and name not in CONTROLLERS
]
WITH_MASK = [(name, argument) for name, argument in SEVERAL if argument in ("mask", "valid")]
WITH_SEGMENTS = [(name, argument) for name, argument in SEVERAL if argument in ("segments", "tokens")]
NOT_EMPTY = [name for name in CASES if name.split(".")[0] in ("segments", "returns", "advantages", "aggregate")]
NOT_EMPTY.remove("advantages.overlong_penalty")  # of single responses
# Any number will do.
FREE = {"masked.fill": "value", "losses.entropy_bonus": "coef", "advantages.pass_at_k": "threshold"}
FREE |= {"preference.bradley_terry": "margin"}

# Section 5 of the design's algorithms: these stay as they are; further keyword-only arguments may join.
SIGNATURES = {
    "returns.reward_to_go": lambda rewards, mask, *, discount=1.0: 0,
    "returns.n_step": lambda rewards, values, mask, *, n, discount=1.0, bootstrap=None: 0,
    "returns.lambda_returns": lambda rewards, values, mask, *, discount=1.0, lambda_=0.95, bootstrap=None: 0,
    "returns.gae": lambda rewards, values, mask, *, discount=1.0, lambda_=0.95, bootstrap=None: 0,
    "advantages.group_centered": lambda rewards, valid=None: 0,
    "advantages.group_normalized": lambda rewards, valid=None, *, ddof=0, epsilon=1e-6: 0,
    "advantages.leave_one_out": lambda rewards, valid=None: 0,
    "advantages.greedy_baseline": lambda rewards, greedy_rewards, valid=None: 0,
    "masked.whiten": lambda x, mask, *, ddof=0, epsilon=1e-8, shift_mean=True: 0,
    "kl.k1": lambda log_probs, ref_log_probs, *, clamp=None: 0,
    "kl.k2": lambda log_probs, ref_log_probs, *, clamp=None: 0,
    "kl.k3": lambda log_probs, ref_log_probs, *, clamp=None: 0,
    "kl.exact": lambda logits, ref_logits: 0,
    "kl.double_or_halve": lambda coef, kl, *, low, high: 0,
    "kl.proportional": lambda coef, kl, *, target, horizon, batch: 0,
    "ratios.token": lambda log_probs, old_log_probs: 0,
    "ratios.segment_product": lambda log_probs, old_log_probs, segments, mask: 0,
    "ratios.segment_mean": lambda log_probs, old_log_probs, segments, mask: 0,
    "ratios.truncated": lambda log_probs, sampler_log_probs, *, cap: 0,
    "losses.reinforce": lambda log_probs, advantages: 0,
    "losses.surrogate": lambda log_probs, old_log_probs, advantages: 0,
    "losses.ppo_clip": lambda log_probs, old_log_probs, advantages, *, clip_low=0.2, clip_high=0.2, dual_clip=None: 0,
    "losses.gspo": lambda log_probs, old_log_probs, advantages, mask, *, clip_low=3e-4, clip_high=4e-4: 0,
    "losses.cispo": lambda log_probs, old_log_probs, advantages, *, clip_low=1.0, clip_high: 0,
    "value_losses.squared": lambda values, returns: 0,
    "value_losses.clipped": lambda values, old_values, returns, *, clip: 0,
    "aggregate.token_mean": lambda x, mask: 0,
    "aggregate.sequence_mean_token_mean": lambda x, mask, *, count_empty=False: 0,
    "aggregate.sequence_mean_token_sum": lambda x, mask: 0,
    "aggregate.constant_length": lambda x, mask, *, length: 0,
    "logprobs.token_log_probs": lambda logits, tokens, *, temperature=1.0: 0,
}


def numbers_of(name: str) -> list[str]:
    """Keyword-only arguments that are given, or default to, a plain number."""
    case = CASES[name]
    given = inspect.signature(case.function).parameters
    defaults = {key: p.default for key, p in given.items() if p.kind is p.KEYWORD_ONLY} | case.options
    plain = [k for k, v in defaults.items() if isinstance(v, numbers.Real) and not isinstance(v, bool) and k != "axis"]
    return [key for key in plain if FREE.get(name) != key]


def call(name, **changes):
    case = CASES[name]
    jax.eval_shape(lambda: case.function(**arguments(case, MASK) | case.options | changes))


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_stay(name):
    module, function = name.split(".")
    modules = {m.__name__: m for m in MODULES}
    got = inspect.signature(getattr(modules[f"jaxpg.estimators.{module}"], function)).parameters
    expected = inspect.signature(SIGNATURES[name]).parameters
    positional = [key for key, p in got.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == [key for key, p in expected.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert {key: got[key].default for key in expected} == {key: p.default for key, p in expected.items()}
    assert all(got[key].default is not inspect.Parameter.empty for key in got.keys() - expected.keys())


@pytest.mark.parametrize("name", CASES)
def test_arrays_are_positional_and_hyper_parameters_keyword_only(name):
    kinds = inspect.signature(CASES[name].function).parameters.values()
    assert all(p.default in (p.empty, None) for p in kinds if p.kind is p.POSITIONAL_OR_KEYWORD)


@pytest.mark.parametrize(("name", "argument"), SEVERAL)
def test_a_wrong_shape_is_named(name, argument):
    """One row too few, and one token too few. Where all others are compared to the argument, one of them is named."""
    x, names = arguments(CASES[name], MASK)[argument], names_of(CASES[name])
    leads = argument == names[0] or (name.startswith("segments") and argument == "mask")
    named = f"({'|'.join(names)})" if leads else argument
    with pytest.raises(ValueError, match=rf"^{named} has shape \(.*\): must be \(.*\)"):
        call(name, **{argument: x[:1]})
    if x.shape == MASK.shape and name != "segments.place_outcome":  # which reads one array per token only
        with pytest.raises(ValueError, match=rf"^{named} has shape \(.*\): must be \(.*\)"):
            call(name, **{argument: x[..., :-1]})


@pytest.mark.parametrize(("name", "argument"), WITH_MASK)
@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_a_mask_that_is_not_boolean_is_named(name, argument, dtype):
    with pytest.raises(ValueError, match=rf"^{argument} has dtype \w+32: must be bool; write {argument} > 0"):
        call(name, **{argument: MASK.astype(dtype)})


@pytest.mark.parametrize(("name", "argument"), WITH_SEGMENTS)
def test_numbers_that_are_not_integers_are_named(name, argument):
    with pytest.raises(ValueError, match=rf"^{argument} has dtype float32: must be integer; write {argument}.astype"):
        call(name, **{argument: np.zeros(MASK.shape, np.float32)})


@pytest.mark.parametrize("name", NOT_EMPTY)
def test_an_empty_group_or_sequence_is_named(name):
    empty = arguments(CASES[name], MASK[..., :0])
    with pytest.raises(ValueError, match=rf"^({'|'.join(empty)}) has shape \(2, 3, 0.*\): .* at least "):
        call(name, **empty)


@pytest.mark.parametrize(("name", "number"), [(name, key) for name in CASES for key in numbers_of(name)])
def test_a_negative_number_is_named(name, number):
    with pytest.raises(ValueError, match=rf"^{number}=-1: must "):
        call(name, **{number: -1})


@pytest.mark.parametrize(("name", "number"), [(name, key) for name in CASES for key in numbers_of(name)])
def test_a_number_that_is_nan_is_named(name, number):
    with pytest.raises(ValueError, match=rf"^{number}=nan: must "):
        call(name, **{number: float("nan")})
