return reject('bad_call', 'unknown operation ' .. tostring(ARGV[1]))
