-- Headgate's tables, and the functions that decide.
--
-- Numbers are integers; times are microseconds since the epoch. The functions are ports of headgate/algorithms: the
-- same names and steps, in the same order. Products that could pass 2^63 are numeric or written as a division.

-- One state per rule and key. Every admission writes it, so updates should stay within the page (HOT): half of each page is
-- free, and only the key has an index.
CREATE TABLE headgate_states (
    key bytea PRIMARY KEY,   -- namespace, limiter, rule and key, each after its length
    state bigint[] NOT NULL, -- as headgate_decide_v2 describes it
    expires bigint NOT NULL  -- the time at which it equals a fresh one, by this server's clock
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);
-- Compressing a log of a thousand entries takes longer than deciding and writing it.
ALTER TABLE headgate_states ALTER COLUMN state SET STORAGE EXTERNAL;

-- A state while headgate_many_v3 works on it.
CREATE TYPE headgate_cell_v2 AS (
    state bigint[], -- or null
    place tid,      -- its location, or null
    expires bigint  -- null if unchanged
);

-- Decide one rule.
--
-- kind             1 fixed window          2 sliding window or log                      3 token bucket
-- a b c d          limit, period, -, -     limit, width, lifetime, -                    burst, n, d, tick
-- state            birth, index, units     birth, total, then index and units of each   birth, level, time, refunded,
--                                          live bucket, oldest first                    n, d, burst
--
-- kind             4 concurrent                                5 calendar
-- a b c d          limit, lease, -, -                          limit, and the starts of three consecutive windows
-- state            birth, latest, total, then end, number      birth, end, units
--                  and units of each lease, by end
--
-- kind             6 penalty
-- a b c d          refusals, duration, growth + 128 * one bit per rule that it watches, longest
-- state            birth, start, refusals, end, duration
--
-- forced           whether to count the units even beyond the limit
--
-- Returns
--   1  -1 if the units are admitted, -2 if they never will be, -3 if counting them would leave the exact range, -4 if the
--      state is not one of this kind, -5 if now is outside of the first two windows; else the time until they are admitted
--   2  units left without this call; after -3 the units that could still be counted; after -5 now
--   3  the time until the state is fresh, without this call
--   4  the same with this call, if it was admitted
--   5  to 9: the receipt: birth and index, number or end; or birth, level before, time, refunded and time before
--   10 and on: the new state, if there is one
--
-- States with a list contain its total, so that no call has to compute it. 9007199254740991 is 2^53 - 1, the largest number
-- that every store counts exactly. The first evaluation of an expression in a transaction is expensive, so there are few
-- expressions on the path of an admission.
CREATE FUNCTION headgate_decide_v2(
    kind bigint, a bigint, b bigint, c bigint, d bigint,
    state bigint[], now bigint, cost bigint, birth bigint, forced boolean
)
RETURNS bigint[]
LANGUAGE plpgsql
IMMUTABLE
AS $$
DECLARE
    "limit" ALIAS FOR a;
    period ALIAS FOR b;
    width ALIAS FOR b;
    lifetime ALIAS FOR c;
    lease ALIAS FOR b;
    duration ALIAS FOR b;
    longest ALIAS FOR d;
    burst ALIAS FOR a;
    n ALIAS FOR b;
    parts ALIAS FOR c; -- small parts in a unit: the algorithm's d
    tick ALIAS FOR d;
    size integer;
    first integer; -- position of the first live bucket or lease
    place integer; -- position of a new lease
    newest bigint; -- the index of the last bucket; the end of a new lease
    index bigint;  -- the end of a calendar's window
    count bigint;
    level bigint;
    time bigint;
    refunded bigint;
    remaining bigint;
    excess bigint;
    retry_after bigint;
    reset_after bigint;
