"""A claim, what we got, and the verdict: the only place where verdicts are made."""

from __future__ import annotations

import dataclasses
import enum
import math


class Verdict(enum.StrEnum):
    """What became of a claim."""

    EXACT = "exact"
    REPRODUCED = "reproduced"
    DIRECTION = "same direction, other size"
    NOT = "not reproduced"
    UNCHECKED = "cannot be checked"


KINDS = ("computed", "simulated", "modelled", "measured", "none")
MARKS = {
    "P": "stated in the paper",
    "AE": "from the authors' artifact",
    "3P": "a third party's reading of the paper's graphics",
    "~": "read off a plot by eye",
    "calc": "arithmetic on the paper's numbers",
    "seed": "claimed elsewhere, without a source",
}


@dataclasses.dataclass(frozen=True)
class Claim:
    """A line of the table.

    Attributes:
      source: figure, table or section.
      what: the claim in words.
      paper: what the paper has, formatted.
      mark: how well that is known; a key of MARKS.
      ours: what we got, formatted.
      kind: how we got it; one of KINDS.
      verdict: see the functions below.
      rule: what was asked for, with numbers.
      note: what a reader must know beside it.
      values: the bare numbers, for the JSON.
    """

    source: str
    what: str
    paper: str
    mark: str
    ours: str
    kind: str
    verdict: Verdict
    rule: str = ""
    note: str = ""
    values: dict[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.mark not in MARKS:
            raise ValueError(f"mark: must be one of {', '.join(MARKS)}, got {self.mark!r}")
        if self.kind not in KINDS:
            raise ValueError(f"kind: must be one of {', '.join(KINDS)}, got {self.kind!r}")


def _decimals(printed: str) -> int:
    return len(printed.partition(".")[2])


def exact(
    source: str, what: str, printed: str, ours: float, *, kind: str, unit: str = "", mark: str = "P", note: str = ""
) -> Claim:
    """Equal to all digits that are printed, or not reproduced.

    Args:
      printed: the paper's number with its digits: "8.9" asks for one decimal, "15728" for the whole number.
    """
    same = not math.isnan(ours) and f"{ours:.{_decimals(printed)}f}" == printed
    shown = f"{ours:.{_decimals(printed) + (0 if same else 1)}f}"
    return Claim(
        source,
        what,
        f"{printed}{unit}",
        mark,
        f"{shown}{unit}",
        kind,
        Verdict.EXACT if same else Verdict.NOT,
        "equal in every printed digit",
        note,
        {"paper": float(printed), "ours": ours},
    )


def near(
    source: str,
    what: str,
    printed: str,
    ours: float,
    spread: tuple[float, float],
    *,
    kind: str,
    unit: str = "",
    mark: str = "P",
    than: float | None = None,
    note: str = "",
) -> Claim:
    """The paper's number lies within what ours may be.

    Args:
      printed: the paper's number with its digits.
      ours: our number.
      spread: (least, most) of ours when what the paper leaves open is varied; half a unit of the last printed digit is added.
      than: the number of what the claim compares with; on the same side of it is the same direction.
    """
    paper, half = float(printed), 0.5 * 10.0 ** -_decimals(printed)
    low, high = min(ours, *spread) - half, max(ours, *spread) + half
    digits = _decimals(printed)
    if low <= paper <= high:
        verdict = Verdict.REPRODUCED
    elif than is not None and (paper - than) * (ours - than) > 0:
        verdict = Verdict.DIRECTION
    else:
        verdict = Verdict.NOT
    rule = f"the paper's number in [{low:.{digits + 1}f}, {high:.{digits + 1}f}]"
    return Claim(
        source,
        what,
        f"{printed}{unit}",
        mark,
        f"{ours:.{digits}f}{unit}",
        kind,
        verdict,
        rule,
        note,
        {"paper": paper, "ours": ours, "low": low, "high": high},
    )


def within(
    source: str,
    what: str,
    paper: tuple[float, float],
    ours: float,
    *,
    kind: str,
    unit: str = "",
    mark: str = "P",
    than: float | None = None,
    digits: int = 2,
    shown: str = "",
    note: str = "",
) -> Claim:
    """Ours lies in the range that is claimed, its ends included.

    Args:
      paper: (least, most); an end may be infinite.
      than: as for `near`.
      shown: the claim as it is printed, if not "least-most".
    """
    low, high = paper
    rounded = round(ours, digits) if not math.isnan(ours) else ours
    if low <= rounded <= high:
        verdict = Verdict.REPRODUCED
    elif than is not None and _side(low, high, than) * (ours - than) > 0:
        verdict = Verdict.DIRECTION
    else:
        verdict = Verdict.NOT
    values = {"low": low, "high": high, "ours": ours}
    return Claim(
        source,
        what,
        shown or f"{low:g}{unit} to {high:g}{unit}",
        mark,
        f"{ours:.{digits}f}{unit}",
        kind,
        verdict,
        f"ours in [{low:g}, {high:g}]",
        note,
        {name: value for name, value in values.items() if math.isfinite(value)},
    )


def _side(low: float, high: float, than: float) -> float:
    """1 where the whole range is above, -1 where it is below, 0 where neither."""
    return 1.0 if low >= than else -1.0 if high <= than else 0.0


def holds(
    source: str,
    what: str,
    paper: str,
    ours: str,
    true: bool,
    *,
    kind: str,
    mark: str = "P",
    partly: bool = False,
    rule: str = "",
    note: str = "",
) -> Claim:
    """A statement that is true of our numbers or not; `partly`: it is, in its direction but not in its size."""
    verdict = Verdict.REPRODUCED if true else Verdict.DIRECTION if partly else Verdict.NOT
    return Claim(source, what, paper, mark, ours, kind, verdict, rule, note)


def unchecked(
    source: str, what: str, paper: str, why: str, *, mark: str = "P", ours: str = "", kind: str = "none"
) -> Claim:
    """Nothing that we have can decide it; a number of ours may stand beside it."""
    return Claim(source, what, paper, mark, ours or "-", kind, Verdict.UNCHECKED, "", why)
