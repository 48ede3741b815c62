-- Rows that no rewind can touch leave for the archive; the store keeps their sums.

local function head(items, count)
  local first = {}
  for i = 1, math.min(count, #items) do first[i] = items[i] end
  return first
end

-- Several rows may have ended at one version: the answer is by ordinal, like every list of rows.
local function settled_rows(limit)
  local found = {}
  if R.phase == 'rewinding' then return found end
  for _, n in ipairs(call('ZRANGEBYSCORE', ENDED, '-inf', R.covered or '0')) do
    if not call('ZSCORE', KEPT, padded(n)) then found[#found + 1] = tonumber(n) end
  end
  table.sort(found)
  return head(found, limit)
end

local function is_settled(ordinal)
  local made = call('ZSCORE', ENDED, ordinal)
  return made and R.phase ~= 'rewinding' and tonumber(made) <= num('covered')
    and not call('ZSCORE', KEPT, padded(ordinal))
end

-- Those that are not settled stay; those that have left already are passed over.
function ops.archived(a)
  local stop = fenced(a)
  if stop then return stop end
  for _, ordinal in ipairs(a.ordinals) do
    if is_settled(ordinal) then
      local t = ticket(ordinal)
      put_run('gone_to', math.max(num('gone_to'), tonumber(call('ZSCORE', ENDED, ordinal))))
      call('HINCRBY', GONE, t.state .. '/' .. t.reason, 1)
      call('HDEL', TICKETS, ordinal)
      call('ZREM', ROWS, ordinal)
      call('ZREM', ENDED, ordinal)
    end
  end
  return '{}'
end

if ops[ARGV[1]] then return perform() end