BEGIN
    IF kind = 1 OR kind = 5 THEN
        IF cardinality(state) <> 3 THEN
            RETURN ARRAY[-4, 0, 0, 0, 0, 0, 0, 0, 0];
        ELSIF kind = 1 THEN
            index := greatest(now / period, state[2]);
            retry_after := (index + 1) * period - now;
        ELSE
            index := CASE WHEN state[2] > now THEN state[2] WHEN now < b THEN NULL WHEN now < c THEN c WHEN now < d THEN d END;
            IF index IS NULL THEN
                RETURN ARRAY[-5, now, 0, 0, 0, 0, 0, 0, 0];
            END IF;
            retry_after := index - now;
        END IF;
        IF state[2] = index THEN
            birth := state[1];
            count := state[3];
        ELSE
            count := 0;
        END IF;
        reset_after := CASE WHEN count > 0 THEN retry_after ELSE 0 END;
        IF cost > 0 AND count + cost <= (CASE WHEN forced THEN 9007199254740991 ELSE "limit" END) THEN
            RETURN ARRAY[
                -1, greatest(0, "limit" - count), reset_after, retry_after,
                birth, index, 0, 0, 0, birth, index, count + cost
            ];
        ELSIF cost = 0 THEN
            retry_after := -1;
        ELSIF forced THEN
            RETURN ARRAY[-3, 9007199254740991 - count, 0, 0, 0, 0, 0, 0, 0];
        ELSIF "limit" = 0 THEN
            retry_after := -2;
        END IF;
        RETURN ARRAY[retry_after, greatest(0, "limit" - count), reset_after, reset_after, 0, 0, 0, 0, 0];

    ELSIF kind = 2 THEN
        IF state IS NULL THEN
            count := 0;
        ELSE
            size := cardinality(state);
            IF size < 4 OR size % 2 = 1 THEN
                RETURN ARRAY[-4, 0, 0, 0, 0, 0, 0, 0, 0];
            END IF;
            count := state[2];
            newest := state[size - 1];
            first := 3;
            time := greatest(now, newest * width) - lifetime; -- buckets that began until this time no longer count
            WHILE state[first] * width <= time LOOP
                count := count - state[first + 1];
                first := first + 2;
            END LOOP;
        END IF;
        reset_after := CASE WHEN count > 0 THEN newest * width + lifetime - now ELSE 0 END;
        IF cost > 0 AND count + cost <= (CASE WHEN forced THEN 9007199254740991 ELSE "limit" END) THEN
            index := now / width;
            IF count = 0 THEN
                RETURN ARRAY[
                    -1, "limit", 0, index * width + lifetime - now, birth, index, 0, 0, 0, birth, cost, index, cost
                ];
            END IF;
            IF first > 3 THEN
                birth := state[1];
                state := state[first - 2 :];
                state[1] := birth;
                size := size - first + 3;
            END IF;
            state[2] := count + cost;
            IF index <= newest THEN
                state[size] := state[size] + cost;
            ELSIF width = 1 AND size > 2 * greatest(1000, "limit") THEN -- full, so this is a record
                newest := index;
                state[size - 1] := index;
                state[size] := state[size] + cost;
            ELSE
                newest := index;
                state[size + 1] := index;
                state[size + 2] := cost;
            END IF;
            RETURN ARRAY[
                -1, greatest(0, "limit" - count), reset_after, newest * width + lifetime - now,
                state[1], newest, 0, 0, 0
            ] || state;
        ELSIF cost = 0 THEN
            retry_after := -1;
        ELSIF forced THEN
            RETURN ARRAY[-3, 9007199254740991 - count, 0, 0, 0, 0, 0, 0, 0];
        ELSIF "limit" = 0 THEN
            retry_after := -2;
        ELSE
            excess := count + cost - "limit" - state[first + 1];
            WHILE excess > 0 LOOP
                first := first + 2;
                excess := excess - state[first + 1];
            END LOOP;
            retry_after := state[first] * width + lifetime - now;
        END IF;
        RETURN ARRAY[retry_after, greatest(0, "limit" - count), reset_after, reset_after, 0, 0, 0, 0, 0];

    ELSIF kind = 4 THEN
        size := cardinality(state);
        IF size < 6 OR size % 3 > 0 THEN
            RETURN ARRAY[-4, 0, 0, 0, 0, 0, 0, 0, 0];
        END IF;
        time := greatest(now, state[2]);
        count := coalesce(state[3], 0);
        first := 4;
        WHILE state[first] <= time LOOP
            count := count - state[first + 2];
            first := first + 3;
        END LOOP;
        reset_after := CASE WHEN count > 0 THEN state[size - 2] - now ELSE 0 END;
        IF cost > 0 AND count + cost <= (CASE WHEN forced THEN 9007199254740991 ELSE "limit" END) THEN
            newest := time + lease;
            IF count = 0 THEN
                RETURN ARRAY[
                    -1, "limit", 0, newest - now, birth, birth, 0, 0, 0, birth, time, cost, newest, birth, cost
                ];
            END IF;
            place := size + 1;
            WHILE place > first AND state[place - 3] > newest LOOP -- only where leases were longer before
                place := place - 3;
            END LOOP;
            RETURN ARRAY[
                -1, greatest(0, "limit" - count), reset_after, greatest(newest, state[size - 2]) - now,
                state[1], birth, 0, 0, 0, state[1], time, count + cost
            ] || state[first : place - 1] || ARRAY[newest, birth, cost] || state[place :];
        ELSIF cost = 0 THEN
            retry_after := -1;
        ELSIF forced THEN
            RETURN ARRAY[-3, 9007199254740991 - count, 0, 0, 0, 0, 0, 0, 0];
        ELSIF "limit" = 0 THEN
            retry_after := -2;
        ELSE
            excess := count + cost - "limit" - state[first + 2];
            WHILE excess > 0 LOOP
                first := first + 3;
                excess := excess - state[first + 2];
            END LOOP;
            retry_after := state[first] - now;
        END IF;
        RETURN ARRAY[retry_after, greatest(0, "limit" - count), reset_after, reset_after, 0, 0, 0, 0, 0];

    ELSIF kind = 6 THEN
        IF state IS NULL THEN
            RETURN ARRAY[-1, 9007199254740991, 0, 0, 0, 0, 0, 0, 0];
        ELSIF cardinality(state) <> 5 THEN
            RETURN ARRAY[-4, 0, 0, 0, 0, 0, 0, 0, 0];
        END IF;
        reset_after := greatest(
            0,
            CASE WHEN state[3] > 0 THEN state[2] + duration - now ELSE 0 END,
            CASE WHEN state[5] > 0 THEN state[4] + CASE WHEN c % 128 > 1 THEN longest ELSE 0 END - now ELSE 0 END
        );
        IF state[4] > now THEN
            RETURN ARRAY[
                CASE WHEN cost = 0 OR forced THEN -1 ELSE state[4] - now END, 0, reset_after, reset_after, 0, 0, 0, 0, 0
            ];
        END IF;
        count := CASE WHEN state[2] + duration > now THEN state[3] ELSE 0 END;
        RETURN ARRAY[-1, 9007199254740991 - count, reset_after, reset_after, 0, 0, 0, 0, 0];
    END IF;

    IF n = 0 THEN
        RETURN ARRAY[CASE WHEN cost = 0 OR forced THEN -1 ELSE -2 END, 0, 0, 0, 0, 0, 0, 0, 0];
    ELSIF cardinality(state) <> 7 THEN
        RETURN ARRAY[-4, 0, 0, 0, 0, 0, 0, 0, 0];
    END IF;
    time := greatest(now / tick, state[3]);
    -- Written as divisions: the time to drain, rather than the amount drained.
    IF time - state[3] < (state[2] + state[5] - 1) / state[5] THEN
        IF state[5] = n AND state[6] = parts AND state[7] = burst THEN
            birth := state[1];
            level := state[2] - n * (time - state[3]);
            refunded := state[4];
            reset_after := (time + (level + n - 1) / n) * tick - now;
        ELSE
            -- Receipts are about units of the old parameters: they must not be given back with the new ones, so the birth is new.
            level := least(div(state[2]::numeric * parts + state[6] - 1, state[6]), 9007199254740992);
            refunded := 0;
            -- Until it is written, the state keeps its old parameters. It is fresh as soon as it is fresh with the old or the
            -- new parameters. A level above 2^53 cannot be computed with the new parameters, so only the old ones count.
            reset_after := (state[3] + (state[2] + state[5] - 1) / state[5]) * tick - now;
            IF level <= 9007199254740991 THEN
                level := CASE WHEN time - state[3] < (level + n - 1) / n THEN level - n * (time - state[3]) ELSE 0 END;
                reset_after := CASE WHEN level = 0 THEN 0 ELSE
                    least((time + (level + n - 1) / n) * tick - now, reset_after) END;
            END IF;
        END IF;
    ELSE
        level := 0;
        refunded := 0;
        reset_after := 0;
    END IF;
    remaining := greatest(0, burst * parts - level) / parts;
    IF cost > 0 AND cost <= ((CASE WHEN forced THEN 9007199254740991 ELSE burst * parts END) - level) / parts THEN
        excess := level + cost * parts;
        RETURN ARRAY[
            -1, remaining, reset_after, (time + (excess + n - 1) / n) * tick - now,
            birth, level, time, refunded, CASE WHEN birth = state[1] THEN state[3] ELSE time END,
            birth, excess, time, refunded, n, parts, burst
        ];
    ELSIF cost = 0 THEN
        retry_after := -1;
    ELSIF forced THEN
        RETURN ARRAY[-3, greatest(0, 9007199254740991 - level) / parts, 0, 0, 0, 0, 0, 0, 0];
    ELSIF level > 9007199254740991 THEN
        retry_after := reset_after;
    ELSE
        excess := level + cost * parts - burst * parts;
        retry_after := least((time + (excess + n - 1) / n) * tick - now, reset_after);
    END IF;
    RETURN ARRAY[retry_after, remaining, reset_after, reset_after, 0, 0, 0, 0, 0];
