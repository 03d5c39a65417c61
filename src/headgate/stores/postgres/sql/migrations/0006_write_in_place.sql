-- A batch of requests takes the server less time: a state is written where it was read, without looking for it once more,
-- and fewer statements lead to an admission. The function takes and returns what it did.

-- A state while headgate_many_v3 works on it.
CREATE TYPE headgate_cell_v2 AS (
    state bigint[], -- null if there is none
    place tid,      -- where it was found; null if it was not
    expires bigint  -- null if it was not changed
);

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
    cells headgate_cell_v2[]; -- by place in keys
    changes headgate_cell_v2[]; -- what the request under way would make of them, by rule
    cell headgate_cell_v2;
    reply bigint[];
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
        cells := ARRAY(
            SELECT (
                SELECT ROW(states.state, states.ctid, NULL)::headgate_cell_v2
                FROM headgate_states AS states WHERE states.key = asked
            )
            FROM unnest(keys) AS asked
        );
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
                reply := reply || after[: 9];
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
                reply := reply || after[2 : 10];
                lefts[i] := after[1];
                admitted := admitted AND after[2] = -1;
                cell := ROW(after[11 :], cells[place].place, server_now + after[5] + grace)::headgate_cell_v2;
                changes[i] := cell;
                q := q + 16;
            END LOOP;
            IF admitted THEN
                q := q - 16 * rules;
                FOR i IN 1 .. rules LOOP
                    reply[cardinality(reply) - 9 * (rules - i + 1) + 2] := lefts[i];
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
    RETURN reply;
END
$$;
