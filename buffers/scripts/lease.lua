-- The learner's side: which held tickets a step trains, and the one atomic act that marks them trained.

local function fenced(a)
  if a.lineage == num('lineage') then return nil end
  return reject('fenced', 'learner of lineage ' .. a.lineage .. ' was replaced by lineage ' .. num('lineage')
    .. '; it must stop')
end

-- `rows`: the batch's tickets, where they are at hand.
local function lease_reply(lease, rows)
  local headers, uses = {}, {}
  for i, ordinal in ipairs(lease.ordinals) do
    local t = rows and rows[i] or ticket(ordinal)
    headers[i], uses[i] = t.header, #t.uses
  end
  return cjson.encode({ lineage = lease.lineage, step = lease.step, attempt = lease.attempt,
    ordinals = list(lease.ordinals), headers = list(headers), uses = list(uses) })
end

local function owners_of(ordinals)
  local owners, seen = {}, {}
  for _, ordinal in ipairs(ordinals) do
    local name = ticket(ordinal).owner_name or '' -- a returned one has none
    if not seen[name] then seen[name] = true; owners[#owners + 1] = name end
  end
  return owners
end

-- Where each batch has a share of fresh groups, a step trains `again()` others at most. Uses that find no step in their
-- window, or before the end of the run, are given up, the youngest groups' first; all of them once no fresh group can
-- come. So those that were trained never hold room that fresh groups need.
local function trim_uses()
  if limits.fresh_per_step == 0 then return end
  local a_step = again()
  if call('ZCARD', USED) == call('ZCARD', LIVE) and not more_to_come() then a_step = 0 end
  local owed = {}
  for _, c in ipairs(candidates(call('ZRANGE', USED, 0, -1))) do
    local last, keep = math.min(due(c.lo), limits.max_steps - 1), c.left
    local function count(sign)
      for step = last - keep + 1, last do owed[step] = (owed[step] or 0) + sign end
    end
    count(1)
    while keep > 0 and not due_test(owed, num('version'), a_step) do
      count(-1)
      keep = keep - 1
      count(1)
    end
    if keep < c.left then
      local t = ticket(c.ordinal)
      forfeit(t, 'min_fresh', keep)
      if keep == 0 then train(t) end
    end
  end
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
  if (not batch or #batch == 0) and #late == 0 and not more_to_come() then
    trim_uses()
    return lease_reply(nothing)
  end
  if not batch or #batch == 0 then
    if not R.learner_waits then put_run('learner_waits', exact(stamp)) end
    put_run('waiting_for', cjson.encode(late))
    return cjson.encode({ wait = list(late), owners = list(owners_of(late)), members = call('HLEN', MEMBERS),
      since = num('learner_waits'), within = next_deadline_s() })
  end
  drop_run('learner_waits')
  drop_run('waiting_for')
  local lease = { lineage = a.lineage, step = a.step, attempt = num('lease_attempt'), ordinals = {} }
  local rows = {}
  for i, c in ipairs(batch) do
    local t = ticket(c.ordinal)
    rows[i] = t
    owe_next(t, -1)
    set_state(t, 'leased')
    t.times.leased = stamp
    mark(t)
    save(t)
    lease.ordinals[i] = c.ordinal
  end
  put_run('lease', cjson.encode(lease))
  grant()
  return lease_reply(lease, rows)
end

local function give_lease_back(lease)
  put_run('lease_attempt', lease.attempt + 1)
  for _, ordinal in ipairs(lease.ordinals) do
    local t = ticket(ordinal)
    set_state(t, 'held')
    owe_next(t, 1)
    mark(t)
    save(t)
  end
  drop_run('lease')
end

function ops.release(a)
  local stop = fenced(a)
  if stop then return stop end
  local lease = R.lease and cjson.decode(R.lease)
  if not lease or lease.step ~= a.step then return cjson.encode({ released = false }) end
  give_lease_back(lease)
  return cjson.encode({ released = true })
end

-- Set damaged payloads of the leased batch aside, return their tickets, give the rest of the lease back. What is set
-- aside lies where it lay, under the field of an attempt that is over.
function ops.quarantine(a)
  local stop = fenced(a)
  if stop then return stop end
  local lease = R.lease and cjson.decode(R.lease)
  if not lease or lease.step ~= a.step then return '{}' end -- done already: the reply was lost
  local bad = {}
  for _, ordinal in ipairs(a.ordinals) do bad[ordinal] = true end
  give_lease_back(lease)
  for _, ordinal in ipairs(lease.ordinals) do
    if bad[ordinal] then
      local t = ticket(ordinal)
      t.aside = t.attempt
      call('LPUSH', ASIDE, payload_field(t))
      call('HINCRBY', RUN, 'quarantined', 1)
      if #t.uses > 0 then -- it was sound before: that use is all it gets
        forfeit(t, a.reason)
        train(t)
      else
        take_back(t, a.reason, true)
      end
    end
  end
  while call('LLEN', ASIDE) > QUARANTINE do call('DEL', PAYLOAD .. call('RPOP', ASIDE)) end
  grant()
  return '{}'
end

-- Record a use of a leased ticket: it is held again while it owes another, else trained.
local function use(t, lineage, step, skipped)
  t.uses[#t.uses + 1] = { lineage, step }
  if t.left == 1 then return train(t, skipped) end
  put_run('owed', num('owed') - 1)
  t.left = t.left - 1
  set_state(t, 'held')
  mark(t)
  save(t)
end

local function commit_reply(again)
  return cjson.encode({ version = num('version'), again = again, ended = num('version') >= limits.max_steps })
end

-- After V moved: what has left the window, and uses that no longer fit before its end or the run's. Under `mask` work in
-- progress still gets newer tokens, and under `wait` nothing leaves the window that was never trained.
local function expire_window()
  local policy, V = limits.over_age, num('version')
  local last = limits.max_steps - V
  local upto = last < limits.max_uses and '+inf' or V - limits.max_age + limits.max_uses - 2
  local ordinals = {}
  for i, n in ipairs(call('ZRANGEBYSCORE', EDGE, '-inf', upto)) do ordinals[i] = tonumber(n) end
  table.sort(ordinals)
  for _, c in ipairs(candidates(ordinals)) do
    local fit = math.min(due(c.lo) - V + 1, last)
    if fit > 0 and c.left > fit then forfeit(ticket(c.ordinal), 'no_step_left', fit) end
    if not in_window(c.lo) and (policy ~= 'wait' or c.used) and (c.held or policy ~= 'mask') then
      over_age(ticket(c.ordinal))
    end
  end
  trim_uses()
end

-- V moves: the one place where room is freed, by the version and not by an acknowledgement.
local function move_to(version, lineage)
  put_run('lease_attempt', 0)
  call('HSET', COMMITS, version - 1, lineage)
  put_run('version', version)
  put_run('moved', exact(now))
  if version >= limits.max_steps then
    local over = call('ZRANGE', LIVE, 0, -1)
    for _, ordinal in ipairs(call('ZRANGE', RETURNED, 0, -1)) do over[#over + 1] = ordinal end
    for _, ordinal in ipairs(over) do
      local t = ticket(ordinal)
      if #t.uses > 0 then
        forfeit(t, 'run_end')
        train(t)
      else
        finish_ticket(t, 'stale', 'run_end')
      end
    end
  else
    expire_window()
  end
  -- Who waits still serves V - 1, and gets V in a moment where every version is published: a ticket issued before that
  -- would be due one step earlier. Its next beat, after the activation or in two seconds, asks again.
  grant(limits.publish_every == 1)
end

function ops.commit(a)
  local stop = fenced(a)
  if stop then return stop end
  if call('HGET', COMMITS, a.step) == tostring(a.lineage) and a.step < num('version') then return commit_reply(true) end
  local lease = R.lease and cjson.decode(R.lease)
  if not lease or lease.step ~= a.step then
    return reject('bad_call', 'step ' .. a.step .. ' has no lease to commit; V is ' .. num('version'))
  end
  drop_run('lease')
  for _, ordinal in ipairs(lease.ordinals) do use(ticket(ordinal), a.lineage, a.step, a.skipped) end
  move_to(a.step + 1, a.lineage)
  return commit_reply(false)
end

function ops.checkpointed(a)
  local stop = fenced(a)
  if stop then return stop end
  if a.version > num('version') then
    return reject('bad_call', 'a checkpoint of version ' .. a.version .. ' cannot exist: V is ' .. num('version'))
  end
  put_run('checkpoint', a.version)
  put_run('covered', a.oldest == cjson.null and a.version or math.min(a.oldest, a.version))
  -- No rewind goes behind the oldest checkpoint on this branch: what earlier steps trained need not be kept.
  for _, name in ipairs(call('ZRANGEBYSCORE', KEPT, '-inf', '(' .. R.covered)) do drop_kept(tonumber(name)) end
  for _, step in ipairs(call('HKEYS', COMMITS)) do
    if tonumber(step) < num('covered') then call('HDEL', COMMITS, step) end
  end
  return '{}'
end

if ops[ARGV[1]] then return perform() end
