-- A store that lost its newest writes, or all of them, is told by a learner what its weights contain.

function ops.adopt(a)
  local missing, newest = {}, num('lineage')
  for name, origin in pairs(a.forks) do
    local known = call('HGET', FORKS, name)
    known = known and cjson.decode(known)
    if not known then
      missing[name] = origin
      newest = math.max(newest, tonumber(name))
    elseif known[1] ~= origin[1] or known[2] ~= origin[2] then
      return reject('bad_call', 'lineage ' .. name .. ' forked from (' .. known[1] .. ', ' .. known[2]
        .. ') in this store, not from (' .. origin[1] .. ', ' .. origin[2] .. ')')
    end
  end
  if not next(missing) then return cjson.encode({ lineage = num('lineage') }) end
  local lineage, version = num('lineage'), num('version')
  for name, origin in pairs(missing) do call('HSET', FORKS, name, cjson.encode(origin)) end
  put_run('lineage', newest)
  while not is_ancestor(lineage, version) do
    -- The next older weights that could lie on the new path: where the path left this lineage, or its parent.
    local last = last_of(lineage)
    if last then
      version = last
    else
      local fork = cjson.decode(call('HGET', FORKS, lineage))
      lineage, version = fork[1], fork[2]
    end
  end
  start_rewind(version)
  return cjson.encode({ lineage = num('lineage') })
end

local function use_again(t, attempt, lineage, step)
  if not t then return end -- settled
  for _, u in ipairs(t.uses) do
    if u[1] == lineage and u[2] == step then return end
  end
  if t.state == 'held' and t.attempt == attempt then
    owe_next(t, -1)
    set_state(t, 'leased')
    return use(t, lineage, step, false)
  end
  if t.ended_at then
    call('HINCRBY', REASONS, t.state .. '/' .. t.reason, -1)
    if call('ZREM', KEPT, padded(t.ordinal)) == 1 then keep(-t.size) end
  end
  tell_owner(t)
  leave_live(t)
  set_state(t, 'returned') -- live no more: `train` takes nothing from it a second time
  drop_payload(t)
  call('ZREM', RETURNED, t.ordinal)
  t.attempt, t.header, t.size, t.left = attempt, nil, 0, 0
  t.uses[#t.uses + 1] = { lineage, step }
  train(t)
end

function ops.recommit(a)
  if not is_ancestor(a.lineage, a.step) then
    local stop = fenced(a)
    if stop then return stop end
  end
  if call('HGET', COMMITS, a.step) == tostring(a.lineage) and a.step < num('version') then return commit_reply(true) end
  if a.step ~= num('version') or R.phase == 'rewinding' then
    return reject('bad_call', 'step ' .. a.step .. ' cannot be committed again: V is ' .. num('version') .. ', phase '
      .. R.phase)
  end
  local lease = R.lease and cjson.decode(R.lease)
  if lease then give_lease_back(lease) end
  -- What collectors work on is not what this store thinks, and what they have handed in it may not know: they join again.
  wake_members()
  for _, incarnation in ipairs(call('HKEYS', MEMBERS)) do forget(incarnation, 'rewind', false) end
  for _, pair in ipairs(a.tickets) do
    while num('next') <= pair[1] do -- those between were issued in what the store has lost
      returned_row(num('next'))
      put_run('next', num('next') + 1)
    end
    use_again(ticket(pair[1]), pair[2], a.lineage, a.step)
  end
  move_to(a.step + 1, a.lineage)
  -- Groups that are as old as the store: what cannot be trained in time any more is generated again.
  call('DEL', SWEEP_DUES)
  for _, ordinal in ipairs(call('ZRANGE', LIVE, 0, -1)) do rewind(ticket(ordinal)) end
  return commit_reply(false)
end

if ops[ARGV[1]] then return perform() end
