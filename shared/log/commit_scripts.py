"""The Lua scripts of the commit log. Each is one atomic step in Redis and safe to send twice.

A request has a record. Each choice has a log (a Redis stream) and a fence: term and name of the gateway that may write.
A higher term supersedes a lower one. Of two holders of one term the first to write wins; that happens only when Redis
has lost a claim.

Not here: who calls them, and when (commit_log.py).
"""

from __future__ import annotations

APPENDED = 1
TAKEN_OVER = 0
# The log does not end where the append begins, the fence is not the holder's, or the record is gone or another's: Redis
# has lost data, or it has expired.
DOES_NOT_FIT = -1

# KEYS: record. ARGV: record, time to live in seconds. Returns 1 if stored, 0 if another request has this id.
BEGIN = """
local existing = redis.call('GET', KEYS[1])
if existing and existing ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
return 1
"""

_HELPERS = """
local function superseded(fence, term, holder)
  local now = tonumber(fence[1] or -1)
  return now > term or (now == term and fence[2] ~= holder)
end
local function entry_id(base_len) return string.format('%.0f-0', tonumber(base_len) + 1) end
-- Redis may have lost the caller's record, and another request may have begun under the same id.
local function is_own(record, head) return redis.call('GETRANGE', record, 0, #head - 1) == head end
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

# KEYS: log, fence, record, then keys whose expiry to refresh.
# ARGV: term, holder, time to live in seconds, base_len, number of tokens, tokens, finish reason, epoch, extras, the
# record's first bytes.
# Returns one of the codes above; a repeated append is recognised and counts as appended.
APPEND = (
    _HELPERS
    + """
local fence = redis.call('HMGET', KEYS[2], 'term', 'holder')
if superseded(fence, tonumber(ARGV[1]), ARGV[2]) then return 0 end
-- Redis has lost the holder's claim, and maybe an earlier holder has written since, to the very same length.
local is_lost = tonumber(ARGV[4]) > 0 and (fence[1] ~= ARGV[1] or fence[2] ~= ARGV[2])
if is_lost then return -1 end
local existing = redis.call('XRANGE', KEYS[1], entry_id(ARGV[4]), entry_id(ARGV[4]))[1]
local is_repeat = existing ~= nil
for field = 1, 5 do
  is_repeat = is_repeat and existing[2][2 * field] == ARGV[4 + field]
end
if not is_repeat then
  if existing or length(KEYS[1]) ~= tonumber(ARGV[4]) or not is_own(KEYS[3], ARGV[10]) then return -1 end
  add(KEYS[1], ARGV[4], 5)
  redis.call('HSET', KEYS[2], 'term', ARGV[1], 'holder', ARGV[2])
end
for _, key in ipairs(KEYS) do redis.call('EXPIRE', key, ARGV[3]) end
return 1
"""
)

# Replaces the log by one holder's copy from memory.
# KEYS: log, fence, record. ARGV: term, holder, time to live in seconds, record, then per entry base_len and five fields
# as in APPEND. Returns APPENDED or TAKEN_OVER.
RESTORE = (
    _HELPERS
    + """
local fence = redis.call('HMGET', KEYS[2], 'term', 'holder')
if superseded(fence, tonumber(ARGV[1]), ARGV[2]) then return 0 end
-- A delayed duplicate of an earlier restore must not remove what the same holder has appended since.
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

# KEYS: record, then the fence of each claimed choice. ARGV: holder, time to live in seconds, the record's first bytes.
# Returns the new term of each, or nothing without the record. All or none: of two claims one wins entirely.
CLAIM = (
    _HELPERS
    + """
if not is_own(KEYS[1], ARGV[3]) then return {} end
redis.call('EXPIRE', KEYS[1], ARGV[2])
local terms = {}
for index = 2, #KEYS do
  local fence = redis.call('HMGET', KEYS[index], 'term', 'holder')
  local term = tonumber(fence[1] or 0)
  if fence[2] ~= ARGV[1] then
    term = term + 1
    redis.call('HSET', KEYS[index], 'term', term, 'holder', ARGV[1])
  end
  redis.call('EXPIRE', KEYS[index], ARGV[2])
  terms[index - 1] = term
end
return terms
"""
)

ALL = (BEGIN, APPEND, RESTORE, CLAIM)
