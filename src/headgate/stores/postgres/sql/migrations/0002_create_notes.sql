-- Notes, which remember what must be done once.

-- Notes: a short text under a name, which is decided once for everybody. They are written once, and never changed.
CREATE TABLE headgate_notes (
    key bytea PRIMARY KEY,  -- namespace and name
    note bytea NOT NULL,    -- text in UTF-8, which may hold what PostgreSQL's own text may not
    expires bigint NOT NULL -- by this server's clock
);
CREATE INDEX headgate_notes_expires ON headgate_notes (expires);

-- Keep a note for so many microseconds, unless there is one that has not expired, and return the one that is kept; without
-- a note, only return it. The ones that expired first are removed as it goes: more than come with each call.
CREATE FUNCTION headgate_note_v1(key bytea, note bytea, lasting bigint, durable boolean)
RETURNS bytea
LANGUAGE plpgsql
VOLATILE
SET enable_seqscan = off -- as in headgate_one_v1
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
        -- Whoever comes second waits here for the first one, and has locked the row then, even if it stays as it is.
        INSERT INTO headgate_notes AS notes VALUES (key, note, now + lasting)
        ON CONFLICT ON CONSTRAINT headgate_notes_pkey
        DO UPDATE SET note = excluded.note, expires = excluded.expires WHERE notes.expires <= now;
        DELETE FROM headgate_notes AS notes WHERE notes.key IN (
            SELECT over.key FROM headgate_notes AS over
            WHERE over.expires <= now ORDER BY over.expires LIMIT 2
            FOR UPDATE SKIP LOCKED
        );
    END IF;
    -- A statement of its own, which sees what was committed while the first one waited.
    SELECT notes.note INTO kept FROM headgate_notes AS notes WHERE notes.key = key AND notes.expires > now;
    RETURN kept;
END
$$;
