-- Weights' announcements, evaluations, the end, and what may be looked at.

function ops.create(a)
  if R.document then return cjson.encode({ document = R.document, created = false }) end
  put_run('document', a.document)
  put_run('limits', cjson.encode(a.limits))
  put_run('phase', 'running')
  put_run('version', 0)
  put_run('lineage', 0)
  put_run('next', 0)
  return cjson.encode({ document = a.document, created = true })
end

function ops.announce(a)
  local stop = fenced(a)
  if stop then return stop end
  if a.version > num('version') then
    return reject('bad_call', 'weights of version ' .. a.version .. ' announced before their commit; V is '
      .. num('version'))
  end
  put_run('announced', cjson.encode({ a.lineage, a.version }))
  put_run('announcement', a.document)
  put_run('announcements', num('announcements') + 1)
  wake_members()
  return '{}'
end

function ops.announcement()
  return cjson.encode({ announced = R.announced and cjson.decode(R.announced) or cjson.null,
    document = R.announcement or cjson.null })
end

function ops.request_verification(a)
  put_run('verify', a.id)
  wake_members()
  return '{}'
end

function ops.request_evaluation(a)
  put_run('evaluation', a.request)
  call('DEL', RESULTS) -- whoever asks for the next one has seen the last: the store holds no history
  drop_run('evaluation_claim')
  wake_members()
  return '{}'
end

function ops.claim_evaluation(a)
  if call('HEXISTS', MEMBERS, a.incarnation) == 0 then return unknown(a) end
  local request = R.evaluation and cjson.decode(R.evaluation)
  local free = R.evaluation_claim == nil or R.evaluation_claim == a.incarnation
  local mine = request and request.id == a.id and free
  if mine then put_run('evaluation_claim', a.incarnation) end
  return cjson.encode({ mine = mine and true or false })
end

function ops.report_evaluation(a)
  call('HSET', RESULTS, a.id, a.result)
  if R.evaluation and cjson.decode(R.evaluation).id == a.id then
    drop_run('evaluation')
    drop_run('evaluation_claim')
  end
  wake('result:' .. a.id)
  return '{}'
end

function ops.evaluation(a)
  return cjson.encode({ result = call('HGET', RESULTS, a.id) or cjson.null })
end

function ops.finish(a)
  put_run('phase', 'ended')
  if a.error ~= cjson.null then put_run('ended_with', a.error) end
  wake_members()
  return '{}'
end

local function numbers(key)
  local found, flat = {}, call('HGETALL', key)
  for i = 1, #flat, 2 do found[flat[i]] = tonumber(flat[i + 1]) end
  return found
end

-- As the server wrote them: cjson would round sums to 14 digits.
local function texts(key)
  local found, flat = {}, call('HGETALL', key)
  for i = 1, #flat, 2 do found[flat[i]] = flat[i + 1] end
  return found
end

local function all_stats()
  local members, known = {}, {}
  for _, incarnation in ipairs(call('HKEYS', MEMBERS)) do
    local m, at = member(incarnation), tonumber(call('ZSCORE', BEATS, incarnation))
    known[incarnation] = m
    members[#members + 1] = { name = m.name, incarnation = incarnation, serving = m.serving or cjson.null,
      checksum = m.checksum, age = now - at, alive = now - at <= limits.member_timeout_s,
      issued = call('SCARD', OWNED .. incarnation), info = m.info }
  end
  local waiting, refused, guards = cjson.null, {}, {}
  if R.learner_waits then
    local late = cjson.decode(R.waiting_for)
    waiting = { ordinals = list(late), owners = list(owners_of(late)), since = num('learner_waits') }
  end
  for _, incarnation in ipairs(call('ZRANGE', WAITERS, 0, -1)) do
    local m = known[incarnation]
    local served = m.serving and m.serving[1] .. ':' .. m.serving[2] or ''
    if not guards[served] then -- the same for all who serve the same
      local ordinal, why = admit(m.serving)
      guards[served] = ordinal and 'turn' or why
    end
    refused[#refused + 1] = { m.name, guards[served], m.asked }
  end
  local forks, flat = {}, call('HGETALL', FORKS)
  for i = 1, #flat, 2 do forks[flat[i]] = cjson.decode(flat[i + 1]) end
  return { phase = R.phase, lineage = num('lineage'), version = num('version'), tickets = num('next'),
    states = numbers(COUNTS), reasons = numbers(REASONS), lost_tokens = numbers(LOST_TOKENS),
    lost_seconds = texts(LOST_SECONDS), worth = texts(WORTH),
    returns = numbers(RETURNS), archived = numbers(GONE), filtered_in_row = num('filtered_in_row'),
    quarantined = num('quarantined'), refused = num('refused'), reserved = num('reserved'), held = num('held'),
    kept = num('kept'), members = list(members), waiting = waiting, blocked = list(refused),
    checkpoint = tonumber(R.checkpoint) or cjson.null, forks = forks, dues = numbers(DUES),
    error = R.ended_with or cjson.null, time = stamp }
end

function ops.stats() return cjson.encode(all_stats()) end

local function row(t)
  local live = t.state == 'issued' or t.state == 'held' or t.state == 'leased'
  return { ordinal = t.ordinal, state = t.state, attempt = t.attempt, reason = t.reason or '', uses = list(t.uses),
    owner = t.owner_name or '', lo = live and edge_of(t) or cjson.null, has_payload = has_payload(t),
    size = t.size or 0, losses = t.losses, requeues = t.requeues, left = t.left,
    times = next(t.times) and t.times or cjson.null }
end

local function rows(ordinals)
  local found = {}
  for i, ordinal in ipairs(ordinals) do found[i] = row(ticket(ordinal)) end
  return list(found)
end

-- Everything `audit` compares, in one atomic snapshot: the sums, and every row they should follow from.
function ops.snapshot() return cjson.encode({ stats = all_stats(), rows = rows(call('ZRANGE', ROWS, 0, -1)) }) end

function ops.row(a)
  local t = ticket(a.ordinal)
  return cjson.encode({ row = t and row(t) or cjson.null })
end

function ops.settled(a)
  local stop = fenced(a)
  if stop then return stop end
  return cjson.encode({ rows = rows(settled_rows(a.limit)) })
end

-- Rows in the given states from an ordinal on; at most SWEEP_CHUNK are looked at, `next` is where to go on.
function ops.rows(a)
  local wanted, found, after = {}, {}, cjson.null
  for _, state in ipairs(a.states) do wanted[state] = true end
  local ordinals = call('ZRANGEBYSCORE', ROWS, a.start, '+inf', 'LIMIT', 0, SWEEP_CHUNK)
  for i, ordinal in ipairs(ordinals) do
    local t = ticket(ordinal)
    if wanted[t.state] then found[#found + 1] = row(t) end
    if #found == a.limit or (i == SWEEP_CHUNK and i == #ordinals) then
      after = t.ordinal + 1
      break
    end
  end
  return cjson.encode({ rows = list(found), next = after })
end

if ops[ARGV[1]] then return perform() end