END
$$;

-- Give units back to one rule.
--
-- kind, a b c d, state   the same arguments as of headgate_decide_v2
-- receipt                the receipt that it returned; a token bucket's is followed by n, d, burst
-- held                   the units of the receipt
--
-- Returns null if nothing changes; else the time at which the new state is fresh, and the new state, if any.
CREATE FUNCTION headgate_refund_v2(
    kind bigint, a bigint, b bigint, c bigint, d bigint,
    state bigint[], receipt bigint[], held bigint, cost bigint, now bigint
)
RETURNS bigint[]
LANGUAGE plpgsql
IMMUTABLE
AS $$
DECLARE
    max_units CONSTANT bigint := 9007199254740991; -- 2^53 - 1
    place integer;
    count bigint;
    level bigint;
    time bigint;
    refunded bigint;
    "left" bigint;
    gone numeric;
    back bigint;
    n bigint;
    parts bigint;
BEGIN
    IF state IS NULL OR state[1] <> receipt[1] THEN
        RETURN NULL;
    END IF;
    cost := least(cost, held);
    IF kind = 1 OR kind = 5 THEN
        IF state[2] <> receipt[2] THEN
            RETURN NULL;
        ELSIF state[3] <= cost THEN
            RETURN ARRAY[0];
        END IF;
        RETURN ARRAY[CASE kind WHEN 1 THEN (state[2] + 1) * b ELSE state[2] END, state[1], state[2], state[3] - cost];

    ELSIF kind = 2 THEN
        place := cardinality(state) - 1; -- most holds are given back soon
        WHILE place > 2 AND state[place] > receipt[2] LOOP
            place := place - 2;
        END LOOP;
        IF place < 3 OR state[place] < receipt[2] THEN
            RETURN NULL;
        END IF;
        count := state[place + 1];
        state[2] := state[2] - least(count, cost);
        state[place + 1] := count - cost;
        IF count <= cost THEN
            state := state[: place - 1] || state[place + 2 :];
        END IF;
        IF cardinality(state) = 2 THEN
            RETURN ARRAY[0];
        END IF;
        RETURN (state[cardinality(state) - 1] * b + c) || state;

    ELSIF kind = 4 THEN
        place := 4;
        LOOP
            place := array_position(state, receipt[2], place + 1);
            EXIT WHEN place % 3 = 2 OR place IS NULL; -- not an end or units with the same value
        END LOOP;
        count := state[place + 1];
        IF count IS NULL THEN
            RETURN NULL;
        END IF;
        state[3] := state[3] - least(count, cost);
        state[place + 1] := count - cost;
        IF count <= cost THEN
            state := state[: place - 2] || state[place + 2 :];
        END IF;
        IF cardinality(state) = 3 THEN
            RETURN ARRAY[0];
        END IF;
        RETURN state[cardinality(state) - 2] || state;
    END IF;

    IF state[5 : 7] <> receipt[6 : 8] THEN
        RETURN NULL;
    END IF;
    level := state[2];
    time := state[3];
    refunded := state[4];
    n := state[5];
    parts := state[6];
    now := greatest(now / d, time);
    "left" := CASE WHEN now - time < (level + n - 1) / n THEN level - n * (now - time) ELSE 0 END;
    -- Order of draining since the hold: first the level before the hold without later refunds, then the units that stay
    -- charged, and finally the units that are given back.
    gone := n::numeric * (now - receipt[3]) - greatest(0, receipt[2] - (refunded - receipt[4])) - (held - cost) * parts;
    back := least("left", greatest(0, cost * parts - greatest(0, gone)));
    IF "left" = back THEN
        RETURN ARRAY[0];
    END IF;
    IF cost = held AND level = receipt[2] + held * parts AND time = receipt[3] AND refunded = receipt[4] THEN
        -- Nothing happened since the hold: restore the state before it, whose level is in the exact range.
        level := receipt[2] + n * (time - receipt[5]);
        time := receipt[5];
    ELSE
        level := level - back;
        refunded := refunded + back;
        IF refunded > max_units THEN
            state[1] := (state[1] + 1) % max_units;
            refunded := 0;
        END IF;
    END IF;
    RETURN ARRAY[(time + (level + n - 1) / n) * d, state[1], level, time, refunded, n, parts, state[7]];
END
$$;

