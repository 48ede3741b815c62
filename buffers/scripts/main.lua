local operation = ops[ARGV[1]]
if not operation then return reject('bad_call', 'unknown operation ' .. tostring(ARGV[1])) end
if not R.document and ARGV[1] ~= 'create' then
  return reject('no_run', 'there is no run under ' .. KEYS[1] .. ' in this store')
end
return operation(cjson.decode(ARGV[2]))
