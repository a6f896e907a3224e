"""What a look at the text alone reaches: its length, patterns, TF-IDF with a logistic regression."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from clearhead.errors import ArgumentError, MissingExtraError
from clearhead.guard.evaluate.metrics import Floats
from clearhead.guard.evaluate.splits import Indices
from clearhead.guard.samples import Sample

Predict = Callable[[Indices], Floats]


class Learner(Protocol):
    """Something that is fitted to some of the samples and scores others; made for one list of samples.

    name: for tables. about: what it is. learns: whether fitting does anything.
    """

    name: str
    about: str
    learns: bool

    def fit(self, train: Indices) -> Predict:
        """Return what scores samples by number, 0 to 1, higher for attacks."""
        ...


class Length:
    """The text's length alone: a logistic regression on its logarithm."""

    name, about, learns = "length", "length of the text alone", True

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.x = np.log([max(1, len(s.text)) for s in samples])
        self.y = np.array([s.attacked for s in samples])

    def fit(self, train: Indices) -> Predict:
        """Return the probability at each length."""
        from clearhead.guard.learning import platt

        slope, offset = platt(self.x[train], self.y[train])
        return lambda test: np.asarray(1 / (1 + np.exp(-(slope * self.x[test] + offset))), np.float64)


#: Phrases that lists of blocked words are made of, in four languages.
PATTERNS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"\b(ignore|disregard|forget|override|bypass)\b.{0,40}\b(previous|prior|above|earlier|all|your)\b",
        r"\b(system|developer|hidden) (prompt|message|instructions?)\b",
        r"\b(you are|act as|pretend to be|from) now( on)?\b",
        r"\b(new|real|actual|updated) (task|instructions?|orders?)\b",
        r"\b(instead of|rather than) (answering|summari[sz]ing|the (task|question))",
        r"\b(do not|don't|never) (answer|mention|tell|summari[sz]e|reveal)\b",
        r"\b(assistant|chatbot|language model|ai model|llm)\b",
        r"\b(jailbreak|DAN mode|developer mode|no restrictions)\b",
        r"<\|?(im_start|system|assistant|endoftext)\|?>|\[/?INST\]|###\s*(instruction|system)",
        r"\b(your (answer|reply|response|summary)|the (answer|summary)) (must|should|shall|has to)\b",
        r"\b(add|append|include|insert|put)\b.{0,60}\b(answer|reply|response|summary)\b",
        r"\b(send|forward|post)\b.{0,60}\b(https?://|@|password|conversation)",
        r"\b(ignoriere|vergiss|missachte)\w*\b.{0,40}\b(anweisung|vorherig|bisherig)\w*",
        r"\b(ignora|olvida)\w*\b.{0,40}\b(instrucci|anterior)\w*",
        r"(忽略|无视|忘记).{0,20}(指令|指示|之前|上面|以上)",
    )
)


class Keywords:
    """How many of `PATTERNS` occur: 1 − 2^−count."""

    name, about, learns = "keywords", f"list of {len(PATTERNS)} patterns", False

    def __init__(self, samples: Sequence[Sample]) -> None:
        counts = [sum(bool(p.search(s.text)) for p in PATTERNS) for s in samples]
        self.scores = 1 - 2.0 ** -np.array(counts, np.float64)

    def fit(self, train: Indices) -> Predict:
        """Return the scores: there is nothing to learn."""
        return lambda test: np.asarray(self.scores[test])


class Tfidf:
    """TF-IDF of the text's n-grams, hashed, with an L2 logistic regression (C = 10, classes balanced).

    by: "word" (1 and 2 words) or "char" (3 to 5 characters within words). Counts are made once; the weights
    of rare n-grams are learned from the texts to learn from only.

    Raises MissingExtraError without scikit-learn.
    """

    learns = True

    def __init__(self, samples: Sequence[Sample], by: str = "word") -> None:
        if by not in ("word", "char"):
            raise ArgumentError(f"by must be word or char, got {by!r}")
        try:
            from sklearn.feature_extraction.text import HashingVectorizer
        except ImportError as error:
            raise MissingExtraError(
                "the TF-IDF baselines need scikit-learn: pip install 'clearhead[guard]'"
            ) from error
        grams = "1–2 words" if by == "word" else "3–5 characters"
        self.name, self.about = f"TF-IDF {by}", f"TF-IDF of {grams}, logistic regression"
        vectorizer = HashingVectorizer(
            analyzer="word" if by == "word" else "char_wb",
            ngram_range=(1, 2) if by == "word" else (3, 5),
            token_pattern=r"(?u)\b\w+\b|[\u4e00-\u9fff]" if by == "word" else None,
            n_features=2**18,
            alternate_sign=False,
            norm=None,
        )
        self.counts: Any = vectorizer.transform([s.text for s in samples])
        self.y = np.array([s.attacked for s in samples])

    def fit(self, train: Indices) -> Predict:
        """Return the probability of an attack."""
        from sklearn.feature_extraction.text import TfidfTransformer
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline

        model = make_pipeline(
            TfidfTransformer(sublinear_tf=True),
            LogisticRegression(C=10.0, class_weight="balanced", max_iter=300, solver="liblinear"),
        )
        model.fit(self.counts[train], self.y[train])
        return lambda test: np.asarray(model.predict_proba(self.counts[test])[:, 1], np.float64)


class Fitted:
    """A read-out fitted anew on features that were read once; see `refitting`.

    features: one item per sample. fit: from items and samples to something with `score(item)` -> 0…1.
    """

    learns = True

    def __init__(
        self,
        name: str,
        about: str,
        samples: Sequence[Sample],
        features: Sequence[Any],
        fit: Callable[[Sequence[Any], Sequence[Sample]], Callable[[Any], float]],
    ) -> None:
        if len(samples) != len(features):
            raise ArgumentError(f"features must be one per sample, got {len(features)} for {len(samples)}")
        self.name, self.about = name, about
        self.samples, self.features, self._fit = samples, features, fit

    def fit(self, train: Indices) -> Predict:
        """Return the fitted read-out."""
        score = self._fit([self.features[i] for i in train], [self.samples[i] for i in train])
        return lambda test: np.array([score(self.features[i]) for i in test], np.float64)


def learners(samples: Sequence[Sample]) -> list[Learner]:
    """Return all baselines that look at the text alone. Raises MissingExtraError without scikit-learn."""
    return [Length(samples), Keywords(samples), Tfidf(samples, "word"), Tfidf(samples, "char")]
