"""The constants of `auto`, each with its unit, what it bounds, and the reason.

"What may drafting cost at worst?": LOSS_SHARE. "How long until a drafter that lost is tried again?": LOOK_SHARE.
"""

from __future__ import annotations

# share of time; long-run loss of drafting against plain decoding; the noise of a plain rate
LOSS_SHARE = 0.01
# plain rounds; the account's maximum and initial credit, the loss that drafting may make at once; enough for a look at
# each of three untried methods
CREDIT_ROUNDS = 24.0
# share of time; the cost of looks: after a look that cost c seconds, the next one follows c / LOOK_SHARE seconds later
LOOK_SHARE = 0.004
# rounds; memory of the ledger's gain, which is added to LOOK_SHARE while nothing is drafted: text that is easy to draft
# comes again
GAIN_MEMORY = 1000.0
# rounds; shortest look at a method, and a fourth of the shortest time between two looks; one outlier must not decide
LOOK_ROUNDS = 4
# sessions; most that draft in a look while nothing is drafted otherwise; LOOK_ROUNDS of them tell an acceptance of a
# half from one of three quarters, and each one more costs a batch that is full as much again
LOOK_SESSIONS = 4
# draft tokens; minimum of a look; two, so that it measures a second position
LOOK_LENGTH = 2
# drafts; longest look at a method; its acceptance is then known to a twentieth
LOOK_DRAFTS = 64
# rounds; length of a look at plain decoding, and weight of the cost model against measured rounds with drafts
PLAIN_ROUNDS = 10
# rounds; discarded after a change of method, as they still have rows and caches of the previous one
SETTLE_ROUNDS = 2
# rounds; memory of a rate; a machine's speed changes within seconds
RATE_MEMORY = 200.0
# drafts; memory of acceptance, and the part kept when the newest drafts contradict the rest
ACCEPTANCE_MEMORY, RECENT_DRAFTS = 400.0, 24.0
# standard errors; difference at which the newest drafts contradict the memory
CHANGE_ERRORS = 3.5
# share, draft tokens; prior acceptance of a new method, and the prior's weight; published heads: 0.6 to 0.8
PRIOR_ACCEPTANCE, PRIOR_TOKENS = 0.7, 10.0
# weight of the newest round in mean costs; a mean of about 20 rounds
COST_WEIGHT = 0.05
# share; smallest gain worth a change, over plain decoding or over another length; the noise of a gain
MIN_GAIN = 0.02
# load classes per doubling of the open sessions; each has its own measurements; 2: a class spans two fifths
LOADS_PER_DOUBLING = 2
# share of the mean time per draft token; prior slope of the drafting time, before lengths have varied; between one
# forward per draft (0) and one per token (1)
PRIOR_SLOPE = 0.6
# ratio to the mean; cap on one measured time; a hiccup must not decide
OUTLIER = 3.0
# plain rounds; what wrong drafts from a prediction may cost beyond what right ones have brought; under 1 %
# of an answer of 1,000 tokens
PREDICTION_CREDIT = 8.0
# tokens; match after which a prediction without credit drafts again: a failed draft costs less than half a plain round
# at most lengths that pay, which is then 1.5 % of the time
PREDICTION_PROOF = 32
# tokens; match after which a predicted token counts as steadily followed; a shorter one may be a common phrase
PREDICTION_STEADY = 8
# tokens; memory of a prediction's acceptance; about a page of text
PREDICTION_MEMORY = 256.0
