"""A report as a table for people, as JSON, and as one self-contained HTML page."""

from __future__ import annotations

import dataclasses
import html
import json
from collections.abc import Iterable

from .verdicts import Replay, Report

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.35rem .6rem;border-bottom:1px solid #ccc;"
    "vertical-align:top}.broken{color:#b00020;font-weight:600}.holds{color:#0a7a32}"
)


def as_table(report: Report) -> str:
    width = max((len(finding.test) for finding in report.findings), default=0)
    lines = [_abilities_line(report), ""]
    lines += [f"{f.verdict.value:19s} {f.test:{width}s}  {f.evidence}" for f in report.findings]
    return "\n".join([*lines, "", _summary(report)])


def _abilities_line(report: Report) -> str:
    known = report.abilities
    told = [f"lists of {known['list_size']} ({known['lists']})", f"fields: {', '.join(known['accepted'])}"]
    told += [f"{name}: {'yes' if known[name] else 'no'}" for name in ("gives_ids", "takes_ids", "prompt_logprobs")]
    told.append(f"speculation seen: {'yes' if known['speculation_seen'] else 'no'}")
    if known["refused"]:
        told.append(f"refused: {', '.join(known['refused'])}")
    return f"{report.server}, model {report.model}: " + "; ".join(told)


def _summary(report: Report) -> str:
    return f"{report.conclusion}: {report.num_requests} requests, {report.num_tokens} tokens, {report.seconds} s"


def as_json(report: Report) -> str:
    return json.dumps({**dataclasses.asdict(report), "conclusion": report.conclusion}, indent=1)


def as_html(report: Report) -> str:
    """Everything that comes from the server is escaped; the page loads nothing."""
    rows = "".join(
        f'<tr><td class="{"broken" if f.verdict == "broken" else "holds" if f.verdict == "holds" else ""}">'
        f"{html.escape(f.verdict)}</td><td>{html.escape(f.test)}</td><td>{html.escape(f.evidence)}</td>"
        f"<td>{html.escape(f.sensitivity)}</td></tr>"
        for f in report.findings
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Losslessness audit</title><style>{_STYLE}</style>'
        f"<h1>Losslessness audit</h1><p>{html.escape(_abilities_line(report))}</p>"
        f"<p><strong>{html.escape(_summary(report))}</strong> (seed {report.seed}, version {report.version})</p>"
        "<table><tr><th>Verdict<th>Test<th>Evidence<th>What it could have found</tr>" + rows + "</table></html>\n"
    )


def as_replay_lines(replays: Iterable[Replay]) -> str:
    return "".join(json.dumps(dataclasses.asdict(replay)) + "\n" for replay in replays)
