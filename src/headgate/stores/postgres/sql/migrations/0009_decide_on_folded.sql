-- Hits on long logs take the server a third less time, as long as none of their entries expires: a folded state is then decided
-- on as it is. The functions take and return what they did.

-- Decide one rule.
--
-- kind             1 fixed window          2 sliding window or log                      3 token bucket
-- a b c d          limit, period, -, -     limit, width, lifetime, -                    burst, n, d, tick
-- state            birth, index, units     birth, total, then index and units of each   birth, level, time, refunded,
--                                          live bucket, oldest first                    n, d, burst
--
-- kind             4 concurrent                                5 calendar
-- a b c d          limit, lease, -, -                          limit, and where three windows begin that follow each other
-- state            birth, latest, total, then end, number      birth, end, units
--                  and units of each lease, first end first
--
-- forced           whether to count the units even beyond the limit
--
-- Returns
--   1  -1 if the units are admitted, -2 if they never will be, -3 if counting them would leave the exact range, -4 if the
--      state is not one of this kind, or is folded and cannot be decided on as it is, -5 if now is in none of the first two
--      windows; else after how long they will be admitted
--   2  units left without this call; after -3 how many more could be counted; after -5 now
--   3  after how long nothing would be counted without this call
--   4  the same with this call, if it was admitted
--   5  to 9: the receipt: birth and index, number or end; or birth, level before, time, refunded and time before
--   10 and on: the new state, if there is one
--
-- States with a list carry its total here, so that no call has to add it up. 9007199254740991 is 2^53 - 1, the
-- most that every store counts exactly. Each expression costs most when it is met first in a transaction, so there are
-- few of them on the way to an admission.
CREATE OR REPLACE FUNCTION headgate_decide_v2(
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
    burst ALIAS FOR a;
    n ALIAS FOR b;
    parts ALIAS FOR c; -- small parts in a unit: the algorithm's d
    tick ALIAS FOR d;
    size integer;
    first integer; -- where the first live bucket or lease stands
    place integer; -- where a new lease goes
    newest bigint; -- the index of the last bucket; the end of a new lease
    index bigint;  -- of a calendar's window: its end
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
                -- A folded state can be decided on as it is while all of its buckets count and the units fit: its total and
                -- its last bucket stand where they do in others.
                IF size < 7 OR state[1] >= 0
                    OR state[3] * width <= greatest(now, state[size - 1] * width) - lifetime
                    OR cost > 0 AND NOT forced AND state[2] + cost > "limit"
                THEN
                    RETURN ARRAY[-4, 0, 0, 0, 0, 0, 0, 0, 0];
                END IF;
            END IF;
            count := state[2];
            newest := state[size - 1];
            first := 3;
            time := greatest(now, newest * width) - lifetime; -- buckets that began by then no longer count
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
            ELSE
                newest := index;
                state[size + 1] := index;
                state[size + 2] := cost;
            END IF;
            RETURN ARRAY[
                -1, greatest(0, "limit" - count), reset_after, newest * width + lifetime - now,
                greatest(state[1], -1 - state[1]), newest, 0, 0, 0
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
    END IF;

    IF n = 0 THEN
        RETURN ARRAY[CASE WHEN cost = 0 OR forced THEN -1 ELSE -2 END, 0, 0, 0, 0, 0, 0, 0, 0];
    ELSIF cardinality(state) <> 7 THEN
        RETURN ARRAY[-4, 0, 0, 0, 0, 0, 0, 0, 0];
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
            -- Receipts name units of the other shape: they must not be given back in this one, so the birth is new.
            level := least(div(state[2]::numeric * parts + state[6] - 1, state[6]), 9007199254740992);
            refunded := 0;
            -- While nothing is written the state keeps its shape, and is fresh as soon as it is so in one of the two. What
            -- cannot be counted in this one is so in its own alone.
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

-- Fold the state of a window with many buckets, and put away the older ones.
--
-- before  the state as it is kept
-- after   the state that headgate_decide_v2 made of it, or of what headgate_unfold_v1 has shown
-- cost    the units that were charged
--
-- Returns the state to be kept. One with up to 96 buckets stays as it is, if it has no chunks. A folded one is
--   1  -1 - birth
--   2  the total, with all chunks
--   3  the index that all buckets have at least: those before it have been dropped
--   4  the units of those that have been dropped but are still in the first chunk
--   5  newest of the first chunk
--   6  and on: index and units of the youngest buckets, of which there is always one
-- and has at least one chunk. Every chunk has units that have not been dropped.
--
-- A chunk has 32 buckets, and more than 8 remain outside when it is made. So it takes many calls until the next one is made,
-- and refunds until one has to be brought back; and what a call writes and looks through is short. Chunks of earlier versions
-- have 64.
CREATE OR REPLACE FUNCTION headgate_fold_v1(key bytea, before bigint[], after bigint[], cost bigint)
RETURNS bigint[]
LANGUAGE plpgsql
VOLATILE
AS $$
#variable_conflict use_variable
DECLARE
    size CONSTANT integer := cardinality(after);
    youngest integer; -- where those begin that are in no chunk
    full_chunks integer;
    dropped bigint;
    newest bigint;
BEGIN
    IF before[1] < 0 AND after[1] = -1 - before[1] THEN
        youngest := size - cardinality(before) + 6;
        IF after[size - 1] > before[cardinality(before) - 1] THEN
            youngest := youngest - 2;
        END IF;
        IF youngest > 3 AND after[3] <= before[5] THEN
            after := ARRAY[before[1], after[2], after[3], before[4] + before[2] + cost - after[2], before[5]]
                || after[youngest :];
        ELSIF youngest > 3 THEN
            -- Everything in the first chunk has expired.
            DELETE FROM headgate_chunks AS chunks WHERE chunks.key = key AND chunks.newest < after[3];
            SELECT chunks.newest, chunks.chunk[2] INTO newest, dropped
            FROM headgate_chunks AS chunks WHERE chunks.key = key ORDER BY chunks.newest LIMIT 1;
            FOR i IN 4 .. youngest - 1 BY 2 LOOP
                dropped := dropped - after[i];
            END LOOP;
            after := ARRAY[before[1], after[2], after[3], dropped, newest] || after[youngest :];
        ELSE
            DELETE FROM headgate_chunks AS chunks WHERE chunks.key = key;
        END IF;
    ELSIF after[1] >= 0 THEN
        -- Nothing in chunks counts any more; or there are none yet, unless a state was removed by hand.
        DELETE FROM headgate_chunks AS chunks WHERE chunks.key = key;
    END IF;

    youngest := CASE WHEN after[1] < 0 THEN 6 ELSE 3 END;
    full_chunks := ((cardinality(after) - youngest + 1) / 2 - 9) / 32;
    IF full_chunks > 0 THEN
        IF after[1] >= 0 THEN
            after := ARRAY[-1 - after[1], after[2], after[3], 0, after[65]] || after[3 :];
        END IF;
        INSERT INTO headgate_chunks
        SELECT
            key,
            (array_agg(numbers.number ORDER BY numbers.place))[63],
            ARRAY[-1 - after[1], sum(numbers.number) FILTER (WHERE numbers.place % 2 = 0)]::bigint[]
                || array_agg(numbers.number ORDER BY numbers.place)
        FROM unnest(after[6 : 5 + 64 * full_chunks]) WITH ORDINALITY AS numbers (number, place)
        GROUP BY (numbers.place - 1) / 64;
        after := after[: 5] || after[6 + 64 * full_chunks :];
    END IF;
    RETURN after;
END
$$;

-- Answer one request about one key: the shortest way.
--
-- operation        0 peek, 1 hit or hold, 2 record
-- kind, a b c d    as in headgate_decide_v2
-- at               a time of the caller's own, or -1 for this server's
-- birth            for a state that is fresh
-- durable          whether to wait until the disk has it
--
-- Returns the first nine numbers of headgate_decide_v2.
CREATE OR REPLACE FUNCTION headgate_one_v2(
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
    now bigint;
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
    after := headgate_decide_v2(
        kind, a, b, c, d, before, CASE WHEN at < 0 THEN server_now ELSE at END, cost, birth, operation = 2
    );
    -- One question for all that is rare: a folded state that cannot be decided on as it is, and one that has many buckets.
    IF (after[1] = -4 OR cardinality(after) > 95) AND kind = 2 THEN
        IF after[1] = -4 AND before[1] < 0 THEN
            now := CASE WHEN at < 0 THEN server_now ELSE at END;
            after := headgate_unfold_v1(
                key, CASE WHEN operation > 0 THEN before END, a, b, c, now, cost, operation = 2
            );
            after := headgate_decide_v2(kind, a, b, c, d, after, now, cost, birth, operation = 2);
        END IF;
        -- It is folded if it was unfolded, has over 40 buckets outside of its chunks, or over 96 and no chunks.
        IF operation > 0 AND cardinality(after) > 9 + (
            CASE WHEN after[10] < 0 THEN 86 WHEN before[1] < 0 THEN 0 ELSE 194 END
        ) THEN
            after := after[: 9] || headgate_fold_v1(key, before, after[10 :], cost);
        END IF;
    END IF;
    IF operation > 0 AND after[10] IS NOT NULL THEN
        -- A state that was written at a time of the caller's own lives an hour longer than it seems to need.
        server_now := server_now + after[4] + CASE WHEN at < 0 THEN 0 ELSE 3600000000 END;
        UPDATE headgate_states AS states SET state = after[10 :], expires = server_now
        WHERE states.ctid = place AND states.key = key; -- where it was just found, unless it was cleared away since
        IF NOT FOUND THEN
            INSERT INTO headgate_states AS states VALUES (key, after[10 :], server_now)
            ON CONFLICT ON CONSTRAINT headgate_states_pkey
            DO UPDATE SET state = excluded.state, expires = excluded.expires;
        END IF;
    END IF;
    RETURN after[: 9];
END
$$;

-- Answer requests one after the other, each for all of its rules together, and write what changed.
--
-- keys     the states that the requests are about, each once; first those that may be written, in ascending order
-- locks    how many these are
-- program  the requests one after the other:
--            operation        0 peek, 1 hit or hold, 2 record, 3 refund, 4 reset, 5 a hold that replaces another
--            at, birth        as in headgate_one_v2
--            rules            how many rules follow, each as
--              key            its place in keys; of a reset nothing else
--              kind, a b c d
--              cost
--              receipt        of 3 and 5 only: eight numbers, then the units that it is for; of 5 these may be 0
-- durable  as in headgate_one_v2
--
-- Returns, for each rule of each request but 3 and 4, the first nine numbers of headgate_decide_v2. Such a request was
-- admitted, and written, if all of its rules begin with -1.
CREATE OR REPLACE FUNCTION headgate_many_v3(keys bytea[], locks integer, program bigint[], durable boolean)
RETURNS bigint[]
LANGUAGE plpgsql
VOLATILE
SET enable_seqscan = off -- as above
SET enable_bitmapscan = off -- an index is read in the order of the keys, so the states need not be sorted
AS $$
DECLARE
    present bytea[]; -- the keys that have a state
    cells headgate_cell_v2[]; -- by place in keys
    changes headgate_cell_v2[]; -- what the request under way would make of them, by rule
    cell headgate_cell_v2;
    reply bigint[];
    recent bigint[]; -- what belongs at its end: adding to a long array takes longer than adding to a short one
    server_now bigint;
    ignored text;
    few boolean;
    updated integer;
    removed boolean := false;
    folding boolean := false; -- whether a state with many buckets has been met
    p integer := 1; -- where the request begins in the program
    q integer; -- where its next rule does
    place integer; -- in keys
    operation bigint;
    at bigint := -1;
    now bigint;
    rules integer;
    lefts bigint[]; -- of each rule, once its receipt's units have been given back
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
    -- Everybody locks in the order of the keys, so no two calls can wait for each other.
    few := cardinality(keys) < 8; -- then a statement for each key costs less than one for all
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
        IF present IS DISTINCT FROM keys THEN -- some have no state yet, or are only looked at and so not in this order
            cells := ARRAY(SELECT cells[array_position(present, asked)] FROM unnest(keys) AS asked);
        END IF;
    END IF;
    server_now := extract(epoch FROM clock_timestamp()) * 1000000;
    now := server_now;

    -- Each statement takes its time, an assignment as much as a question: so there are few on the way to an admission.
    WHILE p <= cardinality(program) LOOP
        operation := program[p];
        rules := program[p + 3];
        IF program[p + 1] <> at THEN
            at := program[p + 1];
            now := CASE WHEN at < 0 THEN server_now ELSE at END;
            grace := CASE WHEN at < 0 THEN 0 ELSE 3600000000 END;
        END IF;
        q := p + 4;
        IF operation <= 2 THEN
            admitted := operation > 0;
            FOR i IN 1 .. rules LOOP
                place := program[q];
                after := headgate_decide_v2(
                    program[q + 1], program[q + 2], program[q + 3], program[q + 4], program[q + 5],
                    cells[place].state, now, program[q + 6], program[p + 2], operation = 2
                );
                -- As in headgate_one_v2.
                IF (after[1] = -4 OR cardinality(after) > 95 AND (after[10] < 0 OR cardinality(after) > 203))
                    AND program[q + 1] = 2
                THEN
                    folding := true;
                    cell := cells[place];
                    IF after[1] = -4 AND cell.state[1] < 0 THEN
                        after := headgate_unfold_v1(
                            keys[place], CASE WHEN place <= locks THEN cell.state END,
                            program[q + 2], program[q + 3], program[q + 4], now, program[q + 6], operation = 2
                        );
                        after := headgate_decide_v2(
                            program[q + 1], program[q + 2], program[q + 3], program[q + 4], program[q + 5],
                            after, now, program[q + 6], program[p + 2], operation = 2
                        );
                    END IF;
                END IF;
                recent := recent || after[: 9];
                admitted := admitted AND after[1] = -1;
                IF admitted THEN
                    -- There is no new state after a cost of 0, or a limit of 0 that records nothing.
                    changes[i] := CASE WHEN after[10] IS NULL THEN cells[place] ELSE
                        ROW(after[10 :], cells[place].place, server_now + after[4] + grace)::headgate_cell_v2 END;
                END IF;
                q := q + 7;
            END LOOP;
            IF admitted THEN
                FOR i IN 1 .. rules LOOP
                    place := program[p + 7 * i - 3];
                    IF folding THEN
                        cell := changes[i];
                        IF program[p + 7 * i - 2] = 2 AND program[p + 7 * i + 3] > 0 AND cardinality(cell.state) > (
                            CASE WHEN cell.state[1] < 0 THEN 86 WHEN cells[place].state[1] < 0 THEN 0 ELSE 194 END
                        ) THEN
                            cell.state := headgate_fold_v1(
                                keys[place], cells[place].state, cell.state, program[p + 7 * i + 3]
                            );
                            changes[i] := cell;
                        END IF;
                    END IF;
                    cells[place] := changes[i];
                END LOOP;
            END IF;
        ELSIF operation = 5 THEN
            admitted := true;
            lefts := '{}';
            FOR i IN 1 .. rules LOOP
                place := program[q];
                IF cells[place].state[1] < 0 THEN
                    after := headgate_move_folded_v1(
                        keys[place], program[q + 2], program[q + 3], program[q + 4], cells[place].state,
                        program[q + 7 : q + 14], program[q + 15], now, program[q + 6], program[p + 2], false
                    );
                ELSE
                    after := headgate_move_v1(
                        program[q + 1], program[q + 2], program[q + 3], program[q + 4], program[q + 5],
                        cells[place].state, program[q + 7 : q + 14], program[q + 15], now, program[q + 6], program[p + 2]
                    );
                END IF;
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
                    IF cells[place].state[1] < 0 THEN
                        after := headgate_move_folded_v1(
                            keys[place], program[q + 2], program[q + 3], program[q + 4], cells[place].state,
                            program[q + 7 : q + 14], program[q + 15], now, program[q + 6], program[p + 2], true
                        );
                        cell.state := after[11 :];
                    ELSIF program[q + 1] = 2 AND cardinality(cell.state) > 194 THEN
                        cell.state := headgate_fold_v1(keys[place], NULL, cell.state, program[q + 6]);
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
                IF cells[program[q]].state[1] < 0 THEN
                    after := headgate_refund_folded_v1(
                        keys[program[q]], program[q + 3], program[q + 4],
                        cells[program[q]].state, program[q + 7 : q + 14], program[q + 15], program[q + 6]
                    );
                ELSE
                    after := headgate_refund_v2(
                        program[q + 1], program[q + 2], program[q + 3], program[q + 4], program[q + 5],
                        cells[program[q]].state, program[q + 7 : q + 14], program[q + 15], program[q + 6], now
                    );
                END IF;
                IF after IS NOT NULL THEN
                    cell := cells[program[q]];
                    cell.state := nullif(after[2 :], '{}');
                    removed := removed OR cell.state IS NULL;
                    cell.expires := server_now + greatest(0, after[1] - now) + grace;
                    cells[program[q]] := cell;
                END IF;
                q := q + 16;
            END LOOP;
        ELSE
            FOR i IN 1 .. rules LOOP
                IF cells[program[q]].state[1] < 0 THEN
                    DELETE FROM headgate_chunks AS chunks WHERE chunks.key = keys[program[q]];
                END IF;
                cells[program[q]] := ROW(NULL, NULL, 0)::headgate_cell_v2;
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

    -- A state is where it was just found, unless it was cleared away since.
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
