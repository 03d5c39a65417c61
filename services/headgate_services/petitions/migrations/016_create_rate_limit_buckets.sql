-- Counters of submissions per submitter and minute (FR-1.5, HC-4, D4).
--
-- The count of a submitter is the sum of the counters whose minute began within the window, so the window slides minute by
-- minute. The cleanup deletes counters older than the TTL (PETITION_RATE_LIMIT_TTL_HOURS), which is longer than the window.

CREATE TABLE IF NOT EXISTS petition_rate_limit_buckets (
    id UUID PRIMARY KEY DEFAULT gen_random_uuid(),
    submitter_id UUID NOT NULL,
    bucket_minute TIMESTAMP WITH TIME ZONE NOT NULL,
    count INTEGER NOT NULL DEFAULT 1 CHECK (count > 0),
    created_at TIMESTAMP WITH TIME ZONE NOT NULL DEFAULT NOW(),
    CONSTRAINT uq_rate_limit_bucket UNIQUE (submitter_id, bucket_minute)
);

-- For the sum of one submitter.
CREATE INDEX IF NOT EXISTS idx_rate_limit_submitter_minute
    ON petition_rate_limit_buckets (submitter_id, bucket_minute DESC);

-- For the cleanup.
CREATE INDEX IF NOT EXISTS idx_rate_limit_bucket_cleanup
    ON petition_rate_limit_buckets (bucket_minute);
