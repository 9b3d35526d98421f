"""Findings as a SARIF 2.1.0 log, for code-review tools."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import epdsl

from .findings import MEANING, Access, Finding

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def sarif(findings: Sequence[Finding], base: Path | None = None) -> dict[str, Any]:
    """A log of one run. Files below `base` are named relative to it."""
    root = (base or Path.cwd()).resolve()
    every = [each for finding in findings for each in (finding, *finding.also)]
    rules = sorted({f.kind for f in every})
    return {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "epdsl check",
                        "version": epdsl.__version__,
                        "rules": [{"id": kind, "shortDescription": {"text": MEANING[kind]}} for kind in rules],
                    }
                },
                "columnKind": "unicodeCodePoints",
                "results": [_result(f, rules, root) for f in every],
            }
        ],
    }


def _result(finding: Finding, rules: list[str], root: Path) -> dict[str, Any]:
    sides = [a for a in (finding.second, finding.first) if a is not None and a.places]
    text = ". ".join(part for part in (f"{MEANING[finding.kind]}: {finding.where}", finding.message, finding.missing) if part)
    made: dict[str, Any] = {
        "ruleId": finding.kind,
        "ruleIndex": rules.index(finding.kind),
        "level": "error",
        "message": {"text": text + (f". Repair: {finding.repair}" if finding.repair else "")},
        "locations": [_location(sides[0], root)] if sides else [],
        "relatedLocations": [{"id": n, **_location(side, root)} for n, side in enumerate(sides)],
        "partialFingerprints": {"epdsl/v1": "|".join([finding.kind, *(f"{Path(a.file).name}:{a.line}" for a in sides)])},
        "properties": {"seen": finding.seen, "runs": finding.runs, "replay": finding.replay},
    }
    return made


def _location(side: Access, root: Path) -> dict[str, Any]:
    file, line, column = side.places[0]
    path = Path(file).resolve()
    inside = path.is_relative_to(root)
    region: dict[str, Any] = {"startLine": max(line, 1)}
    if column > 0:
        region["startColumn"] = column
    return {
        "physicalLocation": {
            "artifactLocation": {"uri": path.relative_to(root).as_posix() if inside else path.as_uri()},
            "region": region,
        },
        "message": {"text": f"{side.action} by {side.who}{side.ordering}"},
    }
