"""From a case to the lines of the table: check, time, compare, judge.

A line is a plain dict, as it stands in the JSON. The first line of a case has our rate and its share of the
ceiling; each peer has a line of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from clearhead.errors import ClearheadError
from speed.case import Case, Error, Setup, WrongResultError
from speed.pairs import Budget, Spread, Times, measure

Line = dict[str, Any]
OURS, MULTIPLY, READ, SUM = "ours", "multiply", "read", "sum"
#: Our mean error may be this many times that of the peer: the outputs are rounded to bfloat16, both of them.
SAME_ERROR = 1.05


def run(make: Callable[[], Case], setup: Setup, budget: Budget, machine: str | None) -> list[Line]:
    """Return the lines of one case; one that says why where there is no figure."""
    case = None
    try:
        case = make()
        errors = case.check()
    except WrongResultError as error:
        return [_without(make, case, f"WRONG: {error}", wrong=True)]
    except (ClearheadError, AttributeError, NotImplementedError) as error:  # not there (yet), or refused
        return [_without(make, case, f"not done: {str(error) or type(error).__name__}")]
    forms = {OURS: case.ours, **case.peers}
    bounds: dict[str, float] = {}  # work of one call of a ceiling's loop: operations or bytes
    if setup.ceilings is not None and MULTIPLY in case.shares and case.operations:
        kind = setup.multiply_bf16 if case.bf16 else setup.multiply
        if kind:
            forms[MULTIPLY], bounds[MULTIPLY] = setup.ceilings.spin(kind, setup.threads)
    if case.stored and READ in case.shares:
        if setup.ceilings is not None:
            forms[READ], bounds[READ] = setup.ceilings.reader(list(case.stored), setup.threads)
        forms[SUM] = lambda: [
            t.view(-1).float().sum() if t.dtype.itemsize < 4 else t.sum() for t in case.stored
        ]
        if any(t.dtype.itemsize < 4 for t in case.stored):
            del forms[SUM]  # torch widens the tensor first: no measure of reading
    times = measure(forms, budget)
    return _judged(case, times, bounds, errors, machine)


def _judged(
    case: Case, times: Times, bounds: dict[str, float], errors: dict[str, Error], machine: str | None
) -> list[Line]:
    ours = times.median(OURS)
    shares = {name: _share(case, times, name, work) for name, work in bounds.items()}
    goals = {name: case.shares[name].on(machine) for name in shares}
    met = [share.middle >= goals[name] for name, share in shares.items() if goals[name] is not None]
    lines = []
    for peer in case.peers or [""]:
        line: Line = {
            "work": case.work,
            "shape": case.shape,
            "ours ms": ours * 1e3,
            "rounds": times.rounds,
            "goal": None,
        }
        line["key"] = case.key
        verdicts, wanted = [], []
        if peer:
            ratio = times.ratio(peer, OURS)
            goal = case.ratios[peer].on(machine) if peer in case.ratios else None
            line |= {"peer": peer, "peer ms": times.median(peer) * 1e3, "ratio": ratio._asdict()}
            line["added"] = case.added
            line["goal"] = goal
            if shares and not case.added:  # were our call as fast as the slower of its ceilings
                line["ratio at the ceiling"] = ratio.middle / max(share.middle for share in shares.values())
            if goal is not None:
                verdicts.append(ratio.middle >= goal)
                wanted.append(_goal_in_words(goal, case.added))
        if not lines:  # what belongs to the case stands in its first line
            line |= _rates(case, times, shares)
            if met:
                verdicts.append(any(met))  # where two ceilings are named, the slower one binds
                parts = (f"{goals[name]:.0%} of {name}" for name in shares if goals[name] is not None)
                wanted.append("≥ " + " or ".join(parts))
            line["errors"] = {name: error._asdict() for name, error in errors.items()}
            if case.error_of and case.error_of in errors:
                verdicts.append(errors[OURS].mean <= SAME_ERROR * errors[case.error_of].mean)
                wanted.append("error ≤ peer's")
            line["note"] = case.note
        line["target"] = ", ".join(wanted)
        line["verdicts"] = verdicts
        line["reached"] = all(verdicts) if verdicts else None
        lines.append(line)
    return lines


def _share(case: Case, times: Times, name: str, work: float) -> Spread:
    """Our rate over the ceiling's, round by round."""
    mine = case.operations if name == MULTIPLY else work
    ratio = times.ratio(name, OURS)
    return Spread(*(mine / work * value for value in ratio))


def _rates(case: Case, times: Times, shares: dict[str, Spread]) -> Line:
    ours, found = times.median(OURS), {}
    if case.operations:
        found["GF/s"] = case.operations / ours / 1e9
    if case.stored:
        size = sum(t.numel() * t.element_size() for t in case.stored)
        found["GB/s"] = size / ours / 1e9
        if READ in shares:
            found["read loop GB/s"] = size / times.median(READ) / 1e9
        if SUM in times.seconds:
            found["torch.sum GB/s"] = size / times.median(SUM) / 1e9
    return {**found, "shares": {name: share._asdict() for name, share in shares.items()}}


def _goal_in_words(goal: float, added: bool) -> str:
    if added:
        return f"≤ +{1 / goal - 1:.0%}"
    if goal < 1:
        return f"≥ {goal:.2f}×"
    return f"≥ {goal:g}×"


def _without(make: Callable[[], Case], case: Case | None, why: str, *, wrong: bool = False) -> Line:
    if case is not None:
        line: Line = {"work": case.work, "shape": case.shape}
    else:  # it could not even be set up
        parts = [str(part) for part in getattr(make, "args", ()) if not isinstance(part, Setup)]
        line = {"work": getattr(getattr(make, "func", make), "__name__", "?"), "shape": ", ".join(parts)}
    return line | {"why": why, "wrong": wrong, "reached": None, "verdicts": []}