-- Return the state after the lease of a receipt was renewed; null if the lease ended or was given back.
--
-- lease    of the rule
-- state    of a concurrent rule, as in headgate_decide_v2
-- receipt  as in headgate_refund_v2
CREATE FUNCTION headgate_renew_v1(lease bigint, state bigint[], receipt bigint[], now bigint)
RETURNS bigint[]
LANGUAGE plpgsql
IMMUTABLE
AS $$
DECLARE
    time CONSTANT bigint := greatest(now, state[2]);
    count bigint := state[3];
    first integer := 4; -- position of the first live lease
    last integer := cardinality(state) + 1; -- position of the renewed lease
    place integer := 4; -- position of its number
    newest bigint; -- its end
BEGIN
    IF state IS NULL OR state[1] <> receipt[1] THEN
        RETURN NULL;
    END IF;
    LOOP
        place := array_position(state, receipt[2], place + 1);
        EXIT WHEN place % 3 = 2 OR place IS NULL; -- not an end or units with the same value
    END LOOP;
    IF place IS NULL OR state[place - 1] <= time THEN
        RETURN NULL;
    END IF;
    newest := greatest(state[place - 1], time + lease);
    WHILE state[first] <= time LOOP
        count := count - state[first + 2];
        first := first + 3;
    END LOOP;
    WHILE state[last - 3] > newest LOOP -- only where leases were longer before
        last := last - 3;
    END LOOP;
    RETURN ARRAY[state[1], time, count] || state[first : place - 2] || state[place + 2 : last - 1]
        || ARRAY[newest, receipt[2], state[place + 1]] || state[last :];
END
$$;

-- Decide one rule after giving back the units of a receipt, in one step: a refusal changes nothing. With a cost, a concurrent
-- rule renews the receipt's lease instead.
--
-- kind, a b c d, state, now, cost, birth  as in headgate_decide_v2
-- receipt, held                           as in headgate_refund_v2; for a token bucket with the current n, d, burst
--
-- Returns
--   1   units left without this call after the refund of the receipt
--   2   to 10: the first nine numbers of headgate_decide_v2. Times without this call are also without the refund.
--   11  and on: the new state; only 0 if it is fresh, nothing if it is unchanged
CREATE FUNCTION headgate_move_v1(
    kind bigint, a bigint, b bigint, c bigint, d bigint,
    state bigint[], receipt bigint[], held bigint, now bigint, cost bigint, birth bigint
)
RETURNS bigint[]
LANGUAGE plpgsql
IMMUTABLE
AS $$
DECLARE
    as_is CONSTANT bigint[] := headgate_decide_v2(kind, a, b, c, d, state, now, 0, birth, false);
    at bigint := now; -- the time of the state: units must not move to an earlier time
    given bigint[]; -- the result of headgate_refund_v2
    after bigint[];
    retry_after bigint;
BEGIN
    IF as_is[1] < -1 THEN
        RETURN 0 || as_is;
    ELSIF kind = 4 AND cost > 0 AND receipt[1] >= 0 THEN
        after := headgate_renew_v1(b, state, receipt, now);
        IF after IS NULL THEN
            RETURN ARRAY[0, -2, as_is[2], as_is[3], as_is[4], 0, 0, 0, 0, 0];
        END IF;
        RETURN ARRAY[
            as_is[2] + cost, -1, as_is[2], as_is[3], after[cardinality(after) - 2] - now, receipt[1], receipt[2], 0, 0, 0
        ] || after;
    ELSIF state IS NULL THEN
        NULL;
    ELSIF kind <> 5 THEN
        at := greatest(now, CASE kind
            WHEN 1 THEN state[2] * b WHEN 2 THEN state[cardinality(state) - 1] * b WHEN 3 THEN state[3] * d ELSE state[2]
        END);
    ELSIF state[2] > now AND NOT now BETWEEN b AND d - 1 THEN
        RETURN ARRAY[0, -5, now, 0, 0, 0, 0, 0, 0, 0];
    ELSIF state[2] > (CASE WHEN now < c THEN c ELSE d END) THEN
        -- A later window is already in use. It decides, even if its count is now zero.
        at := state[2] - 1;
        b := at;
        c := state[2];
    END IF;
    given := headgate_refund_v2(kind, a, b, c, d, state, receipt, held, held, at);
    after := headgate_decide_v2(
        kind, a, b, c, d, CASE WHEN given IS NULL THEN state ELSE nullif(given[2 :], '{}') END, at, cost, birth, false
    );
    IF after[1] = -1 THEN
        IF kind = 3 AND after[5] = state[1] THEN
            after[9] := state[3];
        END IF;
        RETURN ARRAY[
            after[2], -1, as_is[2], as_is[3], CASE WHEN after[4] > 0 THEN after[4] + at - now ELSE 0 END,
            after[5], after[6], after[7], after[8], after[9]
        ] || CASE WHEN cost > 0 THEN after[10 :] WHEN cardinality(given) = 1 THEN given ELSE given[2 :] END;
    END IF;
    retry_after := after[1];
    IF retry_after >= 0 THEN
        retry_after := retry_after + at - now;
        IF kind = 3 AND state IS NOT NULL THEN
            -- At some point the bucket drains the units that would be given back, so waiting for them gains nothing. Then
            -- the wait is as long as without giving back.
            given := headgate_refund_v2(kind, a, b, c, d, state, receipt, held, held, now + retry_after);
            after := headgate_decide_v2(
                kind, a, b, c, d, CASE WHEN given IS NULL THEN state ELSE nullif(given[2 :], '{}') END,
                now + retry_after, cost, birth, false
            );
            IF after[1] <> -1 THEN
                retry_after := (headgate_decide_v2(kind, a, b, c, d, state, now, cost, birth, false))[1];
            END IF;
        END IF;
    END IF;
    RETURN ARRAY[0, retry_after, as_is[2], as_is[3], as_is[4], 0, 0, 0, 0, 0];
END
$$;

-- Count a refusal by another rule, while no penalty is in force.
--
-- The arguments are those of headgate_decide_v2 for a penalty. Returns the new state.
CREATE FUNCTION headgate_punish_v1(
    "limit" bigint, duration bigint, coded bigint, longest bigint, state bigint[], now bigint, birth bigint
)
RETURNS bigint[]
LANGUAGE plpgsql
IMMUTABLE
AS $$
DECLARE
    growth CONSTANT bigint := coded % 128;
    remembered CONSTANT bigint := CASE WHEN growth > 1 THEN longest ELSE 0 END;
