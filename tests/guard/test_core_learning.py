"""The read-out is fitted right, on folds that keep apart what belongs together, and its odds are calibrated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.errors import ArgumentError, GuardError
from clearhead.guard import learning
from clearhead.guard.features import FLOOR, Reading
from clearhead.guard.learning import (
    Example,
    check_enough,
    columns,
    folded,
    folds,
    platt,
    reliability,
    span_classes,
    thresholds,
    train,
)
from clearhead.guard.logistic import fit
from clearhead.guard.readout import Readout, check_views, features, pooled
from clearhead.guard.samples import Sample


def clouds(n: int = 300, d: int = 5) -> tuple[Any, Any]:
    rng = np.random.default_rng(3)
    label = rng.integers(0, 3, n)
    x = (
        rng.normal(0, 1, (n, d)) * [1, 10, 0.1, 3, 1]
        + label[:, None] * [1, 5, 0.05, 0, -1]
        + [0, 50, 0, 0, 9]
    )
    return x.astype(np.float32), label


def test_with_all_labels_known_it_is_the_regression_of_scikit_learn() -> None:
    from sklearn.linear_model import LogisticRegression

    x, label = clouds()
    weight = np.where(label == 2, 2.0, 1.0).astype(np.float32)
    own = fit(x, label[:, None] == np.arange(3), weight, c=0.3, steps=400)
    theirs = LogisticRegression(C=0.3, tol=1e-10, max_iter=5000)
    theirs.fit((x.astype(np.float64) - own.mean) / own.scale, label, sample_weight=weight)
    np.testing.assert_allclose(own.weights, theirs.coef_.T, atol=3e-3)
    expected = theirs.predict_proba((x.astype(np.float64) - own.mean) / own.scale)
    np.testing.assert_allclose(own.probabilities(x), expected, atol=3e-3)


def test_labels_known_in_part_count_as_the_sum_of_their_probabilities() -> None:
    """Held against float64 gradient descent on the loss as the docstring has it."""
    x, label = clouds(60, 5)
    allowed = label[:, None] == np.arange(3)
    allowed[::3] |= np.array([True, True, False])
    allowed[::7] = True
    own = fit(x, allowed, np.ones(60, np.float32), c=0.1, steps=400)
    data = torch.from_numpy((x.astype(np.float64) - own.mean) / own.scale)
    weights, bias = (
        torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (own.weights, own.bias)
    )
    p = torch.softmax(data @ weights + bias, 1)
    loss = -torch.log((p * torch.from_numpy(allowed)).sum(1)).sum() + weights.square().sum() / 0.2
    loss.backward()
    assert weights.grad is not None
    assert bias.grad is not None
    assert max(weights.grad.abs().max(), bias.grad.abs().max()) < 1e-2 * 60  # the minimum: no slope is left


def test_examples_that_may_be_of_every_class_say_nothing() -> None:
    x, label = clouds()
    allowed = label[:, None] == np.arange(3)
    with_open = np.concatenate([allowed, np.ones((300, 3), bool)])
    one = fit(x, allowed, np.ones(300, np.float32), c=0.1, steps=300)
    two = fit(np.concatenate([x, x]), with_open, np.ones(600, np.float32), c=0.1, steps=300)
    np.testing.assert_allclose(one.probabilities(x), two.probabilities(x), atol=5e-3)


def test_the_weights_in_the_file_are_those_of_the_standardised_model() -> None:
    x, label = clouds()
    x = np.concatenate([x, np.full((300, 1), 7, np.float32)], 1)  # a feature that never changes
    model = fit(x, label[:, None] == np.arange(3), np.ones(300, np.float32), c=1.0)
    weights, bias = folded(model)
    z = model.logits(x)
    np.testing.assert_allclose(x @ weights + bias, z[:, 1:] - z[:, :1], atol=2e-2)
    readout = Readout(("attention",), weights, bias, 2.0, -1.0)
    odds = z[:, 2] - np.logaddexp(z[:, 0], z[:, 1])
    np.testing.assert_allclose(readout.span_odds(x), odds, atol=2e-2)
    assert readout.odds([readout.span_odds(x)], 2.0) == pytest.approx(
        2 * (odds.max() - np.log(2)) - 1, abs=5e-2
    )


def test_a_text_has_the_odds_of_its_strongest_span_shared_by_its_windows() -> None:
    windows = [np.array([-1.0, 2.0], np.float32), np.array([0.5], np.float32)]
    assert pooled(windows, 1) == pytest.approx(2.0)
    assert pooled(windows, 2) == pytest.approx(2.0 - np.log(2))


# ---------------------------------------------------------------------------------------------- features


def reading(sizes: Any = (2, 3)) -> Reading:
    rng = np.random.default_rng(0)
    spans = len(sizes)
    mass = rng.dirichlet(np.ones(spans + 2), (2, 4)).astype(np.float32)  # rows, heads, spans and two more
    return Reading(
        mass[..., 0], np.ascontiguousarray(mass[..., 2:].transpose(0, 2, 1)), np.array(sizes, np.float32),
        rng.normal(size=(2, spans, 6)).astype(np.float32), rng.normal(size=(2, 6)).astype(np.float32), 20,
    )  # fmt: skip


def test_the_features_are_what_the_docstring_says() -> None:
    r = reading()
    x = features(r, ("attention", "hidden"))
    assert x.shape == (2, 3 * 4 + 2 * (6 + 2) + 1)
    assert x.dtype == np.float32
    span, head = 1, 2
    own = np.log(r.spans[-1, span, head] / 3 + FLOOR)
    all_of_them = np.log(r.spans[-1, :, head].sum() / 5 + FLOOR)
    assert x[span, head] == pytest.approx(own, abs=1e-5)
    assert x[span, 4 + head] == pytest.approx(own - all_of_them, abs=1e-5)
    assert x[span, 8 + head] == pytest.approx(np.log(r.spans[0, span, head] / 3 + FLOOR), abs=1e-5)
    np.testing.assert_allclose(x[span, 12:18], r.hidden[0, span], rtol=1e-6)

    def cosine(a: Any, b: Any) -> float:
        return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))

    assert x[span, 18] == pytest.approx(cosine(r.hidden[0, span], r.task[0]), abs=1e-5)
    assert x[span, 19] == pytest.approx(cosine(r.hidden[0, span], r.hidden[0].mean(0)), abs=1e-5)
    assert x[span, -1] == pytest.approx(np.log(3))


@pytest.mark.parametrize("views", [("attention",), ("hidden",), ("attention", "hidden")])
def test_the_columns_of_some_views_are_their_features(views: tuple[str, ...]) -> None:
    r = reading()
    both = features(r, ("attention", "hidden"))
    np.testing.assert_array_equal(both[:, columns(views, 4, 6, 2)], features(r, views))


def test_a_span_without_a_token_of_its_own_has_finite_features() -> None:
    r = reading((2, 0))
    empty = replace(r, spans=r.spans * [[[1], [0]]], hidden=r.hidden * [[[1], [0]]])
    assert np.isfinite(features(empty, ("attention", "hidden"))).all()


@pytest.mark.parametrize("views", [(), "attention", ("attention", "pictures"), ("",)])
def test_views_that_are_none_are_refused(views: Any) -> None:
    with pytest.raises(ArgumentError, match="views must be one or both of attention, hidden"):
        check_views(views)


def test_views_come_in_one_order() -> None:
    assert check_views(["hidden", "attention"]) == ("attention", "hidden")


# ----------------------------------------------------------------------------------------------- samples


def sample(
    label: str = "none", *, at: Any = (None, None), family: str = "plain", context: str = "c"
) -> Sample:
    return Sample("Sum up.", "x" * 100, label, *at, family=family, context=context)


@pytest.mark.parametrize(
    ("given", "span", "classes"),
    [
        (sample(), (0, 50), "n"),
        (sample(family="document", label="imperative"), (0, 50), "ni"),
        (sample(family="quote"), (0, 50), "ni"),
        (sample("attack", at=(20, 60), family="f"), (20, 60), "a"),
        (sample("attack", at=(20, 60), family="f"), (10, 40), "a"),  # two thirds of it
        (sample("attack", at=(20, 60), family="f"), (0, 40), "nia"),  # half: who knows
        (sample("attack", at=(20, 60), family="f"), (0, 22), "ni"),  # under a tenth
        (sample("attack", at=(20, 60), family="f"), (60, 99), "ni"),
        (sample("attack", family="f"), (0, 50), "nia"),  # somewhere in the text
        (sample("attack"), (0, 50), "nia"),
        (sample("imperative", at=(20, 60), family="imperative"), (20, 60), "i"),
        (sample("imperative", at=(20, 60), family="imperative"), (0, 40), "ni"),
        (sample("imperative", at=(20, 60), family="imperative"), (60, 99), "ni"),
        (sample("none", at=(20, 60), family="statement"), (20, 60), "n"),
        (sample("attack", at=(20, 60), family="f"), (30, 30), "ni"),  # a span of nothing
    ],
)  # fmt: skip
def test_which_classes_a_span_may_be_of(given: Sample, span: tuple[int, int], classes: str) -> None:
    assert span_classes(given, *span) == [letter in classes for letter in "nia"]


@settings(max_examples=60, deadline=None)
@given(st.integers(4, 30), st.integers(1, 9), st.integers(0, 5))
def test_no_context_and_no_family_of_attacks_is_learned_from_and_judged(
    contexts: int, families: int, seed: int
) -> None:
    given = [
        sample("attack" if n % 2 else "none", at=(0, 9) if n % 2 else (None, None), family=f"f{n % families}" if n % 2 else "plain", context=f"c{n % contexts}")
        for n in range(240)
    ]  # fmt: skip
    tested = np.zeros(240, int)
    for train_side, test_side in folds(given, seed):
        assert not (train_side & test_side).any()
        learned = [s for s, here in zip(given, train_side, strict=True) if here]
        judged = [s for s, here in zip(given, test_side, strict=True) if here]
        assert not {s.context for s in learned} & {s.context for s in judged}
        if len({s.family for s in given if s.attacked}) > 1:
            assert not {s.family for s in learned if s.attacked} & {s.family for s in judged if s.attacked}
        tested += test_side
    assert all(tested[n] == 1 for n, s in enumerate(given) if not s.attacked)
    assert tested.max() == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "at least 20 texts with an attack and its place .*got 0"),
        (
            [sample("attack", at=(0, 9), context=str(n)) for n in range(50)],
            "at least 20 texts without an attack, got 0",
        ),
        (
            [sample(context=str(n)) for n in range(50)] + [sample("attack")] * 30,
            "with an attack and its place .*got 0",
        ),
        ([sample()] * 30 + [sample("attack", at=(0, 9))] * 30, "at least 4 contexts, got 1"),
    ],
)
def test_too_few_texts_are_refused_with_their_number(given: list[Sample], said: str) -> None:
    with pytest.raises(GuardError, match=said):
        check_enough(given)


def example(n: int, strength: float) -> Example:
    rng = np.random.default_rng(n)
    attacked = n % 2 == 1
    x = rng.normal(0, 1, (3, 5)).astype(np.float16)
    x[0, 0] += strength * attacked
    given = sample("attack" if attacked else "none", at=(0, 30) if attacked else (None, None), family=f"f{n % 5}" if attacked else "plain", context=f"c{n % 12}")  # fmt: skip
    allowed = np.array([span_classes(given, a, a + 30) for a in (0, 30, 60)])
    return Example(given, (x,), allowed[None], np.zeros(4, np.float32), 30.0, 0.1, np.zeros(3, np.float32))


def test_what_is_learned_finds_texts_that_were_held_out() -> None:
    examples = [example(n, 6.0) for n in range(200)]
    found = train(examples, ("attention",), np.arange(5))
    attacked = np.array([examples[n].sample.attacked for n in found.tested])
    assert (found.odds[attacked] > 0).mean() > 0.9
    assert (found.odds[~attacked] < 0).mean() > 0.9


def test_pairs_from_which_nothing_is_learned_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "odds_of", lambda model, e, chosen: -float(e.sample.attacked))
    with pytest.raises(GuardError, match="nothing was learned from these pairs"):
        train([example(n, 0.0) for n in range(80)], ("attention",), np.arange(5))


# ------------------------------------------------------------------------------------------- calibration


def drawn(slope: float, offset: float, n: int = 20_000) -> tuple[Any, Any]:
    rng = np.random.default_rng(1)
    true = rng.normal(0, 2, n)
    attacked = rng.random(n) < 1 / (1 + np.exp(-true))
    return (true - offset) / slope, attacked


@pytest.mark.parametrize(("slope", "offset"), [(1.0, 0.0), (0.1, 2.0), (8.0, -3.0)])
def test_odds_are_calibrated_whatever_their_scale(slope: float, offset: float) -> None:
    odds, attacked = drawn(slope, offset)
    a, b = platt(odds, attacked)
    assert a == pytest.approx(slope, rel=0.06)
    assert b == pytest.approx(offset, abs=0.25)
    for mean, share, count in reliability(a * odds + b, attacked):
        assert share == pytest.approx(mean, abs=0.06 + 1.5 / np.sqrt(count))


def test_classes_count_alike_however_many_texts_they_have() -> None:
    odds, attacked = drawn(1.0, 0.0)
    many = np.concatenate([odds, np.repeat(odds[~attacked], 9)])
    assert platt(many, np.concatenate([attacked, np.zeros(9 * int((~attacked).sum()), bool)])) == pytest.approx(platt(odds, attacked), abs=1e-5)  # fmt: skip


@pytest.mark.parametrize("distance", [0.01, 1.0, 40.0, 1000.0])
def test_odds_without_an_error_stay_finite_and_in_order(distance: float) -> None:
    attacked = np.arange(60) % 2 == 1
    slope, offset = platt(np.where(attacked, distance, -distance) + 5 * distance, attacked)
    assert np.isfinite([slope, offset]).all()
    assert slope > 0


def test_odds_that_say_nothing_have_no_slope() -> None:
    slope, offset = platt(np.zeros(40), np.arange(40) % 2 == 1)
    assert np.isfinite([slope, offset]).all()
    assert offset == pytest.approx(0, abs=1e-6)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["plain", "imperative", "quote"]), st.integers(-8, 8)),
        min_size=1,
        max_size=80,
    )
)
def test_no_more_benign_texts_are_flagged_than_the_preset_says(texts: list[tuple[str, int]]) -> None:
    odds = np.array([float(v) for _, v in texts])
    families = [family for family, _ in texts]
    last = 1.0
    for flag, block in ((0.05, 0.01), (0.01, 0.002), (0.001, 0.001)):
        found = thresholds(odds, families, (flag, block), "these")
        scores = 1 / (1 + np.exp(-odds))
        shares = [np.mean(scores[[f == name for f in families]] >= found.flag) for name in set(families)]
        assert np.mean(shares) == pytest.approx(found.flag_fpr, abs=1e-9)
        assert found.flag_fpr <= flag + 1e-9
        assert found.block_fpr <= block + 1e-9
        assert 0 <= found.flag <= found.block <= 1
        assert (found.benign, found.fixed_on) == (len(texts), "these")
        if flag < 0.05:
            assert found.flag >= last
        last = found.flag


def test_a_threshold_lets_through_as_many_as_it_may() -> None:
    found = thresholds(np.linspace(-3, 3, 100), ["plain"] * 100, (0.05, 0.01), "these")
    assert (found.flag_fpr, found.block_fpr) == (pytest.approx(0.05), pytest.approx(0.01))


def test_the_rows_of_the_reliability_plot() -> None:
    odds = np.log(np.array([0.05, 0.05, 0.95, 0.95]) / np.array([0.95, 0.95, 0.05, 0.05]))
    rows = reliability(odds, np.array([False, False, True, False]))
    assert [row[2] for row in rows] == [2, 2]
    assert rows[0][:2] == pytest.approx((0.05, 0.0))
    assert rows[1][:2] == pytest.approx((0.95, 3 / 4))  # one of one attack against one of three others
