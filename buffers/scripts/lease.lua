-- The learner's side: which held tickets a step trains, and the one atomic act that marks them trained.

local function fenced(a)
  if a.lineage == num('lineage') then return nil end
  return reject('fenced', 'learner of lineage ' .. a.lineage .. ' was replaced by lineage ' .. num('lineage')
    .. '; it must stop')
end

local function live_candidates()
  local ordinals, found = call('ZRANGE', LIVE, 0, -1), {}
  for from = 1, #ordinals, 1000 do -- unpack is bounded by the Lua stack
    local upto = math.min(from + 999, #ordinals)
    local marks = call('HMGET', LO, unpack(ordinals, from, upto))
    for i, mark in ipairs(marks) do
      local lo = tonumber(mark:sub(2))
      found[#found + 1] = { ordinal = tonumber(ordinals[from + i - 1]), held = mark:sub(1, 1) == 'h', lo = lo }
    end
  end
  return found
end

local function more_to_come()
  if call('ZCARD', RETURNED) > 0 or call('ZCARD', ISSUED) > 0 then return true end
  return limits.max_tickets == cjson.null or num('next') < limits.max_tickets
end

-- Whether, with this batch gone, everything else can still be trained in time from step V + 1 on.
local function dues_hold(live, batch)
  local taken, owed = {}, {}
  for _, c in ipairs(batch) do taken[c.ordinal] = true end
  for _, c in ipairs(live) do
    if not taken[c.ordinal] then owed[due(c.lo)] = (owed[due(c.lo)] or 0) + 1 end
  end
  return due_test(owed, num('version') + 1)
end

local function head(items, count)
  local first = {}
  for i = 1, math.min(count, #items) do first[i] = items[i] end
  return first
end

-- Contract 4. Returns the batch, or nil and the tickets waited for.
local function choose()
  local V, B, live = num('version'), limits.groups_per_step, live_candidates()
  local visible = math.max(B, math.floor(limits.lookahead * B))
  local ready, sight, late = {}, {}, {}
  for i, c in ipairs(live) do
    c.now = due(c.lo) <= V
    if not c.held then
      late[#late + 1] = c.ordinal
    elseif in_window(c.lo) then
      ready[#ready + 1] = c
      if i <= visible or c.now then sight[#sight + 1] = c end
    end
  end
  table.sort(sight, function(x, y)
    if x.now ~= y.now then return x.now end
    return x.ordinal < y.ordinal
  end)
  local first = head(sight, B)
  if #first < B and not more_to_come() and #late == 0 and #ready <= B then return ready, late end
  local guard = limits.over_age == 'wait'
  if #first == B and (not guard or dues_hold(live, first)) then return first, late end
  if guard and #ready >= B then
    -- Oldest-ready-first may fail the test where the earliest dues pass; without this the learner waits for ever.
    table.sort(ready, function(x, y)
      if x.lo ~= y.lo then return x.lo < y.lo end
      return x.ordinal < y.ordinal
    end)
    local earliest = head(ready, B)
    if dues_hold(live, earliest) then return earliest, late end
  end
  return nil, late
end

local function lease_reply(lease)
  local headers = {}
  for i, ordinal in ipairs(lease.ordinals) do headers[i] = ticket(ordinal).header end
  return cjson.encode({ lineage = lease.lineage, step = lease.step, attempt = lease.attempt,
    ordinals = list(lease.ordinals), headers = list(headers) })
end

function ops.lease(a)
  local stop = fenced(a)
  if stop then return stop end
  local current = R.lease and cjson.decode(R.lease)
  if current and current.step == a.step then return lease_reply(current) end
  if a.step ~= num('version') then
    return reject('bad_call', 'step ' .. a.step .. ' cannot be leased: the next step starts from version '
      .. num('version'))
  end
  expire()
  local nothing = { lineage = a.lineage, step = a.step, attempt = 0, ordinals = {} }
  if num('version') >= limits.max_steps then return lease_reply(nothing) end
  local batch, late = choose()
  if (not batch or #batch == 0) and #late == 0 and not more_to_come() then return lease_reply(nothing) end
  if not batch or #batch == 0 then
    put_run('learner_waits', 1)
    put_run('waiting_for', cjson.encode(late))
    local owners, seen = {}, {}
    for _, ordinal in ipairs(late) do
      local name = ticket(ordinal).owner_name
      if not seen[name] then seen[name] = true; owners[#owners + 1] = name end
    end
    return cjson.encode({ wait = list(late), owners = list(owners), members = call('HLEN', MEMBERS),
      deadline = next_deadline(), now = now })
  end
  drop_run('learner_waits')
  drop_run('waiting_for')
  local lease = { lineage = a.lineage, step = a.step, attempt = num('lease_attempt'), ordinals = {} }
  for i, c in ipairs(batch) do
    local t = ticket(c.ordinal)
    owe(due(c.lo), -1)
    set_state(t, 'leased')
    call('HSET', LO, c.ordinal, 'l' .. c.lo)
    save(t)
    lease.ordinals[i] = c.ordinal
  end
  put_run('lease', cjson.encode(lease))
  grant()
  return lease_reply(lease)
end

function ops.release(a)
  local stop = fenced(a)
  if stop then return stop end
  local lease = R.lease and cjson.decode(R.lease)
  if not lease or lease.step ~= a.step then return cjson.encode({ released = false }) end
  put_run('lease_attempt', lease.attempt + 1)
  for _, ordinal in ipairs(lease.ordinals) do
    local t = ticket(ordinal)
    set_state(t, 'held')
    owe(due(lo_of(t)), 1)
    call('HSET', LO, ordinal, 'h' .. lo_of(t))
    save(t)
  end
  drop_run('lease')
  return cjson.encode({ released = true })
end

local function mark_trained(t, a)
  call('ZREM', LIVE, t.ordinal)
  call('HDEL', LO, t.ordinal)
  hold(-t.size)
  set_state(t, 'trained')
  t.reason = a.skipped and 'skipped' or 'trained'
  t.trained, t.ended_at = { a.lineage, a.step }, { a.lineage, a.step }
  call('HINCRBY', REASONS, 'trained/' .. t.reason, 1)
  if R.checkpoint and t.header.newest <= num('checkpoint') then
    -- Only these can be used again after a rewind: everything else contains tokens of dead weights.
    call('ZADD', KEPT, a.step, kept_name(t.ordinal))
    keep(t.size)
  else
    drop_payload(t)
    t.size = 0
  end
  save(t)
end

function ops.commit(a)
  local stop = fenced(a)
  if stop then return stop end
  local function reply(again)
    return cjson.encode({ version = num('version'), again = again, ended = num('version') >= limits.max_steps })
  end
  if call('HGET', COMMITS, a.step) == tostring(a.lineage) and a.step < num('version') then return reply(true) end
  local lease = R.lease and cjson.decode(R.lease)
  if not lease or lease.step ~= a.step then
    return reject('bad_call', 'step ' .. a.step .. ' has no lease to commit; V is ' .. num('version'))
  end
  for _, ordinal in ipairs(lease.ordinals) do mark_trained(ticket(ordinal), a) end
  drop_run('lease')
  put_run('lease_attempt', 0)
  call('HSET', COMMITS, a.step, a.lineage)
  put_run('version', a.step + 1) -- the room is freed here, by the version, not by an acknowledgement
  if num('version') >= limits.max_steps then
    for _, key in ipairs({ LIVE, RETURNED }) do
      for _, ordinal in ipairs(call('ZRANGE', key, 0, -1)) do finish_ticket(ticket(ordinal), 'stale', 'run_end') end
    end
  elseif limits.over_age == 'drop' then
    for _, c in ipairs(live_candidates()) do
      if not in_window(c.lo) then finish_ticket(ticket(c.ordinal), 'stale', 'over_age') end
    end
  end
  -- Who waits still serves V - 1, and gets V in a moment where every version is published: a ticket issued before that
  -- would be due one step earlier. Its next beat, after the activation or in two seconds, asks again.
  grant(limits.publish_every == 1)
  return reply(false)
end

function ops.checkpointed(a)
  local stop = fenced(a)
  if stop then return stop end
  if a.version > num('version') then
    return reject('bad_call', 'a checkpoint of version ' .. a.version .. ' cannot exist: V is ' .. num('version'))
  end
  put_run('checkpoint', a.version)
  -- No rewind goes behind this checkpoint on this branch: what earlier steps trained need not be kept.
  for _, name in ipairs(call('ZRANGEBYSCORE', KEPT, '-inf', '(' .. a.version)) do drop_kept(tonumber(name)) end
  return '{}'
end