BEGIN
    IF state IS NULL OR greatest(
        CASE WHEN state[3] > 0 THEN state[2] + duration ELSE 0 END,
        CASE WHEN state[5] > 0 THEN state[4] + remembered ELSE 0 END
    ) <= now THEN
        state := ARRAY[birth, now, 0, 0, 0];
    END IF;
    IF state[2] + duration <= now THEN
        state[2] := now;
        state[3] := 0;
    END IF;
    IF state[4] + remembered <= now THEN
        state[4] := 0;
        state[5] := 0;
    END IF;
    state[3] := state[3] + 1;
    IF state[3] >= "limit" THEN
        state[2] := greatest(now, state[2]);
        state[3] := 0;
        state[5] := CASE WHEN state[5] > 0 THEN least(longest, state[5] * growth) ELSE duration END;
        state[4] := state[2] + state[5];
    END IF;
    RETURN state;
END
$$;

-- Return the number of the advisory lock that every writer of a key's state takes.
CREATE FUNCTION headgate_lock_number_v1(key bytea)
RETURNS bigint
LANGUAGE sql
IMMUTABLE
AS $$ SELECT hashtextextended(encode(key, 'escape'), 0) $$;

-- Answer one request about one key: the fast path.
--
-- operation        0 peek, 1 hit or hold, 2 record
-- kind, a b c d    as in headgate_decide_v2
-- at               the time, or -1 for this server's clock
-- birth            the birth of a new state
-- durable          whether to wait until it is on disk
--
-- Returns the first nine numbers of headgate_decide_v2.
CREATE FUNCTION headgate_one_v2(
    key bytea, operation integer, kind bigint, a bigint, b bigint, c bigint, d bigint,
    at bigint, cost bigint, birth bigint, durable boolean
)
RETURNS bigint[]
LANGUAGE plpgsql
VOLATILE
-- A plan that was cached while the table was small would scan the whole table for every key after it has grown.
SET enable_seqscan = off
AS $$
#variable_conflict use_variable
DECLARE
    before bigint[];
    place tid;
    after bigint[];
    server_now bigint;
    ignored text;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE invalid_transaction_state USING MESSAGE = 'headgate needs the isolation level READ COMMITTED';
    END IF;
    IF NOT durable THEN
        ignored := set_config('synchronous_commit', 'off', true);
    END IF;
    IF operation > 0 THEN
        ignored := pg_advisory_xact_lock(headgate_lock_number_v1(key))::text;
    END IF;
    -- Each statement sees the rows committed before it began, so a separate statement reads the state after the lock.
    SELECT states.state, states.ctid INTO before, place FROM headgate_states AS states WHERE states.key = key;
    server_now := extract(epoch FROM clock_timestamp()) * 1000000;
    after := headgate_decide_v2(
        kind, a, b, c, d, before, CASE WHEN at < 0 THEN server_now ELSE at END, cost, birth, operation = 2
    );
    IF operation > 0 AND after[10] IS NOT NULL THEN
        -- A state that was written with the caller's time is kept for an hour longer.
        server_now := server_now + after[4] + CASE WHEN at < 0 THEN 0 ELSE 3600000000 END;
        UPDATE headgate_states AS states SET state = after[10 :], expires = server_now
        WHERE states.ctid = place AND states.key = key; -- its known location, unless it was removed
        IF NOT FOUND THEN
            INSERT INTO headgate_states AS states VALUES (key, after[10 :], server_now)
            ON CONFLICT ON CONSTRAINT headgate_states_pkey
            DO UPDATE SET state = excluded.state, expires = excluded.expires;
        END IF;
    END IF;
    RETURN after[: 9];
END
$$;

