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
  local before = num('timed')
  call('ZADD', TIMES, exact(seconds), before % GROUP_TIMES)
  put_run('timed', before + 1)
  local last = math.min(before, GROUP_TIMES - 1)
  local middle = call('ZRANGE', TIMES, math.floor(last / 2), math.ceil(last / 2), 'WITHSCORES')
  put_run('median', exact((tonumber(middle[2]) + tonumber(middle[#middle])) / 2))
end

function ops.put(a)
  if R.phase == 'rewinding' then return answer('retry') end
  local h = a.header
  local field = h.ordinal .. ':' .. a.attempt
  local t = ticket(h.ordinal)
  local again = repeated(t, a)
  if again or not is_owner(t, a) then
    -- The payload beside this call stays only if it is the very one that is held.
    if not (t and t.attempt == a.attempt and (t.size or 0) > 0) then call('DEL', PAYLOAD .. field) end
    if again then return answer(again) end
    call('HINCRBY', RUN, 'refused', 1)
    return answer('refused')
  end
  local size = call('STRLEN', PAYLOAD .. field)
  if size == 0 then return reject('bad_call', 'ticket ' .. h.ordinal .. ' was put without a payload') end
  first_time(t, a)
  local edge = limits.over_age == 'mask' and h.newest or h.oldest
  if not spans_survive(h) or h.newest > num('version') then
    give_back(t, 'rewind', h)
  elseif h.oldest < t.issued_for[2] then
    -- An engine that fell back behind its promise: held, it could expire under `wait`.
    give_back(t, 'promise', h)
  elseif size > limits.group_bytes then
    finish_ticket(t, 'failed', 'too_large', h)
  elseif not in_window(edge) then
    over_age(t, h)
  else
    take_in(t, h, size)
    remember_time(now - t.began)
    put_run('filtered_in_row', 0)
    wake_learner()
  end
  if t.state ~= 'held' then call('DEL', PAYLOAD .. field) end
  t.answer = (t.state == 'held' or t.state == 'returned') and t.state or 'ended'
  save(t)
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
    finish_ticket(t, a.kind == 'data' and 'failed' or 'filtered', a.reason, a.work)
    if a.kind == 'filtered' then put_run('filtered_in_row', num('filtered_in_row') + 1) end
  else
    take_back(t, a.kind, a.kind == 'infrastructure', a.work)
  end
  t.answer = t.state == 'returned' and 'returned' or 'ended'
  save(t)
  grant()
  return answer(t.answer)
end

if ops[ARGV[1]] and call('EXISTS', QUEUES) == 0 then return perform() end
