-- Batches of many keys and long logs take the server less time: all states of a batch are looked up at once, and fewer buckets
-- of a folded state are outside of its chunks. The functions take and return what they did.

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
    ELSE
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
                IF (after[1] = -4 OR cardinality(after) > 203) AND program[q + 1] = 2 THEN -- as in headgate_one_v2
                    folding := true;
                    cell := cells[place];
                    IF cell.state[1] < 0 THEN
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
                        IF (cells[place].state[1] < 0 OR cardinality(cell.state) > 194)
                            AND program[p + 7 * i - 2] = 2 AND program[p + 7 * i + 3] > 0
                        THEN
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