-- Answer requests one after the other, each for all of its rules together, and write the changed states.
--
-- keys     the keys of all states, each once; first the keys of states that may be written, in ascending order
-- locks    the number of these
-- program  the requests one after the other:
--            operation        0 peek, 1 hit or hold, 2 record, 3 refund, 4 reset, 5 a hold that replaces another or renews,
--                             6 hit or hold whose refusal counts for penalties
--            at, birth        as in headgate_one_v2
--            rules            the number of rules that follow, each as
--              key            its position in keys; a reset has nothing else
--              kind, a b c d
--              cost
--              receipt        for 3 and 5 only: eight numbers, then its units; for 5 these may be 0
-- durable  as in headgate_one_v2
--
-- Returns, for each rule of each request but 3 and 4, the first nine numbers of headgate_decide_v2. Such a request was
-- admitted, and written, if all of its rules begin with -1.
CREATE FUNCTION headgate_many_v3(keys bytea[], locks integer, program bigint[], durable boolean)
RETURNS bigint[]
LANGUAGE plpgsql
VOLATILE
SET enable_seqscan = off -- as above
SET enable_bitmapscan = off -- an index scan returns states in the order of the keys
AS $$
DECLARE
    present bytea[]; -- the keys that have a state
    cells headgate_cell_v2[]; -- by position in keys
    changes headgate_cell_v2[]; -- the changes of the current request, by rule
    cell headgate_cell_v2;
    reply bigint[];
    recent bigint[]; -- values to append to it: appending to a long array is slower than to a short one
    server_now bigint;
    ignored text;
    few boolean;
    updated integer;
    removed boolean := false;
    p integer := 1; -- position of the request in the program
    q integer; -- position of its next rule
    place integer; -- in keys
    operation bigint;
    at bigint := -1;
    now bigint;
    rules integer;
    lefts bigint[]; -- units left of each rule after the refund of its receipt; the reply of a penalty
    first integer; -- position in recent
    has_failed boolean; -- whether a rule could not decide
    grace bigint := 0;
    admitted boolean;
    after bigint[];
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE invalid_transaction_state USING MESSAGE = 'headgate needs the isolation level READ COMMITTED';
    END IF;
    IF NOT durable THEN
        ignored := set_config('synchronous_commit', 'off', true);
    END IF;
    -- All calls lock in the order of the keys, so that no deadlock is possible.
    few := cardinality(keys) < 8; -- then a statement per key is faster than one for all keys
    IF few THEN
        FOR k IN 1 .. locks LOOP
            ignored := pg_advisory_xact_lock(headgate_lock_number_v1(keys[k]))::text;
        END LOOP;
        FOR k IN 1 .. cardinality(keys) LOOP
            SELECT states.state, states.ctid, NULL INTO cell FROM headgate_states AS states WHERE states.key = keys[k];
            cells[k] := cell;
        END LOOP;
    ELSE
        PERFORM pg_advisory_xact_lock(headgate_lock_number_v1(key)) FROM unnest(keys[: locks]) AS key;
        SELECT
            array_agg(states.key ORDER BY states.key),
            array_agg(ROW(states.state, states.ctid, NULL)::headgate_cell_v2 ORDER BY states.key)
        INTO present, cells
        FROM headgate_states AS states WHERE states.key = ANY (keys);
        IF present IS DISTINCT FROM keys THEN -- some have no state yet, or are only read and therefore not sorted
            cells := ARRAY(SELECT cells[array_position(present, asked)] FROM unnest(keys) AS asked);
        END IF;
    END IF;
    server_now := extract(epoch FROM clock_timestamp()) * 1000000;
    now := server_now;

    -- Every statement takes time, even an assignment, so there are few on the path of an admission.
    WHILE p <= cardinality(program) LOOP
        operation := program[p];
        rules := program[p + 3];
        IF program[p + 1] <> at THEN
            at := program[p + 1];
            now := CASE WHEN at < 0 THEN server_now ELSE at END;
            grace := CASE WHEN at < 0 THEN 0 ELSE 3600000000 END;
        END IF;
        q := p + 4;
        IF operation <= 2 OR operation = 6 THEN
            admitted := operation > 0;
            FOR i IN 1 .. rules LOOP
                place := program[q];
                after := headgate_decide_v2(
                    program[q + 1], program[q + 2], program[q + 3], program[q + 4], program[q + 5],
                    cells[place].state, now, program[q + 6], program[p + 2], operation = 2
                );
                recent := recent || after[: 9];
                admitted := admitted AND after[1] = -1;
                IF admitted THEN
                    -- A cost of 0, or a limit of 0 that records nothing, makes no new state.
                    changes[i] := CASE WHEN after[10] IS NULL THEN cells[place] ELSE
                        ROW(after[10 :], cells[place].place, server_now + after[4] + grace)::headgate_cell_v2 END;
                END IF;
                q := q + 7;
            END LOOP;
            IF admitted THEN
                FOR i IN 1 .. rules LOOP
                    place := program[p + 7 * i - 3];
                    cells[place] := changes[i];
                END LOOP;
            ELSIF operation = 6 THEN
                first := cardinality(recent) - 9 * rules + 1; -- of the reply to this request
                has_failed := EXISTS (SELECT FROM generate_series(0, rules - 1) AS j WHERE recent[first + 9 * j] <= -4);
                FOR i IN 1 .. rules LOOP
                    q := p + 7 * i - 3;
                    CONTINUE WHEN has_failed OR program[q + 1] <> 6 OR recent[first + 9 * i - 9] <> -1 OR NOT EXISTS (
                        -- A refusal by a rule that it watches, but not by a limit of 0.
                        SELECT FROM generate_series(0, rules - 1) AS j
                        WHERE program[q + 4] >> (7 + j) & 1 = 1 AND recent[first + 9 * j] >= 0
                    );
                    place := program[q];
                    after := headgate_punish_v1(
                        program[q + 2], program[q + 3], program[q + 4], program[q + 5], cells[place].state, now, program[p + 2]
                    );
                    lefts := headgate_decide_v2(
                        6, program[q + 2], program[q + 3], program[q + 4], program[q + 5], after, now, 1, 0, false
                    );
                    lefts[5] := after[1];
                    recent[first + 9 * i - 9 : first + 9 * i - 1] := lefts;
                    cells[place] := ROW(after, cells[place].place, server_now + lefts[3] + grace)::headgate_cell_v2;
                END LOOP;
                q := p + 7 * rules + 4;
            END IF;
        ELSIF operation = 5 THEN
            admitted := true;
            lefts := '{}';
            FOR i IN 1 .. rules LOOP
                place := program[q];
                after := headgate_move_v1(
                    program[q + 1], program[q + 2], program[q + 3], program[q + 4], program[q + 5],
                    cells[place].state, program[q + 7 : q + 14], program[q + 15], now, program[q + 6], program[p + 2]
                );
                recent := recent || after[2 : 10];
                lefts[i] := after[1];
                admitted := admitted AND after[2] = -1;
                cell := ROW(after[11 :], cells[place].place, server_now + after[5] + grace)::headgate_cell_v2;
                changes[i] := cell;
                q := q + 16;
            END LOOP;
            IF admitted THEN
                q := q - 16 * rules;
                FOR i IN 1 .. rules LOOP
                    recent[cardinality(recent) - 9 * (rules - i + 1) + 2] := lefts[i];
                    place := program[q];
                    cell := changes[i];
                    IF program[q + 1] = 4 AND program[q + 6] = 0 THEN
                        PERFORM headgate_wake_v1(keys[place]);
                    END IF;
                    q := q + 16;
                    CONTINUE WHEN cardinality(cell.state) = 0;
                    IF cardinality(cell.state) = 1 THEN
                        cell.state := NULL;
                        removed := true;
                    END IF;
                    cells[place] := cell;
                END LOOP;
            END IF;
        ELSIF operation = 3 THEN
            FOR i IN 1 .. rules LOOP
                after := headgate_refund_v2(
                    program[q + 1], program[q + 2], program[q + 3], program[q + 4], program[q + 5],
                    cells[program[q]].state, program[q + 7 : q + 14], program[q + 15], program[q + 6], now
                );
                IF after IS NOT NULL THEN
                    cell := cells[program[q]];
                    cell.state := nullif(after[2 :], '{}');
                    removed := removed OR cell.state IS NULL;
                    cell.expires := server_now + greatest(0, after[1] - now) + grace;
                    cells[program[q]] := cell;
                    IF program[q + 1] = 4 THEN
                        PERFORM headgate_wake_v1(keys[program[q]]);
                    END IF;
                END IF;
                q := q + 16;
            END LOOP;
        ELSE
            FOR i IN 1 .. rules LOOP
                cells[program[q]] := ROW(NULL, NULL, 0)::headgate_cell_v2;
                PERFORM headgate_wake_v1(keys[program[q]]);
                q := q + 1;
            END LOOP;
            removed := true;
        END IF;
        p := q;
        IF cardinality(recent) > 200 THEN
            reply := reply || recent;
            recent := NULL;
        END IF;
    END LOOP;

    -- A state is at its known location, unless it was removed.
    IF few THEN
        FOR k IN 1 .. locks LOOP
            cell := cells[k];
            IF cell.expires IS NULL THEN
                CONTINUE;
            ELSIF cell.state IS NULL THEN
                DELETE FROM headgate_states AS states WHERE states.key = keys[k];
            ELSE
                UPDATE headgate_states AS states SET state = cell.state, expires = cell.expires
                WHERE states.ctid = cell.place AND states.key = keys[k];
                IF NOT FOUND THEN
                    INSERT INTO headgate_states AS states VALUES (keys[k], cell.state, cell.expires)
                    ON CONFLICT ON CONSTRAINT headgate_states_pkey
                    DO UPDATE SET state = excluded.state, expires = excluded.expires;
                END IF;
            END IF;
        END LOOP;
    ELSE
        UPDATE headgate_states AS states SET state = changed.state, expires = changed.expires
        FROM unnest(cells) WITH ORDINALITY AS changed (state, place, expires, k)
        WHERE states.ctid = changed.place AND states.key = keys[changed.k]
            AND changed.expires IS NOT NULL AND changed.state IS NOT NULL;
        GET DIAGNOSTICS updated = ROW_COUNT;
        IF updated < locks THEN
            INSERT INTO headgate_states AS states
            SELECT keys[changed.k], changed.state, changed.expires
            FROM unnest(cells) WITH ORDINALITY AS changed (state, place, expires, k)
            WHERE changed.expires IS NOT NULL AND changed.state IS NOT NULL AND (
                changed.place IS NULL
                OR NOT EXISTS (SELECT FROM headgate_states AS known WHERE known.key = keys[changed.k])
            )
            ON CONFLICT ON CONSTRAINT headgate_states_pkey
            DO UPDATE SET state = excluded.state, expires = excluded.expires;
        END IF;
        IF removed THEN
            DELETE FROM headgate_states AS states WHERE states.key = ANY (ARRAY(
                SELECT keys[changed.k]
                FROM unnest(cells) WITH ORDINALITY AS changed (state, place, expires, k)
                WHERE changed.expires IS NOT NULL AND changed.state IS NULL
            ));
        END IF;
    END IF;
    RETURN reply || recent;
