-- Set a value if the key has the expected one (compare-and-swap).
--
-- KEYS[1]  the key
-- ARGV[1]  "1" if a value is expected, "0" if the key must not exist
-- ARGV[2]  the expected value
-- ARGV[3]  the new value
-- ARGV[4]  its time to live in whole seconds
-- Reply    1 if it was set, 0 if the key had another value
local found = redis.call("GET", KEYS[1])
local expected = ARGV[1] == "1" and ARGV[2]
if found ~= expected then
  return 0
end
redis.call("SET", KEYS[1], ARGV[3], "EX", ARGV[4])
return 1
