-- Sliding windows and logs with many buckets keep the older ones in rows of their own, so that a call need not write all of
-- them anew. The functions that are replaced take and return what they did.

-- The older buckets of a sliding window or log that has many, so that no call has to write all of them anew: its state is
-- folded, as headgate_fold_v1 describes it. A chunk is written when it is full and removed when it has expired; between
-- the two only a refund changes it. Only a call that has locked the key writes here.
CREATE TABLE headgate_chunks (
    key bytea,               -- that of the state
    newest bigint,           -- no bucket in the chunk has a higher index, and every bucket in a later one has
    chunk bigint[] NOT NULL, -- like the state of a window with these buckets only
    PRIMARY KEY (key, newest)
) WITH (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);

-- A role that may use the states may use their chunks.
DO $$
DECLARE
    granted record;
BEGIN
    FOR granted IN
        SELECT acl.privilege_type, CASE acl.grantee WHEN 0 THEN 'PUBLIC' ELSE acl.grantee::regrole::text END AS role
        FROM pg_class, aclexplode(pg_class.relacl) AS acl
        WHERE pg_class.oid = 'headgate_states'::regclass AND acl.grantee <> pg_class.relowner
            AND acl.privilege_type IN ('SELECT', 'INSERT', 'UPDATE', 'DELETE')
    LOOP
        EXECUTE format('GRANT %s ON headgate_chunks TO %s', granted.privilege_type, granted.role);
    END LOOP;
END
$$;

-- Return what has to be seen of a folded state to decide on it, as the state of a window that is not folded. What makes no
-- difference is left out, or drawn together into one bucket.
--
-- key                     where the state is
-- state                   the folded state; null to read it here. All that a stable function reads is of one moment, so a
--                         call that has not locked the key must leave reading the state to this one.
-- limit, width, lifetime  of the window
-- now, cost, forced       as in headgate_decide_v2
--
-- The total is that of the buckets that still count. Of these there are those of the oldest chunk and those in no chunk. If
-- the units do not fit, it is the chunk whose end has to be waited for, and one bucket stands for all that are older.
CREATE FUNCTION headgate_unfold_v1(
    key bytea, state bigint[], "limit" bigint, width bigint, lifetime bigint, now bigint, cost bigint, forced boolean
)
RETURNS bigint[]
LANGUAGE plpgsql
STABLE
AS $$
#variable_conflict use_variable
DECLARE
    time bigint; -- buckets that began by then no longer count
    gone bigint; -- the same as an index, together with what was dropped before
    total bigint;
    chunk bigint[];
    newest bigint; -- of the chunk
    place integer := 3;
    units bigint;
    wanted bigint := 1; -- units that have to be found
    following record;
BEGIN
    IF state IS NULL THEN
        SELECT states.state INTO state FROM headgate_states AS states WHERE states.key = key;
        IF state IS NULL OR state[1] >= 0 THEN
            RETURN state; -- it was folded a moment ago
        END IF;
    END IF;
    total := state[2];
    time := greatest(now, state[cardinality(state) - 1] * width) - lifetime;
    IF state[3] * width > time AND (forced OR cost = 0 OR total + cost <= "limit") THEN
        -- All buckets count and the units fit: one bucket can stand for all that are in chunks.
        RETURN ARRAY[-1 - state[1], total, state[3], 1] || state[6 :];
    END IF;

    gone := greatest(state[3] - 1, CASE WHEN time < 0 THEN -1 ELSE time / width END);
    IF state[5] <= gone THEN
        SELECT total + state[4] - sum(chunks.chunk[2]) INTO total
        FROM headgate_chunks AS chunks WHERE chunks.key = key AND chunks.newest <= gone;
    END IF;
    SELECT chunks.newest, chunks.chunk INTO newest, chunk
    FROM headgate_chunks AS chunks WHERE chunks.key = key AND chunks.newest > gone ORDER BY chunks.newest LIMIT 1;
    IF newest IS NULL THEN
        RETURN ARRAY[-1 - state[1], total] || state[6 :];
    END IF;
    units := 0;
    WHILE chunk[place] <= gone LOOP
        units := units + chunk[place + 1];
        place := place + 2;
    END LOOP;
    total := total - units + CASE WHEN newest = state[5] THEN state[4] ELSE 0 END;
    units := chunk[2] - units;
    chunk := chunk[place :];
    IF cost > 0 AND total + cost > "limit" AND "limit" > 0 AND NOT forced THEN
        wanted := total + cost - "limit";
    END IF;
    IF units < wanted THEN
        chunk := '{}';
        FOR following IN
            SELECT chunks.newest, chunks.chunk
            FROM headgate_chunks AS chunks WHERE chunks.key = key AND chunks.newest > newest ORDER BY chunks.newest
        LOOP
            IF units + following.chunk[2] >= wanted THEN
                chunk := following.chunk[3 :];
                EXIT;
            END IF;
            units := units + following.chunk[2];
            newest := following.newest;
        END LOOP;
        IF units > 0 THEN
            chunk := ARRAY[newest, units] || chunk;
        END IF;
    END IF;
    RETURN ARRAY[-1 - state[1], total] || chunk || state[6 :];
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
-- A chunk has 64 buckets, and more than 32 remain outside when it is made. So it takes many calls until the next one is made,
-- and many refunds until one has to be brought back; and each row is short enough to be kept in one piece.
CREATE FUNCTION headgate_fold_v1(key bytea, before bigint[], after bigint[], cost bigint)
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
    ELSE
        -- Nothing in chunks counts any more; or there are none yet, unless a state was removed by hand.
        DELETE FROM headgate_chunks AS chunks WHERE chunks.key = key;
    END IF;

    youngest := CASE WHEN after[1] < 0 THEN 6 ELSE 3 END;
    full_chunks := ((cardinality(after) - youngest + 1) / 2 - 33) / 64;
    IF full_chunks > 0 THEN
        IF after[1] >= 0 THEN
            after := ARRAY[-1 - after[1], after[2], after[3], 0, after[129]] || after[3 :];
        END IF;
        INSERT INTO headgate_chunks
        SELECT
            key,
            (array_agg(numbers.number ORDER BY numbers.place))[127],
            ARRAY[-1 - after[1], sum(numbers.number) FILTER (WHERE numbers.place % 2 = 0)]::bigint[]
                || array_agg(numbers.number ORDER BY numbers.place)
        FROM unnest(after[6 : 5 + 128 * full_chunks]) WITH ORDINALITY AS numbers (number, place)
        GROUP BY (numbers.place - 1) / 128;
        after := after[: 5] || after[6 + 128 * full_chunks :];
    END IF;
    RETURN after;