END
$$;

-- Check the next few states, remove the ones that equal a fresh one, and return the last key; null at the end of the table.
--
-- It skips locked rows, so it cannot cause a deadlock: a state that is just being written must not be removed anyway.
CREATE FUNCTION headgate_clean_v1(after bytea, most integer)
RETURNS bytea
LANGUAGE plpgsql
VOLATILE
SET enable_seqscan = off
AS $$
DECLARE
    now CONSTANT bigint := extract(epoch FROM clock_timestamp()) * 1000000;
    next_few CONSTANT bytea[] := ARRAY(
        SELECT states.key FROM headgate_states AS states WHERE states.key > after ORDER BY states.key LIMIT most
    );
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true); -- states that reappear after a crash are removed again
    DELETE FROM headgate_states AS states WHERE states.key IN (
        SELECT over.key FROM headgate_states AS over
        WHERE over.key = ANY (next_few) AND over.expires <= now
        FOR UPDATE SKIP LOCKED
    );
    RETURN CASE WHEN cardinality(next_few) = most THEN next_few[most] END;
END
$$;

-- Notes: short texts under a name. The first caller decides the text; a caller that names it may replace it.
CREATE TABLE headgate_notes (
    key bytea PRIMARY KEY,  -- namespace and name
    note bytea NOT NULL,    -- text in UTF-8, with characters that PostgreSQL's text type does not allow
    expires bigint NOT NULL -- by this server's clock
);
CREATE INDEX headgate_notes_expires ON headgate_notes (expires);

-- Store a note for some microseconds, unless one exists that has not expired and is not the replaced one, and return the
-- stored one; without a note, only return it. Each call that stores a note removes more expired notes than it adds, oldest
-- first.
CREATE FUNCTION headgate_note_v1(key bytea, note bytea, lasting bigint, durable boolean, replaced bytea)
RETURNS bytea
LANGUAGE plpgsql
VOLATILE
SET enable_seqscan = off -- as in headgate_one_v2
AS $$
#variable_conflict use_variable
DECLARE
    now CONSTANT bigint := extract(epoch FROM clock_timestamp()) * 1000000;
    kept bytea;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE invalid_transaction_state USING MESSAGE = 'headgate needs the isolation level READ COMMITTED';
    END IF;
    IF note IS NOT NULL THEN
        IF NOT durable THEN
            PERFORM set_config('synchronous_commit', 'off', true);
        END IF;
        -- A concurrent call waits here for the first one, and then has the row locked, even if it is unchanged.
        INSERT INTO headgate_notes AS notes VALUES (key, note, now + lasting)
        ON CONFLICT ON CONSTRAINT headgate_notes_pkey
        DO UPDATE SET note = excluded.note, expires = greatest(notes.expires, excluded.expires)
        WHERE notes.expires <= now OR notes.note = excluded.note OR notes.note = replaced;
        DELETE FROM headgate_notes AS notes WHERE notes.key IN (
            SELECT over.key FROM headgate_notes AS over
            WHERE over.expires <= now ORDER BY over.expires LIMIT 2
            FOR UPDATE SKIP LOCKED
        );
    END IF;
    -- A separate statement, which sees the rows committed while the first one waited.
    SELECT notes.note INTO kept FROM headgate_notes AS notes WHERE notes.key = key AND notes.expires > now;
    RETURN kept;
