-- The states, and the functions that decide on them.

-- Which of the numbered migrations have been applied.
CREATE TABLE IF NOT EXISTS headgate_migrations (
    number integer PRIMARY KEY,
    name text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT CURRENT_TIMESTAMP
);

-- One state per rule and key. It is written on every admission, so its row must be able to move within its page: half of
-- each page stays free, and nothing but the key has an index.
CREATE TABLE headgate_states (
    key bytea PRIMARY KEY,   -- namespace, limiter, rule and key, each with its length before it
    state bigint[] NOT NULL, -- as headgate_decide_v1 describes it
    expires bigint NOT NULL  -- when it equals a fresh one, by this server's clock
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);

-- A state while headgate_many_v1 works on it.
CREATE TYPE headgate_cell_v1 AS (
    state bigint[], -- null if there is none
    expires bigint  -- null if it was not changed
);

-- Decide one rule.
--
-- kind             1 fixed window          2 sliding window or log                      3 token bucket
-- a b c d          limit, period, -, -     limit, width, lifetime, -                    burst, n, d, tick
-- state            birth, index, units     birth, total, then index and units of each   birth, level, time, refunded,
--                                          live bucket, oldest first                    n, d, burst
-- forced           whether to count the units even beyond the limit
--
-- Returns
--   1  -1 if the units are admitted, -2 if they never will be, -3 if counting them would leave the exact range, -4 if the
--      state is not one of this kind; else after how long they will be admitted
--   2  units left without this call; after -3 how many more could be counted
--   3  after how long nothing would be counted without this call
--   4  the same with this call, if it was admitted
--   5  to 8: the receipt: birth and index, or birth, level before, time and refunded
--   9  and on: the new state, if there is one
--
-- A sliding window's state carries its total here, so that no call has to add it up. 9007199254740991 is 2^53 - 1, the
-- most that every store counts exactly. Each expression costs most when it is met first in a transaction, so there are
-- few of them on the way to an admission.
CREATE FUNCTION headgate_decide_v1(
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
    burst ALIAS FOR a;
    n ALIAS FOR b;
    parts ALIAS FOR c; -- small parts in a unit: the algorithm's d
    tick ALIAS FOR d;
    size integer;
    first integer; -- where the first live bucket stands
    newest bigint;
    index bigint;
    count bigint;
    level bigint;
    time bigint;
    refunded bigint;
    remaining bigint;
    excess bigint;
    retry_after bigint;
    reset_after bigint;
BEGIN
    IF kind = 1 THEN
        index := now / period;
        IF state[2] >= index AND cardinality(state) = 3 THEN
            birth := state[1];
            index := state[2];
            count := state[3];
        ELSIF cardinality(state) <> 3 THEN
            RETURN ARRAY[-4, 0, 0, 0, 0, 0, 0, 0];
        ELSE
            count := 0;
        END IF;
        retry_after := (index + 1) * period - now;
        reset_after := CASE WHEN count > 0 THEN retry_after ELSE 0 END;
        IF cost > 0 AND count + cost <= (CASE WHEN forced THEN 9007199254740991 ELSE "limit" END) THEN
            RETURN ARRAY[
                -1, greatest(0, "limit" - count), reset_after, retry_after,
                birth, index, 0, 0, birth, index, count + cost
            ];
        ELSIF forced THEN
            RETURN ARRAY[-3, 9007199254740991 - count, 0, 0, 0, 0, 0, 0];
        ELSIF cost = 0 THEN
            retry_after := -1;
        ELSIF "limit" = 0 THEN
            retry_after := -2;
        END IF;
        RETURN ARRAY[retry_after, greatest(0, "limit" - count), reset_after, reset_after, 0, 0, 0, 0];

    ELSIF kind = 2 THEN
        IF state IS NULL THEN
            count := 0;
        ELSE
            size := cardinality(state);
            IF size < 4 OR size % 2 = 1 THEN
                RETURN ARRAY[-4, 0, 0, 0, 0, 0, 0, 0];
            END IF;
            count := state[2];
            newest := state[size - 1];
            first := 3;
            time := greatest(now, newest * width) - lifetime; -- buckets that began by then no longer count
            WHILE first < size AND state[first] * width <= time LOOP
                count := count - state[first + 1];
                first := first + 2;
            END LOOP;
        END IF;
        reset_after := CASE WHEN count > 0 THEN newest * width + lifetime - now ELSE 0 END;
        IF cost > 0 AND count + cost <= (CASE WHEN forced THEN 9007199254740991 ELSE "limit" END) THEN
            index := now / width;
            IF count = 0 THEN
                RETURN ARRAY[
                    -1, "limit", 0, index * width + lifetime - now, birth, index, 0, 0, birth, cost, index, cost
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
            ELSE
                newest := index;
                state[size + 1] := index;
                state[size + 2] := cost;
            END IF;
            RETURN ARRAY[
                -1, greatest(0, "limit" - count), reset_after, newest * width + lifetime - now, state[1], newest, 0, 0
            ] || state;
        ELSIF forced THEN
            RETURN ARRAY[-3, 9007199254740991 - count, 0, 0, 0, 0, 0, 0];
        ELSIF cost = 0 THEN
            retry_after := -1;
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
        RETURN ARRAY[retry_after, greatest(0, "limit" - count), reset_after, reset_after, 0, 0, 0, 0];
    END IF;

    IF n = 0 THEN
        RETURN ARRAY[CASE WHEN cost = 0 OR forced THEN -1 ELSE -2 END, 0, 0, 0, 0, 0, 0, 0];
    ELSIF cardinality(state) <> 7 THEN
        RETURN ARRAY[-4, 0, 0, 0, 0, 0, 0, 0];
    END IF;
    time := greatest(now / tick, state[3]);
    -- Written as divisions: how long it takes to drain, rather than how much does.
    IF time - state[3] < (state[2] + state[5] - 1) / state[5] THEN
        IF state[5] = n AND state[6] = parts AND state[7] = burst THEN
            birth := state[1];
            level := state[2] - n * (time - state[3]);
            refunded := state[4];
            reset_after := (time + (level + n - 1) / n) * tick - now;
        ELSE
            -- The cap may drop units that are held: they must not be given back as well, so the birth is new.
            level := least(div(state[2]::numeric * parts + state[6] - 1, state[6]), burst * parts);
            level := CASE WHEN time - state[3] < (level + n - 1) / n THEN level - n * (time - state[3]) ELSE 0 END;
            refunded := 0;
            -- While nothing is written the state keeps its shape, and is fresh as soon as it is so in one of the two.
            reset_after := CASE WHEN level = 0 THEN 0 ELSE
                least(time + (level + n - 1) / n, state[3] + (state[2] + state[5] - 1) / state[5]) * tick - now END;
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
            birth, level, time, refunded, birth, excess, time, refunded, n, parts, burst
        ];
    ELSIF forced THEN
        RETURN ARRAY[-3, (9007199254740991 - level) / parts, 0, 0, 0, 0, 0, 0];
    ELSIF cost = 0 THEN
        retry_after := -1;
    ELSE
        excess := level + cost * parts - burst * parts;
        retry_after := least((time + (excess + n - 1) / n) * tick - now, reset_after);
    END IF;
    RETURN ARRAY[retry_after, remaining, reset_after, reset_after, 0, 0, 0, 0];
END
$$;

-- Give units back to one rule.
--
-- kind, a b c d, state   as in headgate_decide_v1
-- receipt                the receipt that it returned; a token bucket's is followed by n, d, burst
-- held                   the units that the receipt is for
--
-- Returns null if nothing changes; else when the new state will be fresh, and the new state if there is one.
CREATE FUNCTION headgate_refund_v1(
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
    level_before bigint;
    time bigint;
    gone numeric;
    back bigint;
    n bigint;
    parts bigint;
BEGIN
    IF state IS NULL OR state[1] <> receipt[1] THEN
        RETURN NULL;
    END IF;
    cost := least(cost, held);
    IF kind = 1 THEN
        IF state[2] <> receipt[2] THEN
            RETURN NULL;
        ELSIF state[3] <= cost THEN
            RETURN ARRAY[0];
        END IF;
        RETURN ARRAY[(state[2] + 1) * b, state[1], state[2], state[3] - cost];

    ELSIF kind = 2 THEN
        place := 3;
        WHILE state[place] <> receipt[2] LOOP
            place := place + 2;
        END LOOP;
        count := state[place + 1];
        IF count IS NULL THEN
            RETURN NULL;
        END IF;
        state[2] := state[2] - least(count, cost);
        state[place + 1] := count - cost;
        IF count <= cost THEN
            state := state[: place - 1] || state[place + 2 :];
        END IF;
        IF cardinality(state) = 2 THEN
            RETURN ARRAY[0];
        END IF;
        RETURN (state[cardinality(state) - 1] * b + c) || state;
    END IF;

    IF state[5 : 7] <> receipt[5 : 7] THEN
        RETURN NULL;
    END IF;
    n := state[5];
    parts := state[6];
    time := greatest(now / d, state[3]);
    level := 0;
    IF time - state[3] < (state[2] + n - 1) / n THEN
        level := state[2] - n * (time - state[3]);
    END IF;
    -- The part that stays charged counts as if it had been there before the part that is given back.
    level_before := receipt[2] + (held - cost) * parts;
    gone := greatest(0, n::numeric * (time - receipt[3]) + (state[4] - receipt[4]) - level_before);
    back := least(level, greatest(0, cost * parts - gone));
    IF level = back THEN
        RETURN ARRAY[0];
    END IF;
    level := level - back;
    IF state[4] + back > max_units THEN
        state[1] := (state[1] + 1) % max_units;
        state[4] := 0;
    ELSE
        state[4] := state[4] + back;
    END IF;
    RETURN ARRAY[(time + (level + n - 1) / n) * d, state[1], level, time, state[4], n, parts, state[7]];
END
$$;

-- Return the number of the advisory lock that everybody takes who writes the state of a key.
CREATE FUNCTION headgate_lock_number_v1(key bytea)
RETURNS bigint
LANGUAGE sql
IMMUTABLE
AS $$ SELECT hashtextextended(encode(key, 'escape'), 0) $$;

-- Answer one request about one key: the shortest way.
--
-- operation        0 peek, 1 hit or hold, 2 record
-- kind, a b c d    as in headgate_decide_v1
-- at               a time of the caller's own, or -1 for this server's
-- birth            for a state that is fresh
-- durable          whether to wait until the disk has it
--
-- Returns the first eight numbers of headgate_decide_v1.
CREATE FUNCTION headgate_one_v1(
    key bytea, operation integer, kind bigint, a bigint, b bigint, c bigint, d bigint,
    at bigint, cost bigint, birth bigint, durable boolean
)
RETURNS bigint[]
LANGUAGE plpgsql
VOLATILE
-- A plan that was made while the table was small would read all of it for every key long after it has grown.
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
    -- Each statement sees what was committed before it began: so the state is read by one of its own after the lock.
    SELECT states.state, states.ctid INTO before, place FROM headgate_states AS states WHERE states.key = key;
    server_now := extract(epoch FROM clock_timestamp()) * 1000000;
    after := headgate_decide_v1(
        kind, a, b, c, d, before, CASE WHEN at < 0 THEN server_now ELSE at END, cost, birth, operation = 2
    );
    IF operation > 0 AND after[9] IS NOT NULL THEN
        -- A state that was written at a time of the caller's own lives an hour longer than it seems to need.
        server_now := server_now + after[4] + CASE WHEN at < 0 THEN 0 ELSE 3600000000 END;
        UPDATE headgate_states AS states SET state = after[9 :], expires = server_now
        WHERE states.ctid = place AND states.key = key; -- where it was just found, unless it was cleared away since
        IF NOT FOUND THEN
            INSERT INTO headgate_states AS states VALUES (key, after[9 :], server_now)
            ON CONFLICT ON CONSTRAINT headgate_states_pkey
            DO UPDATE SET state = excluded.state, expires = excluded.expires;
        END IF;
    END IF;
    RETURN after[: 8];
END
$$;

-- Answer requests one after the other, each for all of its rules together, and write what changed.
--
-- keys     the states that the requests are about, each once; first those that may be written, in ascending order
-- locks    how many these are
-- program  the requests one after the other:
--            operation        0 peek, 1 hit or hold, 2 record, 3 refund, 4 reset
--            at, cost, birth  as in headgate_one_v1
--            rules            how many rules follow, each as
--              key            its place in keys; of a reset nothing else
--              kind, a b c d
--              receipt        of a refund only: seven numbers, then the units that it is for
-- durable  as in headgate_one_v1
--
-- Returns, for each rule of each peek, hit, hold and record, the first eight numbers of headgate_decide_v1. Such a request
-- was admitted, and written, if all of its rules begin with -1.
CREATE FUNCTION headgate_many_v1(keys bytea[], locks integer, program bigint[], durable boolean)
RETURNS bigint[]
LANGUAGE plpgsql
VOLATILE
SET enable_seqscan = off -- as above
AS $$
DECLARE
    cells headgate_cell_v1[]; -- by place in keys
    changes headgate_cell_v1[]; -- what the request under way would make of them, by rule
    cell headgate_cell_v1;
    reply bigint[];
    server_now bigint;
    ignored text;
    few boolean;
    removed boolean := false;
    p integer := 1; -- place in the program
    operation bigint;
    at bigint;
    now bigint;
    cost bigint;
    birth bigint;
    rules integer;
    grace bigint;
    admitted boolean;
    after bigint[];
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE invalid_transaction_state USING MESSAGE = 'headgate needs the isolation level READ COMMITTED';
    END IF;
    IF NOT durable THEN
        ignored := set_config('synchronous_commit', 'off', true);
    END IF;
    -- Everybody locks in the order of the keys, so no two calls can wait for each other.
    few := cardinality(keys) < 8; -- then a statement for each key costs less than one for all
    IF few THEN
        FOR k IN 1 .. locks LOOP
            ignored := pg_advisory_xact_lock(headgate_lock_number_v1(keys[k]))::text;
        END LOOP;
        FOR k IN 1 .. cardinality(keys) LOOP
            SELECT states.state, NULL INTO cell FROM headgate_states AS states WHERE states.key = keys[k];
            cells[k] := cell;
        END LOOP;
    ELSE
        PERFORM pg_advisory_xact_lock(headgate_lock_number_v1(key)) FROM unnest(keys[: locks]) AS key;
        cells := ARRAY(
            SELECT ROW((SELECT states.state FROM headgate_states AS states WHERE states.key = asked), NULL)
                ::headgate_cell_v1
            FROM unnest(keys) AS asked
        );
    END IF;
    server_now := extract(epoch FROM clock_timestamp()) * 1000000;

    WHILE p <= cardinality(program) LOOP
        operation := program[p];
        at := program[p + 1];
        now := CASE WHEN at < 0 THEN server_now ELSE at END;
        cost := program[p + 2];
        birth := program[p + 3];
        rules := program[p + 4];
        grace := CASE WHEN at < 0 THEN 0 ELSE 3600000000 END;
        p := p + 5;
        IF operation <= 2 THEN
            admitted := operation > 0;
            FOR i IN 1 .. rules LOOP
                after := headgate_decide_v1(
                    program[p + 1], program[p + 2], program[p + 3], program[p + 4], program[p + 5],
                    cells[program[p]].state, now, cost, birth, operation = 2
                );
                reply := reply || after[: 8];
                IF after[1] <> -1 THEN
                    admitted := false;
                ELSIF admitted THEN
                    cell.state := after[9 :];
                    cell.expires := server_now + after[4] + grace;
                    changes[i] := cell;
                END IF;
                p := p + 6;
            END LOOP;
            IF admitted THEN
                FOR i IN 1 .. rules LOOP
                    IF cardinality(changes[i].state) > 0 THEN -- a limit of 0 records nothing
                        cells[program[p - 6 * (rules - i + 1)]] := changes[i];
                    END IF;
                END LOOP;
            END IF;
        ELSIF operation = 3 THEN
            FOR i IN 1 .. rules LOOP
                after := headgate_refund_v1(
                    program[p + 1], program[p + 2], program[p + 3], program[p + 4], program[p + 5],
                    cells[program[p]].state, program[p + 6 : p + 12], program[p + 13], cost, now
                );
                IF after IS NOT NULL THEN
                    cell.state := nullif(after[2 :], '{}');
                    removed := removed OR cell.state IS NULL;
                    cell.expires := server_now + greatest(0, after[1] - now) + grace;
                    cells[program[p]] := cell;
                END IF;
                p := p + 14;
            END LOOP;
        ELSE
            FOR i IN 1 .. rules LOOP
                cells[program[p]] := ROW(NULL, 0)::headgate_cell_v1;
                p := p + 1;
            END LOOP;
            removed := true;
        END IF;
    END LOOP;

    IF few THEN
        FOR k IN 1 .. locks LOOP
            cell := cells[k];
            IF cell.expires IS NULL THEN
                CONTINUE;
            ELSIF cell.state IS NULL THEN
                DELETE FROM headgate_states AS states WHERE states.key = keys[k];
            ELSE
                UPDATE headgate_states AS states SET state = cell.state, expires = cell.expires
                WHERE states.key = keys[k];
                IF NOT FOUND THEN
                    INSERT INTO headgate_states AS states VALUES (keys[k], cell.state, cell.expires)
                    ON CONFLICT ON CONSTRAINT headgate_states_pkey
                    DO UPDATE SET state = excluded.state, expires = excluded.expires;
                END IF;
            END IF;
        END LOOP;
    ELSE
        INSERT INTO headgate_states AS states
        SELECT keys[changed.k], changed.state, changed.expires
        FROM unnest(cells) WITH ORDINALITY AS changed (state, expires, k)
        WHERE changed.expires IS NOT NULL AND changed.state IS NOT NULL
        ON CONFLICT ON CONSTRAINT headgate_states_pkey
        DO UPDATE SET state = excluded.state, expires = excluded.expires;
        IF removed THEN
            DELETE FROM headgate_states AS states WHERE states.key = ANY (ARRAY(
                SELECT keys[changed.k] FROM unnest(cells) WITH ORDINALITY AS changed (state, expires, k)
                WHERE changed.expires IS NOT NULL AND changed.state IS NULL
            ));
        END IF;
    END IF;
    RETURN reply;
END
$$;

-- Remove those of the next few states that equal a fresh one, and return the key to go on after; null at the end.
--
-- It waits for nobody, so nobody can wait for each other: who writes a state just now has no use for its removal.
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
    PERFORM set_config('synchronous_commit', 'off', true); -- what a crash brings back will be removed again
    DELETE FROM headgate_states AS states WHERE states.key IN (
        SELECT over.key FROM headgate_states AS over
        WHERE over.key = ANY (next_few) AND over.expires <= now
        FOR UPDATE SKIP LOCKED
    );
    RETURN CASE WHEN cardinality(next_few) = most THEN next_few[most] END;
END
$$;
