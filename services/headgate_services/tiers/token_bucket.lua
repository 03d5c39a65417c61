-- Take tokens from a bucket, if there are enough. A refusal writes nothing.
--
-- KEYS  1  remaining tokens at the last admission
--       2  time of that admission, in seconds since the epoch
-- ARGV  1  capacity     the most tokens
--       2  refill_rate  tokens per second
--       3  cost         tokens to take
--       4  now          seconds since the epoch, with a fraction; to the nearest microsecond
--       5  ttl          seconds until the keys expire; at least the time to fill an empty bucket
-- Reply 1  allowed           1 or 0
--       2  retry_after       whole seconds until the call would be admitted, rounded up; 0 if it was admitted
--       3  remaining_tokens  as text with 17 digits, because Redis truncates numbers to integers
--
-- Counts are integers: a token is 60,000,000 parts, so a rate of n tokens per minute refills n parts per microsecond without
-- drift. Other rates refill whole parts too, at most one part too few per admission. bucket.py has the same steps in Python.
--
-- Time: if `now` is less than a minute in the past, or in the future, this server's time is used instead, because the clocks of
-- instances differ and the difference must not become tokens. An older `now` is used as it is, to replay a trace. Time that
-- goes back refills nothing.

local PARTS = 60000000
local SECOND = 1000000
local LIVE = 60 * SECOND

local function whole(number)
  return math.floor(number + 0.5)
end

local capacity = whole(tonumber(ARGV[1]) * PARTS)
local per_us = tonumber(ARGV[2]) * 60
local cost = whole(tonumber(ARGV[3]) * PARTS)
local now = whole(tonumber(ARGV[4]) * SECOND)
local ttl = ARGV[5]

-- 5/60 is not exact as a double, but 5 is. For rates that are not whole, the slack compensates rounding errors.
local slack = 0.001
if math.abs(per_us - whole(per_us)) <= 1e-9 * per_us then
  per_us = whole(per_us)
  slack = 0
end

local clock = redis.call('TIME')
local server_now = tonumber(clock[1]) * SECOND + tonumber(clock[2])
if now > server_now - LIVE then
  now = server_now
end

local tokens, time = capacity, now
local stored_tokens, stored_time = redis.call('GET', KEYS[1]), redis.call('GET', KEYS[2])
if stored_tokens and stored_time then
  local before = whole(tonumber(stored_time) * SECOND)
  time = math.max(now, before)
  local refilled = math.floor((time - before) * per_us + slack)
  tokens = math.min(capacity, whole(tonumber(stored_tokens) * PARTS) + refilled)
end

local allowed, retry_after = 1, 0
if tokens >= cost then
  tokens = tokens - cost
else
  allowed = 0
  local wait = math.ceil((cost - tokens - slack) / per_us) + (time - now)
  retry_after = math.max(1, math.ceil(wait / SECOND))
end

local remaining = string.format('%.17g', tokens / PARTS)
if allowed == 1 then
  redis.call('SETEX', KEYS[1], ttl, remaining)
  redis.call('SETEX', KEYS[2], ttl, string.format('%.6f', time / SECOND))
end
return {allowed, retry_after, remaining}
