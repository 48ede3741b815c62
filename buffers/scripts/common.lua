-- One run's buffer on the server. The files of this folder are joined in the order common, transitions, put, tickets,
-- choose, lease, lineage, ledger, recovery, inspect, main and loaded as one script, in which each file answers its own
-- operations (`perform`). `buffers/reference/` is the same contract in Python, and a stateful test drives both.
--
-- KEYS[1] is the run's prefix, asyncrl:{NAME}. Every other key is made from it, so all lie in one hash slot.
-- ARGV: operation, JSON arguments, and the time in unix seconds ("" = the server's own clock, the normal case).
-- No payload ever passes through here: it is written beside the script in the same transaction.

local call = redis.call
local P = KEYS[1] .. ':'

local RUN = P .. 'run' --           hash: V, lineage, phase, limits, bytes, the current lease, announcements
local FORKS = P .. 'forks' --       hash: lineage -> [parent, version where it forked]
local TICKETS = P .. 'tickets' --   hash: ordinal -> ticket as JSON, live and terminal
local LIVE = P .. 'live' --         zset: issued, held and leased ordinals, in order
local RETURNED = P .. 'returned' -- zset: ordinals to be issued again, in order
local ROWS = P .. 'rows' --         zset: every ordinal that has a row in TICKETS, in order
local ENDED = P .. 'ended' --       zset: terminal ordinal -> version from which on a rewind leaves it as it is
local LO = P .. 'lo' --             hash: live ordinal -> i|h|l, its lo, the uses it owes and had: what choosing a batch reads
local EDGE = P .. 'edge' --         zset: live ordinal -> its lo, to find what leaves the window
local HELD = P .. 'held' --         zset: held ordinal -> step by which its next use is due, to find what is due first
local USED = P .. 'used' --         zset: live ordinal that a step has trained, in order; with `fresh_per_step` only
local DUES = P .. 'dues' --         hash: due step -> uses that issued and held tickets owe
local ISSUED = P .. 'issued' --     zset: issued ordinal -> when
local PROGRESS = P .. 'progress' -- hash: issued ordinal -> its progress count
local MOVED = P .. 'moved' --       zset: issued ordinal -> when its progress last grew
local PAYLOAD = P .. 'payload:' --  string by ordinal:attempt: the group. A key of its own: unlike a hash, the server then
--                                  takes the client's bytes as the value and answers from it, with no copy
local KEPT = P .. 'kept' --         zset: trained ordinal whose payload is kept for a rewind -> step
local MEMBERS = P .. 'members' --   hash: incarnation -> member as JSON
local SERVING = P .. 'serving' --   hash: incarnation -> lineage:version that it serves
local NAMES = P .. 'names' --       hash: collector name -> incarnation
local BEATS = P .. 'beats' --       zset: incarnation -> last beat
local WAITERS = P .. 'waiters' --   zset: incarnation -> order of asking
local QUEUE = P .. 'queue:' --      zset by lineage:version: of WAITERS those that serve it, in the same order
local QUEUES = P .. 'queues' --     set: lineage:version whose queue is not empty
local OWNED = P .. 'owned:' --      set a member: ordinals it holds issued
local COUNTS = P .. 'counts' --     hash: state -> tickets
local REASONS = P .. 'reasons' --   hash: state/reason -> tickets
local LOST_TOKENS = P .. 'lost_tokens'
local LOST_SECONDS = P .. 'lost_seconds'
local WORTH = P .. 'worth' --       hash: state/reason|reward(s), |length(s) -> sum, number
local RETURNS = P .. 'returns' --   hash: reason -> times that a ticket went back
local GONE = P .. 'gone' --         hash: state/reason -> rows that moved to the archive's ledger
local ASIDE = P .. 'aside' --       list: payload fields that were damaged or foreign, newest first
local COMMITS = P .. 'commits' --   hash: step -> lineage that committed it
local TIMES = P .. 'times' --       zset: place in a ring -> seconds that a recent group took
local SWEEP_DUES = P .. 'sweep_dues'
local RESULTS = P .. 'results' --   hash: evaluation id -> result
local MAIL = P .. 'mail:' --        list a waiter: one entry = look again

local GROUP_TIMES = 64
local STRAGGLER_FACTOR = 10
local STRAGGLER_FLOOR_S = 60
local SWEEP_CHUNK = 500
local CLOCK_STEP_S = 5 -- longer than any pause between acts while someone lives: collectors beat every two seconds
local SETTLE_S = 2 -- a collector beats so often, and asks again then; weights of one host are active in milliseconds
local REQUEUES = 3 -- times a ticket may be over age under `requeue`; then it is stale
local QUARANTINE = 8 -- payloads that are kept to be looked at; the oldest gives way
local ENDLESS = 2 ^ 53 -- more versions than any run has
local MAIL_TTL_S = 3600 -- a mailbox nobody opens any more goes away by itself

-- The run's own fields, read once, and written once, when the act is over (`perform`).
local R, changed = {}, {}
do
  local flat = call('HGETALL', RUN)
  for i = 1, #flat, 2 do R[flat[i]] = flat[i + 1] end
end
local exists = R.document ~= nil
local function put_run(field, value)
  value = tostring(value)
  if R[field] ~= value then R[field], changed[field] = value, value end
end
local function drop_run(field)
  if R[field] then call('HDEL', RUN, field) end
  R[field], changed[field] = nil, nil
end
local function num(field) return tonumber(R[field] or '0') end
local limits = R.limits and cjson.decode(R.limits) or nil

-- Two times. `stamp` is the server's own clock, for people; `now` decides who is late. It follows the clock, but an act
-- moves it by CLOCK_STEP_S at most and never back: a clock that is set, or a store that was away, takes nobody's work.
local function exact(number) return string.format('%.17g', number) end
local stamp, now = tonumber(ARGV[3]), num('now')
if not stamp then
  local t = call('TIME')
  stamp = tonumber(t[1]) + tonumber(t[2]) / 1e6
end
if R.stamp then now = now + math.min(math.max(0, stamp - num('stamp')), CLOCK_STEP_S) end

local function reject(kind, message) return cjson.encode({ error = kind, message = message }) end

local ops = {}

-- Who waits for room gets it: `tickets` defines it. A file that comes before answers only while nobody waits.
local grant = function() end

-- The last line of each file that defines operations. A call ends there: to define all the others, which it does not need,
-- takes longer than most operations do.
local function perform()
  if not exists and ARGV[1] ~= 'create' then
    return reject('no_run', 'there is no run under ' .. KEYS[1] .. ' in this store')
  end
  local reply = ops[ARGV[1]](cjson.decode(ARGV[2]))
  local written = exists and { 'now', exact(now), 'stamp', exact(stamp) } or {}
  local only_time = next(changed) == nil
  for field, value in pairs(changed) do
    written[#written + 1] = field
    written[#written + 1] = value
  end
  -- A server without memory refuses to write, and must still answer what only reads.
  if #written > 0 then (only_time and redis.pcall or call)('HSET', RUN, unpack(written)) end
  return reply
end

-- cjson writes an empty table as {}; lists that may be empty are sent as a count and a list.
local function list(items) if #items == 0 then return cjson.null end return items end

local function ticket(ordinal)
  local found = call('HGET', TICKETS, ordinal)
  return found and cjson.decode(found) or nil
end
local function save(t) call('HSET', TICKETS, t.ordinal, cjson.encode(t)) end

local function set_state(t, state)
  if t.state then call('HINCRBY', COUNTS, t.state, -1) end
  call('HINCRBY', COUNTS, state, 1)
  t.state = state
end

local function member(incarnation)
  local found = call('HGET', MEMBERS, incarnation)
  return found and cjson.decode(found) or nil
end
local function save_member(m) call('HSET', MEMBERS, m.incarnation, cjson.encode(m)) end

-- Wake one waiter. At most one entry lies in a mailbox: it says "look again", never what changed.
local function wake(box)
  local key = MAIL .. box
  if call('LLEN', key) == 0 then call('RPUSH', key, '1'); call('EXPIRE', key, MAIL_TTL_S) end
end
local function wake_members()
  for _, incarnation in ipairs(call('HKEYS', MEMBERS)) do wake('nudge:' .. incarnation) end
end
local function more_to_come()
  if call('ZCARD', RETURNED) > 0 or call('ZCARD', ISSUED) > 0 then return true end
  return limits.max_tickets == cjson.null or num('next') < limits.max_tickets
end
-- No batch stands before B groups are held, but for the last one: until then there is nothing to look at.
local function wake_learner()
  if R.learner_waits and (call('ZCARD', HELD) >= limits.groups_per_step or not more_to_come()) then wake('learner') end
end

-- The last version of a lineage on the path from the current one: where the path leaves it, ENDLESS for the current
-- lineage itself; nil if it is not on the path.
local function last_of(name)
  local lineage, limit = num('lineage'), ENDLESS
  while lineage ~= name do
    local fork = call('HGET', FORKS, lineage)
    if not fork then return nil end
    fork = cjson.decode(fork)
    lineage, limit = fork[1], math.min(limit, fork[2])
  end
  return limit
end

-- Whether weights (lineage, version) lie on the path from the current lineage, not beyond a fork.
local function is_ancestor(lineage, version)
  local limit = last_of(lineage)
  return limit ~= nil and version <= limit
end

local function spans_survive(header)
  if not is_ancestor(header.weights[1], header.weights[2]) then return false end
  for _, span in ipairs(header.spans) do
    if not is_ancestor(span[1], span[2]) then return false end
  end
  return true
end

-- `lo` of the contract: what a ticket's age is counted from.
local function edge_of(t)
  if not t.header then return t.issued_for[2] end
  return limits.over_age == 'mask' and t.header.newest or t.header.oldest
end
local function due(lo) return lo + limits.max_age end

-- Call visit(step) for each use that is still promised a step, the first one first; r uses need r steps, of which due(lo)
-- is the last. leased: 1 for the use that a ticket is leased for, which counts no more; had: its uses so far. Where each
-- batch has a share of fresh groups, a ticket is promised one step in its window.
local function each_due(lo, uses, leased, had, visit)
  local from, to = due(lo) - uses + 1 + leased, due(lo)
  if limits.fresh_per_step > 0 then from = leased + had == 0 and uses > 0 and to or to + 1 end
  for step = from, to do visit(step) end
end
local function in_window(lo) return num('version') - lo <= limits.max_age end

-- Contract 1: for every j >= 0, the uses due at or before step first + j number at most (j + 1) x a_step.
local function due_test(owed, first, a_step)
  local steps = {}
  for step in pairs(owed) do steps[#steps + 1] = step end
  table.sort(steps)
  local total = 0
  for _, step in ipairs(steps) do
    total = total + owed[step]
    if total > math.max(0, step - first + 1) * a_step then return false end
  end
  return true
end

local function read_dues(key)
  local owed, flat = {}, call('HGETALL', key)
  for i = 1, #flat, 2 do owed[tonumber(flat[i])] = tonumber(flat[i + 1]) end
  return owed
end

local function owe(step, uses)
  if call('HINCRBY', DUES, step, uses) == 0 then call('HDEL', DUES, step) end
end
local function owe_all(t, sign)
  each_due(edge_of(t), t.left, t.state == 'leased' and 1 or 0, #t.uses, function(step) owe(step, sign) end)
  put_run('owed', num('owed') + sign * t.left)
end
local function first_due(t) return due(edge_of(t)) - t.left + 1 end
-- The use that a ticket is about to be leased for, or is not leased for any more.
local function owe_next(t, sign)
  if limits.fresh_per_step == 0 then
    owe(first_due(t), sign)
  elseif #t.uses == 0 then
    owe(due(edge_of(t)), sign)
  end
end

local function reserve(bytes) put_run('reserved', num('reserved') + bytes) end
local function hold(bytes) put_run('held', num('held') + bytes) end
local function keep(bytes) put_run('kept', num('kept') + bytes) end

local function payload_field(t) return t.ordinal .. ':' .. t.attempt end
-- What is set aside (`ops.quarantine`) lies where it lay, until QUARANTINE others are newer.
local function is_aside(t) return t.aside == t.attempt end
local function drop_payload(t)
  if not is_aside(t) then call('DEL', PAYLOAD .. payload_field(t)) end
end
local function has_payload(t) return not is_aside(t) and call('EXISTS', PAYLOAD .. payload_field(t)) == 1 end

-- Of equal scores a sorted set goes by name: padded, names go by ordinal.
local function padded(ordinal) return string.format('%012d', ordinal) end
