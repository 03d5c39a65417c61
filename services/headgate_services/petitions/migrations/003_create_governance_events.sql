-- The ledger of events: append-only.

CREATE SCHEMA IF NOT EXISTS ledger;

CREATE TABLE IF NOT EXISTS ledger.governance_events (
    sequence BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    event_id UUID NOT NULL UNIQUE DEFAULT gen_random_uuid(),
    event_type TEXT NOT NULL CHECK (event_type ~ '^[a-z_]+\.[a-z_]+\.[a-z_]+$'),
    branch TEXT NOT NULL GENERATED ALWAYS AS (split_part(event_type, '.', 1)) STORED,
    schema_version TEXT NOT NULL DEFAULT '1.0.0' CHECK (schema_version ~ '^\d+\.\d+\.\d+$'),
    timestamp TIMESTAMP WITH TIME ZONE NOT NULL DEFAULT clock_timestamp(),
    actor_id TEXT NOT NULL,
    trace_id TEXT NOT NULL,
    payload JSONB NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE NOT NULL DEFAULT clock_timestamp()
);

CREATE OR REPLACE FUNCTION ledger.refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'the ledger is append-only: % refused', TG_OP;
END
$$;

CREATE OR REPLACE TRIGGER governance_events_append_only
    BEFORE UPDATE OR DELETE OR TRUNCATE ON ledger.governance_events
    FOR EACH STATEMENT EXECUTE FUNCTION ledger.refuse_change();
