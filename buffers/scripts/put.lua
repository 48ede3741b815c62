-- What a collector hands back: a group, or the news that there is none.

-- The identity of a lease of work: right attempt, right incarnation, still issued. Without this guard a collector that
-- was given up puts over its successor.
local function is_owner(t, a)
  return t and t.state == 'issued' and t.attempt == a.attempt and t.owner == a.incarnation
end

-- A put or fail whose reply was lost is answered as the first time, `held` as `duplicate`.
local function repeated(t, a)
  if not t or t.last_owner ~= a.incarnation or t.last_attempt ~= a.attempt or not t.answer then return nil end
  return t.answer == 'held' and 'duplicate' or t.answer
end

local function first_time(t, a) t.last_owner, t.last_attempt = a.incarnation, a.attempt end

local function answer(word) return cjson.encode({ answer = word }) end

local function remember_time(seconds)
  call('LPUSH', TIMES, tostring(seconds))
  call('LTRIM', TIMES, 0, GROUP_TIMES - 1)
  local times = {}
  for i, s in ipairs(call('LRANGE', TIMES, 0, -1)) do times[i] = tonumber(s) end
  table.sort(times)
  local half = math.floor(#times / 2)
  put_run('median', #times % 2 == 1 and times[half + 1] or (times[half] + times[half + 1]) / 2)
end

function ops.put(a)
  if R.phase == 'rewinding' then return answer('retry') end
  local h = a.header
  local field = h.ordinal .. ':' .. a.attempt
  local t = ticket(h.ordinal)
  local again = repeated(t, a)
  if again or not is_owner(t, a) then
    -- The payload beside this call stays only if it is the very one that is held.
    if not (t and t.attempt == a.attempt and (t.size or 0) > 0) then call('HDEL', PAYLOAD, field) end
    if again then return answer(again) end
    call('HINCRBY', RUN, 'refused', 1)
    return answer('refused')
  end
  local size = call('HSTRLEN', PAYLOAD, field)
  if size == 0 then return reject('bad_call', 'ticket ' .. h.ordinal .. ' was put without a payload') end
  first_time(t, a)
  if not spans_survive(h) or h.oldest < t.issued_for[2] or h.newest > num('version') then
    -- Dead weights, or an engine that fell back behind its promise: held, it could expire under `wait`.
    t.answer = 'returned'
    give_back(t)
    call('HDEL', PAYLOAD, field)
  elseif size > limits.group_bytes then
    t.answer = 'ended'
    finish_ticket(t, 'failed', 'too_large', h.tokens, h.seconds)
  elseif not in_window(h.oldest) then
    t.answer = 'ended'
    finish_ticket(t, 'stale', 'over_age', h.tokens, h.seconds)
  else
    leave_live(t)
    set_state(t, 'held')
    t.header, t.size, t.answer = h, size, 'held'
    go_live(t, 'h')
    hold(size)
    owe(due(h.oldest), 1)
    remember_time(now - t.issued)
    save(t)
    wake_learner()
  end
  grant()
  return answer(t.answer)
end

function ops.fail(a)
  if R.phase == 'rewinding' then return answer('retry') end
  local t = ticket(a.ordinal)
  local again = repeated(t, a)
  if again then return answer(again) end
  if not is_owner(t, a) then
    call('HINCRBY', RUN, 'refused', 1)
    return answer('refused')
  end
  first_time(t, a)
  if a.kind == 'data' or a.kind == 'filtered' then
    t.answer = 'ended'
    finish_ticket(t, a.kind == 'data' and 'failed' or 'filtered', a.reason, a.tokens, a.seconds)
  else
    t.answer = 'returned'
    take_back(t, a.kind == 'infrastructure')
    if t.state ~= 'returned' then t.answer = 'ended'; save(t) end
  end
  grant()
  return answer(t.answer)
end
