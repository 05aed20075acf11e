"""The Lua scripts of the commit log. Each is one atomic step on the server, and each may be sent twice.

A request has a record; each of its choices has a log (a Redis stream) and a fence: the term of the gateway that may
write, and its holder's name. A higher term passes a lower one over; of two holders of one term the first to write
stays. That happens only when Redis has lost a claim, and then nobody may go on as if nothing had been.

Not here: who calls them, and when (commit_log.py).
"""

from __future__ import annotations

APPENDED = 1
TAKEN_OVER = 0
# The log does not end where the append begins, or the record is gone: Redis has lost something, or it has expired.
DOES_NOT_FIT = -1

# KEYS: record. ARGV: record, seconds to live. 1 when it is there, 0 when another request has this id.
BEGIN = """
local there = redis.call('GET', KEYS[1])
if there and there ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
return 1
"""

_HELPERS = """
local function passed_over(fence, term, holder)
  local now = tonumber(fence[1] or -1)
  return now > term or (now == term and fence[2] ~= holder)
end
local function entry_id(base_len) return string.format('%.0f-0', tonumber(base_len) + 1) end
local function length(log)
  local last = redis.call('XREVRANGE', log, '+', '-', 'COUNT', 1)[1]
  if not last then return 0 end
  return tonumber(string.match(last[1], '^%d+')) - 1 + tonumber(last[2][2])
end
local function add(log, at, first)
  redis.call('XADD', log, entry_id(at), 'n', ARGV[first], 't', ARGV[first + 1], 'f', ARGV[first + 2],
             'e', ARGV[first + 3], 'x', ARGV[first + 4])
end
"""

# KEYS: log, fence, record, then keys that shall live on with them.
# ARGV: term, holder, seconds to live, base_len, number of tokens, tokens, finish reason, epoch, extras.
# One of the codes above; the same append once more is found in place and counts as appended.
APPEND = (
    _HELPERS
    + """
if passed_over(redis.call('HMGET', KEYS[2], 'term', 'holder'), tonumber(ARGV[1]), ARGV[2]) then return 0 end
local there = redis.call('XRANGE', KEYS[1], entry_id(ARGV[4]), entry_id(ARGV[4]))[1]
local is_repeat = there ~= nil
for field = 1, 5 do
  is_repeat = is_repeat and there[2][2 * field] == ARGV[4 + field]
end
if not is_repeat then
  if there or length(KEYS[1]) ~= tonumber(ARGV[4]) or redis.call('EXISTS', KEYS[3]) == 0 then return -1 end
  add(KEYS[1], ARGV[4], 5)
  redis.call('HSET', KEYS[2], 'term', ARGV[1], 'holder', ARGV[2])
end
for _, key in ipairs(KEYS) do redis.call('EXPIRE', key, ARGV[3]) end
return 1
"""
)

# What one holder says that the log is, from its own memory, whatever stands there now.
# KEYS: log, fence, record. ARGV: term, holder, seconds to live, record, then per entry base_len and five fields as in
# APPEND. APPENDED or TAKEN_OVER.
RESTORE = (
    _HELPERS
    + """
local fence = redis.call('HMGET', KEYS[2], 'term', 'holder')
if passed_over(fence, tonumber(ARGV[1]), ARGV[2]) then return 0 end
-- Sent before, and kept by the network until the same holder had gone on: it must not take away what came since.
local end_len = 0
if #ARGV > 4 then end_len = tonumber(ARGV[#ARGV - 5]) + tonumber(ARGV[#ARGV - 4]) end
if fence[1] == ARGV[1] and length(KEYS[1]) > end_len then return 1 end
local record = redis.call('GET', KEYS[3])
if record and record ~= ARGV[4] then return 0 end
redis.call('SET', KEYS[3], ARGV[4], 'EX', ARGV[3])
redis.call('HSET', KEYS[2], 'term', ARGV[1], 'holder', ARGV[2])
redis.call('DEL', KEYS[1])
for first = 5, #ARGV, 6 do add(KEYS[1], ARGV[first], first + 1) end
redis.call('EXPIRE', KEYS[1], ARGV[3])
redis.call('EXPIRE', KEYS[2], ARGV[3])
return 1
"""
)

# KEYS: record, then the fence of each choice that is claimed. ARGV: holder, seconds to live.
# The new term of each; empty when there is no record. All choices at once: of two claims one wins as a whole.
CLAIM = """
if redis.call('EXISTS', KEYS[1]) == 0 then return {} end
redis.call('EXPIRE', KEYS[1], ARGV[2])
local terms = {}
for place = 2, #KEYS do
  local fence = redis.call('HMGET', KEYS[place], 'term', 'holder')
  local term = tonumber(fence[1] or 0)
  if fence[2] ~= ARGV[1] then
    term = term + 1
    redis.call('HSET', KEYS[place], 'term', term, 'holder', ARGV[1])
  end
  redis.call('EXPIRE', KEYS[place], ARGV[2])
  terms[place - 1] = term
end
return terms
"""

ALL = (BEGIN, APPEND, RESTORE, CLAIM)
