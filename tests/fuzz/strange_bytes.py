"""Bytes that were right once: cut, flipped, doubled, with something in between."""

from __future__ import annotations

from hypothesis import strategies as st

# Lengths that lie, tags that do not exist, text that is no UTF-8.
_SPLINTERS = (b"\x00", b"\xff", b"\xff" * 10, b"\x80" * 11, b"\x07", b"\xed\xa0\x80", b"\x0a\xff\xff\xff\xff\x0f", b"{")


@st.composite
def corrupted(draw: st.DrawFn, whole: st.SearchStrategy[bytes]) -> bytes:
    content = bytearray(draw(whole))
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(content)))
        match draw(st.sampled_from(["flip", "cut", "insert", "double", "drop"])):
            case "flip" if place < len(content):
                content[place] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del content[place:]
            case "insert":
                content[place:place] = draw(st.sampled_from(_SPLINTERS) | st.binary(max_size=8))
            case "double":
                content[place:place] = content[: draw(st.integers(0, 64))]
            case _:
                del content[place : place + draw(st.integers(1, 8))]
    return bytes(content)
