"""The draft lengths whose price a verifier tells: the mean over the sessions of a forward, so parts of a token too.

What rows cost is a staircase (16 rows of a target on two cores 11.5 ms, 17 to 20 14.8, 32 16.1), and n-grams often
propose for some sessions only. Priced by whole tokens of every session, and by a straight line between them, five
proposals for 16 sessions were held for 1.4 ms and took 3.3, and drafting for 3 % of gain where it lost 7 %.
"""

from __future__ import annotations

PRICED_DRAFTS: tuple[float, ...] = (1 / 16, *(quarters / 4 for quarters in range(1, 17)), 5.0, 6.0, 7.0, 8.0)
