"""Sections as one self-contained page, as Markdown, and as JSON."""

from __future__ import annotations

import base64
import collections
import dataclasses
import io
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jinja2
import markupsafe

from pagedjax.simulate.report.claim import MARKS, Claim, Verdict
from pagedjax.simulate.report.section import Section

_CLASS = {
    Verdict.EXACT: "exact",
    Verdict.REPRODUCED: "good",
    Verdict.DIRECTION: "partly",
    Verdict.NOT: "bad",
    Verdict.UNCHECKED: "none",
}
_MEANING = {
    Verdict.EXACT: "equal in every printed digit",
    Verdict.REPRODUCED: "inside the tolerance that stands beside it",
    Verdict.DIRECTION: "better or worse as claimed, but by another amount",
    Verdict.NOT: "neither",
    Verdict.UNCHECKED: "nothing that is here or public can decide it",
}


def _code(text: str) -> Any:
    """`words` as code; all else escaped."""
    parts = [str(markupsafe.escape(part)) for part in text.split("`")]
    return markupsafe.Markup("".join(f"<code>{p}</code>" if i % 2 else p for i, p in enumerate(parts)))


def png(drawn: Any) -> bytes:
    """A matplotlib figure as PNG."""
    buffer = io.BytesIO()
    drawn.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()


def count_verdicts(sections: Sequence[Section]) -> list[tuple[Verdict, int]]:
    """How many claims have each verdict."""
    counted = collections.Counter(claim.verdict for section in sections for claim in section.claims)
    return [(verdict, counted[verdict]) for verdict in Verdict]


def html(sections: Sequence[Section], images: dict[str, bytes], form: str) -> str:
    """The page. Args: PNG by figure name; a sentence on what was run."""
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent), autoescape=True)
    environment.filters["code"] = _code
    shown = [
        (section, [(figure, base64.b64encode(images[figure.name]).decode()) for figure in section.figures])
        for section in sections
    ]
    return environment.get_template("page.html").render(
        sections=shown, counts=count_verdicts(sections), classes=_CLASS, meanings=_MEANING, marks=MARKS, form=form
    )


def _cells(claim: Claim) -> list[str]:
    ours = claim.ours if claim.kind == "none" else f"{claim.ours} ({claim.kind})"
    verdict = claim.verdict.value + (f" (asked for: {claim.rule})" if claim.rule else "")
    notes = f"; {claim.note}" if claim.note else ""
    return [claim.source, claim.what, f"{claim.paper} [{claim.mark}]", ours, verdict + notes]


def markdown(sections: Sequence[Section], form: str) -> str:
    """The same table as text."""
    lines = ["# PagedAttention's claims, tested", "", form, ""]
    lines += [f"- {verdict.value}: {count}" for verdict, count in count_verdicts(sections)]
    for section in sections:
        lines += [
            "",
            f"## {section.title}",
            "",
            section.text,
            "",
            "| where | claim | paper | ours | verdict |",
            "|---|---|---|---|---|",
        ]
        lines += [
            "| " + " | ".join(cell.replace("|", "\\|") for cell in _cells(claim)) + " |" for claim in section.claims
        ]
    return "\n".join(lines) + "\n"


def _plain(value: Any) -> Any:
    """JSON values; what is not finite becomes null, keys become text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, (str, int, bool)) or value is None:
        return value
    return _plain(value.item()) if hasattr(value, "item") else str(value)


def write(sections: Sequence[Section], folder: pathlib.Path, form: str, facts: dict[str, Any]) -> list[pathlib.Path]:
    """Write index.html, claims.md, claims.json and a PNG for each figure; returns the paths.

    Args:
      folder: made if it is not there; files in it are overwritten.
      form: a sentence on what was run.
      facts: of the run, for the JSON.
    """
    folder.mkdir(parents=True, exist_ok=True)
    images = {figure.name: png(figure.drawn) for section in sections for figure in section.figures}
    document = {
        **facts,
        "verdicts": {verdict.value: count for verdict, count in count_verdicts(sections)},
        "claims": [
            {"section": section.title, **dataclasses.asdict(claim)} for section in sections for claim in section.claims
        ],
        "numbers": {section.title: section.numbers for section in sections if section.numbers},
    }
    files = {
        "index.html": html(sections, images, form).encode(),
        "claims.md": markdown(sections, form).encode(),
        "claims.json": json.dumps(_plain(document), indent=1).encode(),
        **{f"{name}.png": image for name, image in images.items()},
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return [folder / name for name in files]
