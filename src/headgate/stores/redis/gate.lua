-- Decides any number of requests in one call: a port of headgate.algorithms with the same names and order of steps.
--
-- KEYS     the states, in the order in which the requests name them
-- ARGV[i]  one request, packed little-endian: "<BHddd" operation, number of rules, now (microseconds since the epoch;
--          below 0: the server's clock), cost (below 0: one cost per rule follows), birth. Then per rule "<Bdddd", its kind
--          and parameters:
--            1 fixed window     limit, period (us), -, -
--            2 sliding window   limit, width (us), lifetime (us), -
--            3 token bucket     burst, n, d, tick (us)
--            4 concurrent       limit, lease (us), -, -
--            5 calendar         limit, start of a window, end of it and start of the next, end of that
--            6 penalty          refusals, duration (us), growth + 128 * one bit per rule that it watches, longest (us)
--          With one cost per rule, and to refund, then per rule "<dB" its cost and the number of values in its receipt,
--          and these as doubles. The units in the receipt of a hit, peek, hold or record are replaced: they are given back
--          first, unless the request is refused. For a concurrent rule with a cost, it is the lease to renew.
--          Operations: 1 hit, 2 peek, 3 hold, 4 record, 5 refund, 6 reset; 7 note, which has one key and no rule; its cost
--          is the time to live in milliseconds (0: only read), its birth the length of the text that may be replaced
--          (-1: none); that text follows, then the new one. The same text extends the time. 8 hit, 10 hold: if it is
--          refused, penalties count it. 0 queue: the ticket of a waiting call. Its key is the name of the queue, and it has
--          no rule; its cost is the time to live in milliseconds (0: leave), its birth the priority; the ticket follows.
-- Reply    one entry per request:
--            hit, peek, hold   text, packed little-endian: per rule "<Bi8i8i8i8" flags (1 allowed, 2 retry_after is known,
--                              4 reset_after is known), remaining, retry_after, reset_after, lag. The last three mean
--                              retry_after * tick + lag microseconds, and so on (windows: a tick of 1, no lag). An
--                              admitted hold is followed by the receipt of each rule that was charged, an "i8" per
--                              number, without the numbers that the caller knows. (Text, because the server takes longer
--                              to reply with a table than to decide.)
--            record            0, or the number of the rule whose count would leave the exact range, and its count
--            refund, reset     0
--            note              the text that is kept under that name, or nil
--            queue             1 if the ticket is first, else 0
--            an error          if this request failed; it does not affect the others. "EDGES" and the server's time: the
--                              time is outside of the calendar windows in the request. Nothing was done.
--
-- All numbers are integers. Doubles are exact below 2^53. A larger product or sum still compares as larger than every smaller
-- number; where an exact result is needed, the steps are ordered so that no intermediate result passes 2^53. Below it,
-- floor(a / b) and ceil(a / b) are exact: a quotient that is not an integer is at least 1/b away from the next one, which is
-- more than the rounding error of a double. (Lua's % is not exact; fmod is.)
--
-- States are doubles, little-endian, as the tuples in Python:
--   fixed window     birth, index, count
--   sliding window   birth, units in all buckets; then index and units of each bucket, oldest first
--   token bucket     birth, level, time, refunded, n, d, burst
--   concurrent       birth, latest time at which a lease began or was renewed, units of all leases; then end, number and units of each
--                    lease, in the order of their ends
--   calendar         birth, end of the window, count
--   penalty          birth, start, refusals, end, duration
--
-- A queue is a sorted set "order:NAME", whose members are a letter for the priority, the tag in 16 digits and the ticket; and a
-- hash "tickets:NAME", which maps each ticket to its expiry in milliseconds and its member. A ticket begins with the 16
-- characters of its process, which listens to the channel "headgate:" and these characters. The queue for places of a
-- concurrent rule has the name of its state. The two keys of a queue are used without being in KEYS, but have the same hash
-- tag as its name: with missing rights for keys in KEYS, the server would refuse all requests of a call.

local call, pack, unpack = redis.call, struct.pack, struct.unpack
local floor, ceil, fmod, min, max, sub = math.floor, math.ceil, math.fmod, math.min, math.max, string.sub

local seconds_and_rest = call("TIME")
local clock = tonumber(seconds_and_rest[1]) * 1000000 + tonumber(seconds_and_rest[2])

-- Every decide returns: allowed, remaining, retry_after, reset_after, lag, state after (nil: unchanged), whether the new state
-- expires at the same time as the old one (if both used the server's clock), then the receipt without parameters and cost.
-- If nothing is ever counted, reset_after and the state after are nil. If a state is given (false: a fresh one), it is used
-- instead of the stored one. Creating a function takes as long as a decision, and each upvalue adds to it. So each
-- function has local constants, and rarely needed functions are created on demand.

local function decide_fixed(key, now, cost, birth, beyond, limit, period, _, _, state)
  local MAX_UNITS = 9007199254740991
  if state == nil then
    state = call("GET", key)
  end
  local index, count, expires_as_before = floor(now / period), 0, false
  if state then
    if #state ~= 24 then
      error("not a fixed window")
    end
    local old_birth, old_index, old_count = unpack("<ddd", state)
    if old_index >= index then
      birth, index, count, expires_as_before = old_birth, old_index, old_count, true
    end
  end
  local reset_after = index * period - now + period
  if cost > 0 and not beyond and count + cost > limit then
    return 0, max(0, limit - count), limit > 0 and reset_after, count > 0 and reset_after or 0, 0
  end
  if beyond and count + cost > MAX_UNITS then
    return 0, count
  end
  count = count + cost
  return 1, max(0, limit - count), false, count > 0 and reset_after or 0, 0,
    cost > 0 and pack("<ddd", birth, index, count), expires_as_before, birth, index
end

local function decide_sliding(key, now, cost, birth, beyond, limit, width, lifetime, _, state)
  local MAX_UNITS, MAX_ENTRIES = 9007199254740991, 1000
  if state == nil then
    state = call("GET", key)
  end
  state = state or ""
  local count, first, size = 0, 17, #state -- first: place of the first bucket that still counts
  local newest, newest_units
  if size > 0 then
    if size < 32 or fmod(size, 16) ~= 0 then
      error("not a sliding window")
    end
    local old_birth, old_count = unpack("<dd", state)
    local last, last_units = unpack("<dd", state, size - 15)
    local horizon = max(now, last * width) - lifetime
    if last * width > horizon then
      birth, count, newest, newest_units = old_birth, old_count, last, last_units
      while true do -- ends at the last bucket at the latest
        local index, units = unpack("<dd", state, first)
        if index * width > horizon then
          break
        end
        count = count - units
        first = first + 16
      end
    end
  end
  if cost > 0 and not beyond and count + cost > limit then
    local retry_after = false
    if limit > 0 then
      local excess, place = count - (limit - cost), first
      repeat
        local index, units = unpack("<dd", state, place)
        excess = excess - units
        retry_after = index * width - now + lifetime
        place = place + 16
      until excess <= 0
    end
    return 0, max(0, limit - count), retry_after, newest and newest * width - now + lifetime or 0, 0
  end
  if beyond and count + cost > MAX_UNITS then
    return 0, count
  end
  local remaining = max(0, limit - count - cost)
  if cost == 0 then
    return 1, remaining, false, newest and newest * width - now + lifetime or 0, 0
  end
  local index, units, expires_as_before = floor(now / width), cost, false
  local kept = "" -- unchanged buckets
  if newest and index <= newest then
    index, units, expires_as_before = newest, newest_units + cost, true
    kept = sub(state, first, size - 16)
  elseif newest and width == 1 and size - first >= 16 * max(MAX_ENTRIES, limit) - 1 then -- full, so this is a record
    units = newest_units + cost
    kept = sub(state, first, size - 16)
  elseif newest then
    kept = sub(state, first)
  end
  local after = pack("<dd", birth, count + cost) .. kept .. pack("<dd", index, units)
  return 1, remaining, false, index * width - now + lifetime, 0, after, expires_as_before, birth, index
end

local function decide_bucket(key, now, cost, birth, beyond, burst, n, d, tick, state)
  local MAX_UNITS = 9007199254740991
  if n == 0 then
    return (cost == 0 or beyond) and 1 or 0, 0, false, false, 0
  end
  if state == nil then
    state = call("GET", key)
  end
  local level, time, refunded = 0, floor(now / tick), 0
  local fresh_after = 0 -- ticks until the state is fresh with its stored parameters
  local birth_before, time_before
  if state then
    if #state ~= 56 then
      error("not a token bucket")
    end
    local old_birth, old_level, old_time, old_refunded, old_n, old_d, old_burst = unpack("<ddddddd", state)
    birth_before, time_before = old_birth, old_time
    time = max(time, old_time)
    if old_level > old_n * (time - old_time) then
      fresh_after = ceil(old_level / old_n) - (time - old_time)
      if old_n ~= n or old_d ~= d or old_burst ~= burst then
        -- old_level * d / old_d, rounded up. The product may have 88 bits, so it is divided in parts: d and old_d stay
        -- below 2^35, so that 17 bits of d at a time keep every step below 2^53. Only the last sum may pass it; it is then
        -- not exact, but at least 2^53, which is enough for the comparisons.
        local rest, low = fmod(old_level, old_d), fmod(d, 131072)
        local product = rest * (d - low) / 131072
        local carried = fmod(product, old_d)
        local parts = (product - carried) / old_d * 131072 + ceil((carried * 131072 + rest * low) / old_d)
        old_level = (old_level - rest) / old_d * d + parts
        -- Receipts are about units of the old parameters: they must not be given back with the new ones.
        old_birth, old_refunded = birth, 0
      end
      -- A level above the exact range stays there until the state is fresh with its stored parameters.
      old_level = old_level > MAX_UNITS and MAX_UNITS + 1 or old_level - n * (time - old_time)
      if old_level > 0 then
        birth, level, refunded = old_birth, old_level, old_refunded
      end
    end
  end
  local lag = time * tick - now
  if beyond then
    if level + cost * d > MAX_UNITS then
      return 0, level
    end
  else
    local excess = level - (burst - cost) * d
    if cost == 0 or excess > 0 then
      local reset_after, retry_after = 0, cost > 0 and fresh_after
      if level > MAX_UNITS then
        reset_after = fresh_after
      elseif level > 0 then
        reset_after = min(ceil(level / n), fresh_after)
        retry_after = cost > 0 and min(ceil(excess / n), reset_after)
      end
      return cost == 0 and 1 or 0, floor(max(0, burst * d - level) / d), retry_after, reset_after, lag
    end
  end
  local before = level
  level = level + cost * d
  return 1, floor(max(0, burst * d - level) / d), false, ceil(level / n), lag,
    pack("<ddddddd", birth, level, time, refunded, n, d, burst), false,
    birth, before, time, refunded, birth == birth_before and time_before or time
end

local DECIDE = { decide_fixed, decide_sliding, decide_bucket }

-- Creates the functions of the other kinds on demand, and returns the one of a kind.
local function decider(asked_kind)
  if asked_kind == 6 then
    local PENALTY, MAX_UNITS = 6, 9007199254740991
    local call, pack, unpack, floor, fmod, min, max =
      redis.call, struct.pack, struct.unpack, math.floor, math.fmod, math.min, math.max

    local function decide_penalty(key, now, cost, _, beyond, _, duration, coded, longest, state)
      if state == nil then
        state = call("GET", key)
      end
      if not state then
        return 1, MAX_UNITS - cost, false, 0, 0
      end
      if #state ~= 40 then
        error("not a penalty")
      end
      local _, start, refusals, last, length = unpack("<ddddd", state)
      local fresh_at = refusals > 0 and start + duration or 0
      if length > 0 then
        fresh_at = max(fresh_at, last + (fmod(coded, 128) > 1 and longest or 0))
      end
      local reset_after = max(0, fresh_at - now)
      if last > now then
        local allowed = (cost == 0 or beyond) and 1 or 0
        return allowed, 0, allowed == 0 and last - now, reset_after, 0
      end
      return 1, max(0, MAX_UNITS - (start + duration > now and refusals or 0) - cost), false, reset_after, 0
    end

    -- Counts a refused request in the penalties of the rules that refused it, and replaces their replies.
    local function count_refusals(request, first_key, rules, now, birth, explicit, reply, save, packed)
      for i = 1, rules do
        local kind, limit, duration, coded, longest = unpack("<Bdddd", request, 33 * i - 5)
        local counts = false
        if kind == PENALTY and string.byte(reply[i]) % 2 == 1 then
          for j = 1, rules do -- only refusals that end: not those of a limit of 0
            if fmod(floor(coded / 2 ^ (j + 6)), 2) == 1 and string.byte(reply[j]) % 4 == 2 then
              counts = true
            end
          end
        end
        if counts then
          local key, remembered = KEYS[first_key + i], fmod(coded, 128) > 1 and longest or 0
          local state = call("GET", key)
          local own, start, refusals, last, length = birth, now, 0, 0, 0
          if state then
            own, start, refusals, last, length = unpack("<ddddd", state)
            if max(refusals > 0 and start + duration or 0, length > 0 and last + remembered or 0) <= now then
              own, start, refusals, last, length = birth, now, 0, 0, 0
            end
          end
          if start + duration <= now then
            start, refusals = now, 0
          end
          if last + remembered <= now then
            last, length = 0, 0
          end
          refusals = refusals + 1
          if refusals >= limit then
            start, refusals = max(now, start), 0
            length = length > 0 and min(longest, length * fmod(coded, 128)) or duration
            last = start + length
          end
          state = pack("<ddddd", own, start, refusals, last, length)
          local allowed, remaining, retry_after, reset_after, lag =
            decide_penalty(key, now, last > now and 1 or 0, birth, false, limit, duration, coded, longest, state)
          save(key, state, reset_after, explicit)
          reply[i] = packed(allowed, remaining, retry_after, reset_after, lag)
        end
      end
    end

    DECIDE[PENALTY], DECIDE.count_refusals = decide_penalty, count_refusals
    return decide_penalty
  end

  local CONCURRENT, CALENDAR, MAX_UNITS = 4, 5, 9007199254740991
  local call, pack, unpack, sub, fmod, max = redis.call, struct.pack, struct.unpack, string.sub, math.fmod, math.max

  local function decide_concurrent(key, now, cost, birth, _, limit, lease, _, _, state)
    if state == nil then
      state = call("GET", key)
    end
    state = state or ""
    local number, time, count = birth, now, 0
    local first, size, newest = 25, #state, nil -- place of the first lease that has not ended; when the last one ends
    if size > 0 then
      if size < 48 or fmod(size, 24) ~= 0 then
        error("not a row of leases")
      end
      local old_birth, latest, old_count = unpack("<ddd", state)
      time, count = max(now, latest), old_count
      while first < size do
        local lease_end, _, units = unpack("<ddd", state, first)
        if lease_end > time then
          birth, newest = old_birth, unpack("<d", state, size - 23)
          break
        end
        count = count - units
        first = first + 24
      end
    end
    if cost > 0 and count + cost > limit then
      local retry_after = false
      if limit > 0 then
        local excess, place = count - (limit - cost), first
        repeat
          local lease_end, _, units = unpack("<ddd", state, place)
          excess = excess - units
          retry_after = lease_end - now
          place = place + 24
        until excess <= 0
      end
      return 0, max(0, limit - count), retry_after, newest and newest - now or 0, 0
    end
    local remaining = max(0, limit - count - cost)
    if cost == 0 then
      return 1, remaining, false, newest and newest - now or 0, 0
    end
    local lease_end, place = time + lease, max(25, size + 1)
    while place > first and unpack("<d", state, place - 24) > lease_end do -- only where leases were longer before
      place = place - 24
    end
    local after = pack("<ddd", birth, time, count + cost) .. sub(state, first, place - 1)
      .. pack("<ddd", lease_end, number, cost) .. sub(state, place)
    return 1, remaining, false, max(lease_end, newest or 0) - now, 0, after, false, birth, number
  end

  local function decide_calendar(key, now, cost, birth, beyond, limit, start, edge, last, state)
    local window_end = now < edge and edge or last
    if now < start or now >= last then
      error({ err = string.format("EDGES %.0f", now) })
    end
    if state == nil then
      state = call("GET", key)
    end
    local count, expires_as_before = 0, false
    if state then
      if #state ~= 24 then
        error("not a calendar window")
      end
      local old_birth, old_end, old_count = unpack("<ddd", state)
      if old_end > now then
        birth, window_end, count, expires_as_before = old_birth, old_end, old_count, true
      end
    end
    local reset_after = window_end - now
    if cost > 0 and not beyond and count + cost > limit then
      return 0, max(0, limit - count), limit > 0 and reset_after, count > 0 and reset_after or 0, 0
    end
    if beyond and count + cost > MAX_UNITS then
      return 0, count
    end
    count = count + cost
    return 1, max(0, limit - count), false, count > 0 and reset_after or 0, 0,
      cost > 0 and pack("<ddd", birth, window_end, count), expires_as_before, birth, window_end
  end

  DECIDE[CONCURRENT], DECIDE[CALENDAR] = decide_concurrent, decide_calendar
  return DECIDE[asked_kind]
end

local function save(key, state, counted_for, explicit, expires_as_before)
  if state == "" then
    call("DEL", key)
    return
  end
  if explicit or not expires_as_before then
    local expires = clock + max(0, counted_for)
    if explicit then
      expires = expires + 3600000000 -- an hour more: the caller's clock may be slower than the server's
    end
    -- No state is kept for more than 253 years, which is close to the server's limit. One millisecond more, because a state
    -- may outlive its last unit, but must not expire before it.
    call("SET", key, state, "PXAT", ceil(min(expires, 8000000000000000) / 1000) + 1)
  else
    call("SET", key, state, "KEEPTTL") -- setting the same expiry again would take as long as the decision
  end
end

local function packed(allowed, remaining, retry_after, reset_after, lag)
  local flags = allowed + (retry_after and 2 or 0) + (reset_after and 4 or 0)
  return pack("<Bi8i8i8i8", flags, remaining, retry_after or 0, reset_after or 0, lag)
end

local function packed_receipt(kind, r1, r2, r3, r4, r5)
  local BUCKET = 3
  return kind == BUCKET and pack("<i8i8i8i8i8", r1, r2, r3, r4, r5) or pack("<i8i8", r1, r2)
end

-- Returns the functions for queues of waiting calls: a port of headgate.algorithms.waiting.
local enter_queue, wake_first
local function queueing()
  if enter_queue then
    return enter_queue, wake_first
  end
  local HIGHEST_PRIORITY, STRIDE, PROCESS_LENGTH = 10, 2520, 16
  local call, sub, char, match, format = redis.call, string.sub, string.char, string.match, string.format
  local now = floor(clock / 1000)

  -- Returns the first or last member with a priority, or nil.
  local function end_of(command, order, priority)
    local from, to = "[" .. char(64 + priority), "(" .. char(65 + priority)
    if command == "ZREVRANGEBYLEX" then
      from, to = to, from
    end
    return call(command, order, from, to, "LIMIT", 0, 1)[1]
  end

  local function tag_of(member)
    return member and tonumber(sub(member, 2, 17)) or 0
  end

  -- Removes expired tickets from the front, and returns the first ticket, its tag, and whether any was removed.
  local function first_of(order, tickets)
    local fronts, has_changed = {}, false
    for priority = 1, HIGHEST_PRIORITY do
      fronts[priority] = end_of("ZRANGEBYLEX", order, priority)
    end
    while true do
      local first, its_priority
      for priority = HIGHEST_PRIORITY, 1, -1 do
        local member = fronts[priority]
        if member and (not first or tag_of(member) < tag_of(first)) then
          first, its_priority = member, priority
        end
      end
      if not first then
        return nil, 0, has_changed
      end
      local ticket = sub(first, 18)
      local kept = call("HGET", tickets, ticket)
      if kept and tonumber(match(kept, "^%d+")) > now then
        return ticket, tag_of(first), has_changed
      end
      call("ZREM", order, first)
      call("HDEL", tickets, ticket)
      fronts[its_priority] = end_of("ZRANGEBYLEX", order, its_priority)
      has_changed = true
    end
  end

  local function tell(ticket)
    redis.pcall("PUBLISH", "headgate:" .. sub(ticket, 1, PROCESS_LENGTH), ticket)
  end

  -- Enters a queue or stays in it, or leaves it with a lifetime of 0; returns 1 if the ticket is first.
  enter_queue = function(order, tickets, ticket, priority, lifetime)
    local kept = call("HGET", tickets, ticket)
    local member = kept and match(kept, " (.*)")
    local function keep()
      call("ZADD", order, 0, member)
      call("HSET", tickets, ticket, format("%.0f %s", now + lifetime, member))
      for _, key in ipairs({ order, tickets }) do
        call("PEXPIRE", key, max(lifetime, call("PTTL", key)))
      end
    end

    if member and lifetime > 0 then
      keep() -- before expired tickets are removed
    end
    local first, tag, has_changed = first_of(order, tickets)
    if lifetime > 0 and not member then
      local last = tag_of(end_of("ZREVRANGEBYLEX", order, priority))
      member = format("%s%016.0f%s", char(64 + priority), max(tag, last) + STRIDE / priority, ticket)
      keep()
      first = first or ticket
    elseif lifetime == 0 and member then
      call("ZREM", order, member)
      call("HDEL", tickets, ticket)
      if first == ticket then
        first = first_of(order, tickets)
        has_changed = true
      end
    end
    if has_changed and first and first ~= ticket then
      tell(first)
    end
    return first == ticket and 1 or 0
  end

  -- Tells the first ticket in the queue of a place that it was released. Without rights for queues, nothing happens.
  wake_first = function(place)
    pcall(function()
      local order = "order:" .. place
      local first = call("EXISTS", order) == 1 and first_of(order, "tickets:" .. place)
      if first then
        tell(first)
      end
    end)
  end

  return enter_queue, wake_first
end

-- Returns the functions that give units back, alone or in exchange for others. They are created on demand, because that takes
-- as long as a decision.
local refund_all, move
local function giving_back()
  if move then
    return refund_all, move
  end
  local FIXED, SLIDING, BUCKET, CONCURRENT, MAX_UNITS = 1, 2, 3, 4, 9007199254740991
  local call, pack, unpack, sub = redis.call, struct.pack, struct.unpack, string.sub
  local floor, ceil, fmod, min, max = math.floor, math.ceil, math.fmod, math.min, math.max

  -- Returns a window of one count with units given back (nil: unchanged, "": a fresh one); of a fixed window by its index,
  -- of a calendar by its end.
  local function refund_window(state, cost, birth, index, held)
    if #state ~= 24 then
      error("not a window of one count")
    end
    local state_birth, state_index, count = unpack("<ddd", state)
    if state_birth ~= birth or state_index ~= index then
      return nil
    end
    count = count - min(cost, held)
    return count > 0 and pack("<ddd", birth, index, count) or ""
  end

  -- Returns the position of a lease in a state, or nil.
  local function find_lease(state, birth, number)
    local size = #state
    if size < 48 or fmod(size, 24) ~= 0 then
      error("not a row of leases")
    end
    if unpack("<d", state) ~= birth then
      return nil
    end
    local packed_number, place = pack("<d", number), 24
    repeat -- these eight bytes may also be parts of two other numbers
      place = string.find(state, packed_number, place + 1, true)
      if not place then
        return nil
      end
    until fmod(place, 24) == 9
    return place - 8
  end

  -- Returns leases with units given back, like refund_window, and when the last one ends.
  local function refund_lease(state, cost, birth, number, held)
    local place = find_lease(state, birth, number)
    if not place then
      return nil
    end
    local _, latest, count = unpack("<ddd", state)
    local lease_end, _, units = unpack("<ddd", state, place)
    local back = min(units, cost, held)
    local kept = units > back and pack("<ddd", lease_end, number, units - back) or ""
    local leases = sub(state, 25, place - 1) .. kept .. sub(state, place + 24)
    if leases == "" then
      return ""
    end
    return pack("<ddd", birth, latest, count - back) .. leases, unpack("<d", leases, #leases - 23)
  end

  -- Returns leases after one of them was renewed, and the end of the last one; nil if the lease ended or was given back.
  local function renew_lease(state, now, lease, birth, number)
    local place = find_lease(state, birth, number)
    if not place then
      return nil
    end
    local _, latest, count = unpack("<ddd", state)
    local time, first, last = max(now, latest), 25, #state + 1
    local lease_end, _, units = unpack("<ddd", state, place)
    if lease_end <= time then
      return nil
    end
    lease_end = max(lease_end, time + lease)
    while unpack("<d", state, first) <= time do -- ends at this lease at the latest
      count = count - select(3, unpack("<ddd", state, first))
      first = first + 24
    end
    local newest = max(lease_end, (unpack("<d", state, last - 24)))
    while unpack("<d", state, last - 24) > lease_end do -- only where leases were longer before
      last = last - 24
    end
    return pack("<ddd", birth, time, count) .. sub(state, first, place - 1) .. sub(state, place + 24, last - 1)
      .. pack("<ddd", lease_end, number, units) .. sub(state, last), newest
  end

  -- Returns the level of a bucket some ticks after a time, and the part of it that belongs to a receipt.
  local function left_of_bucket(ticks, level, time, refunded, later, cost, level_before, at, refunded_before, n, d, held)
    local left = max(0, level - n * (later - time + ticks))
    -- Only the first product may pass 2^53. The level before the hold plus the hold fit into the burst, which is below 2^53.
    -- So in that case gone is more than cost * d, exact or not, and nothing is given back.
    local gone = n * (later - at + ticks) - max(0, level_before - (refunded - refunded_before)) - (held - cost) * d
    return left, min(left, max(0, cost * d - max(0, gone)))
  end

  local function refund_bucket(
    state, now, cost, tick, birth, level_before, at, refunded_before, time_before, n, d, burst, held
  )
    if #state ~= 56 then
      error("not a token bucket")
    end
    local state_birth, level, time, refunded, state_n, state_d, state_burst = unpack("<ddddddd", state)
    if state_birth ~= birth or state_n ~= n or state_d ~= d or state_burst ~= burst then
      return nil
    end
    local later = max(floor(now / tick), time)
    cost = min(cost, held)
    local left, back =
      left_of_bucket(0, level, time, refunded, later, cost, level_before, at, refunded_before, n, d, held)
    if left == back then
      return ""
    end
    if cost == held and level == level_before + held * d and time == at and refunded == refunded_before then
      -- Nothing happened since the hold: restore the state before it.
      level, time = level_before + n * (at - time_before), time_before
    else
      level, refunded = level - back, refunded + back
      if refunded > MAX_UNITS then
        birth, refunded = fmod(birth + 1, MAX_UNITS), 0
      end
    end
    local after = pack("<ddddddd", birth, level, time, refunded, n, d, burst)
    return after, (time * tick - now) + ceil(level / n) * tick
  end

  -- The same for a sliding window, and the start of its newest bucket.
  local function refund_sliding(state, cost, width, birth, index, held)
    local size = #state
    if size < 32 or fmod(size, 16) ~= 0 then
      error("not a sliding window")
    end
    local state_birth, count = unpack("<dd", state)
    if state_birth ~= birth then
      return nil
    end
    local low, high = 0, size / 16 - 2 -- numbers of buckets: the receipt's is between these two, if it is still there
    while low < high do
      local middle = floor((low + high) / 2)
      if unpack("<d", state, 17 + 16 * middle) < index then
        low = middle + 1
      else
        high = middle
      end
    end
    local place = 17 + 16 * low
    local found, units = unpack("<dd", state, place)
    if found ~= index then
      return nil
    end
    local back = min(units, cost, held)
    local bucket = units > back and pack("<dd", index, units - back) or ""
    local buckets = sub(state, 17, place - 1) .. bucket .. sub(state, place + 16)
    if buckets == "" then
      return ""
    end
    return pack("<dd", birth, count - back) .. buckets, unpack("<d", buckets, #buckets - 15) * width
  end

  -- Like decide, in exchange for the units of a receipt. The time is read from the state that has them: if the clock went back,
  -- units must not move to an earlier time.
  move = function(kind, key, now, cost, birth, a, b, c, d, ...)
    local decide, state = DECIDE[kind] or decider(kind), call("GET", key)
    -- The result in case of a refusal. This also checks the state, and that the time is in the windows in the request.
    local _, remaining_as_is, _, reset_as_is, lag_as_is = decide(key, now, 0, birth, false, a, b, c, d, state)
    if kind == CONCURRENT and cost > 0 then
      local after, newest
      if state then
        after, newest = renew_lease(state, now, b, ...)
      end
      if not after then
        return 0, remaining_as_is, false, reset_as_is, 0
      end
      return 1, remaining_as_is, false, newest - now, 0, after, false, ...
    end
    if not state then
      return decide(key, now, cost, birth, false, a, b, c, d, state)
    end
    local _, level_before, held_at, refunded_before, _, n, parts, burst, held = ... -- of a bucket
    local at, start, edge, last, after_refund = now, b, c, d, nil
    if kind == BUCKET then
      if n ~= b or parts ~= c or burst ~= a then
        -- Units of other parameters stay and drain: the waiting time for both would not be exact.
        return decide(key, now, cost, birth, false, a, b, c, d, state)
      end
      local _, _, time = unpack("<ddd", state)
      at = max(now, time * d)
      after_refund = refund_bucket(state, at, MAX_UNITS, d, ...) -- all units of the receipt
    elseif kind == SLIDING then
      at = max(now, unpack("<d", state, #state - 15) * b)
      after_refund = refund_sliding(state, MAX_UNITS, b, ...)
    elseif kind == CONCURRENT then
      local _, latest = unpack("<dd", state)
      at = max(now, latest)
      after_refund = refund_lease(state, MAX_UNITS, ...)
      select(2, queueing())(key)
    else
      local _, state_index = unpack("<dd", state)
      if kind == FIXED then
        at = max(now, state_index * b)
      elseif state_index > (now < edge and edge or last) then -- the clock went back: to that window, not to this one
        at = state_index - 1
        start, edge, last = at, state_index, state_index
      end
      after_refund = refund_window(state, MAX_UNITS, ...)
    end
    local before = state
    if after_refund then
      before = after_refund ~= "" and after_refund
    end
    local allowed, remaining, retry_after, reset_after, lag, after, _, r1, r2, r3, r4, r5 =
      decide(key, at, cost, birth, false, a, start, edge, last, before)
    if allowed == 1 then
      if kind == BUCKET and cost > 0 then
        local state_birth, _, time = unpack("<ddd", state)
        r5 = state_birth == r1 and time or r3
      end
      return 1, remaining, false, reset_after, lag + at - now, cost > 0 and after or after_refund, false, r1, r2, r3, r4, r5
    end
    if kind ~= BUCKET then
      retry_after = retry_after and retry_after + at - now
    elseif after_refund then
      -- At some point the bucket drains the units that would be given back, so waiting for them gains nothing. Then the wait
      -- is as long as without giving back.
      local _, level, time, refunded = unpack("<dddd", state)
      local left, back = left_of_bucket(
        retry_after, level, time, refunded, max(floor(now / d), time), held, level_before, held_at, refunded_before, n,
        parts, held
      )
      if left - back > (a - cost) * c then
        retry_after = select(3, decide(key, now, cost, birth, false, a, b, c, d, state))
      end
    end
    return 0, remaining_as_is, retry_after, reset_as_is, lag_as_is
  end

  refund_all = function(request, first_key, rules, now, explicit)
    local place = 28
    local receipt = place + 33 * rules
    for i = 1, rules do
      local key = KEYS[first_key + i]
      local kind, _, b, c, d = unpack("<Bdddd", request, place)
      local cost, numbers = unpack("<dB", request, receipt)
      local after, counted_for
      local state = call("GET", key)
      if state and kind == BUCKET then
        after, counted_for = refund_bucket(state, now, cost, d, unpack("<ddddddddd", request, receipt + 9))
      elseif state then
        local birth, index, held = unpack("<ddd", request, receipt + 9)
        if kind == SLIDING then
          after, counted_for = refund_sliding(state, cost, b, birth, index, held)
          counted_for = counted_for and counted_for - now + c
        elseif kind == CONCURRENT then
          after, counted_for = refund_lease(state, cost, birth, index, held)
          counted_for = counted_for and counted_for - now
        else
          after = refund_window(state, cost, birth, index, held)
          counted_for = (kind == FIXED and (index + 1) * b or index) - now
        end
      end
      if after then
        save(key, after, counted_for, explicit)
        if kind == CONCURRENT then
          select(2, queueing())(key)
        end
      end
      place = place + 33
      receipt = receipt + 9 + 8 * numbers
    end
    return 0
  end

  return refund_all, move
end

local function decide_one(operation, request, key, now, cost, birth, explicit)
  local PEEK, HOLD, RECORD, BUCKET = 2, 3, 4, 3
  local kind, a, b, c, d = unpack("<Bdddd", request, 28)
  local allowed, remaining, retry_after, reset_after, lag, after, expires_as_before, r1, r2, r3, r4, r5 =
    (DECIDE[kind] or decider(kind))(key, now, cost, birth, operation == RECORD, a, b, c, d)
  if operation == RECORD and allowed == 0 then
    return { 1, remaining }
  end
  if after and operation ~= PEEK then
    save(key, after, kind == BUCKET and reset_after * d + lag or reset_after, explicit, expires_as_before)
    if operation == HOLD then
      return packed(allowed, remaining, retry_after, reset_after, lag) .. packed_receipt(kind, r1, r2, r3, r4, r5)
    end
  end
  return operation == RECORD and 0 or packed(allowed, remaining, retry_after, reset_after, lag)
end

local function decide_all(operation, request, first_key, rules, now, cost, birth, explicit, is_final)
  local PEEK, HOLD, RECORD, BUCKET = 2, 3, 4, 3
  local reply, after, counted_for, as_before = {}, {}, {}, {}
  local refused, beyond = false, operation == RECORD
  local own_cost, numbers, receipts = cost, 0, rules
  local place = 28 + 33 * rules -- position of the next rule's cost and receipt, if present
  for i = 1, rules do
    local kind, a, b, c, d = unpack("<Bdddd", request, 33 * i - 5)
    if cost < 0 then
      own_cost, numbers = unpack("<dB", request, place)
      place = place + 9
    end
    local allowed, remaining, retry_after, reset_after, lag, changed, expires_as_before, r1, r2, r3, r4, r5
    if numbers > 0 then
      local _, move_one = giving_back()
      allowed, remaining, retry_after, reset_after, lag, changed, expires_as_before, r1, r2, r3, r4, r5 =
        move_one(kind, KEYS[first_key + i], now, own_cost, birth, a, b, c, d,
          unpack(numbers == 9 and "<ddddddddd" or "<ddd", request, place))
      place = place + 8 * numbers
    else
      allowed, remaining, retry_after, reset_after, lag, changed, expires_as_before, r1, r2, r3, r4, r5 =
        (DECIDE[kind] or decider(kind))(
          KEYS[first_key + i], now, own_cost, birth, beyond and own_cost > 0, a, b, c, d
        )
    end
    if beyond and allowed == 0 then
      return { i, remaining }
    end
    refused = refused or allowed == 0
    reply[i] = packed(allowed, remaining, retry_after, reset_after, lag)
    after[i], as_before[i] = changed, expires_as_before
    counted_for[i] = reset_after and reset_after * (kind == BUCKET and d or 1) + lag
    if changed and own_cost > 0 and operation == HOLD then
      receipts = receipts + 1
      reply[receipts] = packed_receipt(kind, r1, r2, r3, r4, r5)
    end
  end
  if refused then
    if is_final then
      DECIDE.count_refusals(request, first_key, rules, now, birth, explicit, reply, save, packed)
    end
    -- A rule that would have admitted reports its remaining units without this call.
    for i = 1, rules do
      if string.byte(reply[i]) % 2 == 1 then
        local kind, a, b, c, d = unpack("<Bdddd", request, 33 * i - 5)
        reply[i] = packed(DECIDE[kind](KEYS[first_key + i], now, 0, birth, false, a, b, c, d))
      end
    end
    return table.concat(reply, "", 1, rules)
  end
  if operation ~= PEEK then
    for i = 1, rules do
      if after[i] then
        save(KEYS[first_key + i], after[i], counted_for[i], explicit, as_before[i])
      end
    end
  end
  return beyond and 0 or table.concat(reply)
end

local function run(request, first_key)
  local QUEUE, REFUND, RESET, NOTE, TO_FINAL = 0, 5, 6, 7, 7
  local operation, rules, now, cost, birth = unpack("<BHddd", request)
  local is_final = operation > NOTE
  if is_final then
    operation = operation - TO_FINAL
  end
  local explicit = now >= 0
  if not explicit then
    now = clock
  end
  if operation == RESET then
    for i = 1, rules do
      call("DEL", KEYS[first_key + i])
      select(2, queueing())(KEYS[first_key + i])
    end
    return 0
  elseif operation == REFUND then
    return giving_back()(request, first_key, rules, now, explicit)
  elseif operation == NOTE then
    local key, replaced, text = KEYS[first_key + 1], nil, sub(request, 28)
    if birth >= 0 then
      replaced, text = sub(text, 1, birth), sub(text, birth + 1)
    end
    local kept = call("GET", key)
    if cost > 0 and (not kept or kept == text or kept == replaced) then
      call("SET", key, text, "PX", max(cost, call("PTTL", key)))
      kept = text
    end
    return kept
  elseif operation == QUEUE then
    local queue = KEYS[first_key + 1]
    return queueing()("order:" .. queue, "tickets:" .. queue, sub(request, 28), birth, cost)
  elseif rules == 1 and cost >= 0 then
    return decide_one(operation, request, KEYS[first_key + 1], now, cost, birth, explicit)
  end
  return decide_all(operation, request, first_key, rules, now, cost, birth, explicit, is_final)
end

local replies, keys = {}, 0
for i, request in ipairs(ARGV) do
  local done, reply = pcall(run, request, keys)
  if not done then
    reply = { err = type(reply) == "table" and reply.err or tostring(reply) }
  end
  replies[i] = reply
  local low, high = string.byte(request, 2, 3)
  keys = keys + low + 256 * high
end
return replies
