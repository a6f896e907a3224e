"""The figures are those of their definitions, their intervals go by context, and too few texts are refused."""

from __future__ import annotations

import numpy as np
import pytest

from clearhead.errors import ArgumentError
from clearhead.guard.evaluate.metrics import (
    auroc,
    auroc_interval,
    ece,
    hit_within,
    overlaps,
    reliability,
    roc,
    share_interval,
    tpr_at,
    tpr_interval,
)  # fmt: skip


def drawn(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = rng.random(n) < 0.4
    return np.round(rng.normal(labels * 1.0), 1), labels  # rounded: many ties


@pytest.mark.parametrize("seed", range(5))
def test_auroc_is_the_share_of_pairs_in_the_right_order_ties_half(seed: int) -> None:
    scores, labels = drawn(200, seed)
    pairs = scores[labels][:, None] - scores[~labels][None]
    assert auroc(scores, labels) == pytest.approx(((pairs > 0) + 0.5 * (pairs == 0)).mean(), abs=1e-12)


def test_auroc_agrees_with_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    scores, labels = drawn(500)
    assert auroc(scores, labels) == pytest.approx(metrics.roc_auc_score(labels, scores), abs=1e-12)


@pytest.mark.parametrize("fpr", [0.05, 0.2])
def test_the_true_positive_rate_is_the_best_of_all_thresholds_that_keep_the_limit(fpr: float) -> None:
    scores, labels = drawn(300)
    best = max(
        (scores[labels] >= t).mean() for t in [*scores, np.inf] if (scores[~labels] >= t).mean() <= fpr
    )
    assert tpr_at(scores, labels, fpr) == pytest.approx(best)


def test_a_roc_runs_from_nothing_to_everything() -> None:
    curve = roc(*drawn(100))
    assert (curve.fpr[0], curve.tpr[0], curve.fpr[-1], curve.tpr[-1]) == (0, 0, 1, 1)
    assert (np.diff(curve.fpr) >= 0).all()
    assert (np.diff(curve.tpr) >= 0).all()


def test_one_class_only_is_refused_with_its_counts() -> None:
    with pytest.raises(ArgumentError, match="got 0 attacked and 3 benign"):
        auroc(np.array([0.1, 0.2, 0.3]), np.zeros(3, bool))


def test_scores_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(ArgumentError, match="1 are not"):
        auroc(np.array([0.1, np.nan]), np.array([True, False]))


def test_too_few_benign_texts_for_a_false_alarm_rate_are_refused() -> None:
    scores, labels = np.linspace(0, 1, 60), np.arange(60) % 2 == 0
    assert tpr_at(scores, labels, 0.05) >= 0
    with pytest.raises(ArgumentError, match="1% needs 100 benign texts at least, there are 30"):
        tpr_at(scores, labels, 0.01)


def test_an_interval_holds_the_figure_and_narrows_with_more_contexts() -> None:
    widths = []
    for n in (100, 1600):
        scores, labels = drawn(n)
        found = auroc_interval(scores, labels, [str(i) for i in range(n)], resamples=300)
        assert found.low is not None
        assert found.high is not None
        assert found.low < found.value < found.high
        widths.append(found.high - found.low)
    assert widths[1] < widths[0] / 2.5  # by the square root of 16, about


def test_copies_of_a_text_in_one_context_do_not_narrow_the_interval() -> None:
    scores, labels = drawn(80)
    names = [str(i) for i in range(80)]
    once = auroc_interval(scores, labels, names, resamples=400)
    copied = auroc_interval(
        np.repeat(scores, 9), np.repeat(labels, 9), list(np.repeat(names, 9)), resamples=400
    )
    assert (copied.low, copied.high) == pytest.approx((once.low, once.high), abs=1e-9)
    assert copied.n == 9 * once.n


def test_texts_of_one_context_have_no_interval() -> None:
    found = auroc_interval(*drawn(30), ["same"] * 30)
    assert (found.low, found.high, found.contexts) == (None, None, 1)


def test_the_interval_of_a_rate_fixes_its_threshold_in_every_resample() -> None:
    scores, labels = drawn(400)
    found = tpr_interval(scores, labels, [str(i) for i in range(400)], 0.05, resamples=300)
    assert found.low is not None
    assert found.high is not None
    assert 0 <= found.low <= found.value <= found.high <= 1


def test_no_false_alarm_among_forty_texts_leaves_nine_per_cent_open() -> None:
    found = share_interval(np.zeros(40, bool), [str(i) for i in range(40)])
    assert found.value == 0
    assert found.high == pytest.approx(1 - 0.025 ** (1 / 40))
    with pytest.raises(ArgumentError, match="at least one"):
        share_interval(np.zeros(0, bool), [])


def test_scores_that_are_shares_have_no_calibration_error() -> None:
    scores = np.repeat([0.2, 0.8], 50)
    labels = np.array([True] * 10 + [False] * 40 + [True] * 40 + [False] * 10)
    assert ece(scores, labels) == pytest.approx(0)
    assert ece(1 - scores, labels) == pytest.approx(0.6)
    assert [(b.n, b.share) for b in reliability(scores, labels)] == [(50, 0.2), (50, 0.8)]
    with pytest.raises(ArgumentError, match="0 to 1"):
        ece(scores * 2, labels)


@pytest.mark.parametrize(
    ("found", "hit"),
    [
        ((10, 20), True),
        ((0, 100), True),
        ((15, 30), True),
        ((16, 40), False),
        ((20, 30), False),
        ((12, 14), True),
    ],
)
def test_a_span_points_at_an_attack_by_half_of_the_shorter_one(found: tuple[int, int], hit: bool) -> None:
    assert overlaps(found, (10, 20)) is hit


def test_a_hit_counts_by_its_rank() -> None:
    ranked = [(30, 40), (10, 20)]
    assert [hit_within(ranked, (10, 20), k) for k in (1, 2)] == [False, True]
    assert not hit_within([], (10, 20), 1)
