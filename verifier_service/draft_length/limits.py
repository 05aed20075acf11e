"""Every number that `auto` is set by, each with its unit, what it bounds, and the reason.

"What may drafting cost at worst?": LOSS_SHARE. "How long until a drafter that lost is tried again?": LOOK_SHARE.
"""

from __future__ import annotations

# share of time; the most that drafting may lose against plain decoding in the long run; the noise of a plain rate
LOSS_SHARE = 0.01
# plain rounds; the most that the account holds, and its beginning: what drafting may lose at once; a look at each of
# three methods of which nothing is known
CREDIT_ROUNDS = 24.0
# share of time; what looks may cost: a look that cost c seconds is followed by another one after c / LOOK_SHARE
LOOK_SHARE = 0.004
# rounds; memory of what drafting has gained: so much more may looks cost while nothing is drafted, as text that is easy
# to draft comes again
GAIN_MEMORY = 1000.0
# rounds; shortest look at a method, and a fourth of the shortest time between two looks; an outlier in it not deciding
LOOK_ROUNDS = 4
# draft tokens; of a look at least, so that it shows a second position
LOOK_LENGTH = 2
# drafts; longest look at a method, an acceptance then known to a twentieth
LOOK_DRAFTS = 64
# rounds; a look at plain decoding, and the weight of the model against measured rounds with drafts
PLAIN_ROUNDS = 10
# rounds; after a change of method, not counted for either side, as rows and caches of the other are still in them
SETTLE_ROUNDS = 2
# rounds; memory of a rate: a machine's speed changes within seconds
RATE_MEMORY = 200.0
# drafts; memory of acceptance, and what is left of it when the newest drafts contradict it
ACCEPTANCE_MEMORY, RECENT_DRAFTS = 400.0, 24.0
# standard errors; by which the newest drafts must differ to contradict
CHANGE_ERRORS = 3.5
# share, draft tokens; acceptance that a new method is taken to have, and its weight; published heads: 0.6 to 0.8
PRIOR_ACCEPTANCE, PRIOR_TOKENS = 0.7, 10.0
# weight of the newest round in mean costs, a mean of 20
COST_WEIGHT = 0.05
# share; smallest gain worth a change, over plain decoding or of one length over another; the noise of a gain
MIN_GAIN = 0.02
# classes per doubling of the open sessions that share what is measured; 2: a class spans two fifths
LOADS_PER_DOUBLING = 2
# share of the mean time per draft token; slope of the drafting time before lengths have varied: between one forward per
# draft (0) and one per token (1)
PRIOR_SLOPE = 0.6
# ratio to the mean; what one measured time counts at most: a hiccup must not decide
OUTLIER = 3.0
