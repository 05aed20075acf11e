"""A picture of what a command prints in a terminal, as SVG: `python -m docs.generate.terminal OUT.svg COMMAND...`

The command runs for real, in a pseudo-terminal of WIDTH columns, for at most SECONDS; then it gets SIGINT.
"""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import sys
import time
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

WIDTH = 100
SECONDS = 120.0
# Dark, calm; the same on both of the site's themes.
_BLUE, _WHITE = (124, 164, 221), (223, 231, 236)
_THEME = TerminalTheme(
    (22, 34, 44),
    _WHITE,
    [(22, 34, 44), (224, 138, 128), (116, 194, 135), (217, 171, 76), _BLUE, (196, 150, 210), (124, 196, 221), _WHITE],
)
_ERASE_LINE, _LINE_UP = "\x1b[2K", "\x1b[1A"
_FONT_FACE = re.compile(r"@font-face \{.*?\}", re.DOTALL)
# Cursor movements and erasures; colours (ending in m) stay.
_CONTROL = re.compile(r"\x1b\[\??[0-9;]*[A-LN-Za-ln-z]")


def capture(command: list[str], environ: dict[str, str]) -> str:
    """Returns what the command writes to its terminal."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe(command[0], command, {**environ, "COLUMNS": str(WIDTH), "LINES": "60", "TERM": "xterm-256color"})
    chunks, ends = [], time.monotonic() + SECONDS
    while time.monotonic() < ends:
        if not select.select([terminal], [], [], 0.2)[0]:
            continue
        try:
            chunk = os.read(terminal, 65536)
        except OSError:  # Linux says so at the end of a pseudo-terminal
            break
        if not chunk:
            break
        chunks.append(chunk)
    else:
        os.kill(pid, signal.SIGINT)
    os.waitpid(pid, 0)
    return b"".join(chunks).decode(errors="replace")


def picture(title: str, output: str) -> str:
    """The last screen of `output`, as SVG without fonts from elsewhere."""
    lines: list[str] = []
    for line in output.replace("\r\n", "\n").split("\n"):
        del lines[len(lines) - line.count(_LINE_UP) :]
        lines.append(_CONTROL.sub("", line.rpartition(_ERASE_LINE)[2]).rpartition("\r")[2])
    text = "\n".join(lines).strip("\n")
    console = Console(record=True, width=WIDTH, file=StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.from_ansi(text))
    svg = console.export_svg(title=title, theme=_THEME)
    return _FONT_FACE.sub("", svg).replace("Fira Code", "ui-monospace, DejaVu Sans Mono")


def main() -> None:
    output, command = Path(sys.argv[1]), sys.argv[2:]
    title = " ".join([Path(command[0]).name, *(f'"{word}"' if " " in word else word for word in command[1:])])
    output.write_text(picture(title, capture(command, dict(os.environ))), encoding="utf-8")


if __name__ == "__main__":
    main()
