"""Prompts that do not fit are replaced, counted and told; what is drawn stays a function of seed and index."""

import dataclasses

import pytest

from jaxpg.data import characters, fitting
from jaxpg.tasks import draws

TOKENIZER = characters("0123456789.")


@dataclasses.dataclass(frozen=True)
class Source:
    """Prompts of dots: 1 to 9 of them in an endless stream, or those given."""

    rows: tuple = ()
    tests: tuple = ("5.....",)
    prompt_length: int | None = None

    @property
    def size(self):
        return len(self.rows) or None

    def problems(self, seed, start, count):
        if self.rows:
            return draws.pick(self.rows, seed, start, count)
        drawn = [draws.number(f"{seed}/{i}") for i in range(start, start + count)]
        return [str(bits) + "." * (bits % 9 + 1) for bits in drawn]

    def held_out(self, count):
        if count > len(self.tests):
            raise ValueError(f"count={count}: there are {len(self.tests)}")
        return self.tests[:count]


def dots(problems):
    return [problem.lstrip("0123456789") for problem in problems]


def fit(source, *, length, held_out=1, policy="drop"):
    return fitting.fit(source, dots, TOKENIZER, length=length, held_out=held_out, policy=policy)


def test_fits_says_what_has_room():
    assert fitting.fits(TOKENIZER, ["", "12", "123"], 2) == [True, True, False]
    assert fitting.token_counts(TOKENIZER, ["1"] * 2000 + ["123"])[-2:] == [1, 3]


def test_batches_of_an_endless_task_stay_full_and_each_problem_is_a_function_of_seed_and_index():
    source = Source()
    fitted = fit(source, length=5)
    whole = fitted.problems(3, 0, 60)
    assert len(whole) == 60 and max(map(len, dots(whole))) == 5
    assert fitted.problems(3, 10, 7) == whole[10:17]
    assert [fitted.problems(3, i, 1)[0] for i in range(20)] == whole[:20]
    assert fit(source, length=5).problems(3, 0, 60) == whole, "whatever was drawn before"
    kept = [a == b for a, b in zip(source.problems(3, 0, 60), whole, strict=True)]
    fine = [len(text) <= 5 for text in dots(source.problems(3, 0, 60))]
    assert kept == fine and not all(fine), "what fits keeps its place"
    assert len(set(whole)) == 60 and fitted.problems(4, 0, 60) != whole
    assert fitted.size is None


def test_different_prompts_that_did_not_fit_are_counted_once():
    fitted = fit(Source(), length=5)
    assert fitted.dropped == 4, "6, 7, 8 and 9 dots"
    fitted.problems(5, 0, 100)
    assert fitted.dropped == 4


def test_a_finite_set_is_checked_entirely_and_filtered_once():
    rows = tuple(f"{i}" + "." * (9 if i in (7, 990) else 2) for i in range(1000))
    fitted = fit(Source(rows), length=5)
    assert (fitted.dropped, fitted.size) == (1, 998), "two rows of one prompt"
    drawn = fitted.problems(0, 0, 3000)
    assert drawn[:998] != drawn[998:1996], "each pass has an order of its own"
    for one_pass in (drawn[:998], drawn[998:1996]):
        assert sorted(one_pass) == sorted(set(rows) - {rows[7], rows[990]}), "each row once"
    assert fitted.problems(0, 995, 10) == drawn[995:1005]
    with pytest.raises(
        ValueError, match=r"stop: 2 of 1000 prompts do not fit --prompt-length=5, the longest has 9 tok"
    ):
        fit(Source(rows), length=5, policy="stop")


def test_a_set_that_fits_is_left_as_it_is():
    source = Source(tuple(f"{i}.." for i in range(10)))
    for policy in fitting.POLICIES:
        fitted = fit(source, length=5, policy=policy)
        assert fitted.problems(1, 3, 20) == source.problems(1, 3, 20)
        assert (fitted.dropped, fitted.size, fitted.held_out) == (0, 10, ["5....."])


def test_held_out_prompts_that_do_not_fit_are_replaced_by_further_ones():
    source = Source(tests=("0......", "1.", "2..", "3.......", "4...."))
    fitted = fit(source, length=4, held_out=3)
    assert list(fitted.held_out) == ["1.", "2..", "4...."]
    with pytest.raises(ValueError, match=r"--held-out=4: only 3 of 5 held-out prompts fit --prompt-length=4: ask for"):
        fit(source, length=4, held_out=4)
    with pytest.raises(ValueError, match="stop: 2 of 5 prompts"):
        fit(Source(("1.",), source.tests), length=4, held_out=5, policy="stop")
    with pytest.raises(ValueError, match="count=6: there are 5"):
        fit(source, length=9, held_out=6)
    with pytest.raises(ValueError, match="only 0 of 1 held-out"):
        fit(Source(tests=("0......",)), length=4)


def test_the_length_is_what_the_task_needs_or_the_longest_prompt():
    assert fit(Source(prompt_length=12), length=None).length == 12
    assert fit(Source(("1..", "1...")), length=None).length == len(".....")
    assert fit(Source(), length=None).length == 9


def test_what_cannot_be_is_named():
    with pytest.raises(ValueError, match="none of the first 2 training prompts fits, the shortest has 2 tokens"):
        fit(Source(("1..", "1...")), length=1)
    with pytest.raises(ValueError, match="--long-prompts=cut: choose among drop, stop"):
        fit(Source(), length=1, policy="cut")
    with pytest.raises(ValueError, match="--prompt-length=0: must be at least 1"):
        fit(Source(), length=0)


def test_an_endless_stream_without_any_prompt_that_fits_ends(monkeypatch):
    fitted = fit(Source(tests=("1.",)), length=1)
    monkeypatch.setattr(Source, "problems", lambda self, seed, start, count: ["0.."] * count)
    with pytest.raises(ValueError, match="1000 prompts in a row do not fit"):
        fitted.problems(0, 0, 1)
