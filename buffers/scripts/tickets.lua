-- Members, issue, and what time alone decides.

local function alive(incarnation)
  local at = call('ZSCORE', BEATS, incarnation)
  return at and now - tonumber(at) <= limits.member_timeout_s
end

local function owns(incarnation, ordinal, attempt)
  if call('SISMEMBER', OWNED .. incarnation, ordinal) == 0 then return false end
  return ticket(ordinal).attempt == attempt
end

-- Uses that count against the room of an ordinal: those owed by live tickets of lower ordinal. Returned ones do not
-- count, else a lost collector's ticket blocks its own re-issue.
local function owed_before(ordinal)
  if ordinal >= num('next') then return num('owed') end
  local total, lower = 0, call('ZRANGEBYSCORE', LIVE, '-inf', '(' .. ordinal)
  for _, n in ipairs(lower) do
    local _, _, left = read_mark(call('HGET', LO, n))
    total = total + left
  end
  return total
end

-- Only `wait` promises that nothing held expires: the due test with this ticket. With step V's batch leased it counts
-- from V + 1, since DUES leaves the uses of leased tickets out already.
local function in_time(served, uses)
  if limits.over_age ~= 'wait' then return true end
  local owed = read_dues(DUES)
  each_due(served, uses, 0, 0, function(step) owed[step] = (owed[step] or 0) + 1 end)
  return due_test(owed, num('version') + (R.lease and 1 or 0), limits.groups_per_step)
end

-- Just after a commit a collector that lags is about to serve the new version. A ticket issued before that is due one step
-- earlier, which costs nothing under `wait`, and groups under the policies that give up.
local function settles(serving)
  if limits.over_age == 'wait' or limits.publish_every > 1 or serving[2] >= num('version') then return false end
  return R.moved and now - num('moved') < SETTLE_S
end

-- Contract 2: the ordinal that a collector serving these weights would get now and the uses it would owe; or nil and the
-- guard that refuses.
local function admit(serving)
  if not serving or not is_ancestor(serving[1], serving[2]) then return nil, 'no_weights' end
  if settles(serving) then return nil, 'settling' end
  -- Returned tickets first: else a lost collector's live ticket blocks its own re-issue (deadlock at k 0, B 1).
  local ordinal = tonumber(call('ZRANGE', RETURNED, 0, 0)[1])
  if not ordinal then
    ordinal = num('next')
    if limits.max_tickets ~= cjson.null and ordinal >= limits.max_tickets then return nil, 'no_rows' end
  end
  local V, s, B = num('version'), serving[2], limits.groups_per_step
  local uses = math.min(limits.max_uses, 1 + limits.max_age - (V - s), limits.max_steps - V)
  if uses < 1 then return nil, 'room' end
  while not in_time(s, uses) do
    if uses == 1 then return nil, 'due' end
    uses = uses - 1
  end
  -- Relative admission: only lower ordinals count, against (1 + k - (V - s)) x B.
  if owed_before(ordinal) + uses > math.max(0, 1 + limits.max_age - (V - s)) * B then return nil, 'room' end
  if num('owed') + uses > (limits.max_steps - V) * B then return nil, 'steps' end
  if num('reserved') + num('held') + limits.group_bytes > limits.max_bytes then return nil, 'bytes' end
  return ordinal, uses
end

local function issue(m)
  local ordinal, uses = admit(m.serving)
  if not ordinal or not make_space(limits.group_bytes) then return nil end
  local fresh = ordinal == num('next')
  local t = fresh and new_row(ordinal) or ticket(ordinal)
  if fresh then put_run('next', ordinal + 1) else call('ZREM', RETURNED, ordinal) end
  set_state(t, 'issued')
  t.owner, t.owner_name, t.issued_for, t.began = m.incarnation, m.name, m.serving, now
  t.header, t.reason, t.size, t.left, t.uses, t.times = nil, '', 0, uses, {}, { issued = stamp }
  reserve(limits.group_bytes)
  go_live(t)
  call('SADD', OWNED .. m.incarnation, ordinal)
  call('ZADD', ISSUED, exact(now), ordinal)
  call('ZADD', MOVED, exact(now), ordinal)
  call('HSET', PROGRESS, ordinal, 0)
  save(t)
  return t
end

-- A collector's place among those who wait, and in the queue of those who serve the same.
local function enqueue(incarnation, order)
  call('ZADD', WAITERS, 'NX', order, incarnation)
  local served = call('HGET', SERVING, incarnation)
  if not served then return end
  call('ZADD', QUEUE .. served, call('ZSCORE', WAITERS, incarnation), incarnation)
  call('SADD', QUEUES, served)
