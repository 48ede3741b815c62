-- Which held tickets a step trains. Contract 4.

-- What the choice of a batch knows of these live tickets, in their order.
local function candidates(ordinals)
  local found = {}
  for from = 1, #ordinals, 1000 do -- unpack is bounded by the Lua stack
    local upto = math.min(from + 999, #ordinals)
    for i, text in ipairs(call('HMGET', LO, unpack(ordinals, from, upto))) do
      local state, lo, left, had = read_mark(text)
      found[#found + 1] = { ordinal = tonumber(ordinals[from + i - 1]), held = state == 'h', lo = lo, left = left,
        first = due(lo) - left + 1, used = had > 0 }
    end
  end
  return found
end
local function held_candidates(padded_ordinals)
  local ordinals = {}
  for i, name in ipairs(padded_ordinals) do ordinals[i] = tonumber(name) end
  return candidates(ordinals)
end

-- Whether, with this batch gone, everything else can still be trained in time from step V + 1 on. A batch trains each of
-- its tickets once.
local function dues_hold(batch)
  local owed = read_dues(DUES)
  for _, c in ipairs(batch) do
    local step = limits.fresh_per_step == 0 and c.first or due(c.lo)
    if limits.fresh_per_step == 0 or not c.used then owed[step] = owed[step] - 1 end
  end
  return due_test(owed, num('version') + 1, limits.groups_per_step)
end

-- Groups of a batch that may have been trained before.
local function again() return limits.groups_per_step - limits.fresh_per_step end

-- The first B of these that make a batch: at most `most` of them were trained before.
local function batch_of(sorted, most)
  local batch = {}
  for _, c in ipairs(sorted) do
    if #batch == limits.groups_per_step then break end
    if not c.used or most > 0 then
      batch[#batch + 1] = c
      if c.used then most = most - 1 end
    end
  end
  return batch
end

-- The oldest live tickets, up to the `visible`-th. With a share of fresh groups only those count: others are always ready.
local function oldest(visible)
  local found, counted, from = {}, 0, 0
  while counted < visible do
    local piece = candidates(call('ZRANGE', LIVE, from, from + visible - 1))
    for _, c in ipairs(piece) do
      if counted == visible then break end
      found[#found + 1] = c
      if limits.fresh_per_step == 0 or not c.used then counted = counted + 1 end
    end
    if #piece < visible then break end
    from = from + visible
  end
  return found
end

-- No further group can come: with fewer fresh ones than a batch needs, the rest keeps their share.
local function rest()
  local held = held_candidates(call('ZRANGE', HELD, 0, -1))
  table.sort(held, function(x, y) return x.ordinal < y.ordinal end)
  if limits.fresh_per_step == 0 then return held end
  local fresh = 0
  for _, c in ipairs(held) do fresh = fresh + (c.used and 0 or 1) end
  return batch_of(held, math.min(again(), math.floor(fresh * again() / limits.fresh_per_step)))
end

-- The ready tickets with the earliest due; where fresh ones have a share, they come first.
local function earliest()
  local B = limits.groups_per_step
  if limits.fresh_per_step == 0 then return held_candidates(call('ZRANGE', HELD, 0, B - 1)) end
  local held = held_candidates(call('ZRANGE', HELD, 0, -1))
  table.sort(held, function(x, y)
    if x.used ~= y.used then return y.used end
    if x.lo ~= y.lo then return x.lo < y.lo end
    return x.ordinal < y.ordinal
  end)
  return batch_of(held, again())
end

-- Due ones first, then by ordinal. Where fresh groups have a share, the others come before them, as far as they may: they
-- are what is lost else.
local function in_order(x, y)
  local share = limits.fresh_per_step > 0
  if share and x.used ~= y.used then return x.used end
  if share and x.used and x.first ~= y.first then return x.first < y.first end
  if not (share and x.used) and x.now ~= y.now then return x.now end
  return x.ordinal < y.ordinal
end

-- The ticket that a collector which serves V would be issued again, if there is one.
local function returned_next()
  if call('EXISTS', RETURNED) == 0 then return nil end
  return (admit({ num('lineage'), num('version') }))
end

-- Contract 4. Returns the batch, or nil and the tickets waited for. Reads what is in sight and what is due, however much
-- is live.
local function choose()
  local V, B = num('version'), limits.groups_per_step
  local visible = math.max(B, math.floor(limits.lookahead * B))
  local sight, late, seen = {}, {}, {}
  local function see(c)
    if seen[c.ordinal] or not in_window(c.lo) then return end
    seen[c.ordinal], c.now = true, (limits.fresh_per_step == 0 and c.first or due(c.lo)) <= V
    sight[#sight + 1] = c
  end
  local in_front, strict = oldest(visible), limits.lookahead == 1
  local came_back = strict and #in_front > 0 and returned_next()
  if came_back and came_back < in_front[#in_front].ordinal then late[1] = came_back end
  for _, c in ipairs(in_front) do
    if c.held then see(c) else late[#late + 1] = c.ordinal end
  end
  for _, c in ipairs(held_candidates(call('ZRANGEBYSCORE', HELD, '-inf', V))) do see(c) end
  table.sort(sight, in_order)
  local first, ready = batch_of(sight, again()), call('ZCARD', HELD)
  if #first < B and (ready <= B or limits.fresh_per_step > 0) and not more_to_come() then return rest(), late end
  if strict and #late > 0 then return nil, late end -- nothing passes a ticket that is still to come
  local guard = limits.over_age == 'wait'
  if #first == B and (not guard or dues_hold(first)) then return first, late end
  if guard and ready >= B then
    -- Oldest-ready-first may fail the test where the earliest dues pass; without this the learner waits for ever.
    local batch = earliest()
    if #batch == B and dues_hold(batch) then return batch, late end
  end
  return nil, late
end
