-- A learner starts: fence the old one at once, then rewind in bounded pieces that may be repeated.

function ops.new_lineage(a)
  local parent = a.parent ~= cjson.null and a.parent or nil
  if parent then
    if not is_ancestor(parent[1], parent[2]) then
      return reject('bad_call', 'checkpoint (' .. parent[1] .. ', ' .. parent[2]
        .. ') is not on the current branch (lineage ' .. num('lineage') .. ')')
    end
    if parent[2] > num('version') then
      return reject('bad_call', 'checkpoint of version ' .. parent[2] .. " lies beyond the run's V, "
        .. num('version'))
    end
  end
  local origin = parent or { 0, 0 }
  -- Dues and reservations follow the new limits; held and leased bytes are what they are.
  put_run('limits', cjson.encode(a.limits))
  limits = a.limits
  put_run('reserved', call('ZCARD', ISSUED) * limits.group_bytes)
  call('DEL', DUES)
  for _, ordinal in ipairs(call('ZRANGE', LIVE, 0, -1)) do
    local mark = call('HGET', LO, ordinal)
    if mark:sub(1, 1) ~= 'l' then owe(due(tonumber(mark:sub(2))), 1) end
  end
  put_run('lineage', num('lineage') + 1)
  call('HSET', FORKS, num('lineage'), cjson.encode(origin))
  put_run('version', origin[2])
  put_run('checkpoint', origin[2])
  put_run('phase', 'rewinding')
  put_run('sweep', 0)
  call('DEL', SWEEP_DUES)
  put_run('lease_attempt', 0)
  for _, field in ipairs({ 'lease', 'learner_waits', 'waiting_for', 'announced', 'announcement', 'evaluation',
    'evaluation_claim', 'ended_with' }) do
    drop_run(field)
  end
  for _, incarnation in ipairs(call('HKEYS', MEMBERS)) do
    local m = member(incarnation)
    if m.serving and not is_ancestor(m.serving[1], m.serving[2]) then
      m.serving = nil
      save_member(m)
    end
  end
  return cjson.encode({ lineage = num('lineage') })
end

-- Shed what the new B cannot train in time: in ordinal order, while the due test and (k + 1) x B allow.
local function still_fits(t)
  local owed, step = read_dues(SWEEP_DUES), due(lo_of(t))
  owed[step] = (owed[step] or 0) + 1
  local total = 0
  for _, uses in pairs(owed) do total = total + uses end
  if total > (limits.max_age + 1) * limits.groups_per_step then return false end
  if total > (limits.max_steps - num('version')) * limits.groups_per_step then return false end
  if not due_test(owed, num('version')) then return false end
  call('HINCRBY', SWEEP_DUES, step, 1)
  return true
end

local function usable(t)
  return t.header and has_payload(t) and spans_survive(t.header) and t.header.newest <= num('version')
end

-- A held, leased or undone trained ticket is held if its payload is there, every span survives and the bounds allow it.
local function hold_or_give_back(t)
  if t.state == 'held' then
    if not (usable(t) and still_fits(t)) then give_back(t) end
    return
  end
  if t.state == 'trained' then set_state(t, 'leased') end -- counted in held bytes, in no due
  if not (usable(t) and still_fits(t)) then return give_back(t) end
  set_state(t, 'held')
  t.trained, t.ended_at, t.reason = nil, nil, ''
  go_live(t, 'h')
  owe(due(lo_of(t)), 1)
  save(t)
end

local function rewind(t)
  if t.state == 'returned' then return end
  if t.state == 'trained' then
    -- Step s made version s + 1: its use survives if that version is on the branch.
    if is_ancestor(t.trained[1], t.trained[2] + 1) then return end
    call('HINCRBY', REASONS, 'trained/' .. t.reason, -1)
    if call('ZREM', KEPT, kept_name(t.ordinal)) == 1 then
      keep(-t.size)
      hold(t.size)
    end
    hold_or_give_back(t)
  elseif t.state == 'issued' then
    -- It goes on if what it was issued for survives; the collector drops it if something newer was sampled.
    if not (is_ancestor(t.issued_for[1], t.issued_for[2]) and still_fits(t)) then
      wake('nudge:' .. t.owner)
      give_back(t)
    end
  elseif t.state == 'held' or t.state == 'leased' then
    hold_or_give_back(t)
  elseif not is_ancestor(t.ended_at[1], t.ended_at[2]) then
    call('HINCRBY', REASONS, t.state .. '/' .. t.reason, -1)
    give_back(t)
  end
end

function ops.sweep(a)
  local stop = fenced(a)
  if stop then return stop end
  if not R.sweep then return cjson.encode({ done = true }) end
  local upto = math.min(num('next'), num('sweep') + SWEEP_CHUNK)
  for ordinal = num('sweep'), upto - 1 do rewind(ticket(ordinal)) end
  put_run('sweep', upto)
  if upto < num('next') then return cjson.encode({ done = false }) end
  drop_run('sweep')
  put_run('phase', 'running')
  wake_members()
  grant()
  return cjson.encode({ done = true })
end
