"""A report as a table for people, as JSON, and as one self-contained HTML page."""

from __future__ import annotations

import dataclasses
import html
import json

from .verdicts import Report, Verdict

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.35rem .6rem;border-bottom:1px solid #ccc;"
    "vertical-align:top}.broken{color:#b00020;font-weight:600}.holds{color:#0a7a32}"
)


def as_table(report: Report) -> str:
    width = max((len(finding.test) for finding in report.findings), default=0)
    lines = [_abilities(report), ""]
    for finding in report.findings:
        could = f"; could find {finding.sensitivity}" if finding.sensitivity and finding.verdict is Verdict.PASS else ""
        lines.append(f"{finding.verdict.value:10s}  {finding.test:{width}s}  {finding.evidence}{could}")
    return "\n".join([*lines, "", _summary(report)])


def _abilities(report: Report) -> str:
    known = report.abilities
    abilities = {
        "token ids in answers": known["gives_ids"],
        "token ids as prompts": known["takes_ids"],
        "prompt_logprobs": known["prompt_logprobs"],
        "the same answer without a seed": known["hidden_seed"],
    }
    told = [f"{known['list_size']} logprobs per token ({known['lists']})"]
    told += [f"{name}: {'yes' if has else 'no'}" for name, has in abilities.items()]
    told += [f"{name}: {', '.join(known[name]) or 'none'}" for name in ("accepted", "refused")]
    told.append(f"drafts seen: {known['drafts_seen'] or 'no'}")
    return f"{report.server}, model {report.model}\n  " + "\n  ".join(told)


def _summary(report: Report) -> str:
    return f"{report.conclusion} ({report.num_requests} requests, {report.num_tokens} tokens, {report.seconds} s)"


def as_json(report: Report) -> str:
    return json.dumps({**dataclasses.asdict(report), "conclusion": report.conclusion}, indent=1) + "\n"


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
        f"<h1>Losslessness audit</h1><pre>{html.escape(_abilities(report))}</pre>"
        f"<p><strong>{html.escape(_summary(report))}</strong> (seed {report.seed}, version {report.version})</p>"
        "<table><tr><th>Verdict<th>Test<th>Evidence<th>What it could have found</tr>" + rows + "</table></html>\n"
    )


def as_replay_lines(report: Report) -> str:
    """One replay a line."""
    return "".join(json.dumps(dataclasses.asdict(replay)) + "\n" for replay in report.replays)
