-- Petitions and their states.

DO $$
BEGIN
    IF to_regtype('petition_type') IS NULL THEN
        CREATE TYPE petition_type AS ENUM ('GENERAL', 'CESSATION', 'GRIEVANCE', 'COLLABORATION', 'META');
    END IF;
    IF to_regtype('petition_state') IS NULL THEN
        CREATE TYPE petition_state AS ENUM (
            'RECEIVED', 'DELIBERATING', 'ACKNOWLEDGED', 'REFERRED', 'ESCALATED', 'DEFERRED', 'NO_RESPONSE'
        );
    END IF;
END
$$;

CREATE TABLE IF NOT EXISTS petition_submissions (
    id UUID PRIMARY KEY DEFAULT gen_random_uuid(),
    type petition_type NOT NULL,
    text TEXT NOT NULL CHECK (char_length(text) BETWEEN 1 AND 10000),
    submitter_id UUID,
    state petition_state NOT NULL DEFAULT 'RECEIVED',
    content_hash BYTEA NOT NULL CHECK (octet_length(content_hash) = 32),
    realm TEXT NOT NULL,
    notification_preferences JSONB,
    fate_reason TEXT,
    created_at TIMESTAMP WITH TIME ZONE NOT NULL DEFAULT clock_timestamp(),
    updated_at TIMESTAMP WITH TIME ZONE NOT NULL DEFAULT clock_timestamp()
);

-- For counting the queue.
CREATE INDEX IF NOT EXISTS idx_petition_submissions_waiting
    ON petition_submissions (state) WHERE state = 'RECEIVED';

CREATE OR REPLACE FUNCTION petition_submissions_touch() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.updated_at := clock_timestamp();
    RETURN NEW;
END
$$;

CREATE OR REPLACE TRIGGER petition_submissions_touch BEFORE UPDATE ON petition_submissions
    FOR EACH ROW EXECUTE FUNCTION petition_submissions_touch();
