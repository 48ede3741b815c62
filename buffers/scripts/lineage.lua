-- A learner starts: fence the old one at once, then rewind in bounded pieces that may be repeated.

local function start_rewind(version)
  put_run('version', version)
  put_run('checkpoint', version)
  put_run('covered', version)
  put_run('phase', 'rewinding')
  put_run('sweep', 0)
  put_run('lease_attempt', 0)
  put_run('filtered_in_row', 0)
  -- What is owed follows the new limits and the new tree; leased tickets are held again, their use was not recorded.
  call('DEL', SWEEP_DUES, DUES, USED)
  put_run('owed', 0)
  for _, ordinal in ipairs(call('ZRANGE', LIVE, 0, -1)) do
    local t = ticket(ordinal)
    if t.state == 'leased' then set_state(t, 'held') end
    owe_all(t, 1)
    mark(t)
    save(t)
  end
  for _, field in ipairs({ 'lease', 'learner_waits', 'waiting_for', 'announced', 'announcement', 'evaluation',
    'evaluation_claim', 'ended_with', 'moved' }) do
    drop_run(field)
  end
  for _, incarnation in ipairs(call('HKEYS', MEMBERS)) do
    local m = member(incarnation)
    if m.serving and not is_ancestor(m.serving[1], m.serving[2]) then
      serve(m, nil)
      save_member(m)
    end
  end
end

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
    if parent[2] < num('gone_to') then
      return reject('bad_call', 'checkpoint of version ' .. parent[2] .. ' is older than the oldest that was kept: '
        .. 'ledger rows up to version ' .. num('gone_to') .. ' have moved to the archive')
    end
  end
  local origin = parent or { 0, 0 }
  -- Held and leased bytes are of the old limits too; only the reservations change with the new group size.
  put_run('limits', cjson.encode(a.limits))
  limits = a.limits
  put_run('reserved', call('ZCARD', ISSUED) * limits.group_bytes)
  put_run('lineage', num('lineage') + 1)
  call('HSET', FORKS, num('lineage'), cjson.encode(origin))
  if not parent and call('EXISTS', GONE) == 1 then
    -- From the initial weights everything is generated again, also what had left for the archive's ledger.
    local gone = call('HGETALL', GONE)
    for i = 1, #gone, 2 do
      call('HINCRBY', REASONS, gone[i], -tonumber(gone[i + 1]))
      call('HINCRBY', COUNTS, gone[i]:match('^[^/]+'), -tonumber(gone[i + 1]))
    end
    call('DEL', GONE)
    put_run('gone_to', 0)
    put_run('from_nothing', 1)
  end
  start_rewind(origin[2])
  return cjson.encode({ lineage = num('lineage') })
end

-- Shed what the new B cannot train in time: in ordinal order, while the due test and (k + 1) x B allow; a ticket that
-- owes several uses may be left with fewer.
local function still_fits(t)
  local V, B = num('version'), limits.groups_per_step
  for uses = math.min(t.left, limits.max_steps - V, due(edge_of(t)) - V + 1), 1, -1 do
    local owed, total = read_dues(SWEEP_DUES), 0
    each_due(edge_of(t), uses, 0, #t.uses, function(step) owed[step] = (owed[step] or 0) + 1 end)
    for _, n in pairs(owed) do total = total + n end
    if total <= (limits.max_age + 1) * B and total <= (limits.max_steps - V) * B and due_test(owed, V, B) then
      owe_all(t, -1)
      t.left = uses
      owe_all(t, 1)
      mark(t)
      save(t)
      each_due(edge_of(t), uses, 0, #t.uses, function(step) call('HINCRBY', SWEEP_DUES, step, 1) end)
      return true
    end
  end
  return false
end

local function usable(t)
  return t.header and has_payload(t) and spans_survive(t.header) and t.header.newest <= num('version')
end

-- Held or trained. Step s made version s + 1: a use survives if that version is on the branch. With every use undone, or
-- some still owed, the group is held again if its payload is there, every span survives and the bounds allow it. Else it
-- is generated again - unless a use of it survives: then that is all it gets.
local function rewind_group(t)
  local surviving = {}
  for _, u in ipairs(t.uses) do
    if is_ancestor(u[1], u[2] + 1) then surviving[#surviving + 1] = u end
  end
  local undone = #t.uses - #surviving
  if t.state == 'trained' then
    if undone == 0 then return end
    call('HINCRBY', REASONS, 'trained/' .. t.reason, -1)
    if call('ZREM', KEPT, padded(t.ordinal)) == 1 then keep(-t.size) end
    call('ZREM', ENDED, t.ordinal)
    set_state(t, 'held')
    t.reason, t.ended_at, t.left = '', nil, 0
    hold(t.size)
    go_live(t)
  end
  owe_all(t, -1)
  t.left, t.uses, t.times.ended = t.left + undone, surviving, nil
  owe_all(t, 1)
  mark(t)
  save(t)
  if usable(t) and still_fits(t) then return end
  if #surviving > 0 then
    forfeit(t, 'rewind')
    train(t)
  else
    give_back(t, 'rewind')
  end
end

local function rewind(t)
  if t.state == 'returned' then return end
  if t.state == 'issued' then
    -- It goes on if what it was issued for survives; the collector drops it if something newer was sampled.
    if not (is_ancestor(t.issued_for[1], t.issued_for[2]) and still_fits(t)) then give_back(t, 'rewind') end
  elseif t.state == 'held' or t.state == 'trained' then
    rewind_group(t)
  elseif not is_ancestor(t.ended_at[1], t.ended_at[2]) then
    call('HINCRBY', REASONS, t.state .. '/' .. t.reason, -1)
    give_back(t, 'rewind', { tokens = 0, seconds = 0, length = 0 }) -- its work was lost when it ended
  end
end

function ops.sweep(a)
  local stop = fenced(a)
  if stop then return stop end
  if not R.sweep then return cjson.encode({ done = true }) end
  local ordinals = {}
  if R.from_nothing then
    for ordinal = num('sweep'), math.min(num('next'), num('sweep') + SWEEP_CHUNK) - 1 do
      ordinals[#ordinals + 1] = ordinal
    end
  else
    ordinals = call('ZRANGEBYSCORE', ROWS, R.sweep, '+inf', 'LIMIT', 0, SWEEP_CHUNK)
  end
  for _, ordinal in ipairs(ordinals) do
    rewind(ticket(ordinal) or returned_row(tonumber(ordinal)))
    put_run('sweep', tonumber(ordinal) + 1)
  end
  local left = call('ZCOUNT', ROWS, R.sweep, '+inf')
  if left > 0 or (R.from_nothing and num('sweep') < num('next')) then return cjson.encode({ done = false }) end
  drop_run('sweep')
  drop_run('from_nothing')
  put_run('phase', 'running')
  trim_uses()
  wake_members()
  grant()
  return cjson.encode({ done = true })
end

if ops[ARGV[1]] then return perform() end