END
$$;

-- Tickets of waiting calls, in queues. The table is not logged, because waiting calls enter again: after a crash of the server
-- it is empty. A ticket begins with the 16 characters of its process, which listens to the channel 'headgate_' and these
-- characters. The queue for places of a concurrent rule has the key of its state as its name, so both have the same lock.
CREATE UNLOGGED TABLE headgate_tickets (
    queue bytea,              -- namespace, limiter and key, or the key of a state
    ticket text,
    priority integer NOT NULL,
    tag bigint NOT NULL,      -- the ticket with the lowest one is first; among equal tags the higher priority
    expires bigint NOT NULL,  -- by this server's clock
    PRIMARY KEY (queue, ticket)
) WITH (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX headgate_tickets_order ON headgate_tickets (queue, tag, priority DESC);
CREATE INDEX headgate_tickets_priority ON headgate_tickets (queue, priority, tag);
CREATE INDEX headgate_tickets_expires ON headgate_tickets (expires);

-- Remove expired tickets from the front of a queue whose lock is held.
--
-- Returns the first ticket (null if there is none), its tag, and whether any was removed.
CREATE FUNCTION headgate_first_v1(queue bytea, now bigint, OUT ticket text, OUT tag bigint, OUT has_changed boolean)
LANGUAGE plpgsql
VOLATILE
AS $$
#variable_conflict use_variable
BEGIN
    SELECT tickets.ticket, tickets.tag, tickets.expires <= now INTO ticket, tag, has_changed
    FROM headgate_tickets AS tickets WHERE tickets.queue = queue
    ORDER BY tickets.tag, tickets.priority DESC LIMIT 1;
    IF has_changed THEN
        -- All at once: one by one, each search would pass the tickets that this transaction has removed.
        SELECT tickets.ticket, tickets.tag INTO ticket, tag
        FROM headgate_tickets AS tickets WHERE tickets.queue = queue AND tickets.expires > now
        ORDER BY tickets.tag, tickets.priority DESC LIMIT 1;
        DELETE FROM headgate_tickets AS tickets
        WHERE tickets.queue = queue AND tickets.expires <= now AND (tickets.tag <= tag OR ticket IS NULL);
    END IF;
    tag := coalesce(tag, 0);
    has_changed := coalesce(has_changed, false);
END
$$;

-- Tell a ticket's process that it should look again.
CREATE FUNCTION headgate_tell_v1(ticket text)
RETURNS void
LANGUAGE sql
VOLATILE
AS $$ SELECT pg_notify('headgate_' || left(ticket, 16), ticket) $$;

-- Enter a queue or stay in it for some microseconds, or leave it with a lifetime of 0: a port of algorithms/waiting. A ticket
-- that enters removes two that expired more than a minute ago, the oldest first; queues in use remove theirs earlier.
--
-- Returns whether the ticket is first.
CREATE FUNCTION headgate_queue_v1(queue bytea, ticket text, priority integer, lifetime bigint)
RETURNS boolean
LANGUAGE plpgsql
VOLATILE
SET enable_seqscan = off -- as in headgate_one_v2
AS $$
#variable_conflict use_variable
DECLARE
    stride CONSTANT bigint := 2520;
    now bigint;
    is_member boolean;
    first text;
    first_tag bigint;
    last_tag bigint;
    has_changed boolean;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE invalid_transaction_state USING MESSAGE = 'headgate needs the isolation level READ COMMITTED';
    END IF;
    PERFORM pg_advisory_xact_lock(headgate_lock_number_v1(queue));
    now := extract(epoch FROM clock_timestamp()) * 1000000;
    IF lifetime > 0 THEN
        UPDATE headgate_tickets AS tickets SET expires = now + lifetime
        WHERE tickets.queue = queue AND tickets.ticket = ticket;
        is_member := FOUND;
    END IF;
    SELECT front.ticket, front.tag, front.has_changed INTO first, first_tag, has_changed
    FROM headgate_first_v1(queue, now) AS front;
    IF lifetime = 0 THEN
        DELETE FROM headgate_tickets AS tickets WHERE tickets.queue = queue AND tickets.ticket = ticket;
        IF first = ticket THEN
            SELECT front.ticket INTO first FROM headgate_first_v1(queue, now) AS front;
            has_changed := true;
        END IF;
    ELSIF NOT is_member THEN
        last_tag := (
            SELECT max(tickets.tag) FROM headgate_tickets AS tickets
            WHERE tickets.queue = queue AND tickets.priority = priority
        );
        INSERT INTO headgate_tickets
        VALUES (queue, ticket, priority, greatest(first_tag, last_tag) + stride / priority, now + lifetime);
        first := coalesce(first, ticket);
        DELETE FROM headgate_tickets AS tickets WHERE tickets.ctid = ANY (ARRAY(
            SELECT over.ctid FROM headgate_tickets AS over
            WHERE over.expires <= now - 60000000 ORDER BY over.expires LIMIT 2
            FOR UPDATE SKIP LOCKED
        ));
    END IF;
    IF has_changed AND first <> ticket THEN
        PERFORM headgate_tell_v1(first);
    END IF;
    RETURN coalesce(first = ticket, false);
END
$$;

-- Tell the first ticket in the queue of a place, whose lock is held, that it was released. Without rights for queues, nothing
-- happens.
CREATE FUNCTION headgate_wake_v1(place bytea)
RETURNS void
LANGUAGE plpgsql
VOLATILE
AS $$
DECLARE
    first text;
BEGIN
    IF NOT has_table_privilege('headgate_tickets', 'SELECT') OR NOT has_table_privilege('headgate_tickets', 'DELETE') THEN
        RETURN;
    END IF;
    IF EXISTS (SELECT FROM headgate_tickets AS tickets WHERE tickets.queue = place) THEN
        SELECT front.ticket INTO first
        FROM headgate_first_v1(place, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS front;
        IF first IS NOT NULL THEN
            PERFORM headgate_tell_v1(first);
        END IF;
    END IF;
END
$$;