end
local function dequeue(incarnation)
  call('ZREM', WAITERS, incarnation)
  local served = call('HGET', SERVING, incarnation)
  if served and call('ZREM', QUEUE .. served, incarnation) == 1 and call('EXISTS', QUEUE .. served) == 0 then
    call('SREM', QUEUES, served)
  end
end

local function serve(m, serving)
  local order, old = call('ZSCORE', WAITERS, m.incarnation), call('HGET', SERVING, m.incarnation)
  local new = serving and serving[1] .. ':' .. serving[2] or false
  m.serving = serving
  if new == old then return end
  if order then dequeue(m.incarnation) end
  if new then call('HSET', SERVING, m.incarnation, new) else call('HDEL', SERVING, m.incarnation) end
  if order then enqueue(m.incarnation, order) end
end

-- The first living collector of a queue from place `at` on: incarnation, order, place.
local function first_alive(served, at)
  while true do
    local found = call('ZRANGE', QUEUE .. served, at, at, 'WITHSCORES')
    if not found[1] then return nil end
    if alive(found[1]) then return found[1], tonumber(found[2]), at end
    at = at + 1
  end
end

-- Whatever frees room re-tests the waiting collectors in order. A dead or lagging one consumes nothing and keeps its
-- place; one that serves V and gets nothing ends the round, since nobody has more room. newest_only: see `move_to`.
-- Of those that serve the same only the first is looked at: what is refused to one is refused to all, and room only
-- shrinks here. So a thousand who wait for their weights cost each other nothing.
function grant(newest_only)
  if R.phase ~= 'running' or call('EXISTS', QUEUES) == 0 then return end -- nobody waits
  if not admit({ num('lineage'), num('version') }) then return end
  local queues = {}
  for _, served in ipairs(call('SMEMBERS', QUEUES)) do
    local newest = tonumber(served:match(':(.*)')) >= num('version')
    if newest or not newest_only then queues[#queues + 1] = { served = served, newest = newest, at = 0 } end
  end
  while true do
    local first
    for _, q in ipairs(queues) do
      if not q.refused then
        q.incarnation, q.order, q.at = first_alive(q.served, q.at)
        q.refused = not q.incarnation
        if q.incarnation and (not first or q.order < first.order) then first = q end
      end
    end
    if not first then return end
    local m, reply = member(first.incarnation), {}
    while #reply < m.want do
      local t = issue(m)
      if not t then break end
      reply[#reply + 1] = { t.ordinal, t.attempt }
    end
    if #reply > 0 then
      m.reply = reply
      save_member(m)
      dequeue(first.incarnation)
      wake('tickets:' .. first.incarnation)
    elseif first.newest then
      return
    else
      first.refused = true
    end
  end
end

local function owned_in_order(incarnation)
  local ordinals = {}
  for i, n in ipairs(call('SMEMBERS', OWNED .. incarnation)) do ordinals[i] = tonumber(n) end
  table.sort(ordinals)
  return ordinals
end

-- A member is gone: its tickets are returned; `lost` counts against them, a clean leave does not.
local function forget(incarnation, why, lost)
  local m = member(incarnation)
  call('HDEL', MEMBERS, incarnation)
  if call('HGET', NAMES, m.name) == incarnation then call('HDEL', NAMES, m.name) end
  call('ZREM', BEATS, incarnation)
  dequeue(incarnation)
  call('HDEL', SERVING, incarnation)
  if R.evaluation_claim == incarnation then
    drop_run('evaluation_claim')
    wake_members()
  end
  for _, ordinal in ipairs(owned_in_order(incarnation)) do take_back(ticket(ordinal), why, lost) end
  call('DEL', OWNED .. incarnation)
end

local function straggler_s()
  if not R.median then return limits.no_progress_s end
  return math.min(math.max(STRAGGLER_FLOOR_S, STRAGGLER_FACTOR * num('median')), limits.no_progress_s)
end

-- What time alone decides: lost collectors, tickets without progress, stragglers. Bounded by what is live.
local function expire()
  if R.phase ~= 'running' then return end
  local changed = false
  for _, incarnation in ipairs(call('ZRANGEBYSCORE', BEATS, '-inf', '(' .. exact(now - limits.member_timeout_s))) do
    forget(incarnation, 'member_lost', true)
    changed = true
  end
  for _, ordinal in ipairs(call('ZRANGEBYSCORE', ISSUED, '-inf', '(' .. exact(now - straggler_s()))) do
    finish_ticket(ticket(ordinal), 'stale', 'straggler')
    changed = true
  end
  for _, ordinal in ipairs(call('ZRANGEBYSCORE', MOVED, '-inf', '(' .. exact(now - limits.ticket_progress_s))) do
    take_back(ticket(ordinal), 'no_progress', true)
    changed = true
  end
  if changed then grant() end
end

-- Seconds until time alone may change something; an act moves `now` by CLOCK_STEP_S at most, so no wait for a deadline
-- is longer.
local function next_deadline_s()
  local best = now + CLOCK_STEP_S
  local function consider(key, plus)
    local head = call('ZRANGE', key, 0, 0, 'WITHSCORES')
    if head[2] and tonumber(head[2]) + plus < best then best = tonumber(head[2]) + plus end
  end
  consider(BEATS, limits.member_timeout_s)
  consider(MOVED, limits.ticket_progress_s)
  consider(ISSUED, straggler_s())
  return math.max(0, best - now)
end

-- The reply to a member's current request, as far as it still owns the tickets.
local function granted(m)
  local found = {}
  for _, pair in ipairs(m.reply or {}) do
    if owns(m.incarnation, pair[1], pair[2]) then
      local t = ticket(pair[1])
      found[#found + 1] = { t.ordinal, t.attempt, t.issued_for, t.times.issued }
    end
  end
  return found
end

local function unknown(a)
  return reject('unknown_member', 'collector "' .. a.name .. '" (' .. a.incarnation .. ') is not known to the run')
end

function ops.join(a)
  local other = call('HGET', NAMES, a.name)
  if other and other ~= a.incarnation then forget(other, 'member_lost', true) end
  if call('HEXISTS', MEMBERS, a.incarnation) == 0 then
    save_member({ name = a.name, incarnation = a.incarnation, seq = -1, want = 0, checksum = '', info = a.info })
    call('HSET', NAMES, a.name, a.incarnation)
    call('ZADD', BEATS, exact(now), a.incarnation)
  end
  grant()
  return '{}'
end

function ops.leave(a)
  if call('HEXISTS', MEMBERS, a.incarnation) == 1 then
    forget(a.incarnation, 'left', false)
    grant()
  end
  return '{}'
end

function ops.tickets(a)
  if call('HEXISTS', MEMBERS, a.incarnation) == 0 then return unknown(a) end
  expire()
  local m = member(a.incarnation)
  if not m then return unknown(a) end
  call('ZADD', BEATS, exact(now), a.incarnation)
  if a.seq < m.seq then
    return reject('bad_call', 'request ' .. a.seq .. ' comes after ' .. m.seq .. '; numbers must grow')
  end
  if a.seq > m.seq then
    m.seq, m.want, m.reply, m.asked = a.seq, a.want, nil, stamp
    save_member(m)
    dequeue(a.incarnation)
  end
  local found = granted(m)
  if #found == 0 and m.want > 0 then
    -- Behind those who waited before: one path for old and new requests keeps the order fair. Also where a grant was
    -- revoked (by a rewind) before its reply arrived: else this request would wait for ever.
    m.reply = nil
    save_member(m)
    enqueue(a.incarnation, call('HINCRBY', RUN, 'asks', 1))
    grant()
    found = granted(member(a.incarnation))
  end
  return cjson.encode({ tickets = list(found), within = next_deadline_s() })
end

function ops.beat(a)
  if call('HEXISTS', MEMBERS, a.incarnation) == 0 then return unknown(a) end
  call('ZADD', BEATS, exact(now), a.incarnation) -- before anything expires: it is here
  expire()
  local m = member(a.incarnation)
  serve(m, a.serving ~= cjson.null and is_ancestor(a.serving[1], a.serving[2]) and a.serving or nil)
  m.checksum, m.info = a.checksum, a.info
  save_member(m)
  local revoked = {}
  for _, p in ipairs(a.progress) do
    local ordinal, attempt, count = p[1], p[2], p[3]
    if not owns(a.incarnation, ordinal, attempt) then
      revoked[#revoked + 1] = { ordinal, attempt }
    elseif count > tonumber(call('HGET', PROGRESS, ordinal) or '0') then
      call('HSET', PROGRESS, ordinal, count)
      call('ZADD', MOVED, exact(now), ordinal)
    end
  end
  grant()
  local claim = R.evaluation_claim
  local mine = R.evaluation and (claim == nil or claim == a.incarnation)
  return cjson.encode({
    version = num('version'),
    lineage = num('lineage'),
    announced = R.announced and cjson.decode(R.announced) or cjson.null,
    revoked = list(revoked),
    evaluation = mine and R.evaluation or cjson.null,
    phase = R.phase,
    announcements = num('announcements'),
    verify = R.verify or '',
  })
end

if ops[ARGV[1]] then return perform() end
