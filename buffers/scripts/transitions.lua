-- Moves between ticket states. Each keeps four sums true: counts per state, dues, bytes, ownership.

-- Undo what issued, held or leased had taken.
local function leave_live(t)
  if t.state == 'issued' or t.state == 'held' then owe(due(lo_of(t)), -1) end
  if t.state == 'issued' then
    reserve(-limits.group_bytes)
    call('SREM', OWNED .. t.owner, t.ordinal)
    call('ZREM', ISSUED, t.ordinal)
    call('ZREM', MOVED, t.ordinal)
    t.progress = tonumber(call('HGET', PROGRESS, t.ordinal) or '0')
    call('HDEL', PROGRESS, t.ordinal)
  elseif t.state == 'held' or t.state == 'leased' then
    hold(-t.size)
  end
  call('ZREM', LIVE, t.ordinal)
  call('HDEL', LO, t.ordinal)
end

local function go_live(t, mark)
  call('ZADD', LIVE, t.ordinal, t.ordinal)
  call('HSET', LO, t.ordinal, mark .. lo_of(t))
end

-- Back to be issued again, as the next attempt.
local function give_back(t)
  leave_live(t)
  drop_payload(t)
  set_state(t, 'returned')
  t.attempt = t.attempt + 1
  t.owner, t.owner_name, t.reason, t.size = '', '', '', 0
  t.header, t.trained, t.ended_at = nil, nil, nil
  call('ZADD', RETURNED, t.ordinal, t.ordinal)
  save(t)
  wake_learner()
end

-- To a terminal state other than trained. What was lost: as the caller knows it, else the held group's own, else the
-- progress last reported, a lower bound.
local function finish_ticket(t, state, reason, tokens, seconds)
  leave_live(t)
  if tokens == nil then
    tokens = t.header and t.header.tokens or t.progress or 0
    seconds = t.header and t.header.seconds or 0
  end
  call('ZREM', RETURNED, t.ordinal)
  drop_payload(t)
  set_state(t, state)
  t.reason, t.size = reason, 0
  t.ended_at = { num('lineage'), num('version') }
  local key = state .. '/' .. reason
  call('HINCRBY', REASONS, key, 1)
  call('HINCRBY', LOST_TOKENS, key, tokens)
  call('HINCRBYFLOAT', LOST_SECONDS, key, tostring(seconds))
  save(t)
  if call('HEXISTS', MEMBERS, t.owner) == 1 then wake('nudge:' .. t.owner) end
  wake_learner()
end

-- An issued ticket whose work is gone; `poison` once it has taken too many collectors with it.
local function take_back(t, lost)
  if lost then
    t.losses = t.losses + 1
    if t.losses >= limits.max_losses then return finish_ticket(t, 'failed', 'poison') end
  end
  give_back(t)
end

local function drop_kept(ordinal)
  local t = ticket(ordinal)
  call('ZREM', KEPT, kept_name(ordinal))
  keep(-t.size)
  drop_payload(t)
  t.size = 0
  save(t)
end

-- Payloads kept only for a rewind are given up first, oldest step first: they must never starve tickets.
local function make_space(need)
  while num('reserved') + num('held') + num('kept') + need > limits.max_bytes do
    local oldest = call('ZRANGE', KEPT, 0, 0)[1]
    if not oldest then return false end
    drop_kept(tonumber(oldest))
  end
  return true
end
