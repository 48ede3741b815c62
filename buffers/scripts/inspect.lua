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
  wake_members()
  return '{}'
end

function ops.announcement()
  return cjson.encode({ announced = R.announced and cjson.decode(R.announced) or cjson.null,
    document = R.announcement or cjson.null })
end

function ops.request_evaluation(a)
  put_run('evaluation', a.request)
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

local function all_stats()
  local members = {}
  for _, incarnation in ipairs(call('HKEYS', MEMBERS)) do
    local m, at = member(incarnation), tonumber(call('ZSCORE', BEATS, incarnation))
    members[#members + 1] = { name = m.name, incarnation = incarnation, serving = m.serving or cjson.null,
      checksum = m.checksum, age = now - at, alive = now - at <= limits.member_timeout_s,
      issued = call('SCARD', OWNED .. incarnation), info = m.info }
  end
  local waiting = cjson.null
  if R.learner_waits then
    local late, owners, seen = cjson.decode(R.waiting_for), {}, {}
    for _, ordinal in ipairs(late) do
      local name = ticket(ordinal).owner_name
      if not seen[name] then seen[name] = true; owners[#owners + 1] = name end
    end
    waiting = { ordinals = list(late), owners = list(owners) }
  end
  local forks, flat = {}, call('HGETALL', FORKS)
  for i = 1, #flat, 2 do forks[flat[i]] = cjson.decode(flat[i + 1]) end
  return { phase = R.phase, lineage = num('lineage'), version = num('version'), tickets = num('next'),
    states = numbers(COUNTS), reasons = numbers(REASONS), lost_tokens = numbers(LOST_TOKENS),
    lost_seconds = numbers(LOST_SECONDS), refused = num('refused'), reserved = num('reserved'), held = num('held'),
    kept = num('kept'), members = list(members), waiting = waiting, checkpoint = tonumber(R.checkpoint) or cjson.null,
    forks = forks, dues = numbers(DUES), error = R.ended_with or cjson.null }
end

function ops.stats() return cjson.encode(all_stats()) end

-- Everything `audit` compares, in one atomic snapshot: the sums, and every row they should follow from.
function ops.snapshot()
  local rows = {}
  for ordinal = 0, num('next') - 1 do
    local t = ticket(ordinal)
    rows[#rows + 1] = { ordinal, t.state, t.attempt, t.reason or '', t.trained or cjson.null, t.owner_name or '',
      t.issued_for and lo_of(t) or cjson.null, has_payload(t), t.size or 0 }
  end
  return cjson.encode({ stats = all_stats(), rows = list(rows) })
end
