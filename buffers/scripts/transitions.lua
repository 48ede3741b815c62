-- Moves between ticket states. Each keeps four sums true: counts per state, dues, bytes, ownership.

local function is_live(t) return t.state == 'issued' or t.state == 'held' or t.state == 'leased' end

-- What is read of a live ticket when a batch is chosen and when V moves, without decoding it.
local function mark(t)
  local edge = edge_of(t)
  call('HSET', LO, t.ordinal, t.state:sub(1, 1) .. edge .. ':' .. t.left .. ':' .. #t.uses)
  call('ZADD', EDGE, edge, t.ordinal)
  if t.state == 'held' then
    call('ZADD', HELD, first_due(t), padded(t.ordinal))
  else
    call('ZREM', HELD, padded(t.ordinal))
  end
  if limits.fresh_per_step > 0 then
    if #t.uses > 0 then call('ZADD', USED, t.ordinal, t.ordinal) else call('ZREM', USED, t.ordinal) end
  end
end
local function read_mark(text)
  local state, lo, left, had = text:match('^(%a)(%-?%d+):(%d+):(%d+)$')
  return state, tonumber(lo), tonumber(left), tonumber(had)
end

-- What an issued ticket has and others have not: its reservation, its owner, its progress.
local function end_work(t)
  reserve(-limits.group_bytes)
  call('SREM', OWNED .. t.owner, t.ordinal)
  call('ZREM', ISSUED, t.ordinal)
  call('ZREM', MOVED, t.ordinal)
  call('HDEL', PROGRESS, t.ordinal)
end

-- Undo what issued, held or leased had taken.
local function leave_live(t)
  if not is_live(t) then return end
  owe_all(t, -1)
  if t.state == 'issued' then end_work(t) else hold(-t.size) end
  call('ZREM', LIVE, t.ordinal)
  call('ZREM', EDGE, t.ordinal)
  call('ZREM', HELD, padded(t.ordinal))
  call('HDEL', LO, t.ordinal)
  if limits.fresh_per_step > 0 then call('ZREM', USED, t.ordinal) end
end

local function go_live(t)
  call('ZADD', LIVE, t.ordinal, t.ordinal)
  owe_all(t, 1)
  mark(t)
end

-- An issued ticket is held from now on. It owes what it owed, counted from its oldest token.
local function take_in(t, header, size)
  local promised = edge_of(t)
  end_work(t)
  set_state(t, 'held')
  t.header, t.size, t.times.put = header, size, stamp
  hold(size)
  local edge = edge_of(t)
  if edge ~= promised then
    each_due(promised, t.left, 0, 0, function(step) owe(step, -1) end)
    each_due(edge, t.left, 0, 0, function(step) owe(step, 1) end)
  end
  mark(t)
end

-- A row that did not exist, waiting to be issued.
local function new_row(ordinal)
  local t = { ordinal = ordinal, attempt = 0, losses = 0, requeues = 0, left = 0, uses = {}, times = {}, size = 0,
    last_owner = '', last_attempt = -1 }
  call('ZADD', ROWS, ordinal, ordinal)
  return t
end

-- One whose work is to be done, or done again.
local function returned_row(ordinal)
  local t = new_row(ordinal)
  set_state(t, 'returned')
  call('ZADD', RETURNED, ordinal, ordinal)
  save(t)
  return t
end

-- Work in progress is not wanted any more. Who hands it back itself knows.
local function tell_owner(t)
  local itself = t.last_owner == t.owner and t.last_attempt == t.attempt
  if t.state == 'issued' and not itself and call('HEXISTS', MEMBERS, t.owner) == 1 then wake('nudge:' .. t.owner) end
end

local function remember(key, reward, length)
  if reward and reward ~= cjson.null then
    call('HINCRBYFLOAT', WORTH, key .. '|reward', exact(reward))
    call('HINCRBY', WORTH, key .. '|rewards', 1)
  end
  if length > 0 then
    call('HINCRBYFLOAT', WORTH, key .. '|length', exact(length))
    call('HINCRBY', WORTH, key .. '|lengths', 1)
  end
end

-- Account for work that is thrown away: as the caller knows it (tokens, seconds, reward, length); else the held group's
-- own; else the progress last reported, a lower bound.
local function lose(t, key, work)
  if not work then
    local progress = tonumber(call('HGET', PROGRESS, t.ordinal) or '0')
    work = t.header or { tokens = progress, seconds = 0, length = progress / limits.group_size }
  end
  call('HINCRBY', LOST_TOKENS, key, work.tokens)
  call('HINCRBYFLOAT', LOST_SECONDS, key, exact(work.seconds))
  remember(key, work.reward, work.length)
end

-- Back to be issued again, as the next attempt.
local function give_back(t, why, work)
  lose(t, 'returned/' .. why, work)
  call('HINCRBY', RETURNS, why, 1)
  tell_owner(t)
  leave_live(t)
  drop_payload(t)
  set_state(t, 'returned')
  t.attempt = t.attempt + 1
  t.owner, t.owner_name, t.reason, t.size, t.left, t.uses, t.times = '', '', '', 0, 0, {}, {}
  t.header, t.ended_at = nil, nil
  call('ZREM', ENDED, t.ordinal)
  call('ZADD', RETURNED, t.ordinal, t.ordinal)
  save(t)
  wake_learner()
end

-- To a terminal state other than trained.
local function finish_ticket(t, state, reason, work)
  local key = state .. '/' .. reason
  lose(t, key, work)
  call('HINCRBY', REASONS, key, 1)
  tell_owner(t)
  leave_live(t)
  call('ZREM', RETURNED, t.ordinal)
  drop_payload(t)
  set_state(t, state)
  t.reason, t.size, t.left, t.times.ended = reason, 0, 0, stamp
  t.ended_at = { num('lineage'), num('version') }
  call('ZADD', ENDED, num('version'), t.ordinal)
  save(t)
  wake_learner()
end

-- Give up uses that a live ticket still owes, all but the last `kept`.
local function forfeit(t, why, kept)
  call('HINCRBY', REASONS, 'forfeited/' .. why, t.left - (kept or 0))
  owe_all(t, -1)
  t.left = kept or 0
  owe_all(t, 1)
  mark(t)
  save(t)
end

-- Terminal: its last use is over. The payload stays if a rewind could use it again: that needs tokens of weights that
-- the last checkpoint contains, everything else has tokens of weights that would be dead.
local function train(t, skipped)
  local use = t.uses[#t.uses]
  leave_live(t)
  set_state(t, 'trained')
  t.reason, t.left, t.ended_at, t.times.ended = skipped and 'skipped' or 'trained', 0, use, stamp
  local key = 'trained/' .. t.reason
  call('HINCRBY', REASONS, key, 1)
  call('ZADD', ENDED, use[2] + 1, t.ordinal)
  if t.header then remember(key, t.header.reward, t.header.length) end
  if t.header and R.checkpoint and t.header.newest <= num('checkpoint') and has_payload(t) then
    call('ZADD', KEPT, use[2], padded(t.ordinal))
    keep(t.size)
  else
    drop_payload(t)
    t.size = 0
  end
  save(t)
end

-- An issued or held ticket whose work is gone; `poison` once it has taken too many collectors with it.
local function take_back(t, why, lost, work)
  if lost then
    t.losses = t.losses + 1
    if t.losses >= limits.max_losses then return finish_ticket(t, 'failed', 'poison', work) end
  end
  give_back(t, why, work)
end

-- A ticket that no step may train any more: what of it was trained stays trained, the rest is the policy's.
local function over_age(t, work)
  if #t.uses > 0 then
    forfeit(t, 'over_age')
    train(t)
  elseif limits.over_age == 'requeue' and t.requeues < REQUEUES then
    t.requeues = t.requeues + 1
    give_back(t, 'over_age', work)
  else
    finish_ticket(t, 'stale', 'over_age', work)
  end
end

local function drop_kept(ordinal)
  local t = ticket(ordinal)
  call('ZREM', KEPT, padded(ordinal))
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