END
$$;

-- Give units back to a folded state.
--
-- width, lifetime        of the window
-- receipt, held, cost    as in headgate_refund_v2
--
-- Returns what headgate_refund_v2 does.
CREATE FUNCTION headgate_refund_folded_v1(
    key bytea, width bigint, lifetime bigint, state bigint[], receipt bigint[], held bigint, cost bigint
)
RETURNS bigint[]
LANGUAGE plpgsql
VOLATILE
AS $$
#variable_conflict use_variable
DECLARE
    birth CONSTANT bigint := -1 - state[1];
    index CONSTANT bigint := receipt[2];
    newest bigint;
    chunk bigint[];
    after bigint[];
    place integer := 3;
BEGIN
    IF receipt[1] <> birth OR index < state[3] THEN
        RETURN NULL;
    END IF;
    IF index >= state[6] THEN
        after := headgate_refund_v2(
            2, 0, width, lifetime, 0, ARRAY[birth, state[2]] || state[6 :], receipt, held, cost, 0
        );
        IF after IS NULL THEN
            RETURN NULL;
        ELSIF cardinality(after) > 1 THEN
            RETURN ARRAY[after[1], state[1], after[3]] || state[3 : 5] || after[4 :];
        END IF;
        -- No bucket is left outside the chunks, so the last one is brought back.
        DELETE FROM headgate_chunks AS chunks
        WHERE chunks.key = key
            AND chunks.newest = (SELECT max(latest.newest) FROM headgate_chunks AS latest WHERE latest.key = key)
        RETURNING chunks.newest, chunks.chunk INTO newest, chunk;
        state[2] := state[2] - state[7];
        IF newest > state[5] THEN
            state := state[: 5] || chunk[3 :];
        ELSE
            WHILE chunk[place] < state[3] LOOP
                place := place + 2;
            END LOOP;
            state := ARRAY[birth, state[2]] || chunk[place :];
        END IF;
    ELSE
        SELECT chunks.newest, chunks.chunk INTO newest, chunk
        FROM headgate_chunks AS chunks WHERE chunks.key = key AND chunks.newest >= index ORDER BY chunks.newest LIMIT 1;
        after := headgate_refund_v2(2, 0, width, lifetime, 0, chunk, receipt, held, cost, 0);
        IF after IS NULL THEN
            RETURN NULL;
        END IF;
        state[2] := state[2] - chunk[2] + coalesce(after[3], 0);
        IF after[3] > (CASE WHEN newest = state[5] THEN state[4] ELSE 0 END) THEN
            UPDATE headgate_chunks AS chunks SET chunk = after[2 :] WHERE chunks.key = key AND chunks.newest = newest;
        ELSE
            DELETE FROM headgate_chunks AS chunks WHERE chunks.key = key AND chunks.newest = newest;
            IF newest = state[5] THEN
                SELECT min(chunks.newest) INTO newest FROM headgate_chunks AS chunks WHERE chunks.key = key;
                IF newest IS NULL THEN
                    state := ARRAY[birth, state[2]] || state[6 :];
                ELSE
                    state[4] := 0;
                    state[5] := newest;
                END IF;
            END IF;
        END IF;
    END IF;
    RETURN (state[cardinality(state) - 1] * width + lifetime) || state;
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
    -- One question for all that is rare: a folded state, which was refused as it is, and one that now has over 96 buckets.
    IF after[1] = -4 OR cardinality(after) > 203 THEN
        IF before[1] < 0 THEN
            now := CASE WHEN at < 0 THEN server_now ELSE at END;
            after := headgate_unfold_v1(
                key, CASE WHEN operation > 0 THEN before END, a, b, c, now, cost, operation = 2
            );
            after := headgate_decide_v2(kind, a, b, c, d, after, now, cost, birth, operation = 2);
        END IF;
        IF operation > 0 AND after[10] IS NOT NULL THEN
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
--            operation        0 peek, 1 hit or hold, 2 record, 3 refund, 4 reset
--            at, cost, birth  as in headgate_one_v2
--            rules            how many rules follow, each as
--              key            its place in keys; of a reset nothing else
--              kind, a b c d
--              receipt        of a refund only: eight numbers, then the units that it is for
-- durable  as in headgate_one_v2
--
-- Returns, for each rule of each peek, hit, hold and record, the first nine numbers of headgate_decide_v2. Such a request
-- was admitted, and written, if all of its rules begin with -1.
CREATE OR REPLACE FUNCTION headgate_many_v2(keys bytea[], locks integer, program bigint[], durable boolean)
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
    folding boolean := false; -- whether a state with many buckets has been met
    p integer := 1; -- place in the program
    place integer; -- in keys
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
                after := headgate_decide_v2(
                    program[p + 1], program[p + 2], program[p + 3], program[p + 4], program[p + 5],
                    cells[program[p]].state, now, cost, birth, operation = 2
                );
                IF after[1] = -4 OR cardinality(after) > 203 THEN -- as in headgate_one_v2
                    folding := true;
                    cell := cells[program[p]];
                    IF cell.state[1] < 0 THEN
                        after := headgate_unfold_v1(
                            keys[program[p]], CASE WHEN program[p] <= locks THEN cell.state END,
                            program[p + 2], program[p + 3], program[p + 4], now, cost, operation = 2
                        );
                        after := headgate_decide_v2(
                            program[p + 1], program[p + 2], program[p + 3], program[p + 4], program[p + 5],
                            after, now, cost, birth, operation = 2
                        );
                    END IF;
                END IF;
                reply := reply || after[: 9];
                IF after[1] <> -1 THEN
                    admitted := false;
                ELSIF admitted THEN
                    cell.state := after[10 :];
                    cell.expires := server_now + after[4] + grace;
                    changes[i] := cell;
                END IF;
                p := p + 6;
            END LOOP;
            IF admitted THEN
                FOR i IN 1 .. rules LOOP
                    CONTINUE WHEN cardinality(changes[i].state) = 0; -- a limit of 0 records nothing
                    place := program[p - 6 * (rules - i + 1)];
                    cell := changes[i];
                    IF folding AND (cells[place].state[1] < 0 OR cardinality(cell.state) > 194) THEN
                        cell.state := headgate_fold_v1(keys[place], cells[place].state, cell.state, cost);
                    END IF;
                    cells[place] := cell;
                END LOOP;
            END IF;
        ELSIF operation = 3 THEN
            FOR i IN 1 .. rules LOOP
                IF cells[program[p]].state[1] < 0 THEN
                    after := headgate_refund_folded_v1(
                        keys[program[p]], program[p + 3], program[p + 4],
                        cells[program[p]].state, program[p + 6 : p + 13], program[p + 14], cost
                    );
                ELSE
                    after := headgate_refund_v2(
                        program[p + 1], program[p + 2], program[p + 3], program[p + 4], program[p + 5],
                        cells[program[p]].state, program[p + 6 : p + 13], program[p + 14], cost, now
                    );
                END IF;
                IF after IS NOT NULL THEN
                    cell.state := nullif(after[2 :], '{}');
                    removed := removed OR cell.state IS NULL;
                    cell.expires := server_now + greatest(0, after[1] - now) + grace;
                    cells[program[p]] := cell;
                END IF;
                p := p + 15;
            END LOOP;
        ELSE
            FOR i IN 1 .. rules LOOP
                IF cells[program[p]].state[1] < 0 THEN
                    DELETE FROM headgate_chunks AS chunks WHERE chunks.key = keys[program[p]];
                END IF;
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
-- It waits for nobody, so nobody can wait for each other: who writes a state just now has no use for its removal. What is
-- in chunks may only be removed by a call that has locked the key, which this one tries without waiting.
CREATE OR REPLACE FUNCTION headgate_clean_v1(after bytea, most integer)
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
    folded bytea[];
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true); -- what a crash brings back will be removed again
    WITH removed AS (
        DELETE FROM headgate_states AS states WHERE states.key IN (
            SELECT over.key FROM headgate_states AS over
            WHERE over.key = ANY (next_few)
                AND CASE WHEN over.expires <= now THEN
                    over.state[1] >= 0 OR pg_try_advisory_xact_lock(headgate_lock_number_v1(over.key))
                END
            FOR UPDATE SKIP LOCKED
        )
        RETURNING states.key, states.state[1] < 0 AS was_folded
    )
    SELECT array_agg(removed.key) INTO folded FROM removed WHERE removed.was_folded;
    IF folded IS NOT NULL THEN
        DELETE FROM headgate_chunks AS chunks WHERE chunks.key = ANY (folded);
    END IF;
    RETURN CASE WHEN cardinality(next_few) = most THEN next_few[most] END;
END
$$;
